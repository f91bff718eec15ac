"""Results as table and as record."""

import json

import torch
from rich.console import Console

import advnorm
from advnorm.evaluation import BenchmarkResult, benchmark
from support.classifiers import first
from support.problems import raises_problem

THREAT = advnorm.ThreatModel(eps=0.2)


def test_the_record_has_all_conditions_and_gives_the_result_back(dual, data, tmp_path):
    path = tmp_path / "deep" / "result.json"
    result = benchmark(dual, first(data), THREAT, ["pgd10", "fgsm"], ["adv"], record=path, seed=3)
    record = json.loads(path.read_text())
    assert record == json.loads(json.dumps(result.record()))
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
    with raises_problem("damaged_file", "record"):
        BenchmarkResult.from_record({"format": "x"})


def test_the_table_shows_whole_names_on_a_narrow_terminal(dual, data):
    attacks = ["fgsm", "pgd2-restarts2-cw-worst", "apgd-ce-steps2", "apgd-t-steps2", "pgd2-momentum0.9"]
    result = benchmark(dual, first(data, 8), THREAT, attacks, ["clean", "adv"])
    console = Console(record=True, width=80, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(result.table(80))
    lines = console.export_text().splitlines()
    for name in ("clean", *attacks, "union"):
        assert any(line.startswith(f"│ {name} ") for line in lines), name
    assert "adv ┃" in str(result)
