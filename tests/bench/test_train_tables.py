"""The tables of the documentation from records of ``advnorm bench train``, old and new."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from advnorm.bench.growth import fit_laws

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """The program that writes the tables, with records of its own."""
    spec = importlib.util.spec_from_file_location("readme_tables", ROOT / "benchmarks" / "readme_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RECORDS", tmp_path)
    return module


def row(mode: str, seconds: float, **settings: object) -> dict:
    """A row of a new record."""
    return {
        "model": "resnet18", "batch_size": 128, "attack_steps": 10, "image_size": 32, "processes": 1, "settings": {},
        "mode": mode, "images_per_second": 50_000 / seconds, "epoch_seconds": seconds, "tflops": 250.0,
        "peak_tflops": 800.0, "share_of_peak": 0.3125, "memory": 2**31, "start_up_seconds": 9.0, "first_step": None,
        "speedups": {}, "spread": 0.0, "cost": None, "parts": None, **settings,
    }  # fmt: skip


def record(*rows: dict) -> dict:
    config = {"norm": "dual_bn", "eps": "16/255", "data": {"name": "cifar10"}}
    return {"config": config, "device": "NVIDIA H200", "steps": 50, "rows": rows, "laws": [], "notes": []}


OLD = (("growth", "_batch"), ("train", ""))
NEW = record(
    row("plain", 36.0, speedups={"plain": 1.0, "careful_compiled": 0.25}),
    row("careful_compiled", 9.0, speedups={"plain": 4.0, "careful_compiled": 1.0}),
    row("compiled", 6.0, speedups={"plain": 6.0, "careful_compiled": 1.5}),
)


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]


def test_a_table_has_a_ratio_to_every_reference(tables):
    (tables.RECORDS / "train_h200.json").write_text(json.dumps(NEW))
    head, _, *rows = cells(tables.trained(tables.training("train_*.json")))
    assert head[-2:] == ["× plain", "× careful_compiled"]
    assert [line[-2:] for line in rows] == [["1.00", "0.25"], ["4.00", "1.00"], ["6.00", "1.50"]]
    head, _, *rows = cells(tables.epochs())
    assert [name.split(" (")[0] for name in head[2:-1]] == ["a plain loop", "a careful loop", "advnorm"]
    assert rows == [["resnet18", "128", "36.0 s (6.0×)", "9.0 s (1.5×)", "6.00 s", "31%"]]


def test_the_readme_names_the_strongest_reference(tables):
    (tables.RECORDS / "train_h200.json").write_text(json.dumps(NEW))
    for name in ("autoattack_h200_bf16.json",):
        (tables.RECORDS / name).write_text((ROOT / "results" / "bench" / name).read_text())
    assert "1.5 times faster than a careful loop (bf16, channels-last, `torch.compile`)" in tables.outcome()


def test_settings_sizes_and_costs_are_columns_if_rows_differ_in_them(tables):
    second = [
        row("compiled", 6.0 * factor, settings={"second_pass": name}, cost=factor, image_size=size)
        for name, factor, size in ((None, 1.0, 32), ("sam", 1.4, 32), ("awp", 1.5, 64))
    ]
    head, _, *rows = cells(tables.trained([record(*second)]))
    shown = [dict(zip(head, line)) for line in rows]
    assert [(line["second_pass"], line["cost"], line["pixels"]) for line in shown] == [
        ("none", "1.00", "32"),
        ("sam", "1.40", "32"),
        ("awp", "1.50", "64"),
    ]
    (tables.RECORDS / "train_h200_second_passes.json").write_text(json.dumps(record(*second)))
    (tables.RECORDS / "train_h200.json").write_text(json.dumps(NEW))
    assert len(cells(tables.epochs())) == 3  # a head and one row: hybrid PGD-10 alone


def test_older_records_share_a_law_and_new_ones_have_their_own(tables):
    old = [json.loads((ROOT / "results" / "bench" / f"{name}_h200{end}.json").read_text()) for name, end in OLD]
    new = record(*(row("compiled", seconds, batch_size=size) for size, seconds in ((64, 8.0), (128, 7.0), (2048, 4.0))))
    new["laws"] = [asdict(law) for law in fit_laws(new["rows"])]
    text = tables.trained([*old, new], modes=("compiled",), laws=True)
    assert text.count("| network |") == 1 and text.index("median over 50 steps") < text.index("| setting x |")
    assert "| batch_size | 128, 256, 512, 1024 | ms = " in text and "| batch_size | 64, 128, 2048 | ms = " in text
