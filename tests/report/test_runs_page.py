"""The page of a folder of runs: trainings, evaluations, audits, and files that could not be read."""

import json
import re
import shutil

import pytest
from typer.testing import CliRunner

import advnorm
from advnorm.cli.app import app
from advnorm.evaluation.report_data import collect_results
from advnorm.report.runs import build_runs_page

SMALL = {"model": "small_cnn", "eps": 0.1, "epochs": 2, "batch_size": 256, "attack": {"steps": 1}, "held_out": 0.1}


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with two runs, of which one is evaluated and one audited."""
    folder = tmp_path_factory.mktemp("runs")
    for norm in ("bn", "dual_bn"):
        run = advnorm.train(advnorm.Config.from_dict({**SMALL, "norm": norm, "name": norm}), out=folder, device="cpu")
    few = ("--limit", 12, "--device", "cpu")
    out = invoke("evaluate", run.folder, "--attacks", "fgsm", "pgd2", *few, "--json", run.folder / "evaluation.json")
    assert out.exit_code == 0, out.output
    out = invoke("audit", folder / "bn-seed0", "--budget", "quick", *few, "--json", folder / "audit.json")
    assert out.exit_code in (0, 1, 3, 4), out.output
    return folder


def column(table, label):
    place = [column["label"] for column in table["columns"]].index(label)
    return [row[place] for row in table["rows"] if len(row) > 1]


def headings(table):
    return [row[0] for row in table["rows"] if len(row) == 1]


def test_every_run_evaluation_and_audit_is_on_the_page(runs, tmp_path):
    out = invoke("report", runs, "--out", tmp_path / "page.html")
    assert out.exit_code == 0 and "2 runs, 1 evaluation, 1 audit" in out.output
    page = (tmp_path / "page.html").read_text()
    assert "Evaluated" in page and "Is it real?" in page and 'src="http' not in page
    trained, evaluated, audited = build_runs_page(collect_results(runs))["tables"]
    assert headings(trained) == ["bn-seed0", "dual_bn-seed0"] and column(trained, "norm") == ["bn", "dual_bn"]
    assert column(trained, "epochs") == ["2 of 2", "2 of 2"]
    metrics = [json.loads(line) for line in (runs / "bn-seed0" / "metrics.jsonl").read_text().splitlines()]
    assert column(trained, "adv, training")[0] == metrics[-1]["adv_accuracy"]
    held_out = metrics[-1]["held_out"]
    assert column(trained, "held out, last")[0].startswith(f"clean {100 * held_out['clean']:.1f}, ")
    record = json.loads((runs / "dual_bn-seed0" / "evaluation.json").read_text())
    assert headings(evaluated) == ["dual_bn-seed0: best checkpoint, digits, test, Linf eps=0.1, 12 images"]
    assert column(evaluated, "branch") == ["clean", "adv"]
    assert column(evaluated, "pgd2") == [record["accuracy"][branch]["pgd2"] for branch in ("clean", "adv")]
    assert column(audited, "verdict") == [json.loads((runs / "audit.json").read_text())["verdict"]]


def test_runs_in_the_figure_are_labelled_by_their_differences(runs):
    (figure,) = build_runs_page(collect_results(runs))["figures"]
    assert [row["label"] for row in figure["rows"]] == ["bn", "dual_bn"] and list(figure["x"]) == [1, 2]


def test_more_runs_than_colours_are_drawn_dashed(runs, tmp_path):
    for seed in range(6):
        shutil.copytree(runs / "bn-seed0", tmp_path / "many" / f"run{seed}")
    out = invoke("report", tmp_path / "many", "--out", tmp_path / "page.html")
    assert out.exit_code == 0, out.output
    drawn = re.findall(r'class="line (s\d(?: turn\d)?)"', (tmp_path / "page.html").read_text())
    assert len(drawn) == len(set(drawn)) == 6 and "s0 turn1" in drawn


def test_a_folder_without_records_and_runs_raises(tmp_path):
    (tmp_path / "empty").mkdir()
    out = invoke("report", tmp_path / "empty", "--out", tmp_path / "page.html")
    assert "no records and no runs" in str(out.exception) and not (tmp_path / "page.html").exists()


def test_regularizer_second_pass_and_mixing_are_part_of_the_method(runs):
    found = collect_results(runs)
    extras = {"regularizer": {"name": "ligs"}, "second_pass": {"name": "apart"}, "mix": "mixup"}
    second = {**found["runs"][0], "config": {**found["runs"][0]["config"], **extras}}
    page = build_runs_page({**found, "runs": [found["runs"][0], second]})
    assert column(page["tables"][0], "objective") == ["hybrid", "hybrid + ligs + apart + mixup"]
    assert [row["label"] for row in page["figures"][0]["rows"]] == ["bn, hybrid", "bn, hybrid + ligs + apart + mixup"]


DAMAGE = {
    "verdicts": lambda record: record.pop("verdicts"),
    "letters": lambda record: record["verdicts"]["clean"].update(pgd2="x"),
    "warnings": lambda record: record.update(warnings=3),
    "threat": lambda record: record.update(threat={"eps": -1}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_unreadable_files_are_reported_and_the_rest_is_shown(runs, tmp_path, damage):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    record = json.loads((runs / "dual_bn-seed0" / "evaluation.json").read_text())
    DAMAGE[damage](record)
    (tmp_path / "other.json").write_text(json.dumps(record))
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "list.json").write_text("[1, 2]")  # somebody's
    shutil.copytree(runs / "bn-seed0", tmp_path / "good")
    found = collect_results(tmp_path)
    assert sorted(problem.split(" ")[0] for problem in found["problems"]) == [
        "broken/run.json",
        "deep.json",
        "other.json",
    ]
    assert [run["name"] for run in found["runs"]] == ["good"] and not found["benchmarks"]
    out = invoke("report", tmp_path, "--out", tmp_path / "page.html")
    assert out.exit_code == 0 and out.output.count("is skipped") == 3
    assert "Not read" in (tmp_path / "page.html").read_text()
