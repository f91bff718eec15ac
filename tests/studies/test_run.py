"""Running a study: nothing is done twice, nothing is lost, and bad records are told."""

import json
from dataclasses import replace

import pytest

from advnorm import ConfigError
from advnorm.studies import STUDIES, find, get, list_studies
from advnorm.studies.base import mean
from advnorm.studies.run import Outcome, attempt, run_all, tasks, work
from advnorm.studies.summary import collected


@pytest.fixture(scope="module")
def smoked(tmp_path_factory):
    """Table 8 of paper A as a smoke test, in a folder."""
    out = tmp_path_factory.mktemp("study")
    outcomes = run_all(tasks(STUDIES.get("A/table8"), protocol="smoke", out=out))
    assert [outcome.error for outcome in outcomes] == [None] * 3
    return out


def test_a_study_gives_a_record_per_cell_with_values_for_every_printed_number(smoked):
    study = STUDIES.get("A/table8")
    values, problems = collected(study, protocol="smoke", out=smoked)
    assert not problems
    for number in study.numbers():
        assert 0 <= mean(values, number.cell, number.value) <= 100
    assert study.answer(values) in ("confirmed", "not confirmed")
    assert study.answer({}) == "not run"


def test_a_finished_cell_is_not_done_again(smoked):
    task = tasks(STUDIES.get("A/table8"), protocol="smoke", out=smoked)[0]
    assert task.state == "done"
    before = task.record.stat().st_mtime_ns
    assert work(task)["values"] == json.loads(task.record.read_text())["values"]
    assert task.record.stat().st_mtime_ns == before


def test_a_training_that_two_studies_share_is_done_once(smoked):
    shared = next(t for t in tasks(STUDIES.get("A/table1"), protocol="smoke", out=smoked) if t.cell == "dual_bn/eps16")
    assert shared.state == "started" and shared.run.finished
    timing = (shared.run.folder / "timing.jsonl").read_text()
    other = json.loads(tasks(STUDIES.get("A/table8"), protocol="smoke", out=smoked)[2].record.read_text())
    assert work(shared)["values"] == other["values"]
    assert (shared.run.folder / "timing.jsonl").read_text() == timing


def test_a_damaged_or_foreign_record_is_told_and_skipped(smoked, tmp_path):
    study = STUDIES.get("A/table8")
    good = tasks(study, protocol="smoke", out=smoked)[2].record
    folder = tmp_path / "records" / study.name / "dual_bn" / "eps16"
    folder.mkdir(parents=True)
    (folder / "smoke-seed0.json").write_text(good.read_text())
    (folder / "smoke-seed1.json").write_text("{")
    (folder / "smoke-seed2.json").write_text('{"format": "other"}')
    (folder / "smoke-seed3.json").write_text(json.dumps({"format": "advnorm.cell/1", "seed": 3, "values": [1]}))
    values, problems = collected(study, protocol="smoke", out=tmp_path)
    assert len(values["dual_bn/eps16", "adv/clean"]) == 1
    assert [name in " ".join(problems) for name in ("seed1", "seed2", "seed3", "seed0")] == [True, True, True, False]


def test_a_failed_cell_is_tried_again_and_then_told_and_the_others_go_on(tmp_path, monkeypatch):
    import advnorm.studies.run as module

    tried = []

    def fails(task, *, progress):
        tried.append(task.cell)
        if task.cell.startswith("dual"):
            raise OSError("no space")

    monkeypatch.setattr(module, "work", fails)
    outcomes = run_all(tasks(STUDIES.get("A/table8"), protocol="smoke", out=tmp_path), retries=2)
    assert [outcome.error is None for outcome in outcomes] == [True, True, False]
    assert tried == ["single/eps16", "single_kl/eps16", *["dual_bn/eps16"] * 3]
    assert "no space" in outcomes[2].error


def test_a_wrong_configuration_is_not_tried_again(tmp_path):
    task = replace(tasks(STUDIES.get("A/table8"), protocol="paper", out=tmp_path)[0], data_dir=str(tmp_path / "no"))
    outcome = attempt(task, retries=5)
    assert isinstance(outcome, Outcome) and "missing" in outcome.error
    assert not (tmp_path / "runs").exists()


def test_names_lead_to_studies_and_cells():
    assert "A/table3" in list_studies("A/*")
    assert get("A/table3/dual_bn/eps16").norm == "dual_bn"
    assert find("A/table3")[1] is None
    with pytest.raises(ConfigError, match="did you mean 'dual_bn/eps16'"):
        get("A/table3/dual_bn/eps61")
    with pytest.raises(ConfigError, match="did you mean 'A/table3'"):
        find("A/tabel3")
    with pytest.raises(ConfigError, match="name one: "):
        get("A/table3")
