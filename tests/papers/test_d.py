"""The studies of paper D: trainings and feature data sets, and checks that say what the paper says."""

import pytest

from advnorm.analysis import RECIPES
from advnorm.config import Named
from advnorm.data import load
from advnorm.papers.d import features as feature_figures
from advnorm.studies import STUDIES, printed_entry
from advnorm.studies.claims import mean
from advnorm.studies.protocols import plan_cell
from advnorm.studies.run_tasks import run_task, run_tasks
from advnorm.studies.task import Task
from support.claim_values import LIGS, MADE_UP, fig1, fig2, less_robust
from support.study_records import collect_values


def test_a_claim_about_imagenet_too_is_not_decided_without_it(as_printed):
    study = STUDIES.get("D/table1")
    small = {place: value for place, value in as_printed("D/table1").items() if not place[0].startswith("imagenet")}
    found = study.evaluate_claim(small)
    assert (found.verdict, found.needs) == ("undecided", "8 more cells")
    small["svhn/vgg16/bn", "shared/cw l2 0.25"] = [99.0]
    assert study.verdict(small) == "contradicted"


def test_trainings_on_features_have_the_printed_hyperparameters():
    for row in printed_entry("D/table6")["rows"]:
        config = feature_figures.feature_training(row["label"]["dataset"])
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

    assert trained("D/table1", "cifar10/vgg16/bn") == trained("D/fig1", "standard/bn")
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


def test_robust_features_are_forgotten_only_if_most_of_their_accuracy_is_lost():
    study, values = STUDIES.get("D/fig7"), {place: [value] for place, value in MADE_UP["D/fig7"]().items()}
    assert study.verdict(values) == "supported"
    still = {("D_conflict/bn", "150/aligned_with_robust_features/0"): [45.0]}
    ignored = {("D_conflict/none", "5/aligned_with_robust_features/0"): [5.0]}  # not in the whole stage
    assert study.verdict(values | still) == study.verdict(values | ignored) == "contradicted"


def test_ligs_with_bn_must_be_lower_at_every_moment():
    values = {place: [value] for place, value in fig2().items()}
    between = {(cell, f"75/{LIGS.format('fgsm')}"): [value] for cell, value in (("none", 0.8), ("bn", 0.5))}
    study = STUDIES.get("D/fig2")
    assert study.verdict(values | between) == "supported"
    assert study.verdict(values | between | {("bn", f"75/{LIGS.format('fgsm')}"): [0.81]}) == "contradicted"


@pytest.mark.parametrize(
    ("gain", "verdict"), [(7.5, "supported"), (20.0, "supported"), (7.0, "contradicted"), (1.5, "contradicted")]
)
def test_the_boost_by_adapted_statistics_may_be_larger_than_printed(as_printed, gain, verdict):
    values = as_printed("D/table7")
    (before,) = values["vgg16", "networks/run/mean"]
    assert (
        STUDIES.get("D/table7").verdict(values | {("vgg16", "networks/run/adapted_mean"): [before + gain]}) == verdict
    )


def test_a_curve_that_rises_first_does_not_fall_during_training():
    values = {place: [value] for place, value in fig2().items()}
    rise = {("none", f"75/{LIGS.format('pgd')}"): [0.99], ("bn", f"75/{LIGS.format('pgd')}"): [0.5]}
    assert STUDIES.get("D/fig2").verdict(values | rise) == "contradicted"  # 0.9, 0.99, 0.6


@pytest.mark.parametrize(
    ("study", "cell", "moments"),
    [("D/fig6", "D_rand/bn", 23), ("D/fig7", "D_conflict/bn", 23), ("D/fig14", "bn", 23), ("D/fig17", "resnet20", 23)],
)
def test_curves_whose_course_matters_have_many_snapshots(study, cell, moments):
    found = STUDIES.get(study).cell(cell)
    assert len(found.config.snapshots) == moments
    assert len(plan_cell(found, "fast").config.snapshots) >= 15


def test_networks_that_are_compared_are_clipped_alike():
    for name in ("D/fig2", "D/table1", "D/fig4"):
        planned = [plan_cell(cell, "fast").config for cell in STUDIES.get(name).cells()]
        assert {config.grad_clip for config in planned} == {1.0}
    assert plan_cell(STUDIES.get("D/table7").cell("vgg16"), "fast").config.grad_clip is None


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
