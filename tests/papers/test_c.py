"""The studies of paper C: one PGD everywhere, and checks that say what the paper says."""

import pytest

from advnorm.attacks import get as get_attack
from advnorm.papers.c import trainings
from advnorm.studies import STUDIES
from advnorm.threat import ThreatModel
from support.claim_values import (
    FALSE_PLANE,
    FIG2,
    FIG3,
    FIG5,
    FIG6,
    PAIRED_PLANE,
    SEC32,
    accuracies,
    plane,
    shift,
    supporting,
    trade_off,
)

LARGE = trainings.LARGE_EPS


@pytest.mark.parametrize("setting", trainings.SETTINGS)
def test_training_validation_and_evaluation_use_the_same_pgd(setting):
    config = trainings.mat(setting, 0.5)
    threat = ThreatModel(eps=config.eps)
    [accuracies] = trainings.cell(config).measures
    evaluation = get_attack(accuracies.options["attacks"]["pgd10"], threat=threat)
    assert evaluation == config.build_attack() == config.build_validation_attack()
    assert (evaluation.steps, evaluation.step_size) == (10, "2/255" if setting.endswith("eps8") else "4/255")


# -- the claims --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("C/table1", {(f"{LARGE}/trades_cat_6", "shared/autoattack"): 17.0}),
        ("C/table1", {("cifar10/eps8/mat_cat_0.5", f"shared/{m}"): 1.0 for m in ("clean", "pgd10", "autoattack")}),
        ("C/table2", {(f"{LARGE}/mat_cat_0.5/in", "acc_diff"): 10.0}),  # no longer falsely robust
        ("C/table2", {(f"{LARGE}/mat_cat_0.75/none", "sums/clean-adv"): 1e-4}),
        ("C/table3", {(f"{LARGE}/mat_cat_0.5_kl_4", "shared/autoattack"): 24.0}),
        ("C/table4", {(f"{LARGE}/mat_cat_0.5_kl_1", "shared/autoattack"): 5.0}),  # false robustness with KL
        ("C/table4", {("imagenette/eps16/mat_cat_0.5_dbn", "shared/clean"): 40.0}),
        ("C/table4", {("cifar10/eps8/trades_cat_6_dbn", "shared/clean"): 82.1}),  # one loss of 27: not in all cases
        ("C/table4", {(f"{LARGE}/mat_cat_0.5_dbn", "shared/autoattack"): 20.0}),  # DBN alone ends false robustness
        ("C/table4", {(f"{LARGE}/mat_cat_0.5_kl_1", f"shared/{m}"): 0.0 for m in ("pgd10", "autoattack")}),  # 0 and 0
        ("C/table1", {("imagenette/eps16/mat_cat_0.5", "shared/clean"): 68.0}),  # no significant boost
        ("C/table2", {(f"{LARGE}/trades_cat_6", "accuracy/autoattack"): 0.0}),  # no gap, and no robustness
        (
            "C/table4",
            {(f"{s}/mat_cat_0.5_kl_1", "shared/clean"): 60.0 for s in trainings.SETTINGS},
        ),  # no better trade-off
    ],
)
def test_numbers_that_contradict_the_claim_are_contradicted(name, changed):
    values = supporting(name)
    assert changed.keys() <= values.keys() and STUDIES.get(name).verdict(values) == "supported"
    assert STUDIES.get(name).verdict({**values, **{key: [v] for key, v in changed.items()}}) == "contradicted"


@pytest.mark.parametrize(
    ("name", "points", "changed"),
    [
        ("C/fig2", FIG2, trade_off(LARGE, "mat_cat_0.5_kl_", "trades_cat_", ours_up=-2.0)),
        ("C/fig2", FIG2, {f"{LARGE}/trades_cat_6": (90.0, 50.0, 40.0)}),
        ("C/fig3", FIG3, {"imagenette/eps16/mat_cat_0.1": (90.0, 50.0, 40.0)}),
        ("C/fig3", FIG3, {f"{s}/adversarial_training": (10.0, 50.0, 40.0) for s in (LARGE, "imagenette/eps16")}),
        ("C/fig6", FIG6, trade_off("cifar10/eps8", "mat_cat_0.5_dbn_kl_", "trades_seq_", ours_up=-2.0)),
        ("C/fig2", FIG2, {f"{LARGE}/trades_cat_{beta}": (90.0, 33.0, 25.0) for beta in (1, 12)}),  # one rival of two
        ("C/fig3", FIG3, {f"{LARGE}/trades_seq_12": (90.0, 33.0, 25.0)}),  # one point: not across the board
        ("C/fig5", FIG5, {f"{LARGE}/mat_cat_0.1": (70.0, 0.0, 0.0)}),  # 0 and 0 is not really robust
        ("C/fig5", FIG5, {f"{LARGE}/mat_cat_0.4": (90.0, 33.0, 4.0)}),  # clean accuracy does not grow
        ("C/sec3.2", SEC32, {f"{LARGE}/trades_cat_0.5": (92.0, 33.0, 20.0)}),
        ("C/sec3.2", SEC32, {f"{LARGE}/trades_cat_0.5": (80.0, 33.0, 3.0)}),  # not as accurate as normal training
        ("C/fig5", FIG5, {f"{LARGE}/mat_cat_0.3": (80.0, 33.0, 20.0)}),
        ("C/fig5", FIG5, {f"{LARGE}/mat_cat_0.3": (80.0, 30.0, 4.0)}),
    ],
)
def test_only_curves_that_fit_the_claim_confirm_it(name, points, changed):
    study = STUDIES.get(name)
    assert {cell.name for cell in study.cells()} <= points.keys()
    assert study.verdict(accuracies(points)) == "supported"
    assert study.verdict(accuracies({**points, **changed})) == "contradicted"


def test_falsely_robust_points_are_not_part_of_a_trade_off():
    false = {f"{LARGE}/mat_cat_{gamma:g}": (94.0, 33.0, 4.0) for gamma in (0.3, 0.4, 0.5, 0.75)}
    assert STUDIES.get("C/fig2").verdict(accuracies({**FIG2, **false})) == "supported"


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        (FALSE_PLANE | PAIRED_PLANE, "supported"),
        (FALSE_PLANE, "not run"),
        (FALSE_PLANE | plane(f"{LARGE}/mat_cat_0.5_kl_0.4", {"clean": -9.0, "adv": 9.0}), "contradicted"),
        (plane(f"{LARGE}/mat_cat_0.5", {"clean": -5.0, "adv": 5.0, "autoattack": 9.0}) | PAIRED_PLANE, "contradicted"),
    ],
)
def test_the_projection_compares_the_distance_of_domains_and_the_points_between(values, verdict):
    assert STUDIES.get("C/fig1").verdict(values) == verdict


@pytest.mark.parametrize(
    ("sequential", "concatenated", "verdict"),
    [
        ((2, 20, 4, 25), (16, 8, 3, 1), "supported"),
        ((1, 1, 1, 30), (16, 8, 3, 1), "contradicted"),  # shoots up once
        ((30, 30, 30, 30), (16, 8, 3, 1), "contradicted"),  # never does
        ((2, 20, 4, 25), (4, 3, 2, 1.5), "contradicted"),  # comes hardly nearer
        ((2, 20, 4, 25), (16, 1, 2.5, 1), "contradicted"),  # not steadily
        ((2, 8, 2, 8), (9, 4, 2, 0.85), "contradicted"),  # not to zero, beside the other
        ((1, 2, 1, 12), (40, 9, 3, 1), "contradicted"),  # the smaller ones on the whole
        ((2, 20, 4, 15), (), "not run"),
    ],
)
def test_the_shift_of_statistics_is_evaluated_along_training(sequential, concatenated, verdict):
    assert STUDIES.get("C/fig4").verdict(shift(sequential, concatenated)) == verdict


@pytest.mark.parametrize("kind", ["clean", "adv"])
def test_the_claim_about_the_shift_holds_for_both_kinds_of_images(kind):
    good, steady = (shift(sequential, (16, 8, 3, 1)) for sequential in ((2, 20, 4, 25), (30, 30, 30, 30)))
    mixed = {key: steady[key] if key[1].endswith(f"/{kind}") else value for key, value in good.items()}
    assert mixed != good
    assert STUDIES.get("C/fig4").verdict(mixed) == "contradicted"


def test_the_curves_of_clean_and_adversarial_images_are_measured_apart_at_many_moments():
    for cell in STUDIES.get("C/fig4").cells():
        assert cell.measures[0].options["moments"] == "own"
        assert len(cell.config.snapshots) == 40 and cell.config.snapshots[-1] == cell.config.epochs
