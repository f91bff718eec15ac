"""Loading of Triton kernels: a warning, once, where Triton does not work."""

import pytest
import torch

from advnorm._core import triton_kernels
from advnorm._core.triton_kernels import load_kernels


@pytest.fixture(autouse=True)
def _nothing_loaded():
    load_kernels.cache_clear()
    yield
    load_kernels.cache_clear()


def no_compiler(name):
    raise RuntimeError("Failed to find C compiler\nPlease specify one")


def test_a_failure_of_triton_is_a_warning(monkeypatch):
    monkeypatch.setattr(triton_kernels, "find_spec", lambda name: object())
    monkeypatch.setattr(triton_kernels.importlib, "import_module", no_compiler)
    wanted = "some_kernels", torch.device("cuda"), "noise is slower"
    with pytest.warns(UserWarning, match="Triton does not work here, so noise is slower: Failed to find C compiler"):
        assert load_kernels(*wanted) is None
    assert load_kernels(*wanted) is None  # said once


def test_without_triton_nothing_is_loaded(monkeypatch):
    monkeypatch.setattr(triton_kernels, "find_spec", lambda name: None)
    assert load_kernels("some_kernels", torch.device("cuda"), "noise is slower") is None
