"""The studies of paper A: what is special to them; what all studies have in common is in test_registry."""

import json
from dataclasses import replace

import pytest

from advnorm import train
from advnorm.attacks import get as get_attack
from advnorm.papers.a import trainings as paper_a
from advnorm.studies import STUDIES, Measure, printed_entry
from advnorm.studies.measurement import measure_run
from advnorm.studies.run_tasks import run_task
from advnorm.studies.task import Task, list_tasks
from advnorm.threat import ThreatModel
from support.claim_values import CHANNELS, CURVES, DUAL, GAPS, LAYERS, STANDARD, supporting


def test_pgd10_takes_steps_of_2_255_in_training_and_everywhere_at_test_time():
    for eps in paper_a.EPSILONS:
        threat = ThreatModel(eps=eps)
        wanted = paper_a.hybrid(eps).attack.build(threat)
        assert get_attack(paper_a.ATTACKS["pgd10"], threat=threat) == wanted
        assert paper_a.along_training(eps).build_validation_attack() == wanted


def test_clean_training_is_one_run_for_every_eps_of_the_evaluation(tmp_path):
    both = list_tasks(STUDIES.get("A/table6"), protocol="fast", out=tmp_path)
    (figure,) = list_tasks(STUDIES.get("A/fig7"), protocol="fast", out=tmp_path)
    assert {task.run.folder for task in both} == {figure.run.folder}
    eps = [task.planned_cell.measures[0].options.get("eps", task.planned_cell.config.eps) for task in both]
    assert eps == list(paper_a.EPSILONS)


# -- the claims --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "cell", "value", "other"),
    [
        ("A/table1", "dual_bn/eps8", "clean/autoattack", 20.0),
        ("A/table2", "cross_bn/eps16", "adv/autoattack", 10.0),
        ("A/table2", "single/eps16", "shared/autoattack", 22.0),
        ("A/table3", "setup1/eps16", "adv/autoattack", 10.0),
        ("A/table3", "setup2/eps16", "adv/autoattack", 23.0),
        ("A/table3", "single/eps8", "shared/autoattack", 45.0),
        ("A/table3", "setup1/eps8", "adv/clean", 10.0),  # comparable results are all three
        ("A/table3", "setup1/eps16", "adv/pgd10", 20.0),
        ("A/table3", "setup2/eps8", "adv/autoattack", 7.5),  # beneficial, and not significantly
        ("A/table3", "setup2/eps8", "clean/autoattack", 10.0),  # the branches are not comparable
        ("A/table3", "setup2/eps8", "adv/autoattack", 18.0),  # the benefit is larger than at 16/255, and hardly
        ("A/table3", "dual_bn/eps8", "adv/pgd10", 60.0),  # far above a single BN under PGD-10 too
        ("A/table3", "single/eps8", "shared/pgd10", 60.0),  # or far below
        ("A/table4", "dual_affine_ln/eps16", "adv/autoattack", 16.9),  # not similar to BN
        ("A/table4", "dual_affine_ln/eps16", "clean/clean", 88.41),  # similar in both branches
        ("A/table1", "dual_bn/eps16", "clean/clean", 63.0),  # no significant drop of clean accuracy by swapping
        ("A/table1", "dual_bn/eps8", "adv/autoattack", 7.03),  # what the paper calls very low is not robust
        ("A/table3", "setup2/eps16", "adv/pgd10", 31.0),  # high robustness under one of both attacks
        ("A/table5", "dual_bn/eps16", "rows/6/autoattack", 12.0),  # the control is far from the re-calibration
        ("A/table7", "dual_linear/eps16", "adv/autoattack", 16.5),  # two thirds, and not comparable
        ("A/table8", "single_kl/eps16", "shared/pgd10", 30.0),
        ("A/table4", "dual_affine_gn/eps16", "adv/autoattack", 12.0),
        ("A/table5", "dual_bn/eps8", "rows/4/autoattack", 9.0),
        ("A/table5", "dual_bn/eps16", "rows/5/pgd10-step2", 30.0),
        ("A/table6", "standard/eps16", "shared/noise", 50.0),
        ("A/table6", "standard/eps8", "shared/pgd10", 50.0),
        ("A/table7", "dual_linear/eps16", "adv/autoattack", 1.0),
        ("A/table8", "single_kl/eps16", "shared/autoattack", 1.0),
        ("A/table2", "cross_bn/eps16", "adv/clean", 50.0),  # comparable results are all three
        ("A/table2", "single/eps16", "shared/autoattack", 8.0),  # little, and not almost none
        ("A/table4", "dual_affine_ln/eps16", "clean/pgd10", 20.0),  # not the trend of Dual BN
        ("A/table5", "dual_bn/eps16", "rows/4/autoattack", 17.0),
        ("A/table6", "standard/eps8", "shared/noise", 71.0),
        ("A/table7", "dual_linear/eps16", "clean/autoattack", 16.4),
        ("A/table7", "dual_linear/eps16", "clean/pgd10", 28.0),
    ],
)
def test_a_number_that_contradicts_the_claim_is_contradicted(name, cell, value, other):
    values = supporting(name)
    assert (cell, value) in values and STUDIES.get(name).verdict(values) == "supported"
    assert STUDIES.get(name).verdict({**values, (cell, value): [other]}) == "contradicted"


def test_a_measured_contradiction_of_setup2_is_shown_whatever_dual_bn_gains():
    """A single BN that is as robust as Dual BN at 8/255 leaves nothing to gain, and Setup2's loss still counts."""
    values = supporting("A/table3") | {
        ("single/eps8", "shared/autoattack"): [46.0],
        ("setup2/eps8", "adv/autoattack"): [40.0],
    }
    failed = [clause.text for clause in STUDIES.get("A/table3").evaluate_claim(values).clauses if not clause.held]
    assert any("Setup2 is significantly above a single BN" in text for text in failed)


def test_a_gap_that_the_paper_calls_not_significant_is_no_significant_gain_of_setup2():
    values = supporting("A/table3") | {("setup2/eps8", "adv/autoattack"): [7.03 + 1.81]}
    failed = [clause.text for clause in STUDIES.get("A/table3").evaluate_claim(values).clauses if not clause.held]
    assert any("Setup2 is significantly above a single BN" in text for text in failed)


@pytest.mark.parametrize(("missing", "left"), [("setup1/eps16", "8"), ("dual_bn/eps8", "16"), ("single/eps16", "8")])
def test_one_eps_is_evaluated_even_if_a_cell_of_the_other_is_missing(as_printed, missing, left):
    values = {place: value for place, value in as_printed("A/table3").items() if place[0] != missing}
    study, alone = STUDIES.get("A/table3"), f"single/eps{left}"
    assert study.verdict(values) == "undecided"
    found = study.evaluate_claim({**values, (alone, "shared/autoattack"): [47.0]})
    assert found.verdict == "contradicted"
    words = f"at {left}/255 a single BN has very low robustness"
    assert any(words in clause.text and not clause.held for clause in found.clauses)


NO_ROBUSTNESS = [("", "shared/autoattack", 0.0), ("dual_affine_", "adv/autoattack", 0.01)]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        # Setup2 is below a single BN at both eps.
        ("A/table3", {("setup2/eps8", "adv/autoattack"): 5.0, ("setup2/eps16", "adv/autoattack"): 0.1}),
        # The trend, and far from the robustness of Dual BN.
        ("A/table7", {("dual_linear/eps16", "adv/autoattack"): 3.0}),
        # Far from the clean head and as robust as Dual BN, and both have very little.
        ("A/table7", {(f"{name}/eps16", "adv/autoattack"): 8.0 for name in ("dual_linear", "dual_bn")}),
        # Setup2 is above a single BN, and hardly more so at 8/255.
        ("A/table3", {("setup2/eps8", f"{branch}/autoattack"): 18.0 for branch in ("clean", "adv")}),
        # More than a single set has, and nothing.
        (
            "A/table4",
            {
                (f"{dual}{norm}/eps16", value): other
                for norm in ("ln", "gn", "in")
                for dual, value, other in NO_ROBUSTNESS
            },
        ),
        # AutoAttack's accuracy does not grow.
        ("A/table8", {("single/eps16", "shared/pgd10"): 60.0, ("single/eps16", "shared/autoattack"): 23.6}),
    ],
)
def test_half_of_a_claim_is_contradicted(name, changes):
    values = supporting(name)
    assert changes.keys() <= values.keys() and STUDIES.get(name).verdict(values) == "supported"
    assert STUDIES.get(name).verdict(values | {place: [other] for place, other in changes.items()}) == "contradicted"


@pytest.mark.parametrize(
    ("name", "values", "change"),
    [
        ("A/fig2", CURVES, {("cross_at/eps16", "10/held_out/pgd10-step2"): [0.2]}),
        ("A/fig4", CHANNELS, {(DUAL, "statistics/NS^adv_adv/mean/1"): [4.0, -4.0]}),
        ("A/fig4", CHANNELS, {(DUAL, "statistics/NS^adv_adv/mean/1"): [0.7, -0.7]}),  # closer, and not very close
        ("A/fig2", CURVES, {("cross_at/eps16", "10/held_out/clean"): [0.1]}),  # comparable robustness, no accuracy
        ("A/fig5", CHANNELS, {(DUAL, f"affine/AP_adv/weight/{channel}"): [1.01, 0.99] for channel in range(3)}),
        ("A/fig6", LAYERS, {(DUAL, "relative_layers/NS under adv/bn1/total"): [0.9, 0.9]}),
        ("A/fig6", LAYERS, {(DUAL, "relative_layers/NS under adv/bn1/total"): [0.1, 0.1]}),  # less, and not almost zero
        ("A/fig6", LAYERS, {(DUAL, f"relative_layers/{kind}/bn1/total"): [0.0] for kind in ("AP", "NS under adv")}),
        ("A/fig2", CURVES, {(f"{name}/eps16", "10/held_out/pgd10-step2"): [0.0] for name in ("classical", "cross_at")}),
        ("A/fig7", GAPS, {(STANDARD, "layers/clean-noise/bn1/total"): [1.0]}),  # in one layer of two
        ("A/fig7", GAPS, {(STANDARD, "layers/clean-noise/bn1/total"): [30.0]}),  # noise makes the larger gap
    ],
)
def test_only_numbers_that_fit_the_claim_of_a_figure_confirm_it(name, values, change):
    study = STUDIES.get(name)
    assert study.verdict(values) == "supported"
    assert change.keys() <= values.keys()
    assert study.verdict({**values, **change}) == "contradicted"


# -- really run --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return str(tmp_path_factory.mktemp("paper_a"))


def smoke(study, cell, out):
    return Task(study=study, cell=cell, seed=0, protocol="smoke", out=out)


def test_table_5_is_in_percent_as_table_1_is(out):
    task = smoke("A/table5", "dual_bn/eps16", out)
    config, _ = task.training
    run = train(config, seed=0, out=task.runs_folder, device="cpu")
    swaps = replace(STUDIES.get("A/table5").cell(task.cell).measures[0], options={"attacks": ["pgd2"], "limit": None})
    rows = measure_run(run, swaps, task).values
    evaluated = measure_run(run, Measure(options={"attacks": {"pgd2": "pgd2"}, "route": ["clean", "adv"]}), task).values
    found = [rows[f"rows/{row}/clean"] for row in (0, 1)]
    assert found == pytest.approx([evaluated["adv/clean"], evaluated["clean/clean"]])
    assert max(found) > 1  # of a hundred: some image of the test set is recognized


def test_the_rows_of_table_5_are_those_of_the_swap_table(out):
    task = smoke("A/table5", "dual_bn/eps16", out)
    run = task.run
    if not run.finished:
        run_task(replace(task, study="A/fig4"))
    quick = Measure(name="swap_table", options={"attacks": ["pgd2-step2"], "limit": 4})
    values = measure_run(run, quick, task).values
    rows = json.loads((run.folder / "measures" / f"{quick.key}.json").read_text())["rows"]
    study = STUDIES.get("A/table5")
    for row in printed_entry("A/table5")["rows"]:
        _, path = study.locate(row["label"], "16/255 pgd10")
        position = int(path.split("/")[1])
        found = rows[position]
        assert path == f"rows/{position}/pgd10-step2"
        assert f"rows/{position}/pgd2-step2" in values
        assert f"NS_{found['NS']['of']}^{found['NS']['under']}" == row["label"]["ns"]
        assert f"AP_{found['AP']}" == row["label"]["ap"]
        setups = {"default": "Default", "swapped": "Swap", "re-calibrated": "Re-calibration"}
        assert setups[found["setup"]] == row["label"]["setup"]
