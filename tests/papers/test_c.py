"""The studies of paper C: one PGD everywhere, and checks that say what the paper says."""

import pytest

from advnorm.attacks import get as get_attack
from advnorm.papers.c import studies, trainings
from advnorm.studies import STUDIES
from advnorm.threat import ThreatModel

LARGE = trainings.LARGE_EPS


@pytest.mark.parametrize("setting", trainings.SETTINGS)
def test_training_validation_and_evaluation_use_the_same_pgd(setting):
    config = trainings.mat(setting, 0.5)
    threat = ThreatModel(eps=config.eps)
    [accuracies] = trainings.cell(config).measures
    evaluation = get_attack(accuracies.options["attacks"]["pgd10"], threat=threat)
    assert evaluation == config.build_attack() == config.build_validation_attack()
    assert (evaluation.steps, evaluation.step_size) == (10, "2/255" if setting.endswith("eps8") else "4/255")


PRINTED4 = {(number.cell, number.value): number.printed for number in STUDIES.get("C/table4").numbers}
#: DBN is worse by a point everywhere, and in one number much better, so that it is better on average.
ONE_LARGE_GAIN = {
    (f"{setting}/{after}", f"shared/{metric}"): PRINTED4[f"{setting}/{before}", f"shared/{metric}"] - 1
    for setting in trainings.SETTINGS
    for before, after in studies._WITH_DBN.items()
    for metric in ("clean", "autoattack")
} | {("imagenette/eps16/mat_cat_0.5_dbn", "shared/clean"): 92.0}


# -- the claims --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("C/table1", {(f"{LARGE}/trades_cat_6", "shared/autoattack"): 17.0}),
        ("C/table1", {("cifar10/eps8/mat_cat_0.5", f"shared/{m}"): 1.0 for m in ("clean", "pgd10", "autoattack")}),
        ("C/table2", {(f"{LARGE}/mat_cat_0.5/in", "accuracy/adv"): 0.1}),  # no longer falsely robust
        ("C/table2", {(f"{LARGE}/mat_cat_0.75/none", "sums/clean-adv"): 1e-4}),
        ("C/table3", {(f"{LARGE}/mat_cat_0.5_kl_4", "shared/autoattack"): 24.0}),
        ("C/table4", {(f"{LARGE}/mat_cat_0.5_kl_1", "shared/autoattack"): 5.0}),  # false robustness with KL
        ("C/table4", {("imagenette/eps16/mat_cat_0.5_dbn", "shared/clean"): 40.0}),
        ("C/table4", ONE_LARGE_GAIN),
        ("C/table4", {("cifar10/eps8/trades_cat_6_dbn", "shared/clean"): 79.0}),  # a loss that is not slight
        (
            "C/table4",
            {(f"{s}/mat_cat_0.5_kl_1", "shared/clean"): 60.0 for s in trainings.SETTINGS},
        ),  # no better trade-off
    ],
)
def test_numbers_that_contradict_the_claim_are_contradicted(name, changed, as_printed):
    values = as_printed(name)
    assert changed.keys() <= values.keys()
    assert STUDIES.get(name).verdict({**values, **{key: [v] for key, v in changed.items()}}) == "contradicted"


# The figures print no numbers of cells: each check gets made-up ones that hold the claim, and a change that breaks it.


def accuracies(points):
    """Clean, PGD-10 and AutoAttack accuracy by cell."""
    metrics = ("shared/clean", "shared/pgd10", "shared/autoattack")
    return {(name, metric): [value] for name, point in points.items() for metric, value in zip(metrics, point)}


def line(setting, names, up):
    """Points of a trade-off curve: clean accuracy falls and robustness rises along it; ``up`` lifts both."""
    count = len(names)
    return {
        f"{setting}/{name}": (85 - 20 * i / count + up, 35 + up, 15 + 10 * i / count + up)
        for i, name in enumerate(names)
    }


def trade_off(setting, ours, others, ours_up=1.0):
    kl = line(setting, [f"{ours}{beta:g}" for beta in studies.KL_BETAS], ours_up)
    mat = line(setting, [f"mat_cat_{gamma:g}" for gamma in reversed(studies.GAMMAS)], 0.0)
    trades = line(setting, [f"{others}{beta:g}" for beta in studies.TRADES_BETAS], -3.0)
    return {**kl, **mat, **trades, f"{setting}/adversarial_training": (60.0, 34.0, 20.0)}


FIG2 = trade_off(LARGE, "mat_cat_0.5_kl_", "trades_cat_")
FIG3 = {
    name: point
    for setting in (LARGE, "imagenette/eps16")
    for name, point in trade_off(setting, "mat_cat_0.5_dbn_kl_", "trades_seq_").items()
}
FIG6 = trade_off("cifar10/eps8", "mat_cat_0.5_dbn_kl_", "trades_seq_")
FIG5 = {f"{LARGE}/mat_cat_{gamma:g}": (70 + 10 * gamma, 31.0, 22.0) for gamma in (0.1, 0.2, 0.25)}
FIG5 |= {f"{LARGE}/mat_cat_{gamma:g}": (90.0, 33.0, 4.0) for gamma in (0.3, 0.4, 0.5, 0.75)}


@pytest.mark.parametrize(
    ("name", "points", "changed"),
    [
        ("C/fig2", FIG2, trade_off(LARGE, "mat_cat_0.5_kl_", "trades_cat_", ours_up=-2.0)),
        ("C/fig2", FIG2, {f"{LARGE}/trades_cat_6": (90.0, 50.0, 40.0)}),
        ("C/fig3", FIG3, {"imagenette/eps16/mat_cat_0.1": (90.0, 50.0, 40.0)}),
        ("C/fig3", FIG3, {f"{s}/adversarial_training": (10.0, 50.0, 40.0) for s in (LARGE, "imagenette/eps16")}),
        ("C/fig6", FIG6, trade_off("cifar10/eps8", "mat_cat_0.5_dbn_kl_", "trades_seq_", ours_up=-2.0)),
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


def plane(cell, centres):
    """Two images of each kind at a distance of 1 from their centre, in two layers."""
    return {
        (cell, f"layers/{layer}/points/{kind}/{image}/{component}"): [centre * (component == 0) + image - 0.5]
        for layer in ("layer1.0.bn1", "layer4.1.bn2")
        for kind, centre in centres.items()
        for image in (0, 1)
        for component in (0, 1)
    }


FALSE_PLANE = plane(f"{LARGE}/mat_cat_0.5", {"clean": -5.0, "adv": 5.0, "autoattack": 1.0})
PAIRED_PLANE = plane(f"{LARGE}/mat_cat_0.5_kl_0.4", {"clean": -1.0, "adv": 1.0, "autoattack": 0.0})


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
        ((2, 20, 4, 15), (3, 2, 1.5, 1), "supported"),
        ((1, 1, 1, 10), (3, 2, 1.5, 1), "contradicted"),  # shoots up once
        ((20, 20, 20, 20), (3, 2, 1.5, 1), "contradicted"),  # never does
        ((2, 20, 4, 15), (2, 1.9, 1.8, 1.5), "contradicted"),  # comes hardly nearer
        ((2, 20, 4, 15), (3, 1, 2.5, 1), "contradicted"),  # not steadily
        ((2, 8, 2, 8), (3, 2, 1.5, 1), "contradicted"),  # not to zero, beside the other
        ((1, 2, 1, 12), (40, 9, 3, 1), "contradicted"),  # the smaller ones on the whole
        ((2, 20, 4, 15), (), "not run"),
    ],
)
def test_the_shift_of_statistics_is_evaluated_along_training(sequential, concatenated, verdict):
    values = {
        (f"{LARGE}/mat_{how}_0.25", f"{10 * place}/sums/{kind}"): [value * (1 + (kind == "adv"))]
        for how, course in (("seq", sequential), ("cat", concatenated))
        for place, value in enumerate(course, 8)  # 80, 90, 100, 110: in the order of numbers
        for kind in ("clean", "adv")
    }
    assert STUDIES.get("C/fig4").verdict(values) == verdict
