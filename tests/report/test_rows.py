"""Runs as rows: a data frame and files of all numbers."""

import csv
import json
import shutil

import pytest

import advnorm
from advnorm.evaluation.intervals import wilson_interval
from advnorm.evaluation.report_data import collect_results
from advnorm.report.rows import COLUMNS, result_rows
from support.command import invoke
from support.problems import raises_problem


def test_a_data_frame_has_a_row_per_run_branch_and_attack(runs):
    pytest.importorskip("pandas")
    frame = advnorm.runs(runs)
    assert tuple(frame.columns[: len(COLUMNS)]) == COLUMNS and frame["error"].isna().all()
    evaluated = frame[frame["run"] == "dual_bn-seed0"]
    keys = [(branch, attack) for branch in ("clean", "adv") for attack in ("clean", "fgsm", "pgd2", "union")]
    assert list(zip(evaluated["branch"], evaluated["attack"])) == keys
    record = json.loads((runs / "dual_bn-seed0" / "evaluation.json").read_text())
    assert list(evaluated["accuracy"]) == [record["accuracy"][branch][attack] for branch, attack in keys]
    row = evaluated.iloc[-1]
    assert (row["low"], row["high"]) == wilson_interval(round(12 * row["accuracy"]), 12)
    assert (row["model"], row["data"], row["norm"], row["seed"], row["eps"]) == (
        "small_cnn",
        "digits",
        "dual_bn",
        0,
        0.1,
    )
    assert (row["config.attack.steps"], row["images"], row["record"]) == (1, 12, "dual_bn-seed0/evaluation.json")
    metrics = advnorm.Run(runs / "dual_bn-seed0").metrics()[-1]
    assert row["last.held_out.clean"] == metrics["held_out"]["clean"] and row["last.epoch"] == 2
    verdict = json.loads((runs / "audit.json").read_text())
    (audited,) = frame[frame["run"] == "bn-seed0"].to_dict("records")
    assert (audited["attack"], audited["verdict"], audited["claimed"], audited["accuracy"]) == (
        "audit",
        verdict["verdict"],
        verdict["pgd10"],
        verdict["worst_case"],
    )
    assert audited["record"] == "audit.json" and audited["branch"] == "default"


def test_a_record_elsewhere_belongs_to_the_run_that_it_names(runs, tmp_path):
    shutil.copytree(runs, tmp_path / "all" / "runs")
    shutil.move(tmp_path / "all" / "runs" / "dual_bn-seed0" / "evaluation.json", tmp_path / "all" / "other.json")
    rows = [row for row in result_rows(collect_results(tmp_path / "all")) if row["run"] == "runs/dual_bn-seed0"]
    assert len(rows) == 8 and {(row["record"], row["finished"]) for row in rows} == {("other.json", True)}


def test_a_run_without_an_evaluation_has_one_row(runs, tmp_path):
    shutil.copytree(runs / "bn-seed0", tmp_path / "bn-seed0")
    (row,) = result_rows(collect_results(tmp_path))
    assert row["run"] == "bn-seed0" and row["finished"] and "attack" not in row
    (row,) = result_rows(collect_results(tmp_path / "bn-seed0"))
    assert row["run"] == "bn-seed0", "the folder of a run serves too"


def test_a_record_without_its_run_keeps_the_settings_of_the_training(runs, tmp_path):
    shutil.copy(runs / "dual_bn-seed0" / "evaluation.json", tmp_path / "copy.json")
    rows = result_rows(collect_results(tmp_path))
    assert {(row["run"], row["norm"], row["record"]) for row in rows} == {("dual_bn-seed0", "dual_bn", "copy.json")}


def test_a_damaged_record_without_a_run_is_one_row(runs, tmp_path):
    record = json.loads((runs / "dual_bn-seed0" / "evaluation.json").read_text())
    record["about"]["training"] = {"norm": "bn"}
    (tmp_path / "copy.json").write_text(json.dumps(record))
    (row,) = result_rows(collect_results(tmp_path))
    assert row["record"] == "copy.json" and row["error"]


def test_a_damaged_run_is_a_row_with_its_error(runs, tmp_path):
    shutil.copytree(runs, tmp_path / "runs")
    (tmp_path / "runs" / "bn-seed0" / "run.json").write_text("{")
    record = tmp_path / "runs" / "dual_bn-seed0" / "evaluation.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "about": "a run"}))
    rows = result_rows(collect_results(tmp_path / "runs"))
    errors = {(row["run"], row.get("record")) for row in rows if row.get("error")}
    assert errors == {("bn-seed0", "bn-seed0/run.json"), ("dual_bn-seed0", "dual_bn-seed0/evaluation.json")}
    assert [row["finished"] for row in rows if row["run"] == "dual_bn-seed0" and not row.get("error")] == [True]


def test_a_run_of_own_code_is_read_without_that_code(runs, tmp_path):
    shutil.copytree(runs / "bn-seed0", tmp_path / "own")
    text = json.loads((tmp_path / "own" / "run.json").read_text())
    text["config"]["model"] = {"name": "a_model_of_mine", "depth": 7}
    (tmp_path / "own" / "run.json").write_text(json.dumps(text))
    (row,) = result_rows(collect_results(tmp_path))
    assert (row["model"], row["config.model.depth"], row.get("error")) == ("a_model_of_mine", 7, None)


def test_files_hold_the_rows(runs, tmp_path):
    rows = result_rows(collect_results(runs))
    assert invoke("report", runs, "--format", "json", "--out", tmp_path / "all.json").exit_code == 0
    loaded = json.loads((tmp_path / "all.json").read_text())
    assert [{key: value for key, value in row.items() if value is not None} for row in loaded] == [
        {key: value for key, value in row.items() if value is not None} for row in rows
    ]
    assert invoke("report", runs, "--out", tmp_path / "all.csv").exit_code == 0, "the suffix is the format"
    with (tmp_path / "all.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["accuracy"] for line in lines if line["accuracy"]] == [
        str(row["accuracy"]) for row in rows if "accuracy" in row
    ]
    assert invoke("report", runs, "--out", tmp_path / "all.md").exit_code == 0
    text = (tmp_path / "all.md").read_text()
    assert (
        "| dual_bn | adv | 1 |" in text
        and "## Is it real?" in text
        and "| bn-seed0 | small_cnn | digits | bn |" in text
    )


def test_the_numbers_of_studies_are_written_too(tmp_path):
    (tmp_path / "records").mkdir()
    for form in ("csv", "json", "md"):
        out = invoke("report", tmp_path, "--out", tmp_path / f"all.{form}")
        assert out.exit_code == 0, out.output
    rows = json.loads((tmp_path / "all.json").read_text())
    printed = {row["paper"] for row in rows if row["study"] == "A/table3"}
    assert len(printed) > 3 and all(row["ours"] is None for row in rows)
    assert (tmp_path / "all.csv").read_text().count("\n") == len(rows) + 1
    assert (tmp_path / "all.md").read_text().count("\n| ") == len(rows) + 2


def test_the_name_of_a_report_fits_its_format(runs, tmp_path):
    with raises_problem("unknown_name", "format"):
        invoke("report", runs, "--out", tmp_path / "x.pdf")
    with raises_problem("conflict", "out"):
        invoke("report", runs, "--out", tmp_path / "x.html", "--format", "csv")
    assert invoke("report", runs, "--out", tmp_path / "x", "--format", "csv").exit_code == 0


def test_an_unknown_format_and_a_missing_folder_are_rejected(runs, tmp_path):
    with raises_problem("unknown_name", "format"):
        invoke("report", runs, "--format", "xlsx", "--out", tmp_path / "x")
    pytest.importorskip("pandas")
    with raises_problem("missing_file", "folder"):
        advnorm.runs(tmp_path / "nothing")
