"""The record of a killed evaluation: resumed, checked, and equal to that of an uninterrupted one."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import Tensor

from advnorm.attacks.autoattack import AutoAttack
from advnorm.attacks.autoattack.record import CascadeRecord
from support.autoattack_models import Double, Wrapped, quick, same
from support.problems import raises_problem

#: Evaluates, and kills itself by SIGKILL in a given forward.
SCRIPT = """
import os, pickle, signal, sys
import torch
from torch import nn
torch.set_num_threads(1)
from advnorm.attacks.autoattack import AutoAttack

folder, deadline = sys.argv[1], int(sys.argv[2])
model, attack, x, y = pickle.load(open(sys.argv[3], "rb"))

class Mortal(nn.Module):
    def __init__(self):
        super().__init__()
        self.model, self.forwards = model, 0
    def forward(self, x):
        self.forwards += 1
        if self.forwards == deadline:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.model(x)

mortal = Mortal()
attack.evaluate(mortal, x, y, record=folder)
print(mortal.forwards)
"""


def comparable(folder: Path) -> tuple[dict, dict[str, Tensor]]:
    from safetensors.torch import load_file

    record = json.loads((folder / "record.json").read_text())
    record["answer"].pop("seconds")
    record.pop("digest")  # of the seconds too
    return record, load_file(folder / "answer.safetensors")


def test_a_killed_evaluation_resumes_and_ends_with_the_same_record(linf, tmp_path):
    import pickle

    x, y = linf.first(60)
    attack = quick(linf.threat, batch_size=15)  # 5 images at 3 targets
    pickled = tmp_path / "evaluation"
    pickled.write_bytes(pickle.dumps((linf.model, attack, x, y)))

    def process(folder: Path, deadline: int) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(folder), str(deadline), str(pickled)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)

    whole = process(tmp_path / "whole", -1)
    assert whole.returncode == 0, whole.stderr
    forwards = int(whole.stdout)
    spent, killed = [], tmp_path / "killed"
    for attempt in range(10):  # each attempt is killed later than the one before
        ended = process(killed, forwards // 3 + 20 * attempt)
        stages = [_stage_of(path) for path in sorted(killed.glob("batch-*"))]
        spent.append(stages)
        if ended.returncode == 0:
            break
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        assert "answer" not in json.loads((killed / "record.json").read_text())
    assert ended.returncode == 0 and len(spent) > 2
    in_the_middle = [stages for stages in spent if stages and stages[-1] == "apgd-t"]
    assert in_the_middle, spent  # killed between two batches of APGD-T
    assert int(ended.stdout) < forwards
    assert not [*killed.glob("batch-*"), *killed.glob("*.part")]
    (a, tensors), (b, expected) = comparable(killed), comparable(tmp_path / "whole")
    assert a == b
    assert tensors.keys() == expected.keys() and all(torch.equal(tensors[k], expected[k]) for k in expected)


def _stage_of(path: Path) -> str:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["facts"])["stage"]


class Interrupted(Exception):
    pass


def interrupted(attack: AutoAttack, linf, folder: Path, batches: int) -> None:
    """An evaluation that ends after some batches."""
    original, left = CascadeRecord.add, [batches]

    def add(self, batch):
        if not left[0]:
            raise Interrupted
        left[0] -= 1
        original(self, batch)

    CascadeRecord.add = add
    try:
        with pytest.raises(Interrupted):
            attack.evaluate(linf.model, *linf.first(30), record=folder)
    finally:
        CascadeRecord.add = original


def test_a_record_resumes_with_another_batch_size(linf, tmp_path):
    double = dataclasses.replace(linf, model=Double(linf.model))
    interrupted(quick(linf.threat, batch_size=12), double, tmp_path / "record", 4)
    result = quick(linf.threat, batch_size=50).evaluate(double.model, *linf.first(30), record=tmp_path / "record")
    assert same(result, quick(linf.threat).evaluate(double.model, *linf.first(30)))


def test_a_finished_record_returns_its_result_without_an_attack(linf, tmp_path):
    x, y = linf.first(30)
    attack, counted = quick(linf.threat), Wrapped(linf.model)
    first = attack.evaluate(counted, x, y, record=tmp_path / "record")
    calls: list[int] = []
    counted.before = lambda x: calls.append(len(x)) or x  # type: ignore[func-returns-value]
    again = attack.evaluate(counted, x, y, record=tmp_path / "record")
    assert calls == [8]  # to see that the model is the same
    assert same(first, again)
    for field in ("stages", "seconds", "forwards", "warnings", "batch_size", "halved", "attack"):
        assert getattr(first, field) == getattr(again, field)


def test_a_fifo_in_place_of_a_batch_raises_at_once(linf, tmp_path):
    attack, folder = quick(linf.threat, batch_size=12), tmp_path / "record"
    interrupted(attack, linf, folder, 3)
    batch = next(folder.glob("batch-*"))
    batch.unlink()
    os.mkfifo(batch)
    with raises_problem("damaged_file", "record"):
        attack.evaluate(linf.model, *linf.first(30), record=folder)


def test_a_foreign_or_damaged_record_raises(linf, tmp_path):
    x, y = linf.first(30)
    attack, folder = quick(linf.threat, batch_size=12), tmp_path / "record"
    interrupted(attack, linf, folder, 3)
    other = Wrapped(linf.model)
    moved = copy.deepcopy(linf.model)
    moved[-1].bias.data[0] += 1e-6
    for model, images, labels, settings, what in (
        (linf.model, x.flip(0), y, {}, "images"),
        (linf.model, x, y.flip(0), {}, "labels"),
        (linf.model, x, y, {"seed": 1}, "attack"),
        (linf.model, x, y, {"precision": "bf16"}, "attack, search"),
        (other, x, y, {}, "model"),
        (moved, x, y, {}, "model"),
    ):
        with raises_problem("conflict", "record") as caught:
            dataclasses.replace(attack, **settings).evaluate(model, images, labels, record=folder)
        assert f"(different: {what})" in str(caught.value)
    batch = folder / "batch-000002.safetensors"
    content = bytearray(batch.read_bytes())
    content[-5] ^= 1
    batch.write_bytes(content)
    with raises_problem("damaged_file", "record"):
        attack.evaluate(linf.model, x, y, record=folder)
    batch.write_bytes(content[:100])
    with raises_problem("damaged_file", "record"):
        attack.evaluate(linf.model, x, y, record=folder)
    (folder / "record.json").write_text('{"format": 1, "asked"')
    with raises_problem("damaged_file"):
        attack.evaluate(linf.model, x, y, record=folder)
    (folder / "record.json").unlink()
    with raises_problem("already_exists", "record"):
        attack.evaluate(linf.model, x, y, record=folder)


def test_a_folder_with_a_partial_file_alone_counts_as_empty(linf, tmp_path):
    folder, (x, y) = tmp_path / "record", linf.first(10)
    folder.mkdir()
    (folder / ".record.json.77.part").write_text('{"format"')
    result = quick(linf.threat).evaluate(linf.model, x, y, record=folder)
    assert same(quick(linf.threat).evaluate(linf.model, x, y, record=folder), result)


def test_a_model_is_identified_by_its_logits_too(linf, tmp_path):
    x, y = linf.first(30)
    model = Wrapped(linf.model)
    quick(linf.threat).evaluate(model, x, y, record=tmp_path / "record")
    model.after = lambda logits: logits.flip(1)  # which no tensor of it and no repr shows
    with raises_problem("conflict", "record"):
        quick(linf.threat).evaluate(model, x, y, record=tmp_path / "record")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"digest": None}, "digest"),
        ({"asked": {}}, "asked.logits"),
        ({"asked": {"logits": [[1.0]]}}, "asked.logits.0.0"),
    ],
)
def test_a_record_that_was_edited_raises(linf, tmp_path, change, field):
    path, attack = tmp_path / "record" / "record.json", quick(linf.threat, batch_size=12)
    interrupted(attack, linf, path.parent, 3)
    record = json.loads(path.read_text()) | change
    path.write_text(json.dumps({name: value for name, value in record.items() if value is not None}))
    with raises_problem("damaged_file", f"{path}: {field}"):
        attack.evaluate(linf.model, *linf.first(30), record=path.parent)


def test_a_record_of_another_format_raises(linf, tmp_path):
    folder = tmp_path / "record"
    interrupted(quick(linf.threat, batch_size=12), linf, folder, 3)
    record = json.loads((folder / "record.json").read_text())
    del record["asked"]["model"]
    (folder / "record.json").write_text(json.dumps({**record, "format": 1}))
    with raises_problem("not_supported", f"{folder / 'record.json'}: format"):
        quick(linf.threat, batch_size=12).evaluate(linf.model, *linf.first(30), record=folder)
