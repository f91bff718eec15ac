"""The sweep over libraries, and the networks of its committed record: one per family, converted bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from advnorm import ConfigError
from advnorm.bench import surgery
from advnorm.bench.surgery import bench_surgery, check_conversion, fitting_norm
from support.problems import raises_problem

pytest.importorskip("timm", reason="timm is not installed")
pytest.importorskip("torchvision", reason="torchvision is not installed")

RECORDS = [json.loads(path.read_text()) for path in Path(__file__).parents[2].glob("results/bench/surgery_*.json")]
#: Seconds of CPU time of a family's check above which it runs with the slow tests.
SLOW = 0.6


def families():
    for family, check in ((f, check) for record in RECORDS for f, check in record["families"].items()):
        marks = [pytest.mark.slow] if check["seconds"] > SLOW else []
        if not check["error"]:
            yield pytest.param(check["model"], check["norm"], check["mixed"], id=family, marks=marks)


@pytest.mark.parametrize(("model", "norm", "mixed"), families())
def test_a_network_of_each_family_converts_and_comes_back_bit_for_bit(model, norm, mixed):
    check = check_conversion(model)
    assert check.routes and check.stripped and check.loads, check
    assert (check.norm, check.mixed) == (norm, mixed), check


def test_only_a_network_whose_attention_runs_over_the_batch_mixes_samples():
    mixing = [f for record in RECORDS for f, check in record["families"].items() if check["mixed"] is False]
    unchecked = [f for record in RECORDS for f, check in record["families"].items() if check["error"]]
    assert set(mixing) - set(unchecked) == {"timm csatv2"}


def test_at_least_99_percent_of_the_networks_with_norms_convert():
    counts = [count for record in RECORDS for count in record["counts"].values()]
    total = {outcome: sum(count.get(outcome, 0) for count in counts) for outcome in surgery.OUTCOMES}
    assert total["converted"] >= 0.99 * (total["converted"] + total["rejected"] + total["not built"])
    failures = sum(len(record["failures"]) for record in RECORDS)
    assert total["converted"] > 1000 and failures == total["rejected"] + total["not built"]


def test_a_wrong_conversion_is_noticed(monkeypatch):
    def convert_wrongly(model, name):
        report = convert(model, name)
        norm = next(module for module in model.modules() if isinstance(module, surgery.RoutedNorm))
        nn.init.constant_(norm.weight_adv, 3.0)
        return report

    convert = surgery.convert_norm
    monkeypatch.setattr(surgery, "convert_norm", convert_wrongly)
    check = check_conversion("timm:test_resnet")
    assert not check.routes and not check.stripped and check.loads and not check.passed


def test_the_sweep_counts_outcomes_and_names_failures(monkeypatch):
    names = ["timm:test_resnet", "timm:test_vit", "torchvision:alexnet", "torchvision:resnet18", "timm:nothing"]
    monkeypatch.setattr(surgery, "list_architectures", lambda libraries: iter(names))
    result = bench_surgery(("timm", "torchvision"), check=False)
    assert result.counts == {
        "timm": {"converted": 2, "not built": 1},
        "torchvision": {"no norms": 1, "converted": 1},
    }
    assert result.norms == {"dual_bn": 2, "dual_affine_ln": 1}
    assert list(result.failures) == ["timm:nothing"]
    with raises_problem("unknown_name", "library", ConfigError):
        bench_surgery(("tim",))


def test_the_norm_that_fits_is_that_of_the_layers():
    assert fitting_norm(nn.Sequential(nn.LayerNorm(2), nn.LayerNorm(2), nn.BatchNorm2d(2))) == "dual_bn"
    assert fitting_norm(nn.Sequential(nn.RMSNorm(2), nn.GroupNorm(1, 2), nn.RMSNorm(2))) == "dual_affine_rms"
    assert fitting_norm(nn.Sequential(nn.LayerNorm(2, elementwise_affine=False), nn.Linear(2, 2))) is None


def test_networks_are_built_without_memory():
    network = surgery.build_without_memory("timm:vit_large_patch16_224")
    assert all(parameter.device == torch.device("meta") for parameter in network.parameters())
