"""The studies of paper C: every number has its place, every cell can be run, and the checks say what the paper says."""

import pytest

from advnorm.attacks import get as get_attack
from advnorm.studies import STUDIES, list_studies, paper_c, printed
from advnorm.studies.protocols import under
from advnorm.studies.run import Task, work
from advnorm.threat import ThreatModel

TABLES = ["C/table1", "C/table2", "C/table3", "C/table4"]
NAMES = [*TABLES, *(f"C/fig{number}" for number in range(1, 7))]
LARGE = paper_c.LARGE


def values_of(name):
    """The printed numbers of a table as if they had been measured, by one seed."""
    values = {(n.cell, n.value): [n.printed] for n in STUDIES.get(name).numbers()}
    if name == "C/table2":  # prints the difference of two accuracies, of which the check reads each
        for row in printed(name)["rows"]:
            cell, _ = STUDIES.get(name).place(row["label"], "clean_pgd")
            values |= {(cell, "accuracy/adv"): [row["values"][0] / 100], (cell, "accuracy/autoattack"): [0.0]}
    return values


# -- the registry ------------------------------------------------------------------------------------------------------


def test_every_table_and_figure_is_a_study():
    assert sorted(list_studies("C/*")) == sorted(NAMES)


@pytest.mark.parametrize("name", TABLES)
def test_every_printed_number_has_a_cell_and_a_place_of_its_own(name):
    study, entry = STUDIES.get(name), printed(name)
    numbers = list(study.numbers())
    columns = [column for column in entry["columns"] if column != "acc_diff"]  # a difference of two measured numbers
    assert len(numbers) == len(entry["rows"]) * len(columns)
    assert len({(number.cell, number.value) for number in numbers}) == len(numbers)
    assert {number.cell for number in numbers} == {cell.name for cell in study.cells()}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("protocol", ["paper", "fast", "smoke"])
def test_cells_have_names_of_their_own_and_are_valid_under_every_protocol(name, protocol):
    cells = [under(protocol, cell) for cell in STUDIES.get(name).cells()]  # a wrong configuration cannot be made
    assert len({cell.name for cell in cells}) == len(cells)


def test_cells_of_the_same_name_are_the_same_training_in_all_studies():
    trainings = {}
    for name in NAMES:
        for cell in STUDIES.get(name).cells():
            trainings.setdefault(cell.name, set()).add(cell.config.digest)
    assert all(len(digests) == 1 for digests in trainings.values())
    assert len({digest for digests in trainings.values() for digest in digests}) == len(trainings)


@pytest.mark.parametrize("setting", paper_c.SETTINGS)
def test_training_validation_and_judgement_use_the_same_pgd(setting):
    config = paper_c.mat(setting, 0.5)
    threat = ThreatModel(eps=config.eps)
    judge = get_attack(paper_c.judged(setting).options["attacks"]["pgd10"], threat=threat)
    assert judge == config.build_attack() == config.build_validation_attack()
    assert (judge.steps, judge.step_size) == (10, "2/255" if setting.endswith("eps8") else "4/255")


# -- the claims --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLES)
def test_the_printed_numbers_confirm_the_printed_claim(name):
    assert STUDIES.get(name).answer(values_of(name)) == "confirmed"


@pytest.mark.parametrize("name", NAMES)
def test_a_study_without_numbers_is_not_run(name):
    assert STUDIES.get(name).answer({}) == "not run"


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
    ],
)
def test_numbers_that_contradict_the_claim_are_not_confirmed(name, changed):
    values = values_of(name)
    assert changed.keys() <= values.keys()
    assert STUDIES.get(name).answer({**values, **{key: [v] for key, v in changed.items()}}) == "not confirmed"


# The figures print no numbers of cells: each check gets made-up ones that hold the claim, and a change that breaks it.


def judged(points):
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
    kl = line(setting, [f"{ours}{beta:g}" for beta in paper_c.KL_BETAS], ours_up)
    mat = line(setting, [f"mat_cat_{gamma:g}" for gamma in reversed(paper_c.GAMMAS)], 0.0)
    trades = line(setting, [f"{others}{beta:g}" for beta in paper_c.TRADES_BETAS], -3.0)
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
def test_curves_are_confirmed_where_they_hold_the_claim_and_else_not(name, points, changed):
    study = STUDIES.get(name)
    assert {cell.name for cell in study.cells()} <= points.keys()
    assert study.answer(judged(points)) == "confirmed"
    assert study.answer(judged({**points, **changed})) == "not confirmed"


def test_false_robustness_is_no_part_of_a_trade_off():
    false = {f"{LARGE}/mat_cat_{gamma:g}": (94.0, 33.0, 4.0) for gamma in (0.3, 0.4, 0.5, 0.75)}
    assert STUDIES.get("C/fig2").answer(judged({**FIG2, **false})) == "confirmed"


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
    ("values", "answer"),
    [
        (FALSE_PLANE | PAIRED_PLANE, "confirmed"),
        (FALSE_PLANE, "not run"),
        (FALSE_PLANE | plane(f"{LARGE}/mat_cat_0.5_kl_0.4", {"clean": -9.0, "adv": 9.0}), "not confirmed"),
        (plane(f"{LARGE}/mat_cat_0.5", {"clean": -5.0, "adv": 5.0, "autoattack": 9.0}) | PAIRED_PLANE, "not confirmed"),
    ],
)
def test_the_projection_is_judged_by_the_distance_of_the_domains_and_what_lies_between(values, answer):
    assert STUDIES.get("C/fig1").answer(values) == answer


@pytest.mark.parametrize(("clean", "answer"), [(2.0, "confirmed"), (0.5, "not confirmed")])
def test_the_shift_of_statistics_is_judged_for_clean_and_adversarial_batches(clean, answer):
    sequential = {(f"{LARGE}/mat_seq_0.25", "sums/clean"): [clean], (f"{LARGE}/mat_seq_0.25", "sums/adv"): [3.0]}
    concatenated = {(f"{LARGE}/mat_cat_0.25", f"sums/{kind}"): [1.0] for kind in ("clean", "adv")}
    assert STUDIES.get("C/fig4").answer(sequential | concatenated) == answer


# -- cells that run ----------------------------------------------------------------------------------------------------


def smoked(name, cell, tmp_path):
    return work(Task(study=name, cell=cell, seed=0, protocol="smoke", out=str(tmp_path), device="cpu"))["values"]


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("C/table1", "imagenette/eps16/trades_seq_6"),
        ("C/table4", "cifar10/eps8/mat_cat_0.5_dbn_kl_1"),
        pytest.param("C/table2", f"{LARGE}/mat_cat_0.5/none", marks=pytest.mark.slow),
    ],
)
def test_a_cell_of_a_table_runs_and_gives_its_numbers(name, cell, tmp_path):
    values = smoked(name, cell, tmp_path)
    places = [number.value for number in STUDIES.get(name).numbers() if number.cell == cell]
    assert places and all(values[place] >= 0 for place in places)


@pytest.mark.slow
def test_the_cells_of_the_projection_and_of_the_shift_give_what_the_checks_read(tmp_path):
    for name in ("C/fig1", "C/fig4"):
        study = STUDIES.get(name)
        values = {
            (cell.name, path): [value]
            for cell in study.cells()
            for path, value in smoked(name, cell.name, tmp_path).items()
        }
        assert study.answer(values) in ("confirmed", "not confirmed")
