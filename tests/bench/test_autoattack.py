"""The benchmark of AutoAttack: rows one by one, compared with the first."""

from __future__ import annotations

import io
from dataclasses import replace

import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import nn

from advnorm import ThreatModel
from advnorm.bench import autoattack
from advnorm.bench.autoattack import bench_autoattack
from advnorm.bench.passes import StagePasses
from advnorm.cli.bench_tables import autoattack_tables


def test_each_row_is_reported_when_it_is_finished_and_compared_with_the_first(monkeypatch):
    made = autoattack._build_attack
    monkeypatch.setattr(autoattack, "_build_attack", lambda *asked: replace(made(*asked), steps=2, queries=20))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).eval()
    x = torch.rand(24, 1, 8, 8)
    y = model(x).argmax(1)
    y[:6] = (y[:6] + 1) % 10
    reported, handed = [], []
    result = bench_autoattack(
        model,
        x,
        y,
        ThreatModel(eps=0.03),
        name="linear",
        precisions=("float32", "bf16"),
        official=False,
        on_row=reported.append,
        on_result=lambda so_far: handed.append(so_far.record()),
    )
    assert [list(record["rows"]) for record in handed] == [["advnorm float32"], ["advnorm float32", "advnorm bf16"]]
    assert handed[-1] == result.record() and result.reference == "advnorm float32"
    strict, fast = result.rows.values()
    assert strict.clean == fast.clean == 18 / 24 and strict.speedup == strict.agreement == 1
    assert 0 < strict.robust < strict.clean and fast.speedup == strict.seconds / fast.seconds
    assert strict.passes["clean"] == StagePasses(forwards=1, backwards=0)
    assert strict.passes["square"].backwards == 0 < strict.passes["fab-t"].backwards < strict.passes["fab-t"].forwards
    assert result.forward_flops == 2 * 64 * 10 and result.peak_flops > 0
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(autoattack_tables(result))
    printed = console.export_text()
    for label, row in result.rows.items():
        seconds, forwards = row.stages["square"], row.passes["square"].forwards
        speed = 24 * forwards * 2 * 64 * 10 / seconds
        cells = [f"{forwards:,.1f}", "0.0", f"{seconds:.1f}", f"{speed / 1e12:.3g}", f"{speed / result.peak_flops:.0%}"]
        lines = printed.split(f"stages of {label}")[1].splitlines()
        assert next(line.split() for line in lines if "square" in line) == ["square", *cells]
    parts = [[int(row.split()[-2]) for row in reported if row.startswith(f"{label}: ")] for label in result.rows]
    assert all(part == sorted(part) and part[0] == 0 and part[-1] == 100 for part in parts), reported


def test_a_network_is_named_with_the_epochs_in_its_file(tmp_path):
    tensors = {"weight": torch.zeros(1)}
    save_file(tensors, tmp_path / "plain.safetensors")
    save_file(tensors, tmp_path / "named.safetensors", metadata={"epochs": "14"})
    assert autoattack.describe_weights(tmp_path / "plain.safetensors") == "plain.safetensors"
    assert autoattack.describe_weights(tmp_path / "named.safetensors") == "named.safetensors, 14 epochs"
