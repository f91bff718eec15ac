"""torch.compile: whole graphs with the results of eager, one per route and mode, and none for a repetition."""

from __future__ import annotations

import contextlib
import copy
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from advnorm._core.errors import RouteError
from advnorm.norms import (
    checkpoint_context,
    list_norms,
    make_norm,
    mixture_likelihood,
    pair_banks,
    recalibrate,
    route,
    statistics,
    zero_perturbation,
)
from support.crossing import fast_first
from support.norm_cases import rejects
from support.norm_oracles import BANKED, PAPER, along, batch, build, changed, domains_of, randomized, shares, snapshot

TIGHT = {"rtol": 1e-8, "atol": 1e-10}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, **{"backend": "aot_eager", "fullgraph": True, **options})


class Net(nn.Module):
    """A product before the norm and one after it, so that even no norm leaves a graph."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.norm = build(name, 3, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x * self.scale) * self.scale


Scopes = Callable[[nn.Module], contextlib.ExitStack]


def scopes(*makers: Callable[[nn.Module], Any]) -> Scopes:
    def enter(model: nn.Module) -> contextlib.ExitStack:
        with contextlib.ExitStack() as stack:
            for maker in makers:
                stack.enter_context(maker(model))
            return stack.pop_all()

    return enter


def perturbation(model: nn.Module, value: float) -> Any:
    return zero_perturbation(model, requires_grad=False).map(lambda delta: delta + value * torch.rand_like(delta))


def cases(name: str) -> dict[str, Scopes]:
    """The scopes of a training step: routes, modes, groups, perturbed statistics."""
    counts = shares(name, unit=2)

    def concatenated(model: nn.Module) -> Any:
        return along(model, counts)

    def single(model: nn.Module) -> Any:
        return route(model, domains_of(name)[-1])

    def running(model: nn.Module) -> Any:
        return statistics(model, mode="running")

    found = {
        "concatenated": scopes(concatenated),
        "running": scopes(concatenated, running),
        # Batch statistics of a missing domain raise an error, so that a single domain uses the stored ones.
        "single": scopes(single, running) if PAPER[name].statistics in ("other", "mixture") else scopes(single),
    }
    if name in BANKED:
        found |= {
            "frozen": scopes(concatenated, lambda model: statistics(model, mode="batch_frozen")),
            "groups": scopes(concatenated, lambda model: statistics(model, groups=2)),
            "perturbed": scopes(concatenated, lambda model: statistics(model, perturbation=perturbation(model, 0.2))),
        }
    return found


def outcome(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor, enter: Scopes) -> list[Tensor]:
    """Output, gradients and buffers of one training step."""
    x = x.clone().requires_grad_()
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)  # for the perturbation
    with enter(model):
        y = run(x)
        (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    assert x.grad is not None
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return [y.detach(), x.grad, *gradients, *(b.clone() for b in model.buffers())]


def assert_same(ours: list[Tensor], theirs: list[Tensor], what: str, **tolerance: float) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, **(tolerance or TIGHT), msg=lambda text: f"{what}: {text}")


#: Fast tests: a norm of each kind, with the concatenated batch and one other case. The slow tests cross all.
FAST = {
    "bn": "running",
    "dual_bn": "groups",
    "dual_affine_bn": "frozen",
    "dual_stats_bn": "single",
    "sandwich_bn": "running",
    "cross_bn": "perturbed",
    "gmm_bn": "running",
    "dual_affine_gn": "single",
}


def test_the_fast_cases_cover_every_case():
    assert {"concatenated", *FAST.values()} == set(cases("dual_bn"))


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        *(pytest.param(name, ["concatenated", other], id=name) for name, other in FAST.items()),
        *(pytest.param(name, list(cases(name)), id=f"{name}-all", marks=pytest.mark.slow) for name in list_norms()),
    ],
)
def test_every_route_and_mode_is_one_whole_graph_that_equals_eager_and_is_not_compiled_again(name, chosen):
    model = randomized(Net(name).double())
    eager = copy.deepcopy(model)
    run = compiled(model)
    x = batch(shares(name, unit=2), channels=3, spatial=(2, 2))
    made = []
    for what in chosen:
        before, enter = graphs(), cases(name)[what]
        assert_same(outcome(model, run, x, enter), outcome(eager, eager, x, enter), what)
        made.append(graphs() - before)
    assert max(made) <= 1
    assert name not in BANKED or made == [1] * len(made)
    total = graphs()
    for what in chosen:  # new scopes, new perturbations, other values
        enter = cases(name)[what]
        assert_same(outcome(model, run, x + 1, enter), outcome(eager, eager, x + 1, enter), what)
    assert graphs() == total, "a repetition was compiled again"


@pytest.mark.parametrize("name", fast_first(["dual_affine_bn", "dual_affine_gn"], list_norms()))
def test_scopes_may_be_opened_inside_the_compiled_function(name):
    model = randomized(Net(name).double())
    eager = copy.deepcopy(model)
    counts, last = shares(name), domains_of(name)[-1]
    x = batch(counts, channels=3, spatial=(2, 2))

    def attack_and_train(network: nn.Module) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor) -> Tensor:
            with route(network, last), statistics(network, mode="running"):
                y = network(x)
            with along(network, counts):
                return y + network(x)

        return step

    nothing = scopes()
    run = compiled(attack_and_train(model))
    for shift in (0, 1):
        ours = outcome(model, run, x + shift, nothing)
        assert_same(ours, outcome(eager, attack_and_train(eager), x + shift, nothing), f"step {shift}")
        assert graphs() == 1
    assert model.norm.state == eager.norm.state, "the scope outlived the compiled function"
    if model.norm.plan.routed:
        with rejects("missing_route", "route", RouteError):
            model(x)


def test_the_likelihood_is_collected_inside_the_graph():
    model = randomized(Net("gmm_bn").double())
    eager = copy.deepcopy(model)
    run, counts = compiled(model), shares("gmm_bn")
    x = batch(counts, channels=3, spatial=(2, 2))
    for shift in (0, 1):
        losses, gradients = [], []
        for network, forward in ((model, run), (eager, eager)):
            inputs = (x + shift).requires_grad_()
            with route(network, counts), mixture_likelihood(network) as nll:
                y = forward(inputs)
            losses.append(nll.loss())
            (nll.loss() + y.square().sum()).backward()
            gradients.append(inputs.grad)
        torch.testing.assert_close(*losses, **TIGHT)
        torch.testing.assert_close(*gradients, **TIGHT)
    assert graphs() == 1


@pytest.mark.slow
def test_the_likelihoods_of_two_compiled_forwards_are_summed():
    model = randomized(Net("gmm_bn").double())
    run, counts = compiled(model), shares("gmm_bn")
    x = batch(counts, channels=3, spatial=(2, 2))
    with route(model, counts), mixture_likelihood(model) as nll:
        run(x)
        once = nll.loss()
        run(x)
    torch.testing.assert_close(nll.loss(), 2 * once, **TIGHT)


def test_gradients_of_a_perturbation_flow_through_the_graph():
    model = randomized(Net("dual_bn").double())
    eager = copy.deepcopy(model)
    run, counts = compiled(model), shares("dual_bn")
    x = batch(counts, channels=3, spatial=(2, 2))
    found = []
    for network, forward in ((model, run), (eager, eager)):
        delta = zero_perturbation(network)
        with route(network, counts), statistics(network, mode="batch_frozen", perturbation=delta):
            loss = (forward(x) ** 3).sum()
        found.append(torch.autograd.grad(loss, delta.tensors))
    for ours, theirs in zip(*found):
        assert ours.any()
        torch.testing.assert_close(ours, theirs, **TIGHT)


@pytest.mark.parametrize("name", fast_first(["dual_bn"], ["dual_affine_bn", "cross_bn"]))
def test_a_cumulative_average_is_the_same_compiled(name):
    model = randomized(Net(name, momentum=None).double())
    eager = copy.deepcopy(model)
    run, counts = compiled(model), shares(name)
    for step in range(3):
        x = batch(counts, channels=3, spatial=(2, 2), seed=step)
        enter = scopes(lambda network: along(network, counts))
        assert_same(outcome(model, run, x, enter), outcome(eager, eager, x, enter), f"step {step}")
    assert graphs() == 1
    for key, value in model.norm.named_buffers():
        assert not key.startswith("num_batches") or value == 3


def test_without_a_mode_the_compiled_norm_follows_its_training_flag():
    model = randomized(Net("dual_bn").double())
    run = compiled(model)
    x = batch({"adv": 4}, channels=3, spatial=(2, 2))
    for training in (True, False, True, False):
        model.train(training)
        eager = copy.deepcopy(model)
        enter = scopes(lambda network: route(network, "adv"))
        assert_same(outcome(model, run, x, enter), outcome(eager, eager, x, enter), f"training={training}")
    assert graphs() == 2
    assert model.norm.num_batches_tracked_adv == 2


@pytest.mark.parametrize(
    "name", fast_first(["cross_bn"], ["bn", "dual_bn", "dual_affine_bn", "gmm_bn", "dual_affine_gn"])
)
def test_bfloat16_autocast_and_channels_last_survive_compilation(name):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), build(name)).to(memory_format=torch.channels_last)
    randomized(model)
    eager = copy.deepcopy(model)
    run, counts = compiled(model), shares(name)
    x = batch(counts, channels=3, spatial=(4, 4)).float().contiguous(memory_format=torch.channels_last)
    outputs = []
    for network, forward in ((model, run), (eager, eager)):
        with torch.autocast("cpu", torch.bfloat16), along(network, counts):
            outputs.append(forward(x))
    assert outputs[0].dtype == outputs[1].dtype
    assert outputs[0].stride() == outputs[1].stride()
    torch.testing.assert_close(*outputs, rtol=2e-2, atol=2e-2)
    for a, b in zip(model.buffers(), eager.buffers()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_other_shares_of_the_same_batch_are_right_too():
    """A loop over shares (paper E, figure 1) compiles again where it must, and never computes with the old shares."""
    model = randomized(Net("dual_bn").double())
    eager = copy.deepcopy(model)
    run = compiled(model)
    x = batch({"clean": 5, "adv": 5}, channels=3, spatial=(2, 2))
    for clean in (5, 3, 0, 5):
        enter = scopes(lambda network, clean=clean: route(network, {"clean": clean, "adv": 10 - clean}))
        assert_same(outcome(model, run, x, enter), outcome(eager, eager, x, enter), f"{clean} clean")


def test_other_batch_sizes_are_right_too():
    model = randomized(Net("dual_bn").double())
    eager = copy.deepcopy(model)
    run = compiled(model)
    for size in (4, 6, 7, 9, 4):
        x = batch({"adv": size}, channels=3, spatial=(2, 2))
        enter = scopes(lambda network: route(network, "adv"))
        assert_same(outcome(model, run, x, enter), outcome(eager, eager, x, enter), f"{size} samples")
    assert graphs() <= 2  # one for the first size, one for any other


@pytest.mark.parametrize("name", fast_first(["dual_bn"], ["gmm_bn"]))
def test_a_compiled_block_that_checkpointing_recomputes_updates_once(name):
    model = randomized(Net(name).double())
    eager = copy.deepcopy(model)
    counts = shares(name)
    x = batch(counts, channels=3, spatial=(2, 2))
    block = compiled(model)

    def run(x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False, context_fn=checkpoint_context(model))

    enter = scopes(lambda network: route(network, counts))
    assert_same(outcome(model, run, x, enter), outcome(eager, eager, x, enter), "checkpointed")


def test_checkpointing_inside_the_compiled_function_updates_once():
    model = randomized(Net("dual_bn").double())
    eager = copy.deepcopy(model)
    counts = shares("dual_bn")
    x = batch(counts, channels=3, spatial=(2, 2))
    run = compiled(lambda x: checkpoint(model, x, use_reentrant=False))
    enter = scopes(lambda network: route(network, counts))
    assert_same(outcome(model, run, x, enter), outcome(eager, eager, x, enter), "checkpointed")


def test_a_pair_is_one_whole_graph():
    model = randomized(Net("dual_bn").double())
    eager = copy.deepcopy(model)
    run, x = compiled(model), batch({"all": 4}, channels=3, spatial=(2, 2))
    for mode in ("running", "batch", "running"):
        enter = scopes(
            lambda network: pair_banks(network, statistics="clean", affine="adv"),
            lambda network, mode=mode: statistics(network, mode=mode),
        )
        assert_same(outcome(model, run, x, enter), outcome(eager, eager, x, enter), mode)
    assert graphs() == 2


def test_a_failed_forward_of_a_compiled_norm_raises_the_same_problem():
    norm = make_norm("dual_bn", 3)
    run = compiled(norm, fullgraph=False)
    before = snapshot(norm)
    with rejects("missing_route", "route", RouteError):
        run(torch.randn(4, 3, 2, 2))
    with rejects("wrong_route", "route", RouteError), route(norm, {"clean": 1, "adv": 2}):
        run(torch.randn(4, 3, 2, 2))
    assert changed(norm, before) == set()


def test_a_compiled_model_is_recalibrated_though_its_graph_was_made_before():
    norm = randomized(make_norm("dual_bn", 3))
    run, x = compiled(nn.Sequential(norm)), torch.rand(8, 3, 2, 2)
    with torch.no_grad(), pair_banks(norm, statistics="adv", affine="adv"), statistics(norm, mode="batch_frozen"):
        run(x)
    assert recalibrate(run, x, route="adv") == 8
    torch.testing.assert_close(norm.running_mean_adv, x.mean((0, 2, 3)))
    torch.testing.assert_close(norm.running_var_adv, x.var((0, 2, 3)))


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_equals_eager():
    """One smoke test of the default backend, in train mode; forward only, since its compiler is slow."""
    norm = randomized(make_norm("dual_bn", 4))
    eager = copy.deepcopy(norm)
    run = compiled(norm, backend="inductor")
    counts = {"clean": 5, "adv": 3}
    x = batch(counts, spatial=(2, 2)).float()
    before = snapshot(norm)
    quick = {"compile_threads": 1, "cpp.simdlen": 0, "cpp_cache_precompile_headers": False}
    with torch.no_grad(), torch._inductor.config.patch(quick), route(norm, counts), route(eager, counts):
        torch.testing.assert_close(run(x), eager(x), rtol=1e-4, atol=1e-5)
    for key, value in norm.state_dict().items():
        torch.testing.assert_close(value, eager.state_dict()[key], rtol=1e-4, atol=1e-5)
    assert len(changed(norm, before)) == 6
    assert graphs() == 1
