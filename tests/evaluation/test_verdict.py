"""The verdict as text, table, figure and record."""

import json
import math

import pytest

import advnorm
from advnorm._core.shapes import with_digest
from advnorm.evaluation import Verdict
from advnorm.evaluation import verdict as verdict_module
from advnorm.evaluation.evidence import Evidence, RungResult
from support.problems import raises_problem


@pytest.fixture
def verdict() -> Verdict:
    ladder = [("clean", 0.9, 0.9), ("fgsm", 0.6, 0.6), ("pgd10", 0.5, 0.5), ("apgd-t-steps40", None, 0.05)]
    return Verdict(
        verdict="false",
        reasons=("a reason",),
        advice=("an advice",),
        threat=advnorm.ThreatModel(eps=0.2),
        route="default",
        images=40,
        ladder=tuple(RungResult(attack=name, text="x", alone=alone, worst=worst) for name, alone, worst in ladder),
        evidence=(
            Evidence(name="gap", value=45.0, expected="at most 8", ok=False, weight="decides", text="points"),
            Evidence(name="gradient norm", value=math.nan, expected="", ok=True, weight="note", text="norm"),
        ),
        eps_curve=((0.0, 0.9), (0.2, 0.4), (0.5, 0.0)),
        chance=0.1,
        others={"adv": {"clean": 0.8, "PGD-10": 0.4, "worst case": 0.3}},
        conditions={"seed": 0, "about": {"run": "r", "data": "digits, test"}},
    )


def test_the_text_has_ladder_evidence_reasons_and_advice(verdict):
    text = str(verdict)
    for part in ("default route, 40 images", "apgd-t-steps40", "branch adv", "✗", "✓", "run r, data digits, test"):
        assert part in text
    assert text.splitlines()[-4:] == [
        "FALSE: stronger attacks remove this robustness", "  - a reason", "What to try:", "  - an advice",
    ]  # fmt: skip
    assert (verdict.clean, verdict.claimed, verdict.worst_case, verdict.exit_code) == (0.9, 0.5, 0.05, 1)


def test_the_record_is_plain_json_and_gives_the_verdict_back(verdict):
    record = json.loads(json.dumps(verdict.record(), allow_nan=False))
    assert record["verdict"] == "false" and record["worst_case"] == 0.05 and record["evidence"][1]["value"] is None
    again = Verdict.from_record(with_digest(record))
    assert json.loads(json.dumps(again.record())) == record and str(again) == str(verdict)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda record: record["ladder"][2].update(alone=1.5), "ladder.2.alone"),
        (lambda record: record["ladder"][3].update(worst=-0.05), "ladder.3.worst"),
        (lambda record: record["eps_curve"][1].__setitem__(1, 40), "eps_curve.1.1"),
        (lambda record: record["other_branches"]["adv"].update(clean=80), "other_branches.adv.clean"),
        (lambda record: record.update(chance=10.0), "chance"),
        (lambda record: record.update(images=0), "images"),
    ],
)
def test_an_impossible_accuracy_in_a_record_is_damage(verdict, change, field):
    record = json.loads(json.dumps(verdict.record()))
    Verdict.from_record(record)
    change(record)
    with raises_problem("damaged_file", f"the record: {field}"):
        Verdict.from_record(record)


@pytest.mark.parametrize("name", ["v.png", "deep/v.svg"])
def test_the_figure_is_written(verdict, tmp_path, name):
    verdict.plot(tmp_path / name)
    assert (tmp_path / name).stat().st_size > 5000


def test_the_legend_of_the_figure_covers_no_bar(verdict, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(verdict_module, "write_figure", lambda path, figure: figures.append(figure))
    verdict.plot(tmp_path / "v.png")
    figures[0].draw_without_rendering()
    for axes in figures[0].axes:
        assert axes.get_legend().get_window_extent().y0 >= axes.bbox.y1


def test_a_figure_that_cannot_be_written_is_reported(verdict, tmp_path):
    with raises_problem("unknown_name", "plot"):
        verdict.plot(tmp_path / "v.xyz")
    (tmp_path / "v.png").mkdir()
    with raises_problem("not_writable"):
        verdict.plot(tmp_path / "v.png")
