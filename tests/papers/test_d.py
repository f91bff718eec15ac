"""The studies of paper D: trainings and feature data sets, and checks that say what the paper says."""

import itertools

import pytest

from advnorm.analysis import RECIPES
from advnorm.config import Named
from advnorm.data import load
from advnorm.papers.d import figures, tables, trainings
from advnorm.studies import STUDIES, printed_entry
from advnorm.studies.claims import mean
from advnorm.studies.protocols import plan_cell
from advnorm.studies.run import run_task, run_tasks
from advnorm.studies.task import Task
from support.study_records import collect_values


def test_a_claim_on_small_images_needs_no_imagenet(as_printed):
    study = STUDIES.get("D/table1")
    small = {place: value for place, value in as_printed("D/table1").items() if not place[0].startswith("imagenet")}
    assert study.verdict(small) == "supported"
    del small["svhn/vgg16/bn", "shared/cw l2 0.25"]
    assert study.verdict(small) == "undecided"


def test_trainings_on_features_have_the_printed_hyperparameters():
    for row in printed_entry("D/table6")["rows"]:
        config = figures.learns(row["label"]["dataset"])
        settings = (config.lr, config.batch_size, bool(config.milestones), config.augment != "none")
        assert [*settings, config.momentum, config.weight_decay] == row["values"]
        assert (config.epochs, config.milestones, config.optimizer) == (150, (50.0, 100.0), "sgd")


def test_features_come_from_networks_of_the_kind_that_their_recipe_needs():
    for name in ("D/fig6", "D/fig7", "D/fig12", "D/fig13"):
        cells = {cell.name: cell for cell in STUDIES.get(name).cells()}
        for cell in cells.values():
            if cell.features is not None and cell.after is not None:
                recipe = cell.features.partition(":")[0]
                source = cells[cell.after].config
                assert recipe in RECIPES and source.model == Named("resnet50")
                assert source.objective.name == ("classical" if recipe == "D_R" else "standard")


def test_trainings_that_studies_share_have_one_configuration():
    def trained(name, cell):
        return STUDIES.get(name).cell(cell).config

    assert trained("D/table1", "cifar10/vgg16/bn") == trained("D/fig1", "standard/bn") == trained("D/fig15", "bn")
    assert trained("D/table1", "cifar10/resnet50/bn") == trained("D/fig7", "source/standard")
    assert trained("D/fig2", "none") == trained("D/fig4", "standard/none") == trained("D/fig8", "none")
    assert trained("D/fig11", "resnet50/gn") == trained("D/table2", "imagenet/resnet50/gn")


@pytest.mark.parametrize(
    ("protocol", "epochs"), [("paper", (5, 20, 75, 150)), ("fast", (1, 4, 15, 30)), ("smoke", (1,))]
)
def test_networks_are_measured_along_their_training(protocol, epochs):
    cell = plan_cell(STUDIES.get("D/fig4").cell("standard/bn"), protocol)
    assert cell.config.snapshots == epochs and {measure.checkpoint for measure in cell.measures} == {"along"}


# -- checks of figures and lost tables, on made-up values that bear the claim out --------------------------------------

LIGS = "networks/run/shifts/{}/mean"
NORMED = trainings.NORMED


def trend(epochs=(5, 20, 75, 150), **cells):
    """Cells by their LIGS, robust and clean accuracy, the same all along."""
    names = (LIGS.format("gaussian"), "shared/pgd10", "shared/clean")
    return {
        (cell, f"{epoch}/{name}"): value
        for cell, values in cells.items()
        for name, value in zip(names, values)
        for epoch in epochs
    }


def smooth(**cells):
    paths = [f"5/networks/run/batches/{batch}/smoothness" for batch in (0, 1)]
    return {(cell, path): value for cell, value in cells.items() for path in paths}


def table2():
    pgd = {"none": 30.0, "bn": 20.0, "in": 10.0, "ln": 20.0, "gn": 20.0}
    cells = {f"{data}/{model}/{norm}".lower(): pgd[norm] for data, model in tables.SMALL for norm in pgd}
    return {(cell, "shared/pgd l2 0.25"): value for cell, value in cells.items()} | {
        ("cifar10/resnet50/bn", "shared/pgd l2 0.25"): 5.0  # the exception
    }


def table3():
    return {
        (f"{training}/gn", f"accuracy/{training}/{source}/{training}/{target}"): value + 10 * (source == "none")
        for training, value in (("standard", 0.2), ("robust", 50.0))
        for source, target in itertools.product(trainings.NORM_NAMES, repeat=2)
    }


def fig1():
    accuracy = dict.fromkeys(("gaussian_noise", "speckle_noise", "shot_noise"), (60, 40))
    accuracy |= {"impulse_noise": (30, 40)}  # no part of the claim
    accuracy |= {"fog": (30, 50), "contrast": (30, 50), "snow": (50, 50)}
    better = {"none": 0, "bn": -1, "in": 1, "ln": 0, "gn": 0}
    by_training = {"gaussian_noise": 10, "speckle_noise": 10, "shot_noise": 10, "fog": -10, "contrast": -10}
    return {
        (f"{training}/{norm}", f"networks/run/accuracy/{name}/{level}"): pair[norm != "none"]
        + better[norm]
        + by_training.get(name, 0) * (training == "robust")
        for training in ("standard", "robust")
        for norm in trainings.NORM_NAMES
        for name, pair in accuracy.items()
        for level in range(5)
    }


def fig2():
    values = {("none", 5): 0.9, ("none", 150): 0.6, ("bn", 5): 0.7, ("bn", 150): 0.3}
    shifts = ("gaussian", "uniform", "fgsm", "pgd")
    return {(cell, f"{at}/{LIGS.format(shift)}"): value for (cell, at), value in values.items() for shift in shifts}


def less_robust(*norms):
    standard = {f"standard/{norm}": (0.3, 10, 90) for norm in norms} | {"standard/none": (0.6, 30, 85)}
    return trend(**standard, **{f"robust/{norm}": (0.97, 70, 80) for norm in ("none", *norms)})


def fig8():
    factors = trend(**dict.fromkeys(figures.FACTORS, (0.3, 10, 90)), base=(0.3, 10, 90))
    higher, crossing = ("width/2", "activation/selu", "optimizer/adam"), ("weight_decay/0.005", "lr/0.5")
    early = trend((5,), **dict.fromkeys((*higher, *crossing), (0.32, 10, 90)))
    late = trend((150,), **dict.fromkeys(higher, (0.32, 10, 90)))
    late |= trend((150,), **dict.fromkeys((*crossing, "depth/34", "depth/50"), (0.28, 10, 90)))
    return factors | early | late | trend(none=(0.6, 30, 85))


def fig9():
    shortcuts = {f"{model}{end}": (0.3, 10, 91) for model in figures.SHORTCUTS for end in ("", "_noshortcut")}
    return trend(**shortcuts, **{f"fixup_{model}": (0.5, 20, 90) for model in figures.SHORTCUTS})


def fig11():
    clean = {"none": 66, "bn": 71, "in": 60, "ln": 68, "gn": 69}
    models = ("resnet18", "resnet50")
    return trend(**{f"{m}/{norm}": (0.5 + 0.3 * (norm == "none"), 1, clean[norm]) for m in models for norm in clean})


def conflict(recipe):
    aligned = {("bn", 5): (70, 20), ("bn", 150): (20, 50), ("none", 150): (60, 10)}
    kinds = ("robust", "non_robust")
    return {
        (f"{recipe}/{norm}", f"{epoch}/aligned_with_{kind}_features/0"): value
        for (norm, epoch), pair in aligned.items()
        for kind, value in zip(kinds, pair)
    }


MADE_UP = {
    "D/table2": table2,
    "D/table3": table3,
    "D/fig1": fig1,
    "D/fig2": fig2,
    "D/fig4": lambda: less_robust("bn"),
    "D/fig5": lambda: trend(
        **{"bn": (0.3, 10, 94), "bn/ligs": (0.9, 40, 92), "none": (0.6, 30, 90), "none/ligs": (0.9, 45, 89)}
    ),
    "D/fig6": lambda: (
        trend(
            **{"D_R/none": (0.95, 40, 75), "D_R/bn": (0.95, 45, 80), "D_rand/none": (0.9, 10, 10)},
        )
        | trend((5, 20), **{"D_rand/bn": (0.8, 10, 10)})
        | trend((150,), **{"D_rand/bn": (0.2, 0, 60)})
    ),
    "D/fig7": lambda: conflict("D_conflict"),
    "D/fig8": fig8,
    "D/fig9": fig9,
    "D/fig10": lambda: less_robust("in", "ln", "gn"),
    "D/fig11": fig11,
    "D/fig12": lambda: trend(**{"D_R/bn": (0.95, 0, 0), "D_NR/bn": (0.5, 0, 0), "D_rand/bn": (0.2, 0, 0)}),
    "D/fig13": lambda: conflict("D_det"),
    "D/fig14": lambda: smooth(none=10.0, bn=2.0, **{"in": 11.0, "ln": 12.0, "gn": 13.0}),
    "D/fig15": lambda: smooth(none=10.0, bn=2.0, **{"in": 8.0, "ln": 7.0, "gn": 8.0}),
    "D/fig16": lambda: smooth(resnet18=2.0, resnet18_noshortcut=3.0),
    "D/fig17": lambda: smooth(resnet20=2.0, resnet56=2.0, fixup_resnet20=3.0, fixup_resnet56=4.0),
}


@pytest.mark.parametrize("cell", ["standard/bn", "robust/bn"])
def test_a_claim_about_the_whole_training_is_checked_at_every_moment(cell):
    values = {place: [value] for place, value in less_robust("bn").items()}
    values[cell, f"20/{LIGS.format('gaussian')}"] = [0.8]  # above none's 0.6, and below 0.9
    assert STUDIES.get("D/fig4").verdict(values) == "contradicted"


@pytest.mark.parametrize(("name", "worse"), [("gaussian_noise", -50), ("fog", 50), ("speckle_noise", -50)])
def test_the_claim_covers_corruptions_after_adversarial_training(name, worse):
    values = fig1()
    study = STUDIES.get("D/fig1")
    assert all(name in cell.measures[0].options["corruptions"] for cell in study.cells())
    assert study.verdict({place: [value] for place, value in values.items()}) == "supported"
    there = {place for place in values if place[0] == "robust/gn" and f"/{name}/" in place[1]}
    assert there
    changed = {place: [value + worse * (place in there)] for place, value in values.items()}
    assert study.verdict(changed) == "contradicted"
    assert study.verdict({place: [value] for place, value in values.items() if place not in there}) == "not run"


def test_ligs_with_bn_must_be_lower_at_every_moment():
    values = {place: [value] for place, value in fig2().items()}
    between = {(cell, f"75/{LIGS.format('fgsm')}"): [value] for cell, value in (("none", 0.8), ("bn", 0.5))}
    study = STUDIES.get("D/fig2")
    assert study.verdict(values | between) == "supported"
    assert study.verdict(values | between | {("bn", f"75/{LIGS.format('fgsm')}"): [0.81]}) == "contradicted"


@pytest.mark.parametrize(("gain", "verdict"), [(7.5, "supported"), (20.0, "supported"), (0.5, "contradicted")])
def test_the_boost_by_adapted_statistics_may_be_larger_than_printed(as_printed, gain, verdict):
    values = as_printed("D/table7")
    (before,) = values["vgg16", "networks/run/mean"]
    assert (
        STUDIES.get("D/table7").verdict(values | {("vgg16", "networks/run/adapted_mean"): [before + gain]}) == verdict
    )


def test_every_study_without_printed_numbers_has_invented_ones():
    assert {*MADE_UP} == {name for name in STUDIES.names("D/*") if not list(STUDIES.get(name).numbers)}


@pytest.mark.parametrize("name", MADE_UP)
def test_values_that_fit_the_paper_confirm_the_claim_and_opposite_values_do_not(name):
    study = STUDIES.get(name)
    values = MADE_UP[name]()
    cells = {cell.name for cell in study.cells()}
    assert {cell for cell, _ in values} <= cells
    assert study.verdict({place: [value, value] for place, value in values.items()}) == "supported"
    upside_down = {place: [300 - 99 * value] for place, value in values.items()}
    assert study.verdict(upside_down) == "contradicted"


# -- smoke -------------------------------------------------------------------------------------------------------------


def smoked(out, study, cell):
    task = Task(study=study, cell=cell, seed=0, protocol="smoke", out=str(out), device="cpu")
    return task, run_task(task)["values"]


def test_a_cell_of_table_1_runs_and_measures_under_both_threats(tmp_path):
    task, values = smoked(tmp_path, "D/table1", "svhn/vgg11/none")
    wanted = {f"shared/{column}" for column in printed_entry("D/table1")["columns"]}
    assert wanted == {*values} and all(0 <= value <= 100 for value in values.values())
    # each measure under its own threat
    records = [path.read_text() for path in (task.run.folder / "measures").glob("benchmark-*.json")]
    assert sorted(("L2" in text, "Linf" in text) for text in records) == [(False, True), (True, False)]


def test_conflicting_features_are_made_learned_and_measured(tmp_path):
    study = STUDIES.get("D/fig7")
    todo = [Task(study=study.name, cell=c.name, seed=0, protocol="smoke", out=str(tmp_path)) for c in study.cells()]
    assert [outcome.error for outcome in run_tasks(todo, retries=0)] == [None] * len(todo)
    values, _ = collect_values(study, protocol="smoke", out=tmp_path)
    robust, other = (f"1/aligned_with_{kind}_features/0" for kind in ("robust", "non_robust"))
    assert 0 <= mean(values, "D_conflict/bn", robust) + mean(values, "D_conflict/bn", other) <= 100
    assert study.verdict(values) in ("supported", "contradicted")
    by_recipe = {
        folder.name.split("-")[-1 if folder.name.endswith("D_R") else -2]: folder for folder in features(tmp_path)
    }
    assert {*by_recipe} == {"D_R", "D_conflict"}
    start = load("features", "train", by_recipe["D_R"])
    made = load("features", "train", by_recipe["D_conflict"])
    assert made.labels.tolist() == ((start.labels + 1) % start.num_classes).tolist()


def features(out):
    return sorted((out / "features").iterdir())
