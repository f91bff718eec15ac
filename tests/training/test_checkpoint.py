"""Checkpoints survive kills, full disks and damage; optimizers and models come back bit for bit."""

from __future__ import annotations

import itertools
import json
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import safetensors.torch
import torch
from torch import nn

import advnorm
from advnorm._core.errors import AdvnormError, ConfigError
from advnorm.config.fields import OptimizerName, TrainingSettings
from advnorm.models.weights import restore_model
from advnorm.training import checkpoint
from advnorm.training.checkpoint import (
    CheckpointError,
    flatten_optimizer,
    restore_optimizer,
)
from advnorm.training.optimizer import make_optimizer
from support.problems import raises_problem

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(7), "c": torch.ones(3, dtype=torch.bfloat16)}


def files(folder: Path) -> list[str]:
    """Everything in a folder, hidden files too."""
    return sorted(path.name for path in folder.iterdir())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_what_was_saved_is_loaded(tmp_path):
    meta = {"step": 3, "rate": 0.1, "best": None, "nested": {"list": [1, 2.5, "x"]}}
    tensors = {**TENSORS, "empty": torch.zeros(0, 4), "random": torch.get_rng_state(), "flag": torch.tensor([True])}
    assert not checkpoint.exists(tmp_path / "new", "last")
    path = checkpoint.save(tmp_path / "new", "last", tensors, meta)
    assert checkpoint.exists(tmp_path / "new", "last")
    assert path.name.startswith("last-00000003-") and path.is_file()
    loaded, found = checkpoint.load(tmp_path / "new", "last")
    assert same(loaded, tensors) and found == meta


def test_a_nan_and_a_negative_zero_keep_their_bits(tmp_path):
    value = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])
    checkpoint.save(tmp_path, "last", {"x": value}, {"step": 0})
    loaded, _ = checkpoint.load(tmp_path, "last")
    assert torch.equal(loaded["x"].view(torch.int32), value.view(torch.int32))


def test_the_same_content_gives_the_same_file(tmp_path):
    one = checkpoint.save(tmp_path / "1", "last", TENSORS, {"step": 1})
    other = checkpoint.save(tmp_path / "2", "last", dict(reversed(TENSORS.items())), {"step": 1})
    assert one.name == other.name and one.read_bytes() == other.read_bytes()


def test_only_the_files_that_a_pointer_needs_stay(tmp_path):
    (tmp_path / "record.json").write_text('{"format": "something else"}')
    (tmp_path / "mine.safetensors").write_bytes(b"not a checkpoint")
    (tmp_path / ".record.json.abc").write_text("written by somebody else at this moment")
    others = set(files(tmp_path))
    first = checkpoint.save(tmp_path, "last", TENSORS, {"step": 1})
    checkpoint.alias(tmp_path, "last", "best")
    second = checkpoint.save(tmp_path, "last", {"a": torch.zeros(1)}, {"step": 2})
    third = checkpoint.save(tmp_path, "last", {"a": torch.ones(1)}, {"step": 3})
    assert set(files(tmp_path)) - others == {"last.json", "best.json", first.name, third.name}
    assert not second.exists()
    assert same(checkpoint.load(tmp_path, "best")[0], TENSORS)
    assert checkpoint.load(tmp_path, "best")[1] == {"step": 1}
    checkpoint.alias(tmp_path, "last", "best")
    assert set(files(tmp_path)) - others == {"last.json", "best.json", third.name}
    checkpoint.save(tmp_path, "last", {"a": torch.ones(1)}, {"step": 3, "again": True})  # the very same file
    assert set(files(tmp_path)) - others == {"last.json", "best.json", third.name}
    assert checkpoint.load(tmp_path, "best")[1] == {"step": 3}


def test_what_a_killed_save_left_half_written_goes_with_the_next(tmp_path):
    checkpoint.save(tmp_path, "last", TENSORS, {"step": 1})
    file = "last-00000002-0123abcd.safetensors"
    for name in (f".{file}.77.part", ".last.json.77.part", file):
        (tmp_path / name).write_bytes(b"half")
    path = checkpoint.save(tmp_path, "last", TENSORS, {"step": 3})
    assert files(tmp_path) == sorted(["last.json", path.name])


def test_beside_a_damaged_pointer_nothing_is_removed(tmp_path):
    first = checkpoint.save(tmp_path, "last", TENSORS, {"step": 1})
    checkpoint.alias(tmp_path, "last", "best")
    (tmp_path / "best.json").write_text("{")
    second = checkpoint.save(tmp_path, "last", TENSORS, {"step": 2})
    assert first.exists() and second.exists()


def test_a_tensor_under_several_names_is_stored_once(tmp_path):
    big = torch.rand(20, 20)
    tensors = {"one": big, "two": big, "row": big[3], "turned": big.t(), "half": big[:10], "other": big.clone()}
    path = checkpoint.save(tmp_path, "last", tensors, {"step": 0})
    loaded, _ = checkpoint.load(tmp_path, "last")
    assert same(loaded, tensors) and list(safetensors.torch.load_file(path)).count("two") == 0
    assert loaded["one"] is loaded["two"] and loaded["row"].data_ptr() != loaded["one"][3].data_ptr()


def in_a_process_of_its_own(function: Callable[[Path], None], folder: Path) -> None:
    """This file as a program: it imports torch once and forks for every death."""
    paths = [str(Path(advnorm.__file__).parent.parent), str(Path(__file__).parent.parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, __file__, function.__name__, folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def fork(function: Callable[[], object]) -> int:
    """The id of a child that calls a function and ends: with 0, or with 1 and the traceback on stderr."""
    child = os.fork()
    if child == 0:
        try:
            function()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def save_numbered(folder: Path, step: int) -> None:
    tensors = {"x": torch.full((100_000,), float(step)), "y": torch.tensor(step)}
    checkpoint.save(folder, "last", tensors, {"step": step, "half": step / 2})


def numbered(folder: Path, name: str = "last") -> int:
    """The number of a checkpoint whose tensors and meta belong together."""
    tensors, meta = checkpoint.load(folder, name)
    assert (tensors["x"] == meta["step"]).all() and tensors["y"].item() == meta["step"] == 2 * meta["half"]
    return meta["step"]


def kills(folder: Path) -> None:
    def run() -> None:
        for step in range(numbered(folder) + 1, 10**6):
            save_numbered(folder, step)
            if step % 3 == 0:
                checkpoint.alias(folder, "last", "best")

    moments = random.Random(0)
    save_numbered(folder, 0)
    checkpoint.alias(folder, "last", "best")
    for _ in range(20):
        before, child = numbered(folder), fork(run)
        try:
            while numbered(folder) == before:  # a reader beside it
                time.sleep(0.001)
            time.sleep(moments.uniform(0.0, 0.03))
        finally:
            os.kill(child, signal.SIGKILL)
            assert os.waitpid(child, 0)[1] == signal.SIGKILL
        assert numbered(folder) >= max(before + 1, numbered(folder, "best"))
        assert numbered(folder, "best") % 3 == 0
    assert numbered(folder, "best") > 0
    save_numbered(folder, 10**6)
    assert len(files(folder)) <= 4  # and nothing has piled up


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    in_a_process_of_its_own(kills, tmp_path)


def deaths(folder: Path) -> None:
    """A child that dies at the n-th call of a kind, before it or after, for every n until it gets through."""
    calls = ((os, "fsync"), (os, "replace"), (os, "open"), (Path, "unlink"), (Path, "open"))
    for (owner, call), after, step in itertools.product(calls, (False, True), (1, 2)):
        for left in itertools.count():
            save_numbered(folder, 1)
            child = fork(partial(save_and_die, folder, step, owner, call, left, after))
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            reached = numbered(folder)
            if status == 0:
                assert reached == step and (left > 0 or call == "unlink"), f"{call} was never called"
                break
            assert status == 9 and reached in (1, step), (call, left, status, reached)


def save_and_die(folder: Path, step: int, owner: object, name: str, left: int, after: bool) -> None:
    """Save, and end the process at a call of a kind; a file that is not synced by then is torn."""
    function = getattr(owner, name)

    def dying(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            if after:
                function(*arguments, **options)
            elif name == "fsync" and stat.S_ISREG(os.fstat(arguments[0]).st_mode):
                os.ftruncate(arguments[0], os.fstat(arguments[0]).st_size // 2)
            os._exit(9)
        return function(*arguments, **options)

    setattr(owner, name, dying)
    save_numbered(folder, step)


def test_a_death_at_any_system_call_leaves_the_old_checkpoint_or_the_new(tmp_path):
    in_a_process_of_its_own(deaths, tmp_path)


def full_disks(folder: Path) -> None:
    def run(limit: int) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        with raises_problem("not_writable", kind=CheckpointError) as caught:
            checkpoint.save(folder, "last", {"x": torch.zeros(10_000)}, {"step": 2, "note": "n" * 60_000})
        assert isinstance(caught.value, OSError) and isinstance(caught.value, AdvnormError)

    for limit in (0, 1_000, 50_000):  # with the last one the tensors fit, but not the pointer
        path = checkpoint.save(folder, "last", TENSORS, {"step": 1})
        assert os.waitpid(fork(partial(run, limit)), 0)[1] == 0
        assert files(folder) == sorted(["last.json", path.name])
        assert same(checkpoint.load(folder, "last")[0], TENSORS)


def test_a_file_that_does_not_fit_leaves_the_old_checkpoint_and_no_rest(tmp_path):
    in_a_process_of_its_own(full_disks, tmp_path)


def test_a_folder_that_cannot_be_made_is_a_checkpoint_error(tmp_path):
    (tmp_path / "file").write_text("")
    with raises_problem("not_writable", kind=CheckpointError):
        checkpoint.save(tmp_path / "file" / "run", "last", TENSORS, {"step": 1})


def test_every_kind_of_damage_is_named_with_its_cure(tmp_path):
    path = checkpoint.save(tmp_path, "last", TENSORS, {"step": 1})
    whole, pointer = path.read_bytes(), (tmp_path / "last.json").read_text()
    flips = [whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :] for i in (0, 9, len(whole) // 2, len(whole) - 1)]
    for data in (*flips, whole[:-1], whole[:5], b"", whole + b"\0"):
        path.write_bytes(data)
        with raises_problem("damaged_file"):
            checkpoint.load(tmp_path, "last")
    path.unlink()
    with raises_problem("missing_file"):
        checkpoint.load(tmp_path, "last")
    path.write_bytes(whole)
    record = json.loads(pointer)
    for change in ({"file": "../../etc/passwd"}, {"file": None}, {"meta": []}, {"blake2b": 3}):
        (tmp_path / "last.json").write_text(json.dumps(record | change))
        with raises_problem("damaged_file"):
            checkpoint.load(tmp_path, "last")
    (tmp_path / "last.json").write_text(json.dumps(record | {"format": "advnorm.checkpoint/2"}))
    with raises_problem("not_supported"):
        checkpoint.load(tmp_path, "last")
    (tmp_path / "last.json").write_text(pointer[:40])
    with pytest.raises(ConfigError):
        checkpoint.load(tmp_path, "last")
    (tmp_path / "last.json").write_text(pointer)
    assert same(checkpoint.load(tmp_path, "last")[0], TENSORS)


def test_numbers_beside_the_tensors_are_checked_too(tmp_path):
    checkpoint.save(tmp_path, "last", TENSORS, {"step": 7, "best": {"score": 0.25}})
    pointer = tmp_path / "last.json"
    pointer.write_text(pointer.read_text().replace("0.25", "0.75"))
    with raises_problem("damaged_file"):
        checkpoint.load(tmp_path, "last")


def test_a_missing_checkpoint_is_missed_by_name(tmp_path):
    with raises_problem("unknown_name", "name"):
        checkpoint.load(tmp_path, "last")
    checkpoint.save(tmp_path, "last", TENSORS, {"step": 1})
    (tmp_path / "record.json").write_text("{}")
    for call in (lambda: checkpoint.load(tmp_path, "lost"), lambda: checkpoint.alias(tmp_path, "lost", "best")):
        with raises_problem("unknown_name", "name"):
            call()


def test_a_load_while_a_run_saves_the_next_one_gets_one_of_them(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, "last", TENSORS, {"step": 1})
    read, calls = Path.read_bytes, []

    def late(path: Path) -> bytes:
        if not calls:
            calls.append(path)
            checkpoint.save(tmp_path, "last", {"a": torch.ones(1)}, {"step": 2})
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", late)
    assert checkpoint.load(tmp_path, "last")[1] == {"step": 2}


def test_meta_that_json_cannot_hold_is_rejected_before_anything_is_written(tmp_path):
    for meta in ({"step": 1, "loss": float("nan")}, {"step": 1, "x": torch.ones(1)}):
        with pytest.raises((TypeError, ValueError), match="JSON"):
            checkpoint.save(tmp_path, "last", TENSORS, meta)
    assert files(tmp_path) == []


# -- optimizers --------------------------------------------------------------------------------------------------------


def model_and_optimizer(kind: str, device: str = "cpu", **options) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = advnorm.create_model("small_cnn", norm="dual_bn", in_channels=1).to(device)
    model = model.to(memory_format=torch.channels_last)
    model.scalar = nn.Parameter(torch.tensor(2.0, device=device))  # as small as a step count
    settings = {
        "lr": 0.01,
        "momentum": 0.9,
        "nesterov": kind == "sgd",
        "weight_decay": 0.01,
        "norm_weight_decay": False,
    }
    return model, make_optimizer(model, TrainingSettings(optimizer=kind, **settings | options))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    device = next(model.parameters()).device
    model.train()
    for seed in seeds:
        x = torch.rand(8, 1, 12, 12, generator=torch.Generator().manual_seed(seed)).to(device)
        optimizer.zero_grad()
        with advnorm.route(model, {"clean": 4, "adv": 4}):
            (model(x) * model.scalar).square().mean().backward()
        optimizer.param_groups[0]["lr"] = 0.1 / (seed + 3)
        optimizer.step()


def names_of(model: nn.Module) -> dict[torch.Tensor, str]:
    return {value: name for name, value in model.named_parameters()}


def goes_on_bit_for_bit(kind: str, folder: Path, device: str) -> None:
    model, optimizer = model_and_optimizer(kind, device)
    train(model, optimizer, range(4))
    tensors, meta = flatten_optimizer(optimizer, names_of(model))
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    checkpoint.save(folder, "last", state | tensors, {"step": 4, "optimizer": meta})
    train(model, optimizer, range(4, 7))

    again, fresh = model_and_optimizer(kind, device, lr=0.5, momentum=0.1)
    loaded, found = checkpoint.load(folder, "last")
    weights = {name.removeprefix("model."): value for name, value in loaded.items() if name.startswith("model.")}
    restore_model(again, weights, "last")
    restore_optimizer(fresh, names_of(again), loaded, found["optimizer"])
    for (name, one), other in zip(again.named_parameters(), model.parameters()):
        assert one.stride() == other.stride(), name
        before, after = optimizer.state[other], fresh.state[one]
        assert before.keys() == after.keys()
        for key in before:
            assert (before[key].device, before[key].dtype) == (after[key].device, after[key].dtype), (name, key)
            assert after[key].stride() == (() if key == "step" else one.stride()), (name, key)
    train(again, fresh, range(4, 7))
    assert same(again.state_dict(), model.state_dict())
    for (name, one), other in zip(again.named_parameters(), model.parameters()):
        assert same(fresh.state[one], optimizer.state[other]), name
    settings = [[{k: v for k, v in g.items() if k != "params"} for g in o.param_groups] for o in (optimizer, fresh)]
    assert settings[0] == settings[1]


@pytest.mark.parametrize("kind", get_args(OptimizerName))
def test_a_restored_optimizer_goes_on_bit_for_bit(kind, tmp_path):
    goes_on_bit_for_bit(kind, tmp_path, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", get_args(OptimizerName))
def test_a_restored_optimizer_goes_on_bit_for_bit_on_a_gpu(kind, tmp_path):
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        goes_on_bit_for_bit(kind, tmp_path, "cuda")
    finally:
        torch.backends.cudnn.deterministic = before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", get_args(OptimizerName))
def test_a_run_goes_on_on_another_device(kind):
    model, optimizer = model_and_optimizer(kind, "cpu")
    train(model, optimizer, range(3))
    tensors, meta = flatten_optimizer(optimizer, names_of(model))
    other, fresh = model_and_optimizer(kind, "cuda")
    other.load_state_dict(model.state_dict())
    restore_optimizer(fresh, names_of(other), tensors, meta)
    train(model, optimizer, range(3, 5))
    train(other, fresh, range(3, 5))
    torch.testing.assert_close(other.scalar.cpu(), model.scalar, rtol=1e-2, atol=1e-3)


def test_parameters_that_never_had_a_gradient_have_no_state(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    tensors, meta = flatten_optimizer(optimizer, names_of(model))
    assert {name.split(".")[1] for name in tensors} == {"0"}
    fresh = torch.optim.Adam(model.parameters())
    restore_optimizer(fresh, names_of(model), tensors, json.loads(json.dumps(meta)))
    assert list(fresh.state) == [model[0].weight, model[0].bias]
    assert fresh.param_groups[0]["betas"] == (0.9, 0.999)


def test_the_restored_state_is_no_view_of_what_was_loaded():
    model, optimizer = model_and_optimizer("adam")
    train(model, optimizer, range(2))
    tensors, meta = flatten_optimizer(optimizer, names_of(model))
    kept = {name: value.clone() for name, value in tensors.items()}
    again, fresh = model_and_optimizer("adam")
    restore_optimizer(fresh, names_of(again), kept, meta)
    before = {name: value.clone() for name, value in kept.items()}
    train(again, fresh, range(2))
    assert same(kept, before)


def test_a_state_of_another_optimizer_is_rejected_and_nothing_changes():
    model, optimizer = model_and_optimizer("sgd")
    train(model, optimizer, range(2))
    tensors, meta = flatten_optimizer(optimizer, names_of(model))
    other_kind = make_optimizer(model, TrainingSettings(optimizer="adam", norm_weight_decay=False))
    one_group = make_optimizer(model, TrainingSettings(norm_weight_decay=True))
    fewer = torch.optim.SGD([model.conv1.weight], lr=0.1)
    for other in (other_kind, one_group, fewer):
        with raises_problem("wrong_tensors"):
            restore_optimizer(other, names_of(model), tensors, meta)
        assert not other.state


if __name__ == "__main__":
    torch.set_num_threads(1)  # threads do not survive a fork
    {"kills": kills, "deaths": deaths, "full_disks": full_disks}[sys.argv[1]](Path(sys.argv[2]))
