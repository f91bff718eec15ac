"""Networks, batches and comparisons that the tests of the norms share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from advnorm import AdvnormError, ConfigError
from advnorm.norms import RoutedNorm, list_norms, routed_modules, statistics
from support.norm_oracles import BANKED, PAPER, Oracle, along, batch, build, changed, randomized, snapshot
from support.problems import raises_problem

#: Norms that treat their domains differently.
ROUTED = [name for name, row in PAPER.items() if row.statistics in ("own", "other", "mixture") or row.affine == "own"]

TIGHT = {"rtol": 1e-9, "atol": 1e-11}

#: (name, options of its own): every registered norm, cross_bn with and without the gradient of its statistics.
VARIANTS = {name: (name, {}) for name in list_norms()}

VARIANTS["cross_bn_constant"] = ("cross_bn", {"other_gradient": False})

BANKED_VARIANTS = {key: variant for key, variant in VARIANTS.items() if variant[0] in BANKED}

each_variant = pytest.mark.parametrize(("name", "options"), VARIANTS.values(), ids=VARIANTS)

each_banked_variant = pytest.mark.parametrize(("name", "options"), BANKED_VARIANTS.values(), ids=BANKED_VARIANTS)


def network(name: str, **options: Any) -> nn.Sequential:
    """Two norms behind convolutions, in float64, every bank with values of its own."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), build(name, **options), nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1), build(name, **options), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2),
    )  # fmt: skip
    return randomized(model.double())


def images(counts: dict[str, int], seed: int = 1) -> Tensor:
    return batch(counts, channels=3, spatial=(4, 4), seed=seed)


def scope_states(model: nn.Module) -> list[Any]:
    """What the scopes in force have set, per routed module."""
    return [module.state for module in routed_modules(model).values()]


def random_deltas(norm: RoutedNorm, *, scale: float = 0.3) -> dict[str, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)

    def uniform() -> Tensor:
        value = scale * (2 * torch.rand(norm.shape, generator=generator, dtype=torch.float64) - 1)
        return value.requires_grad_()

    return {bank: (uniform(), uniform()) for bank in norm.plan.statistics_banks}


def compare(
    name: str,
    norm: RoutedNorm,
    x: Tensor,
    counts: dict[str, int],
    *,
    mode: str = "batch",
    groups: int = 1,
    deltas: dict[str, tuple[Tensor, Tensor]] | None = None,
    other_gradient: bool = True,
    tolerance: dict[str, float] = TIGHT,
) -> None:
    """Run norm and oracle on the same batch and loss; compare everything either of them produces."""
    oracle = Oracle(name, norm, other_gradient=other_gradient)
    ours, theirs = x.clone().requires_grad_(), x.double().clone().requires_grad_()
    twins = (
        None
        if deltas is None
        else {k: tuple(d.detach().clone().requires_grad_() for d in v) for k, v in deltas.items()}
    )
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    perturbation = None if deltas is None else {"": deltas}
    with along(norm, counts), statistics(norm, mode=mode, groups=groups, perturbation=perturbation):
        y = norm(ours)
    assert y.dtype == x.dtype
    expected = oracle.forward(theirs, counts, mode=mode, groups=groups, deltas=twins)
    torch.testing.assert_close(y.double(), expected, **tolerance)
    (y.double() * weights).sum().backward()
    (expected * weights).sum().backward()
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad.double(), theirs.grad, **tolerance)
    for key, value in norm.named_parameters():
        assert value.grad is not None, key
        torch.testing.assert_close(value.grad.double(), oracle.parameters[key].grad, **tolerance, msg=key)
    for key, value in norm.named_buffers():
        torch.testing.assert_close(value.double(), oracle.buffers[key].double(), **tolerance, msg=key)
    if deltas is not None:
        assert twins is not None
        for bank in deltas:
            for delta, twin, what in zip(deltas[bank], twins[bank], ("mean", "std")):
                assert delta.grad is not None, f"no gradient reaches the perturbation of the {what} of bank {bank!r}"
                torch.testing.assert_close(delta.grad.double(), twin.grad, **tolerance)


@contextmanager
def rejects(
    code: str, field: str | None = None, kind: type[AdvnormError] = ConfigError, *, unchanged: nn.Module | None = None
) -> Iterator[pytest.ExceptionInfo[AdvnormError]]:
    """Scope: an error of exactly ``kind`` has a problem with this code and field, and the module's state stays."""
    before = {} if unchanged is None else snapshot(unchanged)
    with raises_problem(code, field, kind) as caught:
        yield caught
    assert type(caught.value) is kind
    if unchanged is not None:
        assert changed(unchanged, before) == set()


def in_thread(function: Callable[[], Any]) -> Any:
    """Run in another thread; raise here what it raised there."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.extend((True, function()))
        except BaseException as error:
            outcome.extend((False, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if not outcome[0]:
        raise outcome[1]
    return outcome[1]
