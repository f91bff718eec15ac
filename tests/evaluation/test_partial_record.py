"""Records: an interrupted evaluation resumes, a finished one is read back, and foreign files are rejected."""

import copy
import dataclasses
import json
import runpy
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import advnorm
from advnorm._core.locks import exclusive
from advnorm._core.shapes import with_digest
from advnorm.attacks import PGD
from advnorm.attacks.autoattack import AutoAttack
from advnorm.attacks.autoattack.record import CascadeRecord
from advnorm.evaluation import benchmark
from advnorm.evaluation.partial_record import PartialRecord
from support.classifiers import CountingLinear, first
from support.problems import raises_problem

THREAT = advnorm.ThreatModel(eps=0.2)


def test_the_seconds_of_an_attack_include_all_parts_and_attempts(tmp_path):
    results = torch.tensor([1, 0, -1], dtype=torch.int8)
    one = PartialRecord(tmp_path / "r.json", "this evaluation", {})
    one.save("pgd10", results, 2.0)
    one.save("pgd10", results, 1.0)
    again = PartialRecord(tmp_path / "r.json", "this evaluation", {})
    again.save("pgd10", results, 0.5)
    assert again.job("pgd10")["seconds"] == 3.5
    assert torch.equal(again.results("pgd10", 3), results)
    with raises_problem("damaged_file", "record"):
        again.results("pgd10", 4)


def test_a_second_process_on_one_record_is_rejected(data, tmp_path):
    path = tmp_path / "deep" / "r.json"
    with exclusive(path), raises_problem("busy"):
        benchmark(CountingLinear(), first(data), THREAT, "fgsm", record=path)
    benchmark(CountingLinear(), first(data), THREAT, "fgsm", record=path)
    assert list(path.parent.iterdir()) == [path]


def test_a_record_that_cannot_be_written_is_reported_before_any_computation(data, tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "r.json"):
        model = CountingLinear()
        with raises_problem("not_writable", str(path)):
            benchmark(model, first(data), THREAT, "fgsm", record=path)
        assert model.forwards <= 1


def test_a_finished_record_is_read_back_and_a_foreign_one_rejected(data, tmp_path):
    path = tmp_path / "r.json"
    model = CountingLinear()
    done = benchmark(model, first(data), THREAT, "fgsm", record=path)
    model.forwards = 0
    assert benchmark(model, first(data), THREAT, "fgsm", record=path).record() == done.record()
    assert model.forwards == 3  # the probe, and two forwards of the first images
    for other in ({"attacks": "pgd1"}, {"data": first(data, 41)}):
        with raises_problem("other_evaluation", "record"):
            benchmark(model, **{"data": first(data), "attacks": "fgsm", **other}, threat=THREAT, record=path)
    nn.init.zeros_(model.fc.weight)
    with raises_problem("other_evaluation", "record"):
        benchmark(model, first(data), THREAT, "fgsm", record=path)
    for content, code in (("{", "damaged_file"), ("{}", "not_supported")):
        path.write_text(content)
        with raises_problem(code):
            benchmark(model, first(data), THREAT, "fgsm", record=path)


def test_attacks_under_other_names_have_another_record(data, tmp_path):
    model, attack = CountingLinear(), PGD(threat=THREAT, steps=1)
    done = benchmark(model, first(data), THREAT, {"mine": attack}, record=tmp_path / "r.json")
    again = benchmark(model, first(data), THREAT, {"mine": attack}, record=tmp_path / "r.json")
    assert again.record() == done.record()
    with raises_problem("other_evaluation", "record"):
        benchmark(model, first(data), THREAT, {"other": attack}, record=tmp_path / "r.json")


def test_a_model_with_the_same_tensors_and_other_outputs_does_not_match_a_record(data, tmp_path):
    path, unfinished = tmp_path / "r.json", tmp_path / "p.json"
    model = CountingLinear(lambda z: torch.cat([z[:, :9], torch.full_like(z[:, 9:], -torch.inf)], 1))  # no JSON number
    done = benchmark(model, first(data), THREAT, "fgsm", record=path)

    class Stop(Exception):
        pass

    def stop(*_):
        raise Stop

    attacks = {"a": PGD(threat=THREAT, steps=1), "b": PGD(threat=THREAT, steps=2, progress=stop)}
    with pytest.raises(Stop):
        benchmark(model, first(data), THREAT, attacks, record=unfinished)
    answer = model.answer
    model.answer = lambda z: answer(z) * (1 + 1e-4)  # the rounding of another device
    assert benchmark(model, first(data), THREAT, "fgsm", record=path).record() == done.record()
    model.answer = lambda z: answer(z).clamp(-0.5, 0.5)
    with raises_problem("other_evaluation", "record"):
        benchmark(model, first(data), THREAT, "fgsm", record=path)
    with raises_problem("other_evaluation", "record") as error:
        benchmark(model, first(data), THREAT, {"a": attacks["a"]}, record=unfinished)
    assert "p.json.partial" in str(error.value)
    old = json.loads(path.read_text())
    del old["logits"], old["digest"]
    path.write_text(json.dumps(old))  # written by a version without logits and digests
    assert benchmark(model, first(data), THREAT, "fgsm", record=path).accuracies == done.accuracies


def test_a_randomized_model_is_not_matched_by_its_logits(data, tmp_path):
    model = CountingLinear(lambda z: z + torch.randn_like(z))
    done = benchmark(model, first(data), THREAT, "fgsm", record=tmp_path / "r.json")
    assert done.record()["logits"] == {"default": None}
    model.answer = lambda z: z - torch.randn_like(z)
    assert benchmark(model, first(data), THREAT, "fgsm", record=tmp_path / "r.json").record() == done.record()


OTHER = {"format": "advnorm.partial/1", "jobs": {}, "fingerprint": "x", "commit": None, "logits": {}}


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("{", "damaged_file"),
        ("[]", "damaged_file"),
        ('{"format": "advnorm.benchmark/1"}', "not_supported"),
        ('{"format": "advnorm.partial/1", "jobs": {}, "fingerprint": "x"}', "damaged_file"),
        (json.dumps(OTHER), "damaged_file"),
        (json.dumps(with_digest(OTHER)), "other_evaluation"),
    ],
)
def test_a_partial_file_that_does_not_match_is_named(content, code, data, tmp_path):
    partial = tmp_path / "r.json.partial"
    partial.write_text(content)
    with raises_problem(code) as error:
        benchmark(CountingLinear(), first(data), THREAT, "fgsm", record=tmp_path / "r.json")
    assert str(partial) in str(error.value)


SCRIPT = """
    import os, signal, sys
    import torch
    import advnorm
    from advnorm.attacks.autoattack import AutoAttack
    from advnorm.attacks.autoattack.record import CascadeRecord
    from advnorm.data import digits
    from advnorm.evaluation import benchmark
    from advnorm.evaluation.partial_record import PartialRecord

    torch.set_num_threads(1)
    x, y = digits("train")
    means = torch.stack([x[y == c].mean(0).flatten() for c in range(10)])
    linear = torch.nn.Linear(64, 10)  # the nearest class mean: deterministic, and correct on nine of ten digits
    linear.weight.data, linear.bias.data = means, -means.square().sum(1) / 2
    model = torch.nn.Sequential(torch.nn.Flatten(), linear)
    x, y = (part[:40] for part in digits("test"))
    threat = advnorm.ThreatModel(eps=0.1)
    cascade = AutoAttack(threat=threat, steps=10, queries=50, batch_size=36)

    def killed(function, when):
        count = 0
        def wrapped(self, *arguments):
            nonlocal count
            function(self, *arguments)
            count += when(*arguments)
            if count == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        return wrapped

    def counted(self, *arguments):
        print("batch", flush=True)
        return perturb(self, *arguments)

    perturb, advnorm.attacks.PGD.perturb = advnorm.attacks.PGD.perturb, counted
    record, kill = sys.argv[1], sys.argv[2]
    if kill == "pgd":
        PartialRecord.save = killed(PartialRecord.save, lambda *_: 1)
    elif kill == "apgd-t":
        CascadeRecord.add = killed(CascadeRecord.add, lambda batch: batch.stage == "apgd-t")
    result = benchmark(
        model, (x, y), threat, {"pgd": advnorm.attacks.PGD(threat=threat, steps=5), "aa": cascade},
        batch_size=8, record=record,
    )
    print(result)
"""


def test_a_killed_evaluation_resumes_and_ends_with_the_same_record(tmp_path, monkeypatch, capsys):
    script = tmp_path / "run.py"
    script.write_text(textwrap.dedent(SCRIPT))

    def run(name: str) -> int:
        """The number of batches that PGD attacked."""
        threads = torch.get_num_threads()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", [str(script), str(tmp_path / name), ""])
            patch.setattr(PGD, "perturb", PGD.perturb)
            runpy.run_path(str(script))
        torch.set_num_threads(threads)
        return capsys.readouterr().out.count("batch\n")

    def run_until_killed(name: str, kill: str) -> int:
        command = [sys.executable, str(script), str(tmp_path / name), kill]
        done = subprocess.run(command, capture_output=True, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
        return done.stdout.count(b"batch\n")

    assert run("whole.json") == 5
    assert run_until_killed("killed.json", "pgd") == 2
    partial = json.loads((tmp_path / "killed.json.partial").read_text())
    (pgd,) = partial["jobs"].values()
    assert not (tmp_path / "killed.json").exists() and set("1?") <= set(pgd["verdicts"])
    assert run_until_killed("killed.json", "apgd-t") == 3
    folder = next(tmp_path.glob("killed.json.partial.*"))
    assert len(list(folder.glob("batch-*"))) >= 3  # APGD-CE and two batches of APGD-T
    assert run("killed.json") == 0
    whole, killed = (json.loads((tmp_path / name).read_text()) for name in ("whole.json", "killed.json"))
    # The mark of the commit for changed files may change while the tests run.
    varying = {"seconds": 0, "commit": "", "digest": ""}
    assert {**whole, **varying} == {**killed, **varying}
    assert 0 < whole["accuracy"]["default"]["union"] < whole["accuracy"]["default"]["clean"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed.json", "run.py", "whole.json"]


def test_an_interrupted_cascade_belongs_to_its_model_and_its_seconds_add_up(sound, data, tmp_path, monkeypatch):
    x, y = first(data)
    record, cascade = tmp_path / "r.json", {"aa": AutoAttack(threat=THREAT, steps=3, targets=2, queries=5)}
    original = CascadeRecord.add

    def last(self, batch):
        original(self, dataclasses.replace(batch, seconds=1000.0))
        raise KeyboardInterrupt

    monkeypatch.setattr(CascadeRecord, "add", last)
    with pytest.raises(KeyboardInterrupt):
        benchmark(sound, (x, y), THREAT, cascade, record=record)
    monkeypatch.undo()
    other = copy.deepcopy(sound)
    next(other.parameters()).data.view(-1)[0] += 1e-6
    with raises_problem("other_evaluation", "record"):
        benchmark(other, (x, y), THREAT, cascade, record=record)
    monkeypatch.setattr(PartialRecord, "remove", lambda self: None)
    resumed = benchmark(sound, (x, y), THREAT, cascade, record=record)
    assert 1000 < resumed.seconds["default"]["aa"] < 1100  # those of the first process too
    record.unlink()
    Path(f"{record}.partial").unlink()
    with pytest.raises(advnorm.AdvnormError, match="model"):  # by the folder of the cascade
        benchmark(other, (x, y), THREAT, cascade, record=record)
