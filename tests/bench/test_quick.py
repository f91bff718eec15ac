"""The benchmark of the quick estimate: branches of runs, rows one by one, and passes that are counted."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from advnorm import ThreatModel
from advnorm.attacks import Quick
from advnorm.bench import quick
from advnorm.bench.passes import StagePasses, mean_passes, passes_by_stage, total_passes
from advnorm.bench.quick import bench_quick, open_networks, train_networks
from support.command import invoke
from support.problems import raises_problem
from support.small_runs import small, train


@pytest.fixture
def short(monkeypatch):
    """A short AutoAttack."""
    monkeypatch.setattr(quick, "AutoAttack", partial(quick.AutoAttack, steps=5, queries=20))


@pytest.mark.usefixtures("short")
def test_each_branch_of_a_run_is_a_row_of_the_record(tmp_path):
    run = train(small(norm="dual_bn", epochs=1, eps=0.02), tmp_path)
    record = tmp_path / "quick.json"
    out = invoke("bench", "quick", run.folder, "--images", 12, "--device", "cpu", "--json", record)
    assert out.exit_code == 0, out.output
    assert all(f"stages of {name}, mean over the networks" in out.output for name in ("quick", "AutoAttack"))
    data = json.loads(record.read_text())
    assert [row["network"].rsplit(", ", 1)[1] for row in data["rows"]] == ["clean branch", "adv branch"]
    for row in data["rows"]:
        assert row["images"] == 12 and row["clean"] >= row["quick"] and row["clean"] >= row["autoattack"]
        assert 0 <= row["differing"] <= 12
        assert list(row["quick_passes"]) == ["clean", *Quick(threat=ThreatModel(eps=0.1)).stages()]
    assert {"device", "torch", "precision", "networks", "commit", "advnorm"} <= set(data)


@pytest.mark.usefixtures("short")
def test_rows_are_handed_over_one_by_one_and_compare_the_same_images(tmp_path):
    run = train(small(epochs=2, eps=0.02), tmp_path)
    networks = list(open_networks([run.folder, run.folder], 10, device="cpu"))
    seen = []
    result = bench_quick(networks, name="runs", on_result=lambda so_far: seen.append(len(so_far.rows)))
    row, again = result.rows
    assert seen == [1, 2] and row == replace(
        again, quick_seconds=row.quick_seconds, autoattack_seconds=row.autoattack_seconds
    )
    assert row.quick_seconds > 0 and row.autoattack_seconds > 0
    assert row.points == pytest.approx(100 * (row.quick - row.autoattack))
    assert abs(row.points) <= 100 * row.differing / row.images + 1e-9
    assert row.ratio == total_passes(row.quick_passes) / total_passes(row.autoattack_passes)


def test_the_networks_on_digits_include_scaled_logits_and_both_branches(monkeypatch):
    short = {name: replace(config, epochs=1) for name, config in quick.TRAININGS.items() if "dual" in name}
    short[quick.SCALED] = replace(quick.TRAININGS[quick.SCALED], epochs=1)
    monkeypatch.setattr(quick, "TRAININGS", short)
    networks = {network.name: network for network in train_networks([3], 20)}
    assert list(networks) == [
        "hybrid, dual BN, seed 3, clean branch",
        "hybrid, dual BN, seed 3, adv branch",
        "PGD-AT, seed 3",
        "PGD-AT, logits × 1000, seed 3",
    ]
    plain, scaled = networks["PGD-AT, seed 3"], networks["PGD-AT, logits × 1000, seed 3"]
    assert len(plain.labels) == 20 and plain.threat == scaled.threat
    assert (scaled.model(plain.images) == 1000 * plain.model(plain.images)).all()


def test_a_wrong_precision_is_an_error_before_a_network_is_trained(monkeypatch):
    monkeypatch.setattr(quick, "train", lambda *_, **__: pytest.fail("trained first"))
    with raises_problem("unknown_name", "precision"):
        invoke("bench", "quick", "--precision", "fp16")


def test_passes_by_stage_are_the_calls_of_the_network_per_image():
    """Hooks count too. Both attacks check the model in the same way first; only that is not counted as a stage."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).eval()
    x = torch.rand(24, 1, 8, 8)
    y = model(x).argmax(1)
    calls = []
    model.register_forward_pre_hook(lambda _, args: calls.append(len(args[0])))
    model.register_full_backward_pre_hook(lambda _, grads: calls.append(len(grads[0])))

    def passes(steps: int) -> tuple[int, dict[str, StagePasses]]:
        calls.clear()
        attack = Quick(threat=ThreatModel(eps=0.03), steps=steps)
        stages = passes_by_stage(attack.evaluate(model, x, y, bar=False))
        return sum(calls), stages

    (few_calls, few), (many_calls, many) = passes(4), passes(20)
    assert len(x) * (total_passes(many) - total_passes(few)) == pytest.approx(many_calls - few_calls) != 0
    assert many["first"].backwards > 0 == many["square"].backwards


def test_the_mean_over_networks_counts_missing_stages_as_none():
    one, two = {"a": StagePasses(forwards=4, backwards=2)}, {"b": StagePasses(forwards=1, backwards=0)}
    assert mean_passes([one, two]) == {
        "a": StagePasses(forwards=2, backwards=1),
        "b": StagePasses(forwards=0.5, backwards=0),
    }
