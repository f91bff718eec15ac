"""Scopes of the precision of float32 products: all switches agree inside, and are the caller's afterwards."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from advnorm._core.precision import float32_as, snapshot_precision

CPU = torch.device("cpu")
CUDNN = cast(Any, torch.backends.cudnn)
MATMUL = ("highest", "high", "medium")


def switches() -> list[str]:
    backends: Any = torch.backends
    kinds = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
    return [kind.fp32_precision for kind in (*kinds, backends.mkldnn.matmul, backends.mkldnn.conv)]


@pytest.fixture(autouse=True)
def as_before():
    with snapshot_precision(CPU)():
        yield


@pytest.mark.parametrize("called", MATMUL)
@pytest.mark.parametrize(("precision", "inside"), [("ieee", "ieee"), ("tf32", "tf32")])
def test_a_scope_sets_every_kind_of_product_and_restores_it(precision, inside, called):
    torch.set_float32_matmul_precision(called)
    before = switches()
    with float32_as(precision, CPU):
        assert switches() == [*(inside,) * 3, "ieee", "ieee"]  # recurrent layers too; the CPU has no TF32
        assert CUDNN.allow_tf32 == torch.backends.cuda.matmul.allow_tf32 == (precision == "tf32")
        with torch.backends.cudnn.flags(deterministic=True):  # which reads the older switches
            pass
    assert switches() == before and torch.get_float32_matmul_precision() == called


def test_switches_that_a_caller_set_one_by_one_are_restored():
    CUDNN.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision = "ieee", "tf32"
    before = switches()
    with float32_as("tf32", CPU):
        assert switches()[:3] == ["tf32"] * 3
    with float32_as("ieee", CPU):
        assert switches()[:3] == ["ieee"] * 3
    assert switches() == before


def test_products_on_the_cpu_are_exact_whatever_the_caller_has_set():
    a = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    exact = a @ a
    torch.set_float32_matmul_precision("medium")
    with float32_as("ieee", CPU):
        assert torch.equal(a @ a, exact)
