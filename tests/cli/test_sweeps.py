"""Several runs in one command: train, resume, evaluate, and the commands that are printed for the next step."""

import json
import re
import shlex
from pathlib import Path

import pytest

from advnorm import Run
from advnorm._core.exit_codes import FAILED, PREEMPTED
from support.command import invoke
from support.problems import raises_problem
from support.train_worker import SMALL

CPU = ("--device", "cpu")


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A working directory with a small configuration."""
    monkeypatch.chdir(tmp_path)
    Path("small.json").write_text(json.dumps({**SMALL, "epochs": 1}))
    return tmp_path


def printed_command(output: str, purpose: str) -> list[str]:
    """The words of a printed command, as a shell reads them."""
    (text,) = re.findall(rf"^{purpose}: (.*)$", output, flags=re.MULTILINE)
    return shlex.split(text)


def test_seeds_and_a_sweep_are_trained_resumed_evaluated_and_reported(small):
    words = ("train", "small.json", "--sweep", "norm=bn,dual_bn", "--seeds", "0", "1", "--out", "my runs", *CPU)
    stopped = invoke(*words, "--max-minutes", "0")
    assert stopped.exit_code == PREEMPTED and "evaluate" not in stopped.output
    assert len(list(Path("my runs").iterdir())) == 1, "the runs follow one another"
    done = invoke(*words)
    assert done.exit_code == 0 and done.output.count(" of 4: ") == 4
    folders = sorted(Path("my runs").iterdir())
    assert [(run.config.norm, run.config.seed, run.finished) for run in map(Run, folders)] == [
        (norm, seed, True) for norm in ("bn", "dual_bn") for seed in (0, 1)
    ]
    times = [(folder / "record.json").stat().st_mtime_ns for folder in folders]
    assert invoke(*words).exit_code == 0
    assert [(folder / "record.json").stat().st_mtime_ns for folder in folders] == times, "finished runs are kept"

    command = printed_command(done.output, "evaluate them")
    assert command[:2] == ["advnorm", "evaluate"] and command[2:6] == [str(folder) for folder in folders]
    few = ("--attacks", "fgsm", "--limit", "8")
    evaluated = invoke(*command[1:], *few)
    assert evaluated.exit_code == 0, evaluated.output
    for folder in folders:
        (record,) = folder.glob("evaluation-best-*.json")
        assert json.loads(record.read_text())["about"]["run"] == folder.name
    assert re.search(r"│ adv +│ 2 +│ .*±", evaluated.output), "mean and spread over two seeds"
    again = invoke(*command[1:], *few)
    assert again.output.count("read back from") == 4
    assert len(list(folders[0].glob("evaluation-*.json"))) == 1
    invoke("evaluate", folders[0], "--attacks", "noise-uniform", "--limit", "8", *CPU)
    assert len(list(folders[0].glob("evaluation-*.json"))) == 2, "other settings have a record of their own"

    report = printed_command(evaluated.output, "all results on one page")
    assert report == ["advnorm", "report", "my runs"] and invoke(*report[1:]).exit_code == 0
    assert "4 runs" in invoke(*report[1:]).output and Path("report.html").is_file()


def test_among_several_targets_what_is_no_run_is_skipped_and_what_is_missing_is_an_error_at_once(small):
    for name in ("a", "b"):
        invoke("train", "small.json", "--set", f"name={name}", "--out", "runs", *CPU)
    Path("runs/report.html").write_text("a page")
    few = ("--attacks", "fgsm", "--limit", "4", *CPU)
    assert invoke("evaluate", *sorted(Path("runs").iterdir()), *few).exit_code == 0
    for folder in ("notes", "figures"):
        (small / "runs" / folder).mkdir()
    output = invoke("evaluate", *sorted(Path("runs").iterdir()), *few).output
    assert "runs/notes is skipped" in output and "2 of 2: runs/b-seed0" in output
    parent = invoke("evaluate", "runs", *few)
    assert parent.exit_code == 0 and "2 of 2: runs/b-seed0" in parent.output and "skipped" not in parent.output
    for record in Path("runs").glob("*/evaluation-*"):
        record.unlink()
    with raises_problem("missing_file", "targets"):
        invoke("evaluate", "runs/notes", "runs/figures", *few)
    with raises_problem("missing_file", "targets"):
        invoke("evaluate", "runs/a-seed0", "runs/c-seed0", *few)
    with raises_problem("conflict", "json"):
        invoke("evaluate", "runs/a-seed0", "runs/b-seed0", "--json", "r.json", *few)
    assert not list(Path("runs").glob("*/evaluation-*")), "nothing is evaluated before the error"


def test_the_error_of_one_of_several_targets_does_not_stop_the_rest(small):
    for name in ("a", "b", "c"):
        invoke("train", "small.json", "--set", f"name={name}", "--out", "runs", *CPU)
    for weights in Path("runs/b-seed0/checkpoints").glob("*.safetensors"):
        weights.write_bytes(b"damaged")
    out = invoke("evaluate", *sorted(Path("runs").iterdir()), "--attacks", "fgsm", "--limit", "4", *CPU)
    assert out.exit_code == FAILED and out.output.count("failed:") == 1 and "is damaged" in out.output
    assert len(list(Path("runs").glob("*/evaluation-*.json"))) == 2


def test_the_error_of_one_of_several_runs_does_not_stop_the_rest(small):
    words = ("train", "small.json", "--seeds", "0", "1", "2", "--set", "name=x", "--out", "runs", *CPU)
    Path("runs/x-seed1").mkdir(parents=True)
    Path("runs/x-seed1/notes.txt").write_text("not a run")
    out = invoke(*words)
    assert out.exit_code == FAILED and out.output.count("failed:") == 1
    assert [Run(Path(f"runs/x-seed{seed}")).finished for seed in range(3)] == [True, False, True]
    Path("runs/x-seed0").rename("runs/elsewhere")
    Path("runs/x-seed0").mkdir()
    Path("runs/x-seed0/notes.txt").write_text("not a run")
    with raises_problem("already_exists", "out"):  # what the first one shows is probably wrong with all
        invoke(*words)


def test_a_negative_time_limit_is_rejected(small):
    with raises_problem("out_of_range", "max_minutes"):
        invoke("train", "small.json", "--seeds", "0", "1", "--max-minutes", "-1", *CPU)


def test_one_seed_and_several_exclude_each_other(small):
    with raises_problem("conflict", "seeds"):
        invoke("train", "small.json", "--seed", "0", "--seeds", "1", "2", *CPU)


OWN = """
from torch import nn
from advnorm.models.registry import MODELS, register_model

if "flat" not in MODELS:
    @register_model("flat", mean=None, std=None, has_norm=False)
    def flat(layers):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, layers.num_classes))
"""


def test_a_printed_command_imports_the_code_that_this_one_imported(small, monkeypatch):
    from advnorm.models import MODELS

    monkeypatch.setattr(MODELS, "_entries", dict(MODELS._entries))
    Path("my code.py").write_text(OWN)
    settings = ("--set", "model=flat", "norm=none", "objective=classical")
    out = invoke("--import", "my code.py", "train", "small.json", *settings, *CPU)
    command = printed_command(out.output, "evaluate it")
    assert command[:4] == ["advnorm", "--import", "my code.py", "evaluate"] and command[-2:] == list(CPU)
    assert invoke(*command[1:], "--attacks", "fgsm", "--limit", "4").exit_code == 0
    out = invoke("train", "--set", "epochs=1", "norm=bn", "batch_size=512", *CPU)
    assert "--import" not in printed_command(out.output, "evaluate it")
