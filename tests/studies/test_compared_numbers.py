"""Numbers of figures: single numbers and series."""

from advnorm.studies import STUDIES
from advnorm.studies.report_data import summarize_studies
from support.study_records import make_task, study_in, write_record


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
    assert result["verdict"] == "confirmed"
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
