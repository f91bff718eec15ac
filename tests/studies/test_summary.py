"""What records say of the studies: the paper's numbers beside ours, what is missing, and what is no record of ours."""

import json
import math
import statistics
from dataclasses import asdict, replace

import pytest

from advnorm._core.errors import ConfigError
from advnorm._core.records import write_json
from advnorm.studies import STUDIES
from advnorm.studies.base import Clause, Study, each, mean, same_as
from advnorm.studies.record import FORMAT
from advnorm.studies.run import Task, tasks, work
from advnorm.studies.summary import PAPERS, collected, summary

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def written(task, values, *, seconds=120.0, **changes):
    """A record in the format of the runner, with numbers of our choice."""
    record = {
        "format": FORMAT,
        "study": task.study,
        "cell": task.cell,
        "seed": task.seed,
        "protocol": task.protocol,
        "out": None,
        "data_dir": None,
        "values": values,
        "measures": json.loads(json.dumps([asdict(measure) for measure in task.found().measures])),
        "run": {
            "config": json.loads(json.dumps(task.found().config.to_dict())),
            "seconds": seconds,
            "processes": 1,
            "precision": "bf16",
            "device": "NVIDIA H200",
        },
        "device": "NVIDIA H200",
        "torch": "2.11.0",
        "commit": COMMIT,
        **changes,
    }
    write_json(task.record, record)
    return record


def task(out, cell, *, study="A/table2", seed=0, protocol="fast"):
    return Task(study=study, cell=cell, seed=seed, protocol=protocol, out=str(out))


def table2(out, *, cross=22.0, seeds=(0,), protocol="fast"):
    """All of A's table 2, the claim confirmed where Cross-Hybrid-AT is near Dual BN."""
    robust = {"dual_bn/eps16": 22.0, "cross_bn/eps16": cross, "single/eps16": 1.0}
    for cell, value in robust.items():
        for seed in seeds:
            branches = ("shared",) if cell.startswith("single") else ("clean", "adv")
            values = {
                f"{branch}/{name}": value + seed for branch in branches for name in ("clean", "pgd10", "autoattack")
            }
            written(task(out, cell, seed=seed, protocol=protocol), values)


def of(found, name):
    (study,) = (study for study in found["studies"] if study["name"] == name)
    return study


def entry(result, cell, value):
    return next(entry for entry in result["entries"] if (entry["cell"], entry["value"]) == (cell, value))


def test_without_records_every_study_is_there_and_not_run(tmp_path):
    found = summary(tmp_path)
    assert sorted(study["name"] for study in found["studies"]) == sorted(STUDIES.names())
    assert {name.split("/")[0] for name in STUDIES.names()} <= set(PAPERS)
    for study in found["studies"]:
        (result,) = study["results"]
        assert result["protocol"] is None and result["answer"] == "not run" and result["minutes"] == {}
        assert all(entry["ours"] is None and entry["n"] == 0 for entry in result["entries"])
        assert [cell["name"] for cell in result["cells"]] == [cell.name for cell in STUDIES.get(study["name"]).cells()]
    assert found["problems"] == [] and found["minutes"] == {}


def test_a_number_is_the_mean_and_deviation_over_seeds_beside_the_printed_one(tmp_path):
    sample = [20.0, 23.5, 21.0]
    for seed, value in enumerate(sample):
        written(task(tmp_path, "dual_bn/eps16", seed=seed), {"adv/autoattack": value})
    (result,) = of(summary(tmp_path), "A/table2")["results"]
    found = entry(result, "dual_bn/eps16", "adv/autoattack")
    assert found["paper"] == 22.51 and found["n"] == 3
    assert found["ours"] == pytest.approx(sum(sample) / 3)
    assert found["spread"] == pytest.approx(statistics.stdev(sample))
    assert found["difference"] == pytest.approx(sum(sample) / 3 - 22.51)
    missing = entry(result, "cross_bn/eps16", "adv/autoattack")
    assert missing["ours"] is missing["spread"] is missing["difference"] is None and missing["paper"] == 22.4


def test_of_one_seed_there_is_no_spread(tmp_path):
    table2(tmp_path)
    (result,) = of(summary(tmp_path), "A/table2")["results"]
    assert {(entry["n"], entry["spread"]) for entry in result["entries"]} == {(1, None)}


@pytest.mark.parametrize(("cross", "answer"), [(22.0, "confirmed"), (2.0, "not confirmed")])
def test_the_verdict_is_the_studys_own(tmp_path, cross, answer):
    table2(tmp_path, cross=cross)
    (result,) = of(summary(tmp_path), "A/table2")["results"]
    values, _ = collected(STUDIES.get("A/table2"), protocol="fast", out=tmp_path)
    assert result["answer"] == answer == STUDIES.get("A/table2").answer(values)
    failed = [text for text, held in result["clauses"] if not held]
    parts = [f"Cross-Hybrid-AT is comparable to Dual BN, {metric}" for metric in ("clean", "pgd10", "autoattack")]
    parts.append("both are robust under AutoAttack")
    assert failed == ([] if cross > 20 else [f"{part}: 2.0 and 22.0" for part in parts])
    assert len(result["clauses"]) == 5


def test_a_part_that_failed_decides_though_others_are_missing():
    def check(values):
        yield Clause("one", mean(values, "cell", "one") > 0)
        yield Clause("two", mean(values, "cell", "two") > 0)

    study = Study(name="A/table9", cells=list, place=lambda *_: None, check=check)
    for values, answer in (
        ((1, 1), "confirmed"),
        ((1, -1), "not confirmed"),
        ((1,), "not run"),
        ((-1,), "not confirmed"),
    ):
        found = study.concluded({("cell", name): [value] for name, value in zip(("one", "two"), values)})
        assert found == (answer, [Clause(name, value > 0) for name, value in zip(("one", "two"), values)], None)
    assert study.concluded({}) == ("not run", [], None)


def test_what_is_missing_for_one_item_leaves_the_others():
    def check(values):
        yield from each(lambda name: [Clause(name, mean(values, "cell", name) > 0)], ("one", "two", "three"))
        yield Clause("whole", True)

    study = Study(name="A/table9", cells=list, place=lambda *_: None, check=check)
    for two, three, answer in ((1, 1, "confirmed"), (None, 1, "not run"), (None, -1, "not confirmed")):
        values = {("cell", name): [value] for name, value in (("one", 1), ("two", two), ("three", three)) if value}
        found = study.concluded(values)
        assert found.answer == answer and (("whole", True) in found.clauses) == (two is not None)
        assert ("three", three > 0) in found.clauses


@pytest.mark.parametrize(
    ("check", "answer", "clauses", "problem"),
    [
        (lambda values: [], "not run", [], None),
        (lambda values: True, "not run", [], "'bool' object is not iterable"),
        (lambda values: [("one", True, 3)], "not run", [], "positional arguments"),
        (lambda values: [("one", True)], "confirmed", [Clause("one", True)], None),
        (
            lambda values: (Clause(f"{place}", place < 0) for place in (1, math.log(0))),
            "not run",
            [],
            "math domain error",
        ),
        (lambda values: (Clause(f"{1 / place}", place > 1) for place in (1, 0)), "not confirmed", None, None),
        (lambda values: (Clause("so", int(text) > 1) for text in ("1", "x")), "not confirmed", None, "invalid literal"),
    ],
)
def test_whatever_a_check_gives_is_told(check, answer, clauses, problem):
    found = Study(name="A/table9", cells=list, place=lambda *_: None, check=check).concluded({})
    assert found.answer == answer and (found.problem is None) == (problem is None)
    assert problem is None or problem in str(found.problem)
    if clauses is None:
        assert found.clauses and not found.clauses[-1].held
    else:
        assert found.clauses == clauses


def test_protocols_are_kept_apart_and_a_smoke_run_answers_nothing(tmp_path):
    for protocol, cross in (("paper", 2.0), ("fast", 22.0), ("smoke", 22.0)):
        table2(tmp_path, cross=cross, protocol=protocol)
    results = of(summary(tmp_path), "A/table2")["results"]
    assert [bool(result["clauses"]) for result in results] == [True, True, False]
    assert [(result["protocol"], result["answer"]) for result in results] == [
        ("paper", "not confirmed"),
        ("fast", "confirmed"),
        ("smoke", "not run"),
    ]


def test_a_missing_cell_leaves_the_claim_open_and_is_shown_without_seeds(tmp_path):
    table2(tmp_path, seeds=(0, 1))
    for seed in (0, 1):
        task(tmp_path, "cross_bn/eps16", seed=seed).record.unlink()
    (result,) = of(summary(tmp_path), "A/table2")["results"]
    assert result["answer"] == "not run"
    cells = {cell["name"]: (cell["seeds"], cell["minutes"]) for cell in result["cells"]}
    assert cells == {"dual_bn/eps16": ([0, 1], 4.0), "cross_bn/eps16": ([], None), "single/eps16": ([0, 1], 4.0)}


def test_settings_are_those_of_the_runs_and_each_cell_shows_its_own(tmp_path):
    table2(tmp_path)
    (result,) = of(summary(tmp_path), "A/table2")["results"]
    assert [cell["settings"] for cell in result["cells"]] == [{"norm": "dual_bn"}, {"norm": "cross_bn"}, {"norm": "bn"}]
    epochs = task(tmp_path, "single/eps16").found().config.epochs
    assert (
        result["settings"]["epochs"] == str(epochs) != str(STUDIES.get("A/table2").cell("single/eps16").config.epochs)
    )
    assert result["settings"]["attack.step_size"] == "2/255" and result["settings"]["model"] == "resnet18"
    assert "seed" not in result["settings"]
    assert (result["commits"], result["torch"], result["precision"]) == ([COMMIT], ["2.11.0"], ["bf16"])


def test_a_training_that_studies_share_is_paid_once(tmp_path):
    for study in ("A/table2", "A/table3", "A/table8"):
        written(task(tmp_path, "single/eps16", study=study), {"shared/clean": 90.0}, seconds=600)
    found = summary(tmp_path)
    assert found["minutes"] == {"NVIDIA H200": 10.0}
    for study in ("A/table2", "A/table3", "A/table8"):
        assert of(found, study)["results"][0]["minutes"] == {"NVIDIA H200": 10.0}


def test_every_process_of_a_training_costs(tmp_path):
    one = task(tmp_path, "single/eps16")
    run = {"config": one.found().config.to_dict(), "seconds": 60.0, "processes": 8, "device": "NVIDIA H200"}
    written(one, {"shared/clean": 90.0}, run=json.loads(json.dumps(run)))
    assert summary(tmp_path)["minutes"] == {"NVIDIA H200": 8.0}


BAD = {
    "cut short": (lambda record: json.dumps(record)[:-20], "damaged"),
    "no JSON": (lambda record: "hello", "damaged"),
    "no UTF-8": (lambda record: b"\xff\xfe{}", "damaged"),
    "a list": (lambda record: "[1, 2]", "damaged"),
    "too deep": (lambda record: "[" * 200_000, ""),
    "another format": (lambda record: json.dumps({**record, "format": "advnorm.run/1"}), "advnorm.run/1"),
    "no format": (lambda record: "{}", "None"),
    "another cell's": (lambda record: json.dumps({**record, "cell": "dual_bn/eps16"}), "it says that it is"),
    "an unknown study": (lambda record: json.dumps({**record, "study": "A/tabel2"}), "did you mean 'A/table2'"),
    "a study that is a list": (lambda record: json.dumps({**record, "study": ["A"]}), "no study is called"),
    "an unknown cell": (lambda record: json.dumps({**record, "cell": "singel/eps16"}), "did you mean 'single/eps16'"),
    "an unknown protocol": (lambda record: json.dumps({**record, "protocol": ["quick"]}), "unknown protocol"),
    "a seed that is text": (lambda record: json.dumps({**record, "seed": "0"}), "seed must be an integer"),
    "no values": (lambda record: json.dumps({**record, "values": None}), "values must be"),
    "NaN": (lambda record: json.dumps({**record, "values": {"shared/clean": float("nan")}}), "values must be"),
    "a huge number": (lambda record: json.dumps({**record, "values": {"shared/clean": 10**400}}), "values must be"),
    "no run": (lambda record: json.dumps({**record, "run": 3}), "run must have"),
    "no seconds": (lambda record: json.dumps({**record, "run": {"config": {}}}), "run must have"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_record_of_ours_is_told_and_skipped(tmp_path, kind):
    table2(tmp_path)
    one = task(tmp_path, "single/eps16")
    spoil, reason = BAD[kind]
    text = spoil(json.loads(one.record.read_text()))
    one.record.write_bytes(text if isinstance(text, bytes) else text.encode())
    found = summary(tmp_path)
    (problem,) = found["problems"]
    assert problem.startswith("records/A/table2/single/eps16/fast-seed0.json is skipped") and reason in problem
    assert str(tmp_path) not in problem
    (result,) = of(found, "A/table2")["results"]
    assert entry(result, "single/eps16", "shared/clean")["ours"] is None
    assert entry(result, "dual_bn/eps16", "adv/clean")["ours"] == 22.0


def test_nothing_among_the_records_is_dropped_in_silence(tmp_path):
    table2(tmp_path)
    records = tmp_path / "records"
    (records / "notes.txt").write_text("hello")
    (records / "Z").mkdir()
    (records / "Z" / "link.json").symlink_to(tmp_path / "nowhere")
    (records / "A" / "table2" / "single" / "eps16" / "copy of fast-seed0.json").write_bytes(
        task(tmp_path, "single/eps16").record.read_bytes()
    )
    (records / ".fast-seed1.json.7.part").write_text("{")  # of a writer that was killed
    problems = summary(tmp_path)["problems"]
    assert len(problems) == 3
    for name in ("notes.txt", "Z/link.json", "copy of fast-seed0.json"):
        assert any(name in problem for problem in problems)


def test_other_folders_are_counted_and_not_read(tmp_path):
    for folder in ("bench", "runs", "features", "empty"):
        (tmp_path / folder / "deep").mkdir(parents=True)
        if folder != "empty":
            (tmp_path / folder / "deep" / "a.json").write_text("{")
    found = summary(tmp_path)
    assert found["others"] == {"bench": 1} and found["problems"] == []


def test_a_record_of_settings_that_the_study_has_left_is_shown_and_told(tmp_path):
    one = task(tmp_path, "single/eps16")
    record = written(one, {"shared/clean": 90.0})
    record["run"]["config"]["epochs"] += 7
    write_json(one.record, record)
    found = summary(tmp_path)
    (problem,) = found["problems"]
    epochs = one.found().config.epochs
    assert f"epochs {epochs + 7}, now {epochs}" in problem and "skipped" not in problem
    assert of(found, "A/table2")["results"][0]["outdated"] == ["single/eps16 seed 0"]
    assert entry(of(found, "A/table2")["results"][0], "single/eps16", "shared/clean")["ours"] == 90.0


def test_no_verdict_is_by_a_record_of_other_settings(tmp_path):
    table2(tmp_path, seeds=(0, 1))
    one = task(tmp_path, "cross_bn/eps16", seed=1)
    record = json.loads(one.record.read_text())
    record["run"]["config"]["epochs"] = 1
    record["values"] = dict.fromkeys(record["values"], 0.0)
    write_json(one.record, record)
    (result,) = of(summary(tmp_path), "A/table2")["results"]  # the other seed's stands
    assert result["answer"] == "confirmed" and entry(result, "cross_bn/eps16", "adv/autoattack")["ours"] == 22.0
    task(tmp_path, "cross_bn/eps16").record.unlink()
    (result,) = of(summary(tmp_path), "A/table2")["results"]
    assert result["answer"] == "not run" and entry(result, "cross_bn/eps16", "adv/autoattack")["ours"] == 0.0
    study = STUDIES.get("A/table2")
    assert ("cross_bn/eps16", "adv/autoattack") in collected(study, protocol="fast", out=tmp_path)[0]
    now, _ = collected(study, protocol="fast", out=tmp_path, outdated=False)
    assert {cell for cell, _ in now} == {"dual_bn/eps16", "single/eps16"}


def test_an_accuracy_that_is_none_makes_no_verdict(tmp_path):
    table2(tmp_path)
    one = task(tmp_path, "single/eps16")
    for value in (174.84, -0.5):
        record = json.loads(one.record.read_text())
        write_json(one.record, {**record, "values": {**record["values"], "shared/pgd10": value}})
        found = summary(tmp_path)
        (problem,) = found["problems"]
        assert problem.endswith(f"no record of a cell: shared/pgd10 is no accuracy in percent: {value:g}")
        assert of(found, "A/table2")["results"][0]["answer"] == "not run" and one.state == "damaged"


def test_a_record_without_numbers_or_settings_is_none(tmp_path):
    one, other = task(tmp_path, "single/eps16"), task(tmp_path, "dual_bn/eps16")
    written(one, {})
    written(other, {"adv/clean": 1.0}, run={"config": {}, "seconds": 1.0, "processes": 1})
    problems = summary(tmp_path)["problems"]
    assert [problem.rpartition(": ")[2] for problem in problems] == [
        "run must have its config",
        "values must be finite numbers by name",
    ]
    assert one.state == other.state == "damaged"


@pytest.mark.parametrize(
    ("study", "value"),
    [
        ("A/fig2", "x/held_out/pgd10-step2"),
        ("B/fig1", "accuracy/run/uniform random/a"),
        ("C/fig1", "layers/a/points/clean/0"),
    ],
)
def test_values_that_a_check_cannot_read_are_told_and_the_page_is_made(tmp_path, study, value):
    for cell in STUDIES.get(study).by_name():
        written(task(tmp_path, cell, study=study), {value: 1.0})
    found = summary(tmp_path)
    assert of(found, study)["results"][0]["answer"] == "not run"
    assert all(f"the check of {study} and its values do not fit" in problem for problem in found["problems"])


def test_a_record_of_measurements_that_the_study_has_left_is_told(tmp_path):
    one = task(tmp_path, "single/eps16")
    record = written(one, {"shared/clean": 90.0})
    record["measures"][0]["options"]["attacks"]["pgd10"] = "pgd10-step4"
    write_json(one.record, record)
    (problem,) = summary(tmp_path)["problems"]
    assert "was made with other settings" in problem and "skipped" not in problem
    assert problem.endswith(": measures.0.options.attacks.pgd10 pgd10-step4, now pgd10-step2")


@pytest.mark.parametrize(
    ("protocol", "search", "stands"),
    [("fast", "autoattack", True), ("fast", "autoattack-tf32", False), ("paper", "autoattack-bf16", False)],
)
def test_an_exact_search_stands_for_a_fast_one_and_no_other(tmp_path, protocol, search, stands):
    one = task(tmp_path, "single/eps16", protocol=protocol)
    record = written(one, {"shared/clean": 90.0})
    record["measures"][0]["options"]["attacks"]["autoattack"] = search
    write_json(one.record, record)
    planned = {"fast": "autoattack-bf16", "paper": "autoattack"}[protocol]
    told = f"measures.0.options.attacks.autoattack {search}, now {planned}"
    found = summary(tmp_path)
    assert [problem.endswith(f": {told}") for problem in found["problems"]] == ([] if stands else [True])
    results = of(found, "A/table8")["results"]  # it has the same cell
    assert any(result["protocol"] == protocol for result in results) == stands


@pytest.mark.parametrize("measures", [None, 3, [None], [], [[1]], [{"options": 7}], "text"])
def test_measurements_that_are_no_measurements_harm_nobody(tmp_path, measures):
    table2(tmp_path)
    one = task(tmp_path, "single/eps16")
    write_json(one.record, {**json.loads(one.record.read_text()), "measures": measures})
    found = summary(tmp_path)
    assert len(found["problems"]) == isinstance(measures, list)
    assert entry(of(found, "A/table2")["results"][0], "single/eps16", "shared/clean")["ours"] == 1.0


def test_a_figures_numbers_are_series_by_place_and_single_ones(tmp_path):
    cell = next(iter(STUDIES.get("A/fig2").cells())).name
    values = {f"{epoch}/loss": 1 / epoch for epoch in (10, 9, 1)} | {"sums/AP": 0.5, "conditions/seed": 0, "2/epoch": 2}
    written(task(tmp_path, cell, study="A/fig2"), values)
    (result,) = of(summary(tmp_path), "A/fig2")["results"]
    assert result["series"] == [
        {"cell": cell, "value": "loss", "over": "epoch", "x": [1, 9, 10], "ours": [1.0, 1 / 9, 0.1]}
    ]
    assert [(entry["value"], entry["ours"], entry["paper"]) for entry in result["entries"]] == [("sums/AP", 0.5, None)]


def test_what_is_numbered_within_an_epoch_is_drawn_over_the_epochs(tmp_path):
    cell = next(iter(STUDIES.get("D/fig14").cells())).name
    values = {f"{epoch}/batches/{batch}/smoothness": epoch + batch for epoch in (5, 75, 20) for batch in (0, 1)}
    written(task(tmp_path, cell, study="D/fig14"), values | {f"{at}/layers/clean/bn1/0": 1.0 for at in (5, 20, 75)})
    (result,) = of(summary(tmp_path), "D/fig14")["results"]
    assert [(series["value"], series["x"], series["ours"]) for series in result["series"]] == [
        (f"batches/{batch}/smoothness", [5, 20, 75], [5 + batch, 20 + batch, 75 + batch]) for batch in (0, 1)
    ]


def test_a_line_that_the_check_reads_is_shown_though_it_does_not_change_and_no_network_is_called_run(tmp_path):
    shifts = ("gaussian", "uniform", "fgsm", "pgd")
    values = {f"{at}/networks/run/shifts/{shift}/mean": 0.5 for at in (1, 4, 15, 30) for shift in shifts}
    values |= {f"{at}/networks/run/shifts/pgd/without_gradient": 0.0 for at in (1, 4, 15, 30)}
    for cell in ("bn", "none"):
        written(task(tmp_path, cell, study="D/fig2"), values | {"networks/run/clean": 0.9})
    (result,) = of(summary(tmp_path), "D/fig2")["results"]
    found = [(series["cell"], series["value"]) for series in result["series"]]
    assert found == [(cell, f"shifts/{shift}/mean") for cell in ("bn", "none") for shift in shifts]
    assert [(entry["column"], entry["value"]) for entry in result["entries"]] == [("clean", "networks/run/clean")] * 2


def test_layers_are_a_row_and_what_the_check_reads_comes_first(tmp_path):
    values = {"sums/adv-noise": 9.0, "channels/0": 7, "channels/1": 8, "channels/2": 9}
    layers = {"AP": [5.0, 6.0, 4.0], "clean-adv": [1.0, 2.0, 3.0], "clean-noise": [1.0, 2.0, 2.0]}
    for kind, totals in layers.items():
        values |= {f"layers/{kind}/{name}/total": one for name, one in zip(("bn1", "layer1.0.bn1", "x"), totals)}
    values |= {f"statistics/{place}": float(place) for place in range(3)}
    values |= {f"same/{place}": 1.0 for place in range(3)}  # and read by no check: no line
    written(task(tmp_path, "standard/eps16", study="A/fig7"), values)
    (result,) = of(summary(tmp_path), "A/fig7")["results"]
    assert result["series"].pop() == {
        "cell": "standard/eps16",
        "value": "statistics",
        "over": "channels that were drawn, in order",
        "x": [0, 1, 2],
        "ours": [0.0, 1.0, 2.0],
    }
    assert result["answer"] == "confirmed"
    assert [entry["value"] for entry in result["entries"]] == ["sums/adv-noise"]
    assert result["series"] == [
        {
            "cell": "standard/eps16",
            "value": f"layers/{kind}/total",
            "over": "layer, from input to output",
            "x": [1, 2, 3],
            "ours": layers[kind],
        }
        for kind in ("clean-adv", "clean-noise", "AP")
    ]


BOTH = ("A/table1", "A/table8")  # have Dual BN at 16/255
VALUES = {f"{branch}/{name}": 1.0 for branch in ("clean", "adv") for name in ("clean", "pgd10", "autoattack")}


def dual(out, study, value, *, seed=0, **changes):
    values = dict.fromkeys(VALUES, value)
    return written(task(out, "dual_bn/eps16", study=study, seed=seed), values, **changes)


def found_in(out, study):
    values, problems = collected(STUDIES.get(study), protocol="fast", out=out)
    return values.get(("dual_bn/eps16", "adv/clean")), problems


def test_seeds_of_several_studies_come_together_in_order(tmp_path):
    for study, seed in (("A/table8", 2), ("A/table1", 0), ("A/table3", 1)):
        dual(tmp_path, study, 10.0 + seed, seed=seed)
    for study in (*BOTH, "A/table2", "A/table3", "A/table7"):
        assert found_in(tmp_path, study) == ([10.0, 11.0, 12.0], [])
    [cell] = [cell for cell in of(summary(tmp_path), "A/table1")["results"][0]["cells"] if "16" in cell["name"]]
    assert cell["seeds"] == [0, 1, 2] and cell["measured_for"] == ["A/table3", "A/table8"]
    assert summary(tmp_path)["minutes"] == {"NVIDIA H200": pytest.approx(6.0)}


def test_a_record_of_its_own_comes_first_unless_it_is_outdated(tmp_path):
    for study, value in zip(BOTH, (1.0, 2.0)):
        dual(tmp_path, study, value)
    assert [found_in(tmp_path, study)[0] for study in BOTH] == [[1.0], [2.0]]
    outdated = task(tmp_path, "dual_bn/eps16", study=BOTH[1]).found().config.to_dict() | {"lr": 7.0}
    dual(tmp_path, BOTH[1], 2.0, run={"config": outdated, "seconds": 1.0, "processes": 1})
    values, problems = found_in(tmp_path, BOTH[1])
    assert values == [1.0] and "lr 7.0, now" in problems[0]
    assert task(tmp_path, "dual_bn/eps16", study=BOTH[1]).told()["values"] == dict.fromkeys(VALUES, 1.0)
    task(tmp_path, "dual_bn/eps16", study=BOTH[0]).record.unlink()
    assert found_in(tmp_path, BOTH[1])[0] == [2.0]  # better than none, and it is told


def test_what_the_runner_takes_is_what_the_report_shows(tmp_path):
    for study, value in (("A/table3", 3.0), ("A/fig4", 4.0), ("A/table7", 7.0), ("A/table2", 2.0)):
        dual(tmp_path, study, value)
    for study in BOTH:
        assert task(tmp_path, "dual_bn/eps16", study=study).told()["values"]["adv/clean"] == 2.0
        assert found_in(tmp_path, study)[0] == [2.0]


@pytest.mark.parametrize(
    "wrong", ["no settings", "a setting less", "a setting more", "no measurements", "no values", "another limit"]
)
def test_an_incomplete_record_stands_for_no_other_study(tmp_path, wrong):
    record = dual(tmp_path, BOTH[0], 1.0)
    config = record["run"]["config"]
    changes = {
        "no settings": {"run": {**record["run"], "config": {}}},
        "a setting less": {"run": {**record["run"], "config": {k: v for k, v in config.items() if k != "eps"}}},
        "a setting more": {"run": {**record["run"], "config": {**config, "colour": "red"}}},
        "no measurements": {"measures": None},
        "no values": {"values": {}},
        "another limit": {"measures": [{**record["measures"][0], "options": {"limit": 7}}]},
    }
    write_json(task(tmp_path, "dual_bn/eps16", study=BOTH[0]).record, {**record, **changes[wrong]})
    assert found_in(tmp_path, BOTH[1])[0] is None
    assert task(tmp_path, "dual_bn/eps16", study=BOTH[1]).state == "to do"


def test_the_way_a_length_is_written_does_not_matter(tmp_path):
    record = dual(tmp_path, BOTH[0], 1.0)
    config = {**record["run"]["config"], "eps": 16 / 255}
    write_json(
        task(tmp_path, "dual_bn/eps16", study=BOTH[0]).record, {**record, "run": {**record["run"], "config": config}}
    )
    assert found_in(tmp_path, BOTH[1])[0] == [1.0]
    assert task(tmp_path, "dual_bn/eps16", study=BOTH[1]).state == "done"


def test_a_damaged_record_is_told_while_another_stands_for_it(tmp_path):
    dual(tmp_path, BOTH[0], 1.0)
    path = task(tmp_path, "dual_bn/eps16", study=BOTH[1]).record
    path.parent.mkdir(parents=True)
    path.write_text("{")
    values, problems = found_in(tmp_path, BOTH[1])
    assert values == [1.0] and "is skipped" in problems[0]
    assert task(tmp_path, "dual_bn/eps16", study=BOTH[1]).state == "done" and path.read_text() == "{"


def test_a_study_that_is_registered_later_has_its_cells(tmp_path, monkeypatch):
    dual(tmp_path, BOTH[0], 1.0)
    assert found_in(tmp_path, BOTH[1])[0] == [1.0]
    monkeypatch.setattr(STUDIES, "_entries", dict(STUDIES._entries))
    cell = STUDIES.get("A/table1").cell("dual_bn/eps16")
    STUDIES.add(
        "A/later", Study(name="A/later", cells=lambda: [cell], place=lambda *_: None, check=lambda _: [("", True)])
    )
    assert same_as("A/later", "dual_bn/eps16")[:1] == [("A/table1", "dual_bn/eps16")]
    assert found_in(tmp_path, "A/later")[0] == [1.0]


def test_problems_of_another_study_are_not_this_ones(tmp_path):
    for name in ("D/fig1", "D/fig10"):
        (tmp_path / "records" / name).mkdir(parents=True)
        (tmp_path / "records" / name / "notes.txt").write_text("notes")
    _, problems = collected(STUDIES.get("D/fig1"), protocol="fast", out=tmp_path)
    assert [problem.split(" ")[0] for problem in problems] == ["records/D/fig1/notes.txt"]


def test_tables_come_before_figures_and_both_by_number(tmp_path):
    names = [study["name"] for study in summary(tmp_path)["studies"] if study["name"].startswith("A/")]
    assert names == sorted(names, key=lambda name: ("fig" in name, int("".join(filter(str.isdigit, name)))))


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is no folder; name the one that `advnorm study` wrote"):
        summary(tmp_path / "nowhere")


def test_what_the_runner_writes_is_read(tmp_path):
    (one,) = [one for one in tasks(STUDIES.get("A/table2"), protocol="smoke", out=tmp_path) if "dual" in one.cell]
    record = work(replace(one, device="cpu"))
    found = summary(tmp_path)
    assert found["problems"] == [] and found["others"] == {}
    (result,) = of(found, "A/table2")["results"]
    assert result["protocol"] == "smoke"
    for value in ("clean", "pgd10", "autoattack"):
        assert entry(result, one.cell, f"adv/{value}")["ours"] == record["values"][f"adv/{value}"]
    assert list(result["minutes"]) == ["cpu"] and result["cells"][0]["seeds"] == [0]
