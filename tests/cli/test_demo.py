"""The demonstration: what it trains, how it describes its numbers, and that it resumes after an interruption."""

import json
import re

import pytest

from advnorm._core.exit_codes import PREEMPTED
from advnorm.cli import demonstration
from advnorm.cli.demonstration import ATTACKS, BranchResult, findings
from support.command import invoke

QUICK = ("--quick", "--seed", "3")


def run(out, *options):
    """Return the exit status and the output."""
    result = invoke("demo", "--out", out, *options, width=120)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "deep"
    status, printed = run(out, *QUICK)
    assert status == 0, printed
    return out, printed


def records(out):
    return [json.loads(path.read_text()) for path in sorted((out / "records").glob("*.json"))]


def test_the_models_differ_in_one_setting():
    first, *others = (config.to_dict() for config in demonstration.MODELS.values())
    assert [[key for key in first if first[key] != other[key]] for other in others] == [["norm"], ["objective"]]


def test_the_table_has_the_recorded_numbers_of_every_branch(finished):
    out, printed = finished
    rows = {tuple(cells[1:3]): cells[3:7] for cells in _cells(printed) if len(cells) > 6}
    assert len(rows) == 5  # four branches and the heading
    for record in records(out):
        for route, accuracy in record["accuracy"].items():
            numbers = [f"{100 * accuracy[name]:.1f}" for name in ("clean", "pgd2", "pgd10")]
            branch = route if route in ("clean", "adv") else "shared"
            assert numbers in [cells[:3] for key, cells in rows.items() if key[1] == branch]


def _cells(printed):
    return [[cell.strip() for cell in re.split("[│┃]", line)] for line in printed.splitlines()]


def test_columns_are_named_after_the_attacks_that_ran(finished):
    out, printed = finished
    assert "PGD-2" in printed and "PGD-10" in printed and "AutoAttack" not in printed
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "(quick: no AutoAttack)" in page
    assert page.count("AutoAttack") == 1


def test_the_page_has_the_table_the_plots_the_conditions_and_the_commands(finished):
    out, _ = finished
    page = (out / "report.html").read_text(encoding="utf-8")
    assert page.count("<figure") == 3  # the cascade's plot belongs to AutoAttack
    for record in records(out):
        for accuracy in record["accuracy"].values():
            assert all(f">{100 * accuracy[name]:.1f}</td>" in page for name in ("clean", "pgd2", "pgd10"))
    for piece in (
        "eps 0.35",
        "seed",
        "torch",
        "commit",
        "advnorm demo --out",
        "--checkpoint last",
        "--route clean adv",
    ):
        assert piece in page


def test_a_finished_demo_is_read_back(finished):
    out, printed = finished
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.json*")}
    assert run(out, *QUICK) == (0, printed)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.json*")} == before


def test_a_killed_demo_resumes_and_ends_with_the_same_numbers(finished, tmp_path, monkeypatch):
    class Kill(BaseException):
        pass

    benchmark, calls = demonstration.benchmark, []

    def killed(*arguments, **settings):
        calls.append(settings["record"])
        if len(calls) == 2:
            raise Kill
        return benchmark(*arguments, **settings)

    monkeypatch.setattr(demonstration, "benchmark", killed)
    with pytest.raises(Kill):
        run(tmp_path, *QUICK)
    monkeypatch.undo()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")}
    assert len(before) == 2 and len(records(tmp_path)) == 1
    assert run(tmp_path, *QUICK)[0] == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert [r["outcomes"] for r in records(tmp_path)] == [r["outcomes"] for r in records(finished[0])]


def test_a_preempted_demo_reports_that_it_stopped(tmp_path, monkeypatch):
    train = demonstration.train
    monkeypatch.setattr(demonstration, "train", lambda config, **settings: train(config, max_minutes=0, **settings))
    code, printed = run(tmp_path, *QUICK)
    assert code == PREEMPTED
    assert "the same command resumes" in printed
    assert not (tmp_path / "report.html").exists()


# -- the sentences -----------------------------------------------------------------------------------------------------


def results(single, dual, kl, images=449):
    rows = [("single BN", None, single), ("dual BN", "clean", (0.0, 0.0))]
    rows += [("dual BN", "adv", dual), ("single BN + KL", None, kl)]
    return [
        BranchResult(
            model=model,
            branch=branch,
            accuracy={"clean": 0.9, "pgd10": weak, "autoattack": strong},
            stages={},
            images=images,
        )
        for model, branch, (weak, strong) in rows
    ]


def test_false_robustness_is_reported_with_its_share():
    text = " ".join(findings(results((0.40, 0.04), (0.45, 0.30), (0.50, 0.30)), ATTACKS)).replace("\u00a0", " ")
    assert "falls from 40 % under PGD-10 to 4 % under AutoAttack: 90 % of its robustness was false" in text
    assert "Dual BN's adversarial branch keeps 30 % of 45 %" in text
    assert text.endswith(
        "As the papers report, more of the robustness is false with a single BN that learns both domains."
    )


def test_a_large_loss_of_the_others_is_reported():
    text = findings(results((0.40, 0.01), (0.45, 0.20), (0.50, 0.20)), ATTACKS)[-1]
    assert text.startswith("As the papers report") and text.endswith("lose more than half of theirs.")


def test_an_effect_of_one_model_is_reported_for_that_model_only():
    text = findings(results((0.40, 0.04), (0.40, 0.05), (0.50, 0.40)), ATTACKS)[-1]
    assert text.startswith("Only single BN with the KL term is better")


@pytest.mark.parametrize(
    ("rows", "images"),
    [
        (((0.40, 0.30), (0.40, 0.30), (0.40, 0.30)), 449),  # no difference
        (((0.40, 0.35), (0.40, 0.10), (0.40, 0.10)), 449),  # the other way round
        (((0.50, 0.00), (0.50, 0.25), (0.50, 0.25)), 8),  # too few images to decide
        (((0.40, 0.04), (0.00, 0.00), (0.00, 0.00)), 449),  # nothing to compare with
    ],
)
def test_an_effect_that_does_not_appear_is_not_claimed(rows, images):
    assert "does not appear here" in findings(results(*rows, images=images), ATTACKS)[-1]


def test_a_model_without_robustness_claims_none():
    (text,) = findings(results((0.0, 0.0), (0.3, 0.2), (0.3, 0.2)), ATTACKS)
    assert "it claims no robustness" in text


@pytest.mark.slow
def test_single_bn_is_more_falsely_robust_than_the_others_on_digits(tmp_path):
    code, printed = run(tmp_path)
    assert code == 0
    kept = [
        float(cells[5]) / float(cells[4]) for cells in _cells(printed) if cells[1:] and cells[2] in ("shared", "adv")
    ]
    single, dual, kl = kept
    assert single < dual and single < kl
