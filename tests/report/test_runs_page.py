"""The page of a folder of runs: trainings, evaluations, audits, and files that could not be read."""

import json
import re
import shutil

import pytest
from scipy.stats import binomtest

from advnorm.evaluation.report_data import collect_results
from advnorm.report.figures import draw_figure
from advnorm.report.rows import record_rows
from advnorm.report.runs import build_runs_page, seed_table
from support.command import invoke
from support.problems import raises_problem


def column(table, label):
    place = [column["label"] for column in table["columns"]].index(label)
    return [row[place] for row in table["rows"] if len(row) > 1]


def with_interval(share, images):
    """Percent and Wilson's interval by SciPy."""
    interval = binomtest(round(share * images), images).proportion_ci(method="wilson")
    return f"{100 * share:.1f} ({100 * interval.low:.1f}\u2060–\u2060{100 * interval.high:.1f})"


def headings(table):
    return [row[0] for row in table["rows"] if len(row) == 1]


def test_every_run_evaluation_and_audit_is_on_the_page(runs, tmp_path):
    out = invoke("report", runs, "--out", tmp_path / "page.html")
    assert out.exit_code == 0 and "2 runs, 1 evaluation, 1 audit" in out.output
    page = (tmp_path / "page.html").read_text()
    assert "All evaluations" in page and "Is it real?" in page and 'src="http' not in page
    content = build_runs_page(collect_results(runs))
    (accuracy, audited), (trained, evaluated, _) = content["tables"], content["details"]
    assert headings(trained) == ["bn-seed0", "dual_bn-seed0"] and column(trained, "norm") == ["bn", "dual_bn"]
    assert column(trained, "model") == ["small_cnn"] * 2 and column(trained, "data") == ["digits"] * 2
    assert column(trained, "epochs") == ["2 of 2", "2 of 2"]
    metrics = [json.loads(line) for line in (runs / "bn-seed0" / "metrics.jsonl").read_text().splitlines()]
    last, held_out = metrics[-1], metrics[-1]["held_out"]
    assert column(trained, "training")[0] == f"{100 * last['clean_accuracy']:.1f} / {100 * last['adv_accuracy']:.1f}"
    assert column(trained, "held out, last")[0] == f"{100 * held_out['clean']:.1f} / {100 * held_out['pgd10']:.1f}"
    record = json.loads((runs / "dual_bn-seed0" / "evaluation.json").read_text())
    assert headings(accuracy) == headings(evaluated) == ["dual_bn"]
    assert (
        "best checkpoint, tested on digits, test, attacked in Linf, attacked with eps 0.1, 12 images"
        in accuracy["note"]
    )
    assert column(evaluated, "branch") == column(accuracy, "branch") == ["clean", "adv"]
    shares = [record["accuracy"][branch]["pgd2"] for branch in ("clean", "adv")]
    assert column(accuracy, "pgd2") == column(evaluated, "pgd2") == [with_interval(share, 12) for share in shares]
    assert column(audited, "verdict") == [json.loads((runs / "audit.json").read_text())["verdict"]]


def test_the_page_has_ladder_accuracy_against_eps_evidence_and_advice_of_an_audit(runs):
    record = json.loads((runs / "audit.json").read_text())
    page = build_runs_page(collect_results(runs))
    ladder, curve = (figure for figure in page["figures"] if figure["title"].endswith("bn-seed0"))
    assert ladder["title"] == "Ladder of attacks: bn-seed0"
    ((heading, rungs),) = ladder["groups"]
    assert heading == f"{record['verdict']}, Linf eps=0.1"
    assert [rung["label"] for rung in rungs] == [rung["attack"] for rung in record["ladder"] if not rung["skipped"]]
    assert rungs[-1]["values"] == [record["ladder"][-1]["alone"], record["worst_case"]]
    assert [*zip(curve["x"], curve["rows"][0]["values"])] == [tuple(point) for point in record["eps_curve"]]
    assert draw_figure(curve).count(">0.1<") == 1
    evidence = page["details"][-1]
    assert evidence["title"] == "Evidence: bn-seed0"
    assert column(evidence, "measured") == [item["measured"] for item in record["evidence"]]
    marks = {"decides": "✗", "doubt": "?", "note": "i"}
    assert column(evidence, "") == ["✓" if item["ok"] else marks[item["weight"]] for item in record["evidence"]]
    assert all(text in evidence["note"] for text in [*record["reasons"], *record["advice"]])


def test_two_audits_of_one_network_are_named_by_their_files(runs, tmp_path):
    folder = shutil.copytree(runs, tmp_path / "copy")
    shutil.copy(folder / "audit.json", folder / "again.json")
    titles = [table["title"] for table in build_runs_page(collect_results(folder))["details"]]
    assert titles[-2:] == ["Evidence: again.json", "Evidence: audit.json"]


def test_the_figures_compare_attacks_and_label_runs_by_their_differences(runs):
    points, *_, curves = build_runs_page(collect_results(runs))["figures"]
    assert points["series"] == ["clean", "fgsm", "pgd2"] and [row["label"] for row in points["groups"][0][1]] == [
        "clean",
        "adv",
    ]
    assert [row["label"] for row in curves["rows"]] == ["bn", "dual_bn"] and list(curves["x"]) == [1, 2]


def copies(runs, folder, seeds, norms=("bn",)):
    """Runs with these seeds and norms whose evaluations differ by a tenth per seed."""
    record = json.loads((runs / "dual_bn-seed0" / "evaluation.json").read_text())
    for norm in norms:
        for seed in seeds:
            copy = folder / f"{norm}-{seed}"
            shutil.copytree(runs / "bn-seed0", copy)
            text = json.loads((copy / "run.json").read_text())
            text["config"] |= {"seed": seed, "norm": norm}
            (copy / "run.json").write_text(json.dumps(text))
            letters = {"clean": "1" * 9 + "0", "pgd2": "1" * (5 + seed) + "0" * (5 - seed)}
            record = {key: value for key, value in record.items() if key not in ("digest", "outcomes", "rows")}
            record |= {"attacks": {"pgd2": "PGD"}, "seconds": {"default": {}}, "verdicts": {"default": letters}}
            (copy / "evaluation.json").write_text(json.dumps(record))


def test_seeds_of_one_configuration_are_averaged(runs, tmp_path):
    copies(runs, tmp_path, (0, 1, 2), ("bn", "ln"))
    content = build_runs_page(collect_results(tmp_path))
    (table,), (_, single) = content["tables"], content["details"]
    assert headings(single) == [f"{norm}, seed={seed}" for norm in ("bn", "ln") for seed in range(3)]
    assert headings(table) == ["bn", "ln"] and column(table, "seeds") == ["3", "3"]
    assert column(single, "pgd2") == [with_interval(share, 10) for share in (0.5, 0.6, 0.7)] * 2
    assert column(table, "pgd2") == ["60.0 ±\u00a010.0"] * 2 and column(table, "clean") == ["90.0 ±\u00a00.0"] * 2
    points, curves = content["figures"]
    assert points["groups"][0][1][0]["values"][1] == pytest.approx(0.6)
    assert [row["label"] for row in curves["rows"]] == ["bn", "ln"]


def test_other_conditions_are_not_averaged(runs, tmp_path):
    record = json.loads((runs / "dual_bn-seed0" / "evaluation.json").read_text())
    rows = record_rows(record) + record_rows({**record, "threat": {"norm": "Linf", "eps": 8 / 255}})
    table = seed_table(rows)
    assert headings(table) == ["dual_bn, attacked with eps 0.1", "dual_bn, attacked with eps 8/255"]
    assert set(column(table, "seeds")) == {"1"}


def test_one_epoch_is_singular():
    row = {"norm": "bn", "branch": "default", "attack": "clean", "accuracy": 0.5, "low": 0.4, "high": 0.6, "seed": 0}
    table = seed_table([row | {"run": f"r{epochs}", "group": f"g{epochs}", "epochs": epochs} for epochs in (1, 2)])
    assert headings(table) == ["1 epoch", "2 epochs"]


def test_thirty_runs_are_drawn_four_to_a_figure(runs, tmp_path):
    norms = [f"norm_with_a_long_name_{number}" for number in range(30)]
    copies(runs, tmp_path, (0,), norms)
    points, *curves = build_runs_page(collect_results(tmp_path))["figures"]
    assert len(points["groups"]) == 30 and [len(curve["rows"]) for curve in curves] == [4] * 7 + [2]
    for curve in curves:
        svg = draw_figure(curve)
        drawn = re.findall(r'd="M([\d.]+) [\d.]+L[^"]*" class="line s\d"', svg)
        assert drawn and svg.count(f">{curve['rows'][0]['label']}<") == 1
        ends = [float(x) for x in re.findall(r'L([\d.]+) [\d.]+" class="line s\d"', svg)]
        assert min(ends) > 300, "a long label leaves the lines their width"


def test_a_folder_without_records_and_runs_raises(tmp_path):
    (tmp_path / "empty").mkdir()
    with raises_problem("empty", "results"):
        invoke("report", tmp_path / "empty", "--out", tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_regularizer_second_pass_and_mixing_are_part_of_the_method(runs):
    found = collect_results(runs)
    extras = {"regularizer": {"name": "ligs"}, "second_pass": {"name": "apart"}, "mix": "mixup"}
    second = {**found["runs"][0], "name": "second", "config": {**found["runs"][0]["config"], **extras}}
    page = build_runs_page({**found, "runs": [found["runs"][0], second]})
    assert column(page["details"][0], "objective") == ["hybrid", "hybrid + ligs + apart + mixup"]
    assert [row["label"] for row in page["figures"][-1]["rows"]] == ["hybrid", "hybrid + ligs + apart + mixup"]


DAMAGE = {
    "outcomes": lambda record: record.pop("outcomes"),
    "bits": lambda record: record["outcomes"]["clean"].update(pgd2="x"),
    "warnings": lambda record: record.update(warnings=3),
    "about": lambda record: record.update(about="a run"),
    "training": lambda record: record["about"].update(training={"norm": "bn"}),
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
    page = build_runs_page(collect_results(tmp_path))
    (unread,) = page["tables"]
    assert sorted(row[0].partition(":")[0] for row in unread["rows"]) == ["broken/run.json", "deep.json", "other.json"]
    (trained,) = page["details"]
    assert headings(trained) == ["good"]
    out = invoke("report", tmp_path, "--out", tmp_path / "page.html")
    assert out.exit_code == 0 and out.output.count("is skipped") == 3
    assert "Not read" in (tmp_path / "page.html").read_text()


METRICS = {
    "no epoch": '{"adv_accuracy": 0.5}\n{"adv_accuracy": 0.5}\n',
    "text": '{"epoch": 1, "adv_accuracy": "half"}\n',
    "earlier": '{"epoch": 1, "adv_accuracy": null}\n{"epoch": 2, "adv_accuracy": 0.5}\n',
    "list": '{"epoch": 1, "adv_accuracy": [0.5]}\n',
}


@pytest.mark.parametrize("damage", METRICS)
def test_a_run_with_damaged_metrics_is_left_out(runs, tmp_path, damage):
    shutil.copytree(runs / "bn-seed0", tmp_path / "bad")
    (tmp_path / "bad" / "metrics.jsonl").write_text(METRICS[damage])
    shutil.copytree(runs / "bn-seed0", tmp_path / "good")
    page = build_runs_page(collect_results(tmp_path))
    assert headings(page["details"][0]) == ["good"] and page["tables"][0]["rows"][0][0].startswith("bad/run.json: ")
