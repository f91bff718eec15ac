"""Errors of a training: reported before files are written, or with an intact checkpoint."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import advnorm
from advnorm import ConfigError, Run
from advnorm.training import TrainingError, checkpoint, loop
from advnorm.training.loop import TrainingLoop
from support import train_worker
from support.problems import raises_problem
from support.small_runs import ENVIRONMENT, SOURCE, small, tensors, train
from support.train_worker import SMALL, patched


def test_a_loss_that_is_not_finite_ends_the_run_before_a_checkpoint_holds_it(tmp_path):
    config = small(norm="dual_bn", lr=1e30)
    with raises_problem("not_finite", kind=TrainingError):
        train(config, tmp_path, checkpoint_minutes=0)
    run = Run.open(next(tmp_path.iterdir()))
    if checkpoint.exists(run.checkpoints, "last"):
        assert all(value.isfinite().all() for value in tensors(run).values())
    assert not run.finished and not [row for row in run.metrics() if not math.isfinite(row["loss"])]
    assert "failed: the loss or a parameter is not finite" in (run.folder / "log.txt").read_text().splitlines()[-1]


def test_parameters_that_are_not_finite_are_found_though_the_loss_was(tmp_path, monkeypatch):
    def spoil(loop, *_):
        next(loop.model.parameters()).data.view(-1)[0] = math.nan

    monkeypatch.setattr(TrainingLoop, "_check_finite", TrainingLoop._check_finite)
    patched(TrainingLoop, "_check_finite", before=spoil, at=2)
    with pytest.raises(TrainingError, match="step 8 of 12"):
        train(small(), tmp_path)
    run = Run.open(next(tmp_path.iterdir()))
    assert checkpoint.load(run.checkpoints, "last")[1]["step"] == 4 and len(run.metrics()) == 1
    assert all(value.isfinite().all() for value in tensors(run).values())


def test_out_of_memory_is_a_training_error_with_a_hint(tmp_path, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nlong advice")

    monkeypatch.setattr(TrainingLoop, "train_step", TrainingLoop.train_step)
    patched(TrainingLoop, "train_step", before=full, at=5)
    with pytest.raises(TrainingError, match="out of memory: .*9 GiB.; lower batch_size") as raised:
        train(small(), tmp_path)
    assert "long advice" not in str(raised.value)
    assert checkpoint.load(next(tmp_path.iterdir()) / "checkpoints", "last")[1]["step"] == 4


FULL_DISK = """
import resource, sys
import advnorm
from support.train_worker import CASES
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
try:
    advnorm.train(CASES["hybrid"], out=sys.argv[1], device="cpu")
except advnorm.AdvnormError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("limit", [2000, 20_000], ids=["the description", "the checkpoint"])
def test_a_full_disk_is_one_readable_error_and_the_run_resumes_later(tmp_path, limit):
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([SOURCE, str(Path(__file__).parent.parent)])}
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path), str(limit)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert re.match(r"(CheckpointError|TrainingError) .*(File too large).*intact", done.stdout), done.stdout
    run = train(train_worker.CASES["hybrid"], tmp_path)
    assert run.finished and len(run.metrics()) == 3


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"held_out": 64}, {}, "held_out must be a share"),
        ({"batch_size": 60}, {}, "batch_size 60 is larger than the 48 images"),
        ({"data": "cifar10"}, {}, "--data-dir"),
        ({"data": "cifar10"}, {"data_dir": "missing"}, "cifar"),
        ({"weights": "missing.safetensors"}, {}, "cannot read missing.safetensors: No such file"),
        ({"weights": "."}, {}, "not a training run"),
        ({"model": "vgg11"}, {}, "vgg11 with norm bn cannot take 12 images of 1×8×8: .*use another model"),
        ({"model": {"name": "resnet18", "width": 0.05}, "norm": "in"}, {}, "one value per group"),
        (
            {"model": {"name": "resnet18", "width": 0.05}, "batch_size": 1, "objective": "standard"},
            {},
            "cannot take 1 images",
        ),
        (
            {
                "model": {"name": "resnet18", "width": 0.05},
                "objective": "standard",
                "second_pass": {"name": "apart", "groups": 12},
            },
            {},
            "second_pass apart cannot take 12 images: .*change second_pass.samples, second_pass.groups",
        ),
        ({"regularizer": {"name": "ligs", "shift": "fgsm", "size": 2}}, {}, "size must lie in pixel scale"),
        ({}, {"device": "cuda"}, "device 'cuda:0' is not available"),
        ({}, {"device": "tpu"}, "device must be 'cpu' or 'cuda', got 'tpu'"),
        ({}, {"max_minutes": -1, "checkpoint_minutes": math.nan}, "max_minutes .* got -1; checkpoint_minutes"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_problems_are_reported_before_files_are_written(tmp_path, monkeypatch, settings, options, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=message) as raised:
        advnorm.train(small(**settings), **{"out": "runs", "device": "cpu", **options})
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_network_without_values_is_rejected(tmp_path, monkeypatch):
    build = loop.build_model
    monkeypatch.setattr(loop, "build_model", lambda *how: build(*how).to("meta"))
    with raises_problem("wrong_device", "model"):
        train(small(), tmp_path)


def test_a_folder_with_other_content_is_rejected_and_unchanged(tmp_path):
    run = train(small(epochs=1, name="mine"), tmp_path)
    content = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    with raises_problem("already_exists", "out"):
        train(small(epochs=1, name="mine", lr=0.2), tmp_path)
    other = {**SMALL["data"], "seed": 1}
    with raises_problem("already_exists", "out"):
        train(small(epochs=1, name="mine", data=other), tmp_path)
    assert content == {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    foreign = tmp_path / "foreign-seed0"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    with raises_problem("already_exists", "out"):
        train(small(epochs=1, name="foreign"), tmp_path)
    (tmp_path / "file-seed0").write_text("")
    with raises_problem("already_exists", "out"):
        train(small(epochs=1, name="file"), tmp_path)
    assert sorted(path.name for path in foreign.iterdir()) == ["thesis.tex"]
    with raises_problem("missing_file", "run"):
        Run.open(foreign)


def test_two_trainings_into_one_folder_at_once_are_rejected(tmp_path, monkeypatch):
    errors = []

    def second(*_):
        thread = threading.Thread(target=meanwhile)
        thread.start()
        thread.join()

    def meanwhile():
        try:
            train(small(), tmp_path)
        except ConfigError as error:
            errors.append(str(error))

    monkeypatch.setattr(TrainingLoop, "train_step", TrainingLoop.train_step)
    patched(TrainingLoop, "train_step", before=second, at=2)
    assert train(small(), tmp_path).finished
    assert len(errors) == 1 and "another process is writing" in errors[0]
