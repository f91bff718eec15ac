"""The summary of all studies: printed numbers beside measured ones, missing cells, cost."""

import json
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advnorm._core.records import write_json
from advnorm.studies import PAPERS, STUDIES
from advnorm.studies.report_data import _length_of_union, summarize_studies
from advnorm.studies.run_tasks import run_task
from advnorm.studies.task import list_tasks
from support.problems import raises_problem
from support.study_records import COMMIT, collect_values, entry_in, make_task, study_in, write_record, write_table2


def test_without_records_every_study_is_listed_as_not_run(tmp_path):
    found = summarize_studies(tmp_path)
    assert sorted(study["name"] for study in found["studies"]) == sorted(STUDIES.names())
    assert {name.split("/")[0] for name in STUDIES.names()} <= set(PAPERS)
    for study in found["studies"]:
        (result,) = study["results"]
        assert result["protocol"] is None and result["verdict"] == "not run" and result["minutes"] == {}
        assert all(entry["ours"] is None and entry["n"] == 0 for entry in result["entries"])
        assert [cell["name"] for cell in result["cells"]] == [cell.name for cell in STUDIES.get(study["name"]).cells()]
    assert found["problems"] == [] and found["minutes"] == {}


def test_a_number_is_the_mean_over_seeds_with_its_deviation_beside_the_printed_one(tmp_path):
    sample = [20.0, 23.5, 21.0]
    for seed, value in enumerate(sample):
        write_record(make_task(tmp_path, "dual_bn/eps16", seed=seed), {"adv/autoattack": value})
    (result,) = study_in(summarize_studies(tmp_path), "A/table2")["results"]
    found = entry_in(result, "dual_bn/eps16", "adv/autoattack")
    assert found["paper"] == 22.51 and found["n"] == 3
    assert found["ours"] == pytest.approx(sum(sample) / 3)
    assert found["spread"] == pytest.approx(statistics.stdev(sample))
    assert found["difference"] == pytest.approx(sum(sample) / 3 - 22.51)
    missing = entry_in(result, "cross_bn/eps16", "adv/autoattack")
    assert missing["ours"] is missing["spread"] is missing["difference"] is None and missing["paper"] == 22.4


def test_a_record_that_lacks_a_number_is_reported(tmp_path):
    write_table2(tmp_path)
    write_record(make_task(tmp_path, "dual_bn/eps16"), {"adv/clean": 60.0, "adv/pgd10": 30.0})
    (problem,) = summarize_studies(tmp_path)["problems"]
    assert problem.startswith("records/A/table2/dual_bn/eps16/fast-seed0.json lacks adv/autoattack")


def test_one_seed_has_no_spread(tmp_path):
    write_table2(tmp_path)
    (result,) = study_in(summarize_studies(tmp_path), "A/table2")["results"]
    assert {(entry["n"], entry["spread"]) for entry in result["entries"]} == {(1, None)}


@pytest.mark.parametrize(("cross", "verdict"), [(22.0, "supported"), (0.5, "contradicted")])
def test_the_summary_has_the_verdict_of_the_study(tmp_path, cross, verdict):
    write_table2(tmp_path, cross=cross)
    (result,) = study_in(summarize_studies(tmp_path), "A/table2")["results"]
    values, _ = collect_values(STUDIES.get("A/table2"), protocol="fast", out=tmp_path)
    assert result["verdict"] == verdict == STUDIES.get("A/table2").verdict(values)
    failed = [clause.text for clause in result["clauses"] if clause.verdict == "contradicted"]
    parts = [f"Cross-Hybrid-AT is comparable to Dual BN, {metric}" for metric in ("clean", "pgd10", "autoattack")]
    parts.append("both are robust under AutoAttack")
    assert failed == ([] if cross > 20 else [f"{part}: 0.5 (0.4–0.7) and 22.0 (21.2–22.8)" for part in parts])
    assert len(result["clauses"]) == 5


def test_protocols_are_separate_and_a_smoke_run_gives_no_verdict(tmp_path):
    for protocol, cross in (("paper", 2.0), ("fast", 22.0), ("smoke", 22.0)):
        write_table2(tmp_path, cross=cross, protocol=protocol)
    results = study_in(summarize_studies(tmp_path), "A/table2")["results"]
    assert [bool(result["clauses"]) for result in results] == [True, True, False]
    assert [(result["protocol"], result["verdict"]) for result in results] == [
        ("paper", "contradicted"),
        ("fast", "supported"),
        ("smoke", "not run"),
    ]


def test_a_missing_cell_leaves_the_claim_undecided_or_not_run_and_has_no_seeds(tmp_path):
    write_table2(tmp_path, seeds=(0, 1))
    for seed in (0, 1):
        make_task(tmp_path, "cross_bn/eps16", seed=seed).record_path.unlink()
    (result,) = study_in(summarize_studies(tmp_path), "A/table2")["results"]
    assert result["verdict"] == "not run"
    cells = {cell["name"]: (cell["seeds"], cell["minutes"]) for cell in result["cells"]}
    assert cells == {"dual_bn/eps16": ([0, 1], 4.0), "cross_bn/eps16": ([], None), "single/eps16": ([0, 1], 4.0)}


def test_settings_come_from_the_runs_and_each_cell_lists_its_own(tmp_path):
    write_table2(tmp_path)
    (result,) = study_in(summarize_studies(tmp_path), "A/table2")["results"]
    assert [cell["settings"] for cell in result["cells"]] == [{"norm": "dual_bn"}, {"norm": "cross_bn"}, {"norm": "bn"}]
    epochs = make_task(tmp_path, "single/eps16").planned_cell.config.epochs
    assert (
        result["settings"]["epochs"] == str(epochs) != str(STUDIES.get("A/table2").cell("single/eps16").config.epochs)
    )
    assert result["settings"]["attack.step_size"] == "2/255" and result["settings"]["model"] == "resnet18"
    assert "seed" not in result["settings"]
    assert (result["commits"], result["torch"], result["precision"]) == ([COMMIT], ["2.11.0"], ["bf16"])


def test_trainings_side_by_side_on_one_gpu_share_its_minutes(tmp_path):
    """Three on one GPU, of which two overlap, one on another GPU, and one that names none."""
    cells = (("single/eps16", "a", 0), ("dual_bn/eps16", "a", 300), ("setup1/eps16", "a", 3000))
    cells += (("setup2/eps16", "b", 0), ("single/eps8", None, 0))
    for cell, device_id, started in cells:
        task = make_task(tmp_path, cell, study="A/table3")
        record = write_record(task, {"shared/clean": 90.0}, seconds=600)
        record["run"] |= {"device_id": device_id, "first_step_seconds": 20.0, "first_step_ended": 1e9 + started + 20}
        write_json(task.record_path, record)
    assert summarize_studies(tmp_path)["minutes"] == {"NVIDIA H200": pytest.approx(15 + 10 + 10 + 10)}


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20))))
def test_the_length_of_a_union_is_the_number_of_covered_units(spans):
    covered = {unit for start, length in spans for unit in range(start, start + length)}
    assert _length_of_union([(start, start + length) for start, length in spans]) == len(covered)


def test_a_shared_training_costs_once(tmp_path):
    for study in ("A/table2", "A/table3", "A/table8"):
        write_record(make_task(tmp_path, "single/eps16", study=study), {"shared/clean": 90.0}, seconds=600)
    found = summarize_studies(tmp_path)
    assert found["minutes"] == {"NVIDIA H200": 10.0}
    for study in ("A/table2", "A/table3", "A/table8"):
        assert study_in(found, study)["results"][0]["minutes"] == {"NVIDIA H200": 10.0}


def test_every_process_of_a_training_counts_as_cost(tmp_path):
    one = make_task(tmp_path, "single/eps16")
    run = {"config": one.planned_cell.config.to_dict(), "seconds": 60.0, "processes": 8, "device": "NVIDIA H200"}
    write_record(one, {"shared/clean": 90.0}, run=json.loads(json.dumps(run)))
    assert summarize_studies(tmp_path)["minutes"] == {"NVIDIA H200": 8.0}


def test_files_in_other_folders_are_counted_but_not_read(tmp_path):
    for folder in ("bench", "runs", "features", "empty"):
        (tmp_path / folder / "deep").mkdir(parents=True)
        if folder != "empty":
            (tmp_path / folder / "deep" / "a.json").write_text("{")
    found = summarize_studies(tmp_path)
    assert found["others"] == {"bench": 1} and found["problems"] == []


@pytest.mark.parametrize(
    ("study", "value"),
    [
        ("A/fig2", "x/held_out/pgd10-step2"),
        ("B/fig1", "accuracy/run/uniform random/a"),
        ("C/fig1", "layers/a/points/clean/0"),
    ],
)
def test_values_that_a_check_cannot_read_are_reported(tmp_path, study, value):
    for cell in STUDIES.get(study).by_name:
        write_record(make_task(tmp_path, cell, study=study), {value: 1.0})
    found = summarize_studies(tmp_path)
    assert study_in(found, study)["results"][0]["verdict"] == "not run"
    assert all(f"the check of {study} cannot read" in problem for problem in found["problems"])


def test_tables_come_before_figures_each_in_numeric_order(tmp_path):
    names = [study["name"] for study in summarize_studies(tmp_path)["studies"] if study["name"].startswith("A/")]
    assert names == sorted(names, key=lambda name: ("fig" in name, int("".join(filter(str.isdigit, name)))))


def test_a_missing_folder_raises(tmp_path):
    with raises_problem("missing_file", "out"):
        summarize_studies(tmp_path / "nowhere")


def test_the_summary_reads_the_runners_records(tmp_path):
    (one,) = [one for one in list_tasks(STUDIES.get("A/table2"), protocol="smoke", out=tmp_path) if "dual" in one.cell]
    record = run_task(replace(one, device="cpu"))
    found = summarize_studies(tmp_path)
    assert found["problems"] == [] and found["others"] == {}
    (result,) = study_in(found, "A/table2")["results"]
    assert result["protocol"] == "smoke"
    for value in ("clean", "pgd10", "autoattack"):
        assert entry_in(result, one.cell, f"adv/{value}")["ours"] == record["values"][f"adv/{value}"]
    assert list(result["minutes"]) == ["cpu"] and result["cells"][0]["seeds"] == [0]


def test_numbers_of_a_figure_are_series_or_single_numbers(tmp_path):
    cell = next(iter(STUDIES.get("A/fig2").cells())).name
    values = {f"{epoch}/loss": 1 / epoch for epoch in (10, 9, 1)} | {"sums/AP": 0.5, "conditions/seed": 0, "2/epoch": 2}
    write_record(make_task(tmp_path, cell, study="A/fig2"), values)
    (result,) = study_in(summarize_studies(tmp_path), "A/fig2")["results"]
    assert result["series"] == [
        {"cell": cell, "value": "loss", "over": "epoch", "x": [1, 9, 10], "ours": [1.0, 1 / 9, 0.1]}
    ]
    assert [(entry["value"], entry["ours"], entry["paper"]) for entry in result["entries"]] == [("sums/AP", 0.5, None)]


def test_numbers_within_an_epoch_form_series_over_epochs(tmp_path):
    cell = next(iter(STUDIES.get("D/fig14").cells())).name
    values = {f"{epoch}/batches/{batch}/smoothness": epoch + batch for epoch in (5, 75, 20) for batch in (0, 1)}
    write_record(
        make_task(tmp_path, cell, study="D/fig14"), values | {f"{at}/layers/clean/bn1/0": 1.0 for at in (5, 20, 75)}
    )
    (result,) = study_in(summarize_studies(tmp_path), "D/fig14")["results"]
    assert [(series["value"], series["x"], series["ours"]) for series in result["series"]] == [
        (f"batches/{batch}/smoothness", [5, 20, 75], [5 + batch, 20 + batch, 75 + batch]) for batch in (0, 1)
    ]


def test_a_constant_series_that_the_check_reads_is_kept_and_names_omit_the_network(tmp_path):
    shifts = ("gaussian", "uniform", "fgsm", "pgd")
    values = {f"{at}/networks/run/shifts/{shift}/mean": 0.5 for at in (1, 4, 15, 30) for shift in shifts}
    values |= {f"{at}/networks/run/shifts/pgd/without_gradient": 0.0 for at in (1, 4, 15, 30)}
    for cell in ("bn", "none"):
        write_record(make_task(tmp_path, cell, study="D/fig2"), values | {"networks/run/clean": 0.9})
    (result,) = study_in(summarize_studies(tmp_path), "D/fig2")["results"]
    found = [(series["cell"], series["value"]) for series in result["series"]]
    assert found == [(cell, f"shifts/{shift}/mean") for cell in ("bn", "none") for shift in shifts]
    assert [(entry["column"], entry["value"]) for entry in result["entries"]] == [("clean", "networks/run/clean")] * 2


def test_layers_form_a_series_and_values_that_the_check_reads_come_first(tmp_path):
    values = {"sums/adv-noise": 9.0, "channels/0": 7, "channels/1": 8, "channels/2": 9}
    layers = {"AP": [5.0, 6.0, 4.0], "clean-adv": [1.0, 2.0, 3.0], "clean-noise": [1.0, 2.0, 2.0]}
    for kind, totals in layers.items():
        values |= {f"layers/{kind}/{name}/total": one for name, one in zip(("bn1", "layer1.0.bn1", "x"), totals)}
    values |= {f"statistics/{place}": float(place) for place in range(3)}
    values |= {f"same/{place}": 1.0 for place in range(3)}  # and read by no check: no line
    write_record(make_task(tmp_path, "standard/eps16", study="A/fig7"), values)
    (result,) = study_in(summarize_studies(tmp_path), "A/fig7")["results"]
    assert result["series"].pop() == {
        "cell": "standard/eps16",
        "value": "statistics",
        "over": "channels that were drawn, in order",
        "x": [0, 1, 2],
        "ours": [0.0, 1.0, 2.0],
    }
    assert result["verdict"] == "undecided"  # distances of one network
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
