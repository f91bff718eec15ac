"""Every study of every paper: its cells are valid, its printed numbers are located, and it runs."""

import math
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import get_args

import pytest

from advnorm.analysis import ANALYSES
from advnorm.attacks import get as get_attack
from advnorm.studies import STUDIES, printed_entry
from advnorm.studies.protocols import plan_cell
from advnorm.studies.run_tasks import run_tasks
from advnorm.studies.store import RecordStore
from advnorm.studies.study import ClaimVerdict
from advnorm.studies.task import list_tasks
from advnorm.threat import ThreatModel
from support.problems import raises_problem
from support.study_records import collect_values

#: The tables, figures and sections that measure something.
EXPECTED = [
    "A/table1", "A/table2", "A/table3", "A/table4", "A/table5", "A/table6", "A/table7", "A/table8",
    "A/fig2", "A/fig4", "A/fig5", "A/fig6", "A/fig7",
    "B/table1", "B/table2", "B/table3",
    "B/fig1", "B/fig2",
    "C/table1", "C/table2", "C/table3", "C/table4",
    "C/fig1", "C/fig2", "C/fig3", "C/fig4", "C/fig5", "C/fig6", "C/sec3.2",
    "D/table1", "D/table2", "D/table3", "D/table7", "D/table8",
    "D/fig1", "D/fig2", "D/fig4", "D/fig5", "D/fig6", "D/fig7", "D/fig8", "D/fig9", "D/fig10", "D/fig11", "D/fig12",
    "D/fig13", "D/fig14", "D/fig15", "D/fig16", "D/fig17",
    "E/table1", "E/table2", "E/table3", "E/table4", "E/table5", "E/table6", "E/table7",
    "E/fig1", "E/fig2", "E/fig3", "E/fig5", "E/fig6", "E/fig7", "E/sec4.2", "E/sec4.4",
]  # fmt: skip
#: Tables and figures without a measurement.
NO_STUDY = {
    "A/fig1": "a scheme of Cross-AT",
    "A/fig3": "a scheme of the setups of table 3",
    "D/fig3": "a scheme of usefulness and robustness",
    "D/table4": "settings of trainings, and lost",
    "D/table5": "settings of adversarial trainings, and lost",
    "D/table6": "settings of trainings on features, which figures 6, 7, 12 and 13 have",
    "E/fig4": "a scheme of Mixture BN",
}
NUMBERED = {"A": (8, 7), "B": (3, 2), "C": (4, 6), "D": (8, 17), "E": (7, 7)}  # tables and figures of each paper

NAMES = STUDIES.names()
TABLES = [name for name in NAMES if any(True for _ in STUDIES.get(name).numbers)]
#: Columns that follow from others: the spread over seeds, and differences of two accuracies.
DERIVED = ("std", "gain", "acc_diff")
#: Figures whose text prints only some of the numbers that the check reads.
SOME_NUMBERS = {
    "A/table5": "no control of the re-calibration",
    "C/fig5": "clean and AutoAttack accuracy at two weights of seven",
}
#: Claims that numbers are close to each other, which also hold for their opposites.
FLAT = {"E/table1", "E/fig3"}
#: Claims that the paper's own numbers contradict, and the words of a clause that they fail.
PRINT_FAILS = {
    "A/table4": "LN with two sets is similar to BN",
    "A/table7": "Dual Linear is comparable to Dual BN, adv head, autoattack",
    "B/table1": "preact_resnet18/cifar100 with mixup APART-SAM is slightly below APART",
    "B/table3": "APART beats every standard training whatever its hyperparameters",
    "C/table4": "DBN improves the accuracy in all cases",
    "E/table1": "MBN_adv of mbn_alp/pgd30 is at most 3 points below",
    "E/table3": "none of 6 other changes is significant",
}
#: Cells that the check reads and another table prints.
PRINTED_ELSEWHERE = {"A/table4": {"dual_bn/eps16", "setup1/eps16"}}
#: Cells with different names and the same training; they differ in their measurements.
ONE_TRAINING = {"A/table6": {"standard/eps8", "standard/eps16"}}
#: Studies whose check needs more values than a smoke test measures.
TOO_LITTLE = {"B/fig1": "groups of eight images", "D/fig1": "two corruptions of all"}


def test_every_measured_table_and_figure_is_a_study():
    assert sorted(NAMES) == sorted(EXPECTED)


@pytest.mark.parametrize("paper", NUMBERED)
def test_a_table_or_figure_without_a_study_has_a_reason(paper):
    tables, figures = NUMBERED[paper]
    numbered = {f"{paper}/table{n + 1}" for n in range(tables)} | {f"{paper}/fig{n + 1}" for n in range(figures)}
    assert {name for name in [*EXPECTED, *NO_STUDY] if name.startswith(paper) and "/sec" not in name} == numbered
    assert not {*EXPECTED} & {*NO_STUDY}
    assert all(printed_entry(name)["caption"] for name in numbered)


# -- cells -------------------------------------------------------------------------------------------------------------


BY_PROTOCOL = [(name, protocol) for name in NAMES for protocol in STUDIES.get(name).protocols]


def test_papers_have_their_own_protocols_beside_the_general_ones():
    own = {name[0]: {*STUDIES.get(name).protocols} - {"paper", "fast", "smoke"} for name in NAMES}
    stand_in = {"imagenette"}
    assert own == {"A": {"authors"}, "B": set(), "C": {"authors", *stand_in}, "D": stand_in, "E": stand_in}
    with raises_problem("unknown_name", "protocol"):
        plan_cell(STUDIES.get("B/fig1").cell("standard"), "authors")


@pytest.mark.parametrize(("name", "protocol"), BY_PROTOCOL)
def test_cells_have_unique_names_and_valid_settings_under_every_protocol(name, protocol):
    cells = [plan_cell(cell, protocol) for cell in STUDIES.get(name).cells()]  # a wrong configuration cannot be made
    assert len({cell.name for cell in cells}) == len(cells) > 0
    for cell in cells:
        assert cell.measures and cell.config.run_name
        for measure in cell.measures:
            if measure.name in ("benchmark", "metrics"):
                continue
            known = ANALYSES.get(measure.name).options()
            assert measure.options.keys() <= {*known, "limit", "eps", "beside"}
        for attack in chain.from_iterable(attacks_of(measure) for measure in cell.measures):
            assert get_attack(attack, threat=ThreatModel(norm=cell.config.threat, eps=cell.config.eps))


def attacks_of(measure):
    attacks = measure.options.get("attacks", ())
    return attacks.values() if isinstance(attacks, dict) else attacks


@pytest.mark.parametrize("name", NAMES)
def test_cells_come_after_their_prerequisites(name, tmp_path):
    before = set()
    for task in list_tasks(STUDIES.get(name), out=tmp_path):
        assert {*task.prerequisites} <= before
        before.add(task.cell)


@pytest.mark.parametrize("paper", ["A", "C", "E"])  # B and D name cells within a study
def test_cells_have_the_same_name_exactly_if_they_are_the_same_training(paper):
    studies = [STUDIES.get(name) for name in STUDIES.names(f"{paper}/*")]
    trainings = {(cell.name, cell.config.digest) for study in studies for cell in study.cells()}
    assert set(Counter(name for name, _ in trainings).values()) == {1}
    names: dict[str, set[str]] = {}
    for name, digest in trainings:
        names.setdefault(digest, set()).add(name)
    assert [shared for shared in names.values() if len(shared) > 1] == [
        cells for study, cells in ONE_TRAINING.items() if study.startswith(paper)
    ]


#: Cells that the shortened schedule makes equal, because they differ in the schedule.
SAME_IF_SHORT = {
    "B/table3": {"standard/1.00x", "standard/1.20x"},
    "E/table3": {
        "alp/pgd10/uniform/batch1536/rmsprop/lr0.045/exponential/resnet101",
        "alp/pgd10/uniform/batch1536/rmsprop/lr0.045/resnet101",
    },
}


@pytest.mark.parametrize(("name", "protocol"), [case for case in BY_PROTOCOL if case[1] != "smoke"])
def test_no_two_cells_of_a_study_share_a_training(name, protocol, tmp_path):
    folders: dict[Path, set[str]] = {}
    for task in list_tasks(STUDIES.get(name), protocol=protocol, out=tmp_path):
        folders.setdefault(task.run.folder, set()).add(task.cell)
    shared = [cells for cells in folders.values() if len(cells) > 1]
    expected = ONE_TRAINING | (SAME_IF_SHORT if protocol in ("fast", "imagenette") else {})
    assert shared == [expected[name] for name in {name} & {*expected}]


@pytest.mark.parametrize(
    ("study", "cell", "lr", "clip"),
    [
        ("A/table3", "dual_bn/eps16", 0.4, None),
        ("B/table1", "preact_resnet18/cifar10/standard/1x", 0.4, 1.0),  # it ends without a norm
        ("B/table1", "wrn_40_2/cifar10/standard/1x", 0.4, None),
        ("C/table1", "cifar10/eps16/mat_cat_0.5", 0.2, None),
        ("C/table2", "cifar10/eps16/mat_cat_0.5/none", 0.2, 1.0),  # it has none
    ],
)
def test_the_short_schedule_scales_the_rate_and_clips_where_a_network_would_diverge(study, cell, lr, clip):
    config = plan_cell(STUDIES.get(study).cell(cell), "fast").config
    assert (config.epochs, config.batch_size, config.schedule) == (30, 512, "one_cycle")
    assert config.lr == pytest.approx(lr) and config.grad_clip == clip
    assert plan_cell(STUDIES.get(study).cell(cell), "paper").config.grad_clip is None


# -- numbers and claims ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLES)
def test_every_printed_number_has_its_own_cell_and_value(name):
    study = STUDIES.get(name)
    entry, numbers = study.printed, list(study.numbers)
    for row in entry["rows"]:
        for column, value in zip(entry["columns"], row["values"]):
            placed = study.locate(row["label"], column) is not None
            assert not placed if column.endswith(DERIVED) else placed or value is None
    elsewhere = PRINTED_ELSEWHERE.get(name, set())
    assert {number.cell for number in numbers} | elsewhere == {cell.name for cell in study.cells()}
    assert len({number.row for number in numbers}) == len(entry["rows"])  # a row's label tells it apart
    shared = name == "A/table6"  # both rows have the accuracy without perturbation
    assert len({(number.cell, number.value) for number in numbers}) == len(numbers) - shared


def test_a_row_is_named_by_its_label_with_keys_of_numbers_and_flags():
    def rows(name):
        return [number.row for number in STUDIES.get(name).numbers]

    assert rows("A/table3")[0] == "Single BN, ns 1, ap 1"
    assert rows("B/table3")[-1] == "APART, 2.00x, N 128, eps 0.1, n 32"
    assert rows("E/table2")[1] == "100% adv + 0% clean, running statistics"  # its number counts from the row above


@pytest.mark.parametrize("name", TABLES)
def test_the_printed_numbers_confirm_the_printed_claim_or_are_listed_and_their_opposite_does_not(name, as_printed):
    study, values = STUDIES.get(name), as_printed(name)
    failed = [clause.text for clause in study.printed_conclusion.clauses if not clause.held]
    if name in PRINT_FAILS:
        assert failed and all(PRINT_FAILS[name] in text for text in failed)
    else:
        assert study.printed_conclusion.verdict == ("undecided" if name in SOME_NUMBERS else "supported"), failed
    turned = {place: [100 - value for value in found] for place, found in values.items()}
    if name not in {*FLAT, *SOME_NUMBERS}:
        assert study.verdict(turned) == "contradicted"


@pytest.mark.parametrize("name", ["C/fig5", "E/fig1", "E/fig2", "E/fig3", "E/fig7", "E/sec4.4"])
def test_numbers_printed_in_the_text_of_a_figure_are_compared(name):
    assert any(number.printed is not None for number in STUDIES.get(name).numbers)


def test_printed_numbers_without_a_measured_value_are_listed_or_explained():
    listed = [item["value"] for item in printed_entry("C/table2")["printed"]]
    assert listed == [row["values"][0] for row in printed_entry("C/table2")["rows"]]
    assert all("beside ours" in printed_entry(f"B/table{n}")["notes"] for n in (1, 2, 3))


@pytest.mark.parametrize("name", NAMES)
def test_a_study_without_numbers_is_not_run(name):
    assert STUDIES.get(name).verdict({}) == "not run"


# -- smoke tests -------------------------------------------------------------------------------------------------------


def training_kind(cell):
    """What a training exercises. Cells of one kind differ in network, eps, weights of losses and schedule."""
    config = cell.config
    named = (config.second_pass, config.regularizer)
    parts = (config.norm, config.objective.name, *(part and part.name for part in named), config.mix, config.train_only)
    recipe = (cell.features or "").partition(":")[0]
    return *parts, config.dual_head, config.running_epochs > 0, recipe, cell.after is not None


def measure_kind(cell):
    return tuple(measure.key for measure in cell.measures)


def choose_representatives():
    """A cell for every kind of training and every kind of measurement: pairwise, not the full crossing."""
    cells = {(name, one.name): plan_cell(one, "smoke") for name in NAMES for one in STUDIES.get(name).cells()}
    trainings, measures = set(), {}
    chosen = []
    for address, one in cells.items():
        if training_kind(one) not in trainings or measure_kind(one) not in measures:
            trainings.add(training_kind(one))
            measures.setdefault(measure_kind(one), address)
            chosen.append(address)
    return chosen, measures


REPRESENTATIVES, BY_MEASURES = choose_representatives()


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """One folder for all studies, as a user has it: studies find shared trainings there."""
    return tmp_path_factory.mktemp("results")


def run_smoke(study, cell, out):
    """Run a cell and its prerequisites; return its values."""
    tasks = list_tasks(STUDIES.get(study), cell=cell, protocol="smoke", out=out, device="cpu")
    assert [outcome.error for outcome in run_tasks(tasks, retries=0)] == [None] * len(tasks)
    return RecordStore(out).load(next(task for task in tasks if task.cell == cell))["values"]


def benchmark_names(cell):
    """The value names of a cell with benchmarks only; None if it has other measurements."""
    if any(measure.name != "benchmark" for measure in cell.measures):
        return None
    names = set()
    for measure in cell.measures:
        for branch in measure.options.get("route") or ("shared",):
            names |= {f"{branch}/{name}" for name in ("clean", *measure.options["attacks"])}
    along = [f"{epoch}/" for epoch in cell.config.snapshots] if cell.measures[0].checkpoint == "along" else [""]
    return {f"{epoch}{name}" for epoch in along for name in names}


@pytest.mark.parametrize(("study", "cell"), REPRESENTATIVES)
def test_every_kind_of_training_and_measurement_runs(study, cell, results):
    values = run_smoke(study, cell, results)
    assert values and all(map(math.isfinite, values.values()))
    assert benchmark_names(plan_cell(STUDIES.get(study).cell(cell), "smoke")) in (None, {*values})


@pytest.mark.parametrize("name", NAMES)
def test_a_study_measures_all_values_of_its_table_and_its_check(name, results):
    study, values = STUDIES.get(name), {}
    for one in study.cells():
        planned = plan_cell(one, "smoke")
        names = benchmark_names(planned)
        if names is None:  # the names of an analysis are those of any cell with the same measurements
            names = run_smoke(*BY_MEASURES[measure_kind(planned)], results)
        values |= {(one.name, value): [float(place % 7)] for place, value in enumerate(names)}
    check_values(study, values)


def check_values(study, values):
    assert [number for number in study.numbers if (number.cell, number.value) not in values] == []
    assert (study.verdict(values) == "not run") == (study.name in TOO_LITTLE)
    assert study.verdict({place: [0.0] for place in values}) in get_args(ClaimVerdict)  # whatever a check divides by


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_study_runs_completely(name, results):
    study = STUDIES.get(name)
    tasks = list_tasks(study, protocol="smoke", out=results, device="cpu")
    assert [outcome.error for outcome in run_tasks(tasks, retries=0)] == [None] * len(tasks)
    values, problems = collect_values(study, protocol="smoke", out=results)
    assert not problems
    assert {cell for cell, _ in values} == {cell.name for cell in study.cells()}
    assert all(len(found) == 1 and math.isfinite(found[0]) for found in values.values())
    check_values(study, values)
