"""One rank of the distributed tests: ``python norm_ranks.py RANK WORLD INIT_FILE OUT_FILE``.

Runs every case of CASES and the DDP scenarios, and saves what it saw; test_distributed.py compares. A scenario that
fails is stored as its error, so that one failure does not take the others with it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from advnorm.attacks import PGD
from advnorm.norms import checkpoint_context, make_norm, recalibrate, route, routed_modules, statistics
from advnorm.threat import ThreatModel
from support.norm_oracles import BANKED, along, batch, build, parts_of, randomized
from support.ranks import join_ranks, run_cases

WORLD = 2
CHANNELS = 3

#: Samples of each part on rank 0 and rank 1, for norms with two domains, with three, and with two and forwarded ones.
SHARES: dict[str, dict[int, tuple[tuple[int, ...], tuple[int, ...]]]] = {
    "equal": {2: ((3, 3), (3, 3)), 3: ((2, 2, 2), (2, 2, 2)), 4: ((3, 3, 2, 2), (3, 3, 2, 2))},
    "unequal": {2: ((4, 2), (1, 3)), 3: ((3, 1, 2), (1, 4, 2)), 4: ((4, 2, 1, 3), (1, 3, 2, 2))},
    "without": {2: ((4, 0), (2, 3)), 3: ((3, 0, 2), (1, 4, 0)), 4: ((4, 0, 2, 3), (2, 3, 0, 3))},
    "apart": {2: ((4, 0), (0, 3)), 3: ((4, 0, 0), (0, 3, 2)), 4: ((4, 0, 3, 0), (0, 3, 0, 2))},
}


@dataclass(frozen=True)
class Case:
    name: str
    shares: str
    options: dict[str, Any] = field(default_factory=dict)
    spatial: tuple[int, ...] = (2, 2)
    dtype: torch.dtype = torch.float64
    mode: str | None = None
    checkpointed: bool = False

    def counts(self, rank: int) -> dict[str, int]:
        parts = parts_of(self.name)
        return dict(zip(parts, SHARES[self.shares][len(parts)][rank]))

    def norm(self, *, sync: bool) -> nn.Module:
        norm = build(self.name, CHANNELS, dim=max(1, len(self.spatial)), sync=sync, **self.options)
        return randomized(norm.to(self.dtype))

    def whole(self, step: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Inputs and loss weights of all ranks, by part; rank 0's samples come first."""
        total = {part: sum(self.counts(rank)[part] for rank in range(WORLD)) for part in parts_of(self.name)}
        sizes = list(total.values())
        x = batch(total, CHANNELS, self.spatial, seed=step).to(self.dtype)
        weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(x.dtype)
        return dict(zip(total, x.split(sizes))), dict(zip(total, weights.split(sizes)))

    def mine(self, by_part: dict[str, Tensor], rank: int) -> Tensor:
        """A rank's share of a whole batch, as the rank concatenates it."""
        pieces = []
        for part, whole in by_part.items():
            first = self.counts(0)[part]
            pieces.append(whole[:first] if rank == 0 else whole[first:])
        return torch.cat(pieces)


VARIANTS = [(name, {}) for name in BANKED] + [("cross_bn", {"other_gradient": False})]
CASES: dict[str, Case] = {}
for _name, _options in VARIANTS:
    _id = _name + ("_constant" if _options else "")
    for _shares in SHARES:
        CASES[f"{_id}-{_shares}"] = Case(_name, _shares, _options)
    CASES[f"{_id}-cumulative"] = Case(_name, "without", {**_options, "momentum": None})
    CASES[f"{_id}-float32"] = Case(_name, "unequal", _options, dtype=torch.float32)
    CASES[f"{_id}-vectors"] = Case(_name, "unequal", _options, spatial=())
    CASES[f"{_id}-frozen"] = Case(_name, "unequal", _options, mode="batch_frozen")
    CASES[f"{_id}-checkpointed"] = Case(_name, "without", _options, checkpointed=True)
    CASES[f"{_id}-running"] = Case(_name, "apart", _options, mode="running")


def run_case(case: Case, rank: int) -> dict[str, Any]:
    """Two training steps; of the last one everything that a step produces."""
    norm = case.norm(sync=True)
    for step in range(2):
        norm.zero_grad()
        x, weights = (case.mine(values, rank).clone() for values in case.whole(step))
        x.requires_grad_()
        with along(norm, case.counts(rank)), statistics(norm, mode=case.mode):
            if case.checkpointed:
                y = checkpoint(norm, x, use_reentrant=False, context_fn=checkpoint_context(norm))
            else:
                y = norm(x)
        (y * weights).sum().backward()
    gradients = {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in norm.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, "gradients": gradients, "buffers": dict(norm.named_buffers())}


# -- DDP (trap 12) ---------------------------------------------------------------------------------------------


def small_network(*, sync: bool = True) -> nn.Module:
    return randomized(
        nn.Sequential(
            nn.Conv2d(3, 4, 3), make_norm("dual_bn", 4, sync=sync), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)
        ).double()
    )


def half(rank: int, seed: int = 0) -> Tensor:
    return batch({"all": 6}, 3, (4, 4), seed=seed).chunk(WORLD)[rank]


class Objective(nn.Module):
    """A hybrid step in one forward: attack the bare model, then a clean and an adversarial pass, then one loss."""

    def __init__(self, model: nn.Module, *, attack: bool = True) -> None:
        super().__init__()
        self.model = model
        self.attack = attack
        self.seen: dict[str, int] = {}

    def perturbed(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        with route(self.model, "adv"), statistics(self.model, mode="running"):
            (gradient,) = torch.autograd.grad(self.model(x).square().sum(), x)
        return (x + 0.1 * gradient.sign()).detach()

    def forward(self, x: Tensor) -> Tensor:
        before = CALLS.copy()
        x_adv = self.perturbed(x) if self.attack else x + 0.1
        self.seen = {key: CALLS[key] - before[key] for key in CALLS}  # what the attack communicated
        with route(self.model, "clean"):
            clean = self.model(x)
        with route(self.model, "adv"):
            adv = self.model(x_adv)
        return 0.5 * clean.square().sum() + 0.5 * adv.square().sum()


#: Collectives of the norms (dist.all_reduce) and buckets that DDP reduced.
CALLS = {"all_reduce": 0, "bucket": 0}


def count_collectives() -> None:
    original = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        CALLS["all_reduce"] += 1
        return original(*args, **kwargs)

    dist.all_reduce = counted


def counting(ddp: DDP) -> DDP:
    def hook(state, bucket):  # no annotations: DDP wants the types themselves, not their names
        CALLS["bucket"] += 1
        return allreduce_hook(state, bucket)

    ddp.register_comm_hook(dist.group.WORLD, hook)
    return ddp


def objective_in_one_forward(rank: int) -> dict[str, Any]:
    objective = Objective(small_network())
    ddp = counting(DDP(objective))
    for step in range(3):
        ddp.zero_grad()
        before = CALLS.copy()
        loss = ddp(half(rank, step))
        forward = {key: CALLS[key] - before[key] for key in CALLS}
        loss.backward()
    gradients = {k: p.grad for k, p in objective.model.named_parameters()}
    buckets = CALLS["bucket"] - before["bucket"]
    return {
        "gradients": gradients, "buffers": dict(objective.model.named_buffers()), "attack": objective.seen,
        "forward": forward, "buckets": buckets,
    }  # fmt: skip


def adversarial(model: nn.Module, mode: Any) -> Tensor:
    """By an attack that uses the statistics of its batch."""
    attack = PGD(threat=ThreatModel(eps=0.1), steps=3, route="adv", statistics=mode)
    return attack(model, half(0).float().sigmoid(), torch.tensor([0, 1, 0]))


def attack_of_one_rank(rank: int) -> dict[str, Any]:
    """It would wait for ever if a norm asked the other rank."""
    model, before = small_network().float().train(), CALLS["all_reduce"]
    made = {mode: adversarial(model, mode) for mode in ("batch_frozen", "batch") if rank == 0}
    attack = CALLS["all_reduce"] - before
    with route(model, "adv"):
        model(half(rank).float())  # together again
    return {"made": made, "attack": attack, "forward": CALLS["all_reduce"] - before}


def one_route_with_defaults(rank: int) -> dict[str, Any]:
    ddp = DDP(small_network())
    for step in range(2):
        with route(ddp, "adv"):
            ddp(half(rank, step)).square().sum().backward()
    return {}


def one_route_with_find_unused(rank: int) -> dict[str, Any]:
    model = small_network()
    ddp = DDP(model, find_unused_parameters=True)
    for step in range(2):
        ddp.zero_grad()
        with route(ddp, "adv"):
            ddp(half(rank, step)).square().sum().backward()
    return {"gradients": {k: p.grad for k, p in model.named_parameters()}, "buffers": dict(model.named_buffers())}


def two_forwards_with_find_unused(rank: int) -> dict[str, Any]:
    ddp = DDP(small_network(), find_unused_parameters=True)
    for step in range(2):
        with route(ddp, "clean"):
            clean = ddp(half(rank, step))
        with route(ddp, "adv"):
            adv = ddp(half(rank, step) + 0.1)
        (clean.square().sum() + adv.square().sum()).backward()
    return {}


def concatenated_with_defaults(rank: int) -> dict[str, Any]:
    model = small_network()
    ddp = DDP(model)
    for step in range(2):
        ddp.zero_grad()
        x = half(rank, step)
        with route(ddp, {"clean": 3, "adv": 3}):
            ddp(torch.cat([x, x + 0.1])).square().sum().backward()
    return {"gradients": {k: p.grad for k, p in model.named_parameters()}, "buffers": dict(model.named_buffers())}


def collectives_per_forward(rank: int) -> dict[str, int]:
    """How often a synchronized norm talks: once where it uses the batch's statistics, else never."""
    found = {}
    x = half(rank)
    for name in ("dual_bn", "cross_bn", "gmm_bn"):
        norm = make_norm(name, 3, sync=True).double()
        counts = dict(zip(parts_of(name), (1, 1, 1, 0) if name == "cross_bn" else (2, 1)))
        for mode in ("running", "batch_frozen", "batch"):
            before = CALLS["all_reduce"]
            with along(norm, counts), statistics(norm, mode=mode):
                norm(x)
            found[f"{name}-{mode}"] = CALLS["all_reduce"] - before
    norm = make_norm("dual_bn", 3, sync=False).double()
    before = CALLS["all_reduce"]
    with route(norm, "adv"):
        norm(x)
    found["unsynchronized"] = CALLS["all_reduce"] - before
    return found


def crossed_norm(*, sync: bool) -> nn.Module:
    return randomized(make_norm("cross_bn", 3, sync=sync).double())


def crossed_without_forwarded(rank: int) -> dict[str, Any]:
    """Every rank has the images of one domain, and none is forwarded."""
    norm = crossed_norm(sync=True)
    with route(norm, {"clean": 3 - 3 * rank, "adv": 3 * rank}):
        y = norm(half(rank))
    return {"y": y.detach(), "buffers": dict(norm.named_buffers())}


def recalibrated(rank: int) -> dict[str, Any]:
    """Ranks with another number of batches each."""
    model = small_network(sync=True)
    recalibrate(model, shares_of_data()[rank], route="adv")
    return {"buffers": dict(model.named_buffers()), "sync": all(norm.sync for norm in routed_modules(model).values())}


def shares_of_data() -> list[list[Tensor]]:
    return [[half(0), half(1) * 2, half(0, 1) + 1], [half(1, 1) - 1]]


SCENARIOS: dict[str, Callable[[int], dict[str, Any]]] = {
    scenario.__name__: scenario
    for scenario in (
        objective_in_one_forward,
        attack_of_one_rank,
        concatenated_with_defaults,
        one_route_with_find_unused,
        collectives_per_forward,
        crossed_without_forwarded,
        recalibrated,
        # Failures last: they leave a reducer in the middle of its work.
        one_route_with_defaults,
        two_forwards_with_find_unused,
    )
}


def main(rank: int, world: int, init_file: str, out_file: str) -> None:
    join_ranks(rank, world, init_file)
    count_collectives()
    cases = {key: partial(run_case, case, rank) for key, case in CASES.items()}
    run_cases(cases | {key: partial(scenario, rank) for key, scenario in SCENARIOS.items()}, out_file)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
