"""One rank of the distributed tests: ``python objective_ranks.py RANK WORLD INIT_FILE OUT_FILE``.

Trains every case of CASES for three steps under DDP with its defaults, and saves what it saw; test_distributed.py
compares. A case that fails is stored as its error, so that one failure does not take the others with it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from advnorm.objectives import OBJECTIVES, Objective
from support.objective_oracles import images, pgd, tiny
from support.ranks import join_ranks, run_cases

WORLD, STEPS, PER_RANK = 2, 3, 4


@dataclass(frozen=True)
class Case:
    name: str
    norm: str
    options: dict[str, Any] = field(default_factory=dict)
    norm_options: dict[str, Any] = field(default_factory=dict)
    find_unused: bool = False  # DDP must expect parameters without a gradient

    def objective(self, *, sync: bool) -> Objective:
        model = tiny(self.norm, sync=sync, **self.norm_options)
        return OBJECTIVES.get(self.name)(model, pgd(), **self.options)

    @property
    def forwards(self) -> int:
        """Forwards of the training pass: each talks once per synchronized norm."""
        return 2 if self.options.get("layout") == "sequential" else 1


def _cases() -> dict[str, Case]:
    cases = {}
    for norm in ("bn", "dual_bn", "dual_affine_bn", "cross_bn", "gmm_bn"):
        for layout in ("concatenated",) if norm in ("cross_bn", "gmm_bn") else ("concatenated", "sequential"):
            for name in ("hybrid", "trades"):
                cases[f"{name}-{norm}-{layout}"] = Case(name, norm, {"layout": layout})
    cases["everything-gmm_bn"] = Case(
        "hybrid", "gmm_bn", {"kl_weight": 1.0, "pairing_weight": 0.5, "likelihood_weight": 0.01, "clean_weight": 0.3}
    )
    cases["share-dual_bn"] = Case("hybrid", "dual_bn", {"clean_share": 0.5})
    cases["running-dual_bn"] = Case("hybrid", "dual_bn", {"statistics": "running"})
    cases["constant-cross_bn"] = Case("hybrid", "cross_bn", {}, {"other_gradient": False})
    cases["share-cross_bn"] = Case("hybrid", "cross_bn", {"clean_share": 0.5})
    cases["classical-bn"] = Case("classical", "bn")
    return cases


CASES = _cases()


def data(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images, labels and identities of the whole batch of a step."""
    x, y = images(WORLD * PER_RANK, seed=step)
    return x, y, torch.arange(len(x)) + 100 * step


def share(rank: int, step: int) -> tuple[Tensor, ...]:
    """The rank's part of the whole batch, as the loaders cut it."""
    return tuple(value.chunk(WORLD)[rank] for value in data(step))


def descend(module: nn.Module, batches: list[tuple[Tensor, ...]]) -> list[float]:
    """Gradient descent, a step per batch; the losses."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, y, index in batches:
        optimizer.zero_grad()
        step = module(x, y, index=index)
        step.loss.backward()
        optimizer.step()
        losses.append(step.loss.item())
    return losses


#: Collectives of the norms' forwards (dist.all_reduce outside of a backward) and buckets of gradients that DDP reduced.
CALLS = {"all_reduce": 0, "bucket": 0}


def count_collectives() -> None:
    original = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        CALLS["all_reduce"] += torch._C._current_graph_task_id() == -1
        return original(*args, **kwargs)

    dist.all_reduce = counted


def hook(state, bucket):  # no annotations: DDP wants the types themselves, not their names
    CALLS["bucket"] += 1
    return allreduce_hook(state, bucket)


def run(case: Case, rank: int) -> dict[str, Any]:
    objective = case.objective(sync=True)
    ddp = DDP(objective, find_unused_parameters=case.find_unused)
    ddp.register_comm_hook(dist.group.WORLD, hook)
    CALLS.update(all_reduce=0, bucket=0)
    losses = descend(ddp, [share(rank, step) for step in range(STEPS)])
    return {"losses": losses, "state": objective.model.state_dict(), "calls": dict(CALLS)}


def main(rank: int, world: int, init_file: str, out_file: str) -> None:
    join_ranks(rank, world, init_file)
    count_collectives()
    run_cases({key: partial(run, case, rank) for key, case in CASES.items()}, out_file)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
