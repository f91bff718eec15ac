"""Results as table and as record."""

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

import advnorm
from advnorm.attacks import PGD
from advnorm.evaluation import BenchmarkResult, benchmark
from support.classifiers import first
from support.problems import raises_problem

THREAT = advnorm.ThreatModel(eps=0.2)
RESULTS = Path(__file__).parents[2] / "results"


def test_the_record_has_all_conditions_and_gives_the_result_back(dual, data, tmp_path):
    path = tmp_path / "deep" / "result.json"
    result = benchmark(dual, first(data), THREAT, ["pgd10", "fgsm"], ["adv"], record=path, seed=3)
    record = json.loads(path.read_text())
    assert len(record.pop("digest")) == 32 and record == json.loads(json.dumps(result.record()))
    conditions = {"threat", "attacks", "routes", "images", "seed", "batch_size", "device", "torch", "advnorm", "commit"}
    assert conditions <= set(record)
    assert record["model"]["norms"] == ["dual_bn"] and record["model"]["domains"] == ["clean", "adv"]
    assert record["model"]["parameters"] == sum(p.numel() for p in dual.parameters())
    assert "steps=10" in record["attacks"]["pgd10"] and "seed=3" in record["attacks"]["pgd10"]
    assert record["seconds"]["adv"]["pgd10"] > 0
    assert list(tmp_path.glob("deep/*")) == [path]
    loaded = BenchmarkResult.load(path)
    assert loaded.record() == record and str(loaded) == str(result)
    assert torch.equal(loaded.robust["adv"]["pgd10"], result.robust["adv"]["pgd10"])
    with raises_problem("not_supported", "the record: format"):
        BenchmarkResult.from_record({"format": "x"})


def test_the_table_shows_whole_names_on_a_narrow_terminal(dual, data):
    attacks = ["fgsm", "pgd2-restarts2-cw-worst", "apgd-ce-steps2", "apgd-t-steps2", "pgd2-momentum0.9"]
    result = benchmark(dual, first(data, 8), THREAT, attacks, ["clean", "adv"])
    console = Console(record=True, width=80, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(result.table(80))
    lines = console.export_text().splitlines()
    for name in ("clean", *attacks, "union"):
        assert any(line.startswith(f"│ {name} ") for line in lines), name
    assert "adv ┃" in str(result) and "noise seed 0" in str(result)
    settings = {"step_size": "1/255", "restarts": 2, "loss": "cw", "momentum": 0.5, "keep": "worst"}
    labelled = benchmark(dual, first(data, 8), THREAT, PGD(threat=THREAT, steps=1, **settings), ["clean", "adv"])
    assert all(f"{name}={value}" in str(labelled) for name, value in settings.items()) and "…" not in str(labelled)


def test_an_edited_record_is_rejected_and_one_without_digest_is_shown_as_such(dual, data, tmp_path):
    path = tmp_path / "r.json"
    done = benchmark(dual, first(data, 8), THREAT, "fgsm", "adv", record=path)
    record = json.loads(path.read_text())
    edited = json.loads(json.dumps(record))
    edited["outcomes"]["adv"]["fgsm"] = "/w=="  # eight robust images
    path.write_text(json.dumps(edited))
    with raises_problem("damaged_file", f"{path}: digest"):
        BenchmarkResult.load(path)
    del record["digest"]
    path.write_text(json.dumps(record))
    loaded = BenchmarkResult.load(path)
    assert loaded.record() == done.record()
    assert "record without digest" in str(loaded) and "without digest" not in str(done)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"outcomes": None}, "outcomes"),
        ({"outcomes": {}}, "outcomes"),
        ({"outcomes": {"adv": {"clean": "/w==", "fgsm": "//8="}}}, "outcomes"),
        ({"outcomes": {"adv": {"fgsm": "/w=="}}}, "outcomes"),
        ({"rows": [[0, 10**15]]}, "outcomes"),
        ({"rows": [[4, 0]]}, "outcomes"),
        ({"rows": [-1, 0, 1, 2]}, "outcomes"),
        ({"stages": {"adv": {"autoattack": {"clean": 1.5}}}}, "stages.adv.autoattack.clean"),
        ({"outcomes": {"adv": {"clean": "no bits"}}}, "outcomes"),
        ({"verdicts": {}}, "outcomes"),
        ({"verdicts": {"adv": {"clean": "11", "fgsm": "1"}}}, "outcomes"),
        ({"verdicts": {"adv": {"fgsm": "11"}}}, "outcomes"),
        ({"verdicts": {"adv": {"clean": "1x"}}}, "outcomes"),
        ({"threat": {"norm": "L3", "eps": 1}}, "threat.norm"),
        ({"seconds": {"adv": {"fgsm": "x"}}}, "seconds.adv.fgsm"),
        ({"warnings": 3}, "warnings"),
        ({"model": []}, "model"),
    ],
)
def test_a_record_without_digest_is_still_checked_by_its_shape(dual, data, change, field):
    record = {**benchmark(dual, first(data, 4), THREAT, "fgsm", "adv").record(), **change}
    if "verdicts" in change:  # version 1
        del record["outcomes"]
    with raises_problem("damaged_file", f"the record: {field}"):
        BenchmarkResult.from_record(record)


def test_the_committed_records_are_read():
    paths = list(RESULTS.glob("evaluations/**/*.json"))
    assert paths and all("record without digest" in str(BenchmarkResult.load(path)) for path in paths)


def test_printing_a_result_in_a_notebook_displays_nothing_else(dual, data, monkeypatch):
    shown = []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *args: shown.append(args))
    assert "adv" in str(benchmark(dual, first(data, 8), THREAT, "fgsm", ["adv"]))
    assert shown == []
