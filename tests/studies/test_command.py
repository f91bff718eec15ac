"""The verbs ``study`` and ``show``: what they run, what they print, and their exit status."""

import pytest
from typer.testing import CliRunner

from advnorm import ConfigError
from advnorm.cli.app import app, spelled_out
from advnorm.studies import STUDIES
from advnorm.studies.run import tasks


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
    done, started, *_ = tasks(study, protocol="fast", out=tmp_path)
    done.record.parent.mkdir(parents=True)
    done.record.write_text("{}")
    started.run.folder.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    out = invoke("study", "A/table3", "--protocol", "fast", "--dry-run", "--out", tmp_path)
    assert out.exit_code == 0
    states = [line.split("│")[1:5] for line in out.output.splitlines() if "│ fast" in line]
    found = {cell.strip(): state.strip() for cell, _, _, state in states}
    assert found == dict.fromkeys(study.by_name(), "to do") | {done.cell: "done", started.cell: "started"}
    assert sorted(tmp_path.rglob("*")) == before


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
        (["study", "A/table6", "--smoke", "--launcher", "rye", "--device", "cpu"], "did you mean 'ray'"),
    ],
)
def test_what_is_wrong_with_a_command_is_told(arguments, message):
    out = invoke(*arguments)
    assert isinstance(out.exception, ConfigError) and message in str(out.exception)
