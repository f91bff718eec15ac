"""Training in several processes: two are one on the whole batch, and they stop and fail together."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from advnorm import Run
from advnorm.data import load, make_loader
from advnorm.training import checkpoint
from support import train_ranks
from support.train_ranks import COMPARED, OWN, SHARDED, SLOW, STEPS, SYNCHRONIZED, WORLD

pytestmark = [
    pytest.mark.world_size(WORLD),
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed"),
]


Launched = tuple[Path, Path, list[dict[str, Any]]]


def launch_cases(speed: str, launch, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """Folders of the runs of two processes and of one, and what each of the two saw; started at the same time."""
    folder, alone = tmp_path_factory.mktemp("ranks"), tmp_path_factory.mktemp("alone")
    arguments = [[rank, WORLD, folder / "init", folder] for rank in range(WORLD)] + [[alone]]
    launch(*([train_ranks.__file__, speed, *words] for words in arguments), timeout=300)
    return folder, alone, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.fixture(scope="module")
def launched(launch, tmp_path_factory) -> Launched:
    return launch_cases("fast", launch, tmp_path_factory)


@pytest.fixture(scope="module")
def launched_slow(launch, tmp_path_factory) -> Launched:
    return launch_cases("slow", launch, tmp_path_factory)


@pytest.fixture(scope="module")
def launched_sharded(launch, tmp_path_factory) -> Launched:
    return launch_cases("sharded", launch, tmp_path_factory)


def in_all_launches(fast: Iterable[str]) -> Any:
    """The cases of both launches; a test finds its launch by the name of the fixture."""
    slow = [pytest.param("launched_slow", name, marks=pytest.mark.slow) for name in SLOW]
    return pytest.mark.parametrize(("fixture", "name"), [*(("launched", name) for name in fast), *slow])


def seen(launched: Any, name: str) -> list[dict[str, Any]]:
    found = [rank[name] for rank in launched[2]]
    for rank, result in enumerate(found):
        assert "error" not in result, f"rank {rank}: {result.get('trace')}"
    return found


def only_run(folder: Path) -> Run:
    return Run.open(next(folder.iterdir()))


def weights(run: Run) -> dict[str, torch.Tensor]:
    return checkpoint.load(run.checkpoints, "last")[0]


@in_all_launches(COMPARED["fast"])
def test_two_processes_train_as_one_on_the_whole_batch(request, fixture, name):
    compare_with_one(request.getfixturevalue(fixture), name)


def compare_with_one(launched: Launched, name: str) -> None:
    seen(launched, name)
    two, one = only_run(launched[0] / name), only_run(launched[1] / name)
    assert two.record["processes"] == 2 and one.record["processes"] == 1
    assert two.metrics()[-1]["step"] == STEPS // 2 * two.config.epochs
    for found, expected in zip(two.metrics(), one.metrics(), strict=True):
        assert found["held_out"] == expected["held_out"]
        for term in expected.keys() - {"held_out"}:
            assert found[term] == pytest.approx(expected[term], rel=1e-12), term
    expected = weights(one)
    for key, value in weights(two).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-12, atol=1e-12, msg=lambda m, key=key: f"{key}: {m}")


@in_all_launches(SYNCHRONIZED)
def test_a_step_reduces_the_gradients_once(request, fixture, name):
    for result in seen(request.getfixturevalue(fixture), name):
        assert result["bucket"] == STEPS


@pytest.mark.parametrize("name", SHARDED)
def test_two_processes_with_parts_of_the_parameters_train_as_one(launched_sharded, name):
    compare_with_one(launched_sharded, name)


def test_a_sharded_step_gathers_once_and_reduces_once(launched_sharded):
    """Attacks communicate nothing: 2 steps of PGD in training, 1 in validation."""
    for result in seen(launched_sharded, "fsdp-dual_affine_ln"):
        assert result["scatter"] == STEPS
        # Beside the steps: the check before training, two validations, and the tensors of two checkpoints.
        assert result["gather"] == STEPS + 3, "the check before training, and two validations"


def test_a_sharded_training_that_was_stopped_ends_with_the_same_bits(launched_sharded):
    for result in seen(launched_sharded, "fsdp-stopped"):
        assert not result["first"]["finished"] and result["finished"]
    stopped, whole = (only_run(launched_sharded[0] / name) for name in ("fsdp-stopped", "fsdp-whole"))
    expected = weights(whole)
    assert any(name.startswith("ema.") for name in expected) and any("momentum" in name for name in expected)
    assert all(torch.equal(value, expected[key]) for key, value in weights(stopped).items())


def test_sharded_processes_with_statistics_of_their_own_validate_the_same_model(launched_sharded):
    first, second = seen(launched_sharded, "fsdp-own")
    assert first["finished"] and first["validated"] == second["validated"] and len(set(first["validated"])) == 2


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_processes_together_see_the_batches_of_one(world):
    data = load("synthetic", "train", **OWN.data.options)
    loaders = [
        make_loader(data, batch_size=16, seed=0, augment="crop_flip", rank=rank, world=world) for rank in range(world)
    ]
    whole = make_loader(data, batch_size=16, seed=0, augment="crop_flip").epoch(1)
    for batch, *parts in zip(whole, *(loader.epoch(1) for loader in loaders), strict=True):
        for one, *several in zip(batch, *parts):
            assert torch.equal(one, torch.cat(several))


def test_statistics_that_are_pooled_need_no_more_than_an_image_of_each_process(launched):
    assert all(result["finished"] for result in seen(launched, "single"))


@pytest.mark.parametrize("name", ["own", "own_plain", "moved"])
def test_without_synchronization_the_first_process_rules(launched, name):
    first, second = seen(launched, name)
    assert first["finished"] and second["finished"]
    assert first["validated"] == second["validated"] and len(set(first["validated"])) == 2, (
        "every rank validates the same model after each epoch"
    )
    assert first["validated"][-1] == train_ranks.fingerprint(only_run(launched[0] / name).model("last"))


def test_sigterm_to_one_process_stops_all_and_they_go_on_to_the_same_bits(launched):
    for result in seen(launched, "stopped"):
        assert not result["first"]["finished"] and result["finished"]
        assert result["step"] == 4, "the next step at which the processes agree"
    stopped, alone = only_run(launched[0] / "stopped"), only_run(launched[0] / "own")
    assert (stopped.folder / "metrics.jsonl").read_text() == (alone.folder / "metrics.jsonl").read_text()
    expected = weights(alone)
    assert all(torch.equal(value, expected[key]) for key, value in weights(stopped).items())


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("nan", ["not_finite", ""], ["not_finite", ""]),
        ("full_disk", ["not_writable", ""], ["first_process_failed", ""]),
        ("odd_share", ["conflict", "objective.clean_share"], ["conflict", "objective.clean_share"]),
        ("odd_batch", ["out_of_range", "batch_size"], ["out_of_range", "batch_size"]),
    ],
)
def test_processes_fail_together_and_each_reports_the_reason(launched, name, first, second):
    results = seen(launched, name)
    assert [result["problems"] for result in results] == [[first], [second]]


SEVERAL = """
import os, sys, advnorm
from support.train_worker import SMALL
out, rank, port = sys.argv[1:]
os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=port)
for number in range(3):
    config = advnorm.Config.from_dict({**SMALL, "epochs": 1, "name": f"number{number}"})
    assert advnorm.train(config, out=out, device="cpu").record["processes"] == 2
"""


def test_several_trainings_in_the_same_processes_do_not_wait_for_each_other(launch, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    launch(*(["-c", SEVERAL, tmp_path, rank, port] for rank in range(WORLD)), timeout=120)
    assert len(list(tmp_path.glob("*/record.json"))) == 3


@pytest.mark.slow
def test_the_command_trains_under_torchrun_and_one_process_tells(launch, tmp_path):
    settings = ["name=two", "epochs=1", "batch_size=128", "norm=dual_bn", "attack.steps=1", "validation_attack=pgd1"]
    command = [
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "advnorm", "train", "--device", "cpu", "--out", tmp_path, "--set", *settings,
    ]  # fmt: skip
    (printed,) = launch(command, timeout=300)
    assert printed.count("advnorm evaluate") == 1
    assert Run.open(tmp_path / "two-seed0").record["processes"] == 2
