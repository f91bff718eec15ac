"""The verbs ``study`` and ``show``: what they run, what they print, and their exit status."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from advnorm import ConfigError
from advnorm._core.records import write_json
from advnorm.cli import listing
from advnorm.cli.app import app, spelled_out
from advnorm.engine import PREEMPTED
from advnorm.studies import STUDIES
from advnorm.studies.record import FORMAT
from advnorm.studies.run import tasks
from advnorm.studies.summary import decisive


def invoke(*arguments):
    return CliRunner().invoke(app, spelled_out([str(argument) for argument in arguments]), env={"COLUMNS": "200"})


def test_a_smoke_test_runs_every_cell_prints_the_table_and_keeps_nothing(tmp_path):
    out = invoke("study", "A/table6", "--smoke", "--seeds", 0, 1, "--out", tmp_path / "results", "--device", "cpu")
    assert out.exit_code == 0, out.output
    for cell in ("standard/eps8", "standard/eps16"):
        assert all(f"done {cell} seed {seed}" in out.output for seed in (0, 1))
    assert "(n=2)" in out.output and "A smoke test shows that it runs; its numbers mean nothing." in out.output
    assert not (tmp_path / "results").exists()


def test_a_dry_run_says_how_far_each_cell_is_and_runs_nothing(tmp_path):
    study = STUDIES.get("A/table3")
    done, damaged, started, *_ = tasks(study, protocol="fast", out=tmp_path)
    names = {"format": FORMAT, "study": done.study, "cell": done.cell, "protocol": "fast", "seed": 0}
    run = {"config": {"lr": 7.0}, "seconds": 1.0, "processes": 1}
    write_json(done.record, {**names, "values": {"shared/clean": 90.0}, "run": run})
    write_json(damaged.record, {})
    started.run.folder.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    out = invoke("study", "A/table3", "--protocol", "fast", "--dry-run", "--out", tmp_path)
    assert out.exit_code == 0
    states = [line.split("│")[1:5] for line in out.output.splitlines() if "│ fast" in line]
    found = {cell.strip(): state.strip() for cell, _, _, state in states}
    states = {done.cell: "done", damaged.cell: "damaged", started.cell: "started"}
    assert found == dict.fromkeys(study.by_name(), "to do") | states
    assert "single/eps8/fast-seed0.json was made with other settings than the study has now: lr 7.0, now" in out.output
    assert "single/eps16/fast-seed0.json is skipped: its format is None" in out.output
    assert sorted(tmp_path.rglob("*")) == before


def test_a_figure_which_prints_no_numbers_is_told_in_whole_lines():
    study = STUDIES.get("C/fig4")
    assert listing.study(study).plain.splitlines()[:2] == ["C/fig4", f"claim: {study.printed['claim']}"]
    sums = {(cell.name, f"sums/{kind}"): [1.0] for cell in study.cells() for kind in ("clean", "adv")}
    told = listing.study(study, sums, "fast").plain
    assert (
        told.startswith("C/fig4 fast\nclaim: ") and "Not confirmed." in told and "`advnorm report` shows ours" in told
    )
    read = sorted(decisive(study, sums))
    assert read and told.splitlines()[-len(read) :] == [f"{cell} {name}: 1" for cell, name in read]
    out = invoke("study", "A/fig7", "--smoke", "--device", "cpu")
    assert out.exit_code == 0 and "its numbers mean nothing.\nThe paper prints no numbers.\n" in out.output


#: The command, which gets SIGTERM in its first step of training.
TERMINATED = """
import os, signal, sys
from advnorm.cli import main
loop = sys.modules["advnorm.engine.train"].Loop
step = loop.train_step
loop.train_step = lambda self, batch: (os.kill(os.getpid(), signal.SIGTERM), step(self, batch))
main()
"""


def test_sigterm_stops_a_study_at_a_checkpoint_with_the_exit_status_of_a_training():
    command = [sys.executable, "-c", TERMINATED, "study", "A/table6", "--smoke", "--device", "cpu"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == PREEMPTED, found.stderr
    assert "standard/eps8 was stopped before its end; the same command goes on" in found.stdout
    assert not any(word in found.stdout for word in ("done", "failed"))


def test_a_cell_that_fails_is_told_and_the_exit_status_is_1(tmp_path):
    missing = tmp_path / "nothing"
    out = invoke("study", "A/table6", "--protocol", "fast", "--out", tmp_path / "results", "--data-dir", missing)
    assert out.exit_code == 1
    assert "failed standard/eps8 seed 0" in out.output and "failed standard/eps16 seed 0" in out.output
    assert "missing" in out.output and "| not run" in out.output and "Not run." in out.output


def test_show_prints_a_study_with_the_papers_numbers_and_a_cell_with_its_settings():
    study = invoke("show", "A/table3").output
    assert "Setup1" in study and "claim: " in study and "ours" not in study
    cell = invoke("show", "A/table3/setup1/eps16").output
    assert "dual_affine_bn" in cell and "16/255" in cell


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["study", "A/tabel3"], "did you mean 'A/table3'"),
        (["study", "A/table3", "--protocol", "quick"], "unknown protocol 'quick'"),
        (["study", "A/table3", "--protocol", "fast", "--smoke"], "--smoke is a protocol of its own"),
        (["study", "A/table6", "--smoke", "--launcher", "rye", "--device", "cpu"], "did you mean 'ray'"),
    ],
)
def test_what_is_wrong_with_a_command_is_told(arguments, message):
    out = invoke(*arguments)
    assert isinstance(out.exception, ConfigError) and message in str(out.exception)
