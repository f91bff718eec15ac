"""An objective under DDP: two processes are one process on the whole batch, with one reduction per step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support import objective_ranks
from support.objective_ranks import CASES, STEPS, WORLD, data, descend
from support.ranks import seen, two_processes

pytestmark = two_processes


@pytest.fixture(scope="module")
def ranks(launch_ranks) -> list[dict[str, Any]]:
    """What each rank saw, from one launch of all ranks."""
    return launch_ranks(objective_ranks.__file__, WORLD)


@pytest.mark.parametrize("key", CASES)
def test_two_ranks_train_as_one_process_on_the_whole_batch(ranks, key):
    found = seen(ranks, key)
    objective = CASES[key].objective(sync=False)
    before = {name: value.clone() for name, value in objective.model.state_dict().items()}
    losses = descend(objective, [data(step) for step in range(STEPS)])
    mean = [sum(pair) / WORLD for pair in zip(*(result["losses"] for result in found))]
    assert mean == pytest.approx(losses, rel=1e-9)
    after = objective.model.state_dict()
    assert not torch.allclose(after["conv1.weight"], before["conv1.weight"])
    for result in found:
        for name, value in after.items():
            torch.testing.assert_close(
                result["state"][name], value, rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}"
            )


@pytest.mark.parametrize("key", CASES)
def test_a_step_reduces_the_gradients_once_and_the_attack_communicates_nothing(ranks, key):
    case = CASES[key]
    moments = 0 if case.options.get("statistics") == "running" else 2 * case.forwards
    for result in seen(ranks, key):
        assert result["calls"] == {"bucket": STEPS, "all_reduce": STEPS * moments}
