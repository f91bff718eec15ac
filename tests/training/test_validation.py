"""Accuracy on held-out images."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import advnorm
from advnorm.data import load, split_held_out
from advnorm.training.ranks import Ranks
from advnorm.training.validation import BATCH, Validation
from support.small_runs import small, train


def test_classical_training_never_updates_the_clean_banks_and_is_evaluated_by_the_others(tmp_path):
    run = train(small(objective="classical", norm="dual_bn", epochs=1), tmp_path)
    values = run.model("last").state_dict()
    assert all((value == 1).all() for name, value in values.items() if name.endswith(("weight_clean", "var_clean")))
    assert not any((value == 1).all() for name, value in values.items() if name.endswith("weight_adv"))
    _, held_out = split_held_out(load("synthetic", "train", **run.config.data.options), 16, 0)
    model = run.model("last")
    with advnorm.route(model, "adv"):
        accuracy = (model(held_out.pixels()).argmax(1) == held_out.labels).double().mean().item()
    assert run.metrics()[-1]["held_out"]["clean"] == accuracy
    assert run.record["trained_domains"] == ["adv"]
    assert run.record["routing"][0]["domains"]["clean"] == {"normalized_by": None, "feed": None, "scaled_by": None}


def test_held_out_accuracies_are_those_of_the_last_model(tmp_path):
    config = small(norm="dual_bn", ema=0.9, ema_buffers="average", epochs=2, validation_images=12)
    run = train(config, tmp_path)
    model = run.model("last")
    _, held_out = split_held_out(load("synthetic", "train", **config.data.options), 16, 0)
    _, some = split_held_out(held_out, 12, 0)
    x, y = some.pixels(), some.labels
    with advnorm.route(model, "clean"):
        clean = (model(x).argmax(1) == y).double().mean().item()
    attack = advnorm.attacks.get("pgd1", threat=advnorm.ThreatModel(eps=0.1), route="adv")
    with advnorm.route(model, "adv"):
        adv = (model(attack(model, x, y)).argmax(1) == y).double().mean().item()
    assert run.metrics()[-1]["held_out"] == {"clean": clean, "pgd1": adv, "score": clean + adv}


def test_advprop_trains_both_branches_and_is_validated_by_the_clean_one(tmp_path):
    run = train(small(objective="advprop", norm="dual_bn", epochs=2), tmp_path)
    model = run.model("last")
    _, held_out = split_held_out(load("synthetic", "train", **run.config.data.options), 16, 0)
    x, y = held_out.pixels(), held_out.labels
    attack = advnorm.attacks.get("pgd1", threat=advnorm.ThreatModel(eps=0.1), route="clean")
    with advnorm.route(model, "clean"):
        clean, adv = ((model(images).argmax(1) == y).double().mean().item() for images in (x, attack(model, x, y)))
    assert run.metrics()[-1]["held_out"] == {"clean": clean, "pgd1": adv, "score": clean + adv}
    assert run.record["trained_domains"] == ["clean", "adv"]


def test_some_held_out_images_are_of_every_class(tmp_path):
    data = load("synthetic", "train", size=80, classes=4, image_size=8, channels=1)
    data = data.take(data.labels.argsort(stable=True))  # as a folder has them
    ranks = Ranks(device=torch.device("cpu"))
    common = {"tested": ("clean",), "workers": 0}
    validation = Validation(data, small(validation_images=12), ranks, **common)
    (batch,) = validation.loader.epoch(0)
    assert batch.y.bincount().tolist() == [3, 3, 3, 3] and validation.images == 12
    (other,) = Validation(data, small(validation_images=12, seed=1), ranks, **common).loader.epoch(0)
    assert not torch.equal(other.x, batch.x)
    assert Validation(data, small(), ranks, **common).images == 80


def test_held_out_accuracies_do_not_depend_on_the_batch_size(monkeypatch):
    class Recording(nn.Sequential):
        def forward(self, x):
            if not torch.is_grad_enabled():
                seen.append(x)
            return super().forward(x)

    data, model = load("synthetic", "train", **small().data.options), Recording(nn.Flatten(), nn.Linear(64, 4))
    common = {"tested": ("clean",), "workers": 0}
    found = []
    for size in (64, 5):
        monkeypatch.setitem(BATCH, "cpu", size)
        seen, validation = [], Validation(data, small(eps=0.03), Ranks(device=torch.device("cpu")), **common)
        found.append((validation(model), torch.cat(seen[::2]), torch.cat(seen[1::2])))
    (one, clean, adv), (many, *images) = found
    assert one == many and 0 < one["pgd1"] < one["clean"]
    assert torch.equal(clean, images[0]) and torch.equal(adv, images[1]) and not torch.equal(clean, adv)


def test_held_out_images_that_do_not_fit_into_memory_are_validated_in_smaller_batches():
    class Large(nn.Sequential):
        def forward(self, input):
            sizes.append(len(input))
            if len(input) > most:
                raise torch.OutOfMemoryError("CUDA out of memory (simulated)")
            return super().forward(input)

    data, model = load("synthetic", "train", **small().data.options), Large(nn.Flatten(), nn.Linear(64, 4))
    found = []
    for most in (len(data), 5):
        ranks, sizes = Ranks(device=torch.device("cpu")), list[int]()
        validation = Validation(data, small(eps=0.03), ranks, tested=("clean",), workers=0)
        found.append(validation(model))
        sizes.clear()
        assert validation(model) == found[-1] and max(sizes) <= most  # the next epoch starts with the smaller size
    assert found[0] == found[1]


@pytest.mark.parametrize(("every", "validated"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (4, [4, 5]), (9, [5])])
def test_validation_runs_every_few_epochs_and_after_the_last(tmp_path, every, validated):
    run = train(small(objective="standard", epochs=5, validate_every=every), tmp_path)
    assert [row["epoch"] for row in run.metrics() if "held_out" in row] == validated
    assert run.record["best"]["epoch"] in validated


def test_validation_evaluates_in_float32_in_every_precision():
    data = load("synthetic", "train", **small().data.options)
    config, ranks = small(eps=0.15, precision="bf16"), Ranks(device=torch.device("cpu"))
    validation = Validation(data, config, ranks, tested=("clean", "adv"), workers=0)
    model, x, y = nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), data.pixels(), data.labels
    means = torch.stack([x[y == c].mean(0).flatten() for c in range(4)])
    model[1].weight.data, model[1].bias.data = means, 1000 - means.square().sum(1) / 2  # one and the same in bf16
    with torch.autocast("cpu", torch.bfloat16):
        x_adv, inside = validation.attack(model, x, y), validation(model)
    clean, adv = ((model(images).argmax(1) == y).double().mean().item() for images in (x, x_adv))
    assert validation(model) == inside == {"clean": clean, "pgd1": adv, "score": clean + adv}
    assert clean > adv > 0.3  # where all logits are equal, the first of four classes is right for a quarter


@pytest.mark.parametrize("statistics", ["running", "batch", "batch_frozen"])
def test_validation_does_not_change_the_model(tmp_path, statistics):
    models = []
    for every in (0, 1):
        config = small(
            attack={"steps": 1, "statistics": statistics}, validation_attack="training", validate_every=every
        )
        models.append(train(config, tmp_path / str(every)).model("last").state_dict())
    assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())
