"""Paper E's studies: every printed number has its cell, every cell can be run, every check knows its claim."""

import pytest

from advnorm.engine.run import Run
from advnorm.studies import paper_e
from advnorm.studies.base import STUDIES, printed
from advnorm.studies.protocols import under
from advnorm.studies.run import tasks, work
from advnorm.studies.summary import collected

NAMES = STUDIES.names("E/*")
TABLES = [name for name in NAMES if "/table" in name]
#: Drawn, nothing measured.
DRAWINGS = {"E/fig4"}


def absolute(name):
    """The printed values as measured ones: a relative row refers to the last one above that is not."""
    study, entry = STUDIES.get(name), printed(name)
    values, last = {}, {}
    for row in entry["rows"]:
        for column, value in zip(entry["columns"], row["values"]):
            if value is None:
                continue
            if not row["label"].get("relative"):
                last[column] = value
            else:
                value = round(last[column] + value, 1)
            placed = study.place(row["label"], column)
            if placed is not None:
                values.setdefault(placed, []).append(value)
    return values


def given(cell):
    """The names of the numbers that a cell's benchmarks give."""
    for measure in cell.measures:
        if measure.name == "benchmark":
            for branch in measure.options["route"] or ["shared"]:
                yield from (f"{branch}/{name}" for name in ("clean", *measure.options["attacks"]))


def test_every_table_and_figure_of_the_paper_has_a_study():
    assert set(NAMES) | DRAWINGS == {f"E/table{n}" for n in range(1, 8)} | {f"E/fig{n}" for n in range(1, 8)} | {
        "E/sec4.4"
    }


@pytest.mark.parametrize("name", NAMES)
def test_names_of_cells_are_unique_and_what_a_cell_starts_from_comes_before_it(name):
    seen = []
    for cell in STUDIES.get(name).cells():
        assert cell.name not in seen
        assert cell.after is None or cell.after in seen
        seen.append(cell.name)


@pytest.mark.parametrize("name", TABLES)
def test_every_printed_number_has_a_place_that_a_measurement_fills(name):
    study = STUDIES.get(name)
    measured = {cell.name: set(given(cell)) for cell in study.cells()}
    numbers = list(study.numbers())
    for number in numbers:
        assert number.printed is not None
        assert number.value in measured[number.cell], number
    count = sum(value is not None for row in printed(name)["rows"] for value in row["values"])
    assert len(numbers) == count - (6 if name == "E/table3" else 0)  # of RMSProp
    # No two printed numbers of a table share a place.
    assert len({(number.cell, number.value) for number in numbers}) == len(numbers)


@pytest.mark.parametrize("name", TABLES)
def test_no_table_has_cells_that_fill_no_place(name):
    study = STUDIES.get(name)
    assert {cell.name for cell in study.cells()} == {number.cell for number in study.numbers()}


@pytest.mark.parametrize("protocol", ["paper", "fast", "smoke"])
def test_every_cell_can_be_run_under_every_protocol(protocol):
    for name in NAMES:
        for cell in STUDIES.get(name).cells():
            assert under(protocol, cell).config.run_name  # a wrong configuration cannot be made


def test_cells_of_the_same_name_are_the_same_training_and_no_two_names_share_one():
    by_name, by_digest = {}, {}
    for name in NAMES:
        for cell in STUDIES.get(name).cells():
            assert by_name.setdefault(cell.name, cell.config) == cell.config
            assert by_digest.setdefault(cell.config.digest, cell.name) == cell.name


def test_the_training_is_that_of_section_3():
    config = STUDIES.get("E/table7").cell("adv/pgd30").config
    attack = config.build_attack()
    assert (attack.steps, attack.step, attack.threat.eps) == (30, 1 / 255, 16 / 255)
    assert (attack.start, attack.target, config.epochs, config.milestones) == (0.2, "random", 110, (35, 70, 95))
    fewer = [paper_e.adversarial(steps).attack.step_size for steps in (5, 10, 20)]
    assert fewer == ["4/255", "2/255", "1/255"]  # footnote 6


def test_tables_that_print_the_same_number_agree():
    """What tables 1 to 6 say of a training is what table 7 says; a misplaced number would disagree."""
    everything, told = absolute("E/table7"), 0
    for name in TABLES[:-1]:
        for place, values in absolute(name).items():
            if place in everything:
                assert values == everything[place], (name, place)
                told += 1
    assert told == 62  # of 71: not the clean training, MBN_clean twice, ResNet-101 six times


@pytest.mark.parametrize("name", TABLES)
def test_the_printed_numbers_of_a_table_bear_its_claim_out(name):
    assert STUDIES.get(name).answer(absolute(name)) == "confirmed"


@pytest.mark.parametrize("name", ["E/fig1", "E/fig2", "E/fig3", "E/fig7", "E/sec4.4"])
def test_the_numbers_of_table_7_and_of_the_text_bear_the_claims_of_figures_out(name):
    values = absolute("E/table7") | absolute("E/table1")
    values["clean/resnet338", "shared/clean"] = [78.9 + 0.5]  # sec. 5
    values["adv_to_clean", "shared/clean"] = [73]  # sec. 4.4
    values["clean_to_adv", "shared/pgd2000"] = [0]
    assert STUDIES.get(name).answer(values) == "confirmed"


def statistics(cell, series):
    """Values as an analysis of channels records them."""
    return {
        (cell, f"statistics/{name}/{what}/{channel}"): [number]
        for name, parts in series.items()
        for what, numbers in parts.items()
        for channel, number in enumerate(numbers)
    }


def test_figure_5_is_confirmed_by_larger_adversarial_statistics_and_by_nothing_less():
    """The paper prints no numbers of figures 5 and 6, so these are made up."""
    small, large = {"mean": [-0.2, 0.1], "std": [1.0, 1.5]}, {"mean": [-0.4, 0.2], "std": [1.5, 1.6]}
    study = STUDIES.get("E/fig5")

    def answer(clean, adv):
        return study.answer(statistics("mbn_hybrid/pgd30", {"NS^clean_running": clean, "NS^adv_running": adv}))

    assert answer(small, large) == "confirmed"
    assert answer(large, small) == answer(small, {**large, "std": small["std"]}) == "not confirmed"


def test_figure_6_is_confirmed_where_variances_differ_more_than_means():
    stored = {"mean": [0.0, 1.0], "std": [1.0, 2.0]}
    other_variance = {"mean": [0.01, 1.0], "std": [1.0, 2.5]}
    other_mean = {"mean": [0.5, 1.0], "std": [1.0, 2.0]}
    study = STUDIES.get("E/fig6")

    def answer(batch):
        return study.answer(statistics("adv/pgd30", {"running": stored, "batch 1": stored, "batch 2": batch}))

    assert answer(other_variance) == "confirmed"
    assert answer(other_mean) == "not confirmed"


@pytest.mark.parametrize("name", NAMES)
def test_without_measurements_a_study_is_not_run(name):
    assert STUDIES.get(name).answer({}) == "not run"


def test_claims_are_refuted_by_numbers_that_contradict_them():
    """Each check looks at what it speaks of: with all numbers of table 7 equal nothing holds but the table itself."""
    values = {place: [30.0] for place in absolute("E/table7") | absolute("E/table3")} | absolute("E/table1")
    values |= {("adv/pgd30", "shared/pgd2000"): [30.0], ("adv/pgd30", "shared/clean"): [80.0]}
    values |= {("adv_to_clean", "shared/clean"): [73], ("clean_to_adv", "shared/pgd2000"): [20]}
    values["clean/resnet338", "shared/clean"] = [79.4]
    values["mbn_alp/pgd30", "clean/clean"] = [50.0]
    flat = {"E/table7", "E/fig3", "E/fig5", "E/fig6"}
    for name in set(NAMES) - flat:
        assert STUDIES.get(name).answer(values) == "not confirmed", name


def smoked(study, out, *cells):
    for task in tasks(study, protocol="smoke", out=out):
        if not cells or task.cell in cells:
            work(task)
    values, problems = collected(study, protocol="smoke", out=out)
    assert not problems
    return values


@pytest.mark.slow
def test_norms_are_tuned_from_the_weights_of_another_cell(tmp_path):
    """Section 4.4 as a smoke test."""
    study = STUDIES.get("E/sec4.4")
    values = smoked(study, tmp_path)
    assert 0 <= values["adv_to_clean", "shared/clean"][0] <= 100
    assert study.answer(values) in ("confirmed", "not confirmed")
    runs = [Run.open(folder) for folder in (tmp_path / "runs").iterdir()]
    tuned = [run for run in runs if run.config.train_only == "norms"]
    assert {run.config.objective.name for run in tuned} == {"standard", "classical"}
    for run in tuned:
        start = Run.open(run.config.weights)
        assert start.config.objective.name != run.config.objective.name
        before, after = start.model("last"), run.model("last")
        assert before.layer1[0].conv1.weight.equal(after.layer1[0].conv1.weight)
        assert not before.layer1[0].bn1.weight.equal(after.layer1[0].bn1.weight)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["E/fig5", "E/fig6"])
def test_figures_of_channels_find_their_numbers_in_the_records(name, tmp_path):
    study = STUDIES.get(name)
    assert study.answer(smoked(study, tmp_path)) in ("confirmed", "not confirmed")


@pytest.mark.slow
def test_mixture_bn_is_judged_through_either_set(tmp_path):
    values = smoked(STUDIES.get("E/table1"), tmp_path, "mbn_hybrid/pgd30")
    assert {value for _, value in values} == {"adv/clean", "adv/pgd2000", "clean/clean", "clean/pgd10"}
