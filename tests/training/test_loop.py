"""The training loop computes what a loop by hand computes."""

from __future__ import annotations

import dataclasses
import itertools
import math
import signal
import threading
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import advnorm
from advnorm.config.fields import OptimizerName, ScheduleName
from advnorm.data import load, make_loader, split_held_out
from advnorm.objectives import OBJECTIVES, Objective, ObjectiveOutput, register_objective
from advnorm.training import loop as loop_module
from advnorm.training.averaging import EMA
from advnorm.training.build import build_model, data_properties
from advnorm.training.loop import TrainingLoop
from advnorm.training.optimizer import norm_parameters
from support.small_runs import norm_for, small, tensors, train


def test_standard_training_equals_a_loop_by_hand(tmp_path):
    config = small(objective="standard", lr=0.05, weight_decay=0.01, milestones=[2], grad_clip=1.0, epochs=3)
    run = train(config, tmp_path)
    data = load("synthetic", "train", **config.data.options)
    part, _ = split_held_out(data, 16, 0)
    loader = make_loader(part, batch_size=12, seed=0, augment="none")
    torch.manual_seed(0)
    model = build_model(config, data_properties(data))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    for epoch in range(3):
        optimizer.param_groups[0]["lr"] = 0.05 if epoch < 2 else 0.05 * 0.1
        losses, right = [], []
        for x, y, _ in loader.epoch(epoch):
            logits = model.train()(x)
            loss = F.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            right.append((logits.argmax(1) == y).double().mean().item())
        row = run.metrics()[epoch]
        assert row["loss"] == row["clean_ce"] == pytest.approx(sum(losses) / 4, rel=1e-12)
        assert row["clean_accuracy"] == pytest.approx(sum(right) / 4, rel=1e-12)
        assert (row["epoch"], row["step"], row["lr"]) == (epoch + 1, 4 * epoch + 4, optimizer.param_groups[0]["lr"])
    trained = run.model("last").state_dict()
    assert all(torch.equal(trained[name], value) for name, value in model.state_dict().items())


def test_an_objective_of_the_user_trains_also_with_a_second_pass(tmp_path, monkeypatch):
    monkeypatch.setattr(OBJECTIVES, "_entries", dict(OBJECTIVES._entries))

    @register_objective("own")
    class Own(Objective):
        domains = ("adv",)

        def compute_loss(self, batch, execution):  # as documented: the execution is always given
            logits = self.domain_logits({"adv": batch.x_adv}, execution=execution)
            loss = self.cross_entropy(logits["adv"], batch.y)
            return ObjectiveOutput(loss, logits, {"own": loss.detach()}, {"adv": batch.y})

    run = train(small(objective="own", second_pass="sam", epochs=1), tmp_path)
    assert run.finished and run.metrics()[0]["own"] > 0


def an_epoch_by_hand(objective, data, *, seed):
    """With the settings of ``small``, which are the defaults."""
    optimizer = torch.optim.SGD(objective.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    for x, y, index in make_loader(data, batch_size=12, seed=seed, augment="none").epoch(0):
        optimizer.zero_grad()
        objective(x, y, index=index).loss.backward()
        optimizer.step()


def test_hybrid_training_equals_its_objective_in_a_loop_by_hand(tmp_path):
    config = small(norm="dual_bn", epochs=1, eps_warmup_epochs=1, label_smoothing=0.1, held_out=0, validate_every=0)
    run = train(config, tmp_path)
    data = load("synthetic", "train", **config.data.options)
    torch.manual_seed(0)
    model = build_model(config, data_properties(data))
    attack = advnorm.attacks.PGD(threat=advnorm.ThreatModel(eps=0.05), steps=2)
    an_epoch_by_hand(advnorm.objectives.Hybrid(model, attack, label_smoothing=0.1), data, seed=0)
    trained = run.model().state_dict()
    assert all(torch.equal(trained[name], value) for name, value in model.state_dict().items())
    assert run.record["best"] is None and "held_out" not in run.metrics()[0]


def test_seed_augmentation_decay_rates_and_average_are_those_of_a_loop_by_hand(tmp_path):
    steps = {"lr": 0.05, "momentum": 0.8, "nesterov": True, "weight_decay": 0.1, "norm_weight_decay": False}
    rates = {"milestones": [1.5], "gamma": 0.5, "warmup_epochs": 0.5}
    config = small(objective="standard", seed=3, augment="crop_flip", ema=0.9, epochs=2, **steps, **rates)
    found = tensors(train(config, tmp_path))
    data = load("synthetic", "train", **config.data.options)
    part, _ = split_held_out(data, 16, 3)
    loader = make_loader(part, batch_size=12, seed=3, augment="crop_flip")
    torch.manual_seed(3)
    model = build_model(config, data_properties(data)).train()
    norms = set(norm_parameters(model))
    groups = [{"params": [p for p in model.parameters() if (p in norms) == own]} for own in (False, True)]
    groups[1]["weight_decay"] = 0.0
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.1)
    average = EMA(model, 0.9)
    batches = [batch for epoch in range(2) for batch in loader.epoch(epoch)]
    for (x, y, _), share in zip(batches, (0.5, 1, 1, 1, 1, 1, 0.5, 0.5), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * share
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        average.update(model)
    assert all(torch.equal(found[f"model.{name}"], value) for name, value in model.state_dict().items())
    assert all(torch.equal(found[f"ema.{name}"], value) for name, value in average.average.items())


def test_a_regularizer_and_a_second_pass_are_those_of_a_loop_by_hand(tmp_path):
    more = {"regularizer": {"name": "ligs", "weight": 0.5, "size": 0.1}, "second_pass": {"name": "apart", "samples": 6}}
    config = small(objective="standard", seed=3, epochs=1, held_out=0, validate_every=0, **more)
    run = train(config, tmp_path)
    data = load("synthetic", "train", **config.data.options)
    torch.manual_seed(3)
    model = build_model(config, data_properties(data)).train()
    bare = advnorm.objectives.Standard(model)
    bare.seed = 3
    regularized = advnorm.objectives.LIGS(bare, weight=0.5, size=0.1)
    an_epoch_by_hand(advnorm.objectives.APART(regularized, samples=6), data, seed=3)
    trained = run.model().state_dict()
    assert all(torch.equal(trained[name], value) for name, value in model.state_dict().items())
    assert {"ligs", "second_pass"} <= set(run.metrics()[0])


def test_the_attack_grows_until_its_warm_up_is_over(tmp_path, monkeypatch):
    seen, step = [], TrainingLoop.train_step
    monkeypatch.setattr(
        TrainingLoop, "train_step", lambda loop, batch: (seen.append(loop.objective.attack), step(loop, batch))
    )
    train(small(objective="classical", attack={"steps": 3}, eps_warmup_epochs=2, steps_warmup_epochs=1), tmp_path)
    assert [attack.threat.eps for attack in seen[::4]] == pytest.approx([0.1 / 3, 0.2 / 3, 0.1])
    assert [attack.steps for attack in seen[::4]] == [2, 3, 3] and seen[3] == seen[0]


def test_the_peak_of_one_cycle_is_where_the_configuration_puts_it(tmp_path):
    config = small(objective="standard", schedule="one_cycle", peak_share=0.75, epochs=4, validate_every=0)
    rates = [row["lr"] for row in train(config, tmp_path).metrics()]
    assert rates[2] == config.lr and rates[0] < rates[1] < rates[2] > rates[3]


def test_random_numbers_of_a_model_differ_between_steps_and_repeat_after_a_stop(tmp_path, monkeypatch):
    class Drawing(nn.Module):
        def forward(self, x):
            if self.training:
                draws.append(torch.rand(()).item())
            return x

    make = loop_module.build_model
    monkeypatch.setattr(loop_module, "build_model", lambda *of: nn.Sequential(Drawing(), make(*of)))
    seen = []
    for name, limit, seed in (("alone", None, 0), ("a step at a time", 0, 0), ("of another seed", None, 1)):
        draws, run = [], None
        config = small(objective="standard", epochs=2, validate_every=0, seed=seed)
        while run is None or not run.finished:
            torch.manual_seed(len(draws))
            run = train(config, tmp_path / name, max_minutes=limit)
        seen.append(draws)
    assert seen[0] == seen[1] and len(set(seen[0])) == len(seen[0]) == 8
    assert not set(seen[0]) & set(seen[2])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_trains_by_its_name(tmp_path, name):
    config = small(objective=name, norm=norm_for(name), epochs=1, batch_size=24, held_out=16)
    run = train(config, tmp_path)
    (row,) = run.metrics()
    assert row["step"] == 2 and math.isfinite(row["loss"])
    seen = [domain for domain in ("clean", "adv") if f"{domain}_accuracy" in row]
    assert seen == list(OBJECTIVES.get(name).domains)
    assert set(row["held_out"]) == {"clean", "pgd1", "score"}


PAIRWISE = [("sgd", "step"), ("adam", "cosine"), ("adagrad", "one_cycle"), ("rmsprop", "constant")]
CROSSING = list(itertools.product(get_args(OptimizerName), get_args(ScheduleName)))


@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [pytest.param(*pair, marks=[] if pair in PAIRWISE else pytest.mark.slow) for pair in CROSSING],
)
def test_every_optimizer_and_schedule_trains(tmp_path, optimizer, schedule):
    config = small(objective="standard", optimizer=optimizer, schedule=schedule, lr=0.01, epochs=2)
    first, second = train(config, tmp_path).metrics()
    assert second["loss"] < first["loss"]
    assert (first["lr"] == second["lr"]) == (schedule in ("step", "constant"))


def test_bf16_trains_on_the_cpu_near_float32(tmp_path):
    rows = [train(small(norm="dual_bn", precision=p), tmp_path).metrics() for p in ("float32", "bf16")]
    assert rows[0] != rows[1]
    assert [row["loss"] for row in rows[0]] == pytest.approx([row["loss"] for row in rows[1]], rel=0.1)
    with torch.autocast("cpu", torch.bfloat16):  # the caller's own scope changes nothing
        inside = [train(small(norm="dual_bn", precision=p), tmp_path / "in").metrics() for p in ("float32", "bf16")]
    assert inside == rows


@pytest.mark.slow
def test_a_compiled_network_trains_as_the_eager_one(tmp_path):
    limit = torch._dynamo.config.recompile_limit
    rows = [train(small(norm="dual_bn", compile=c, epochs=2), tmp_path).metrics() for c in (False, True)]
    for eager, compiled in zip(*rows):
        assert eager["loss"] == pytest.approx(compiled["loss"], rel=1e-4)
    assert limit == torch._dynamo.config.recompile_limit


def test_running_epochs_leave_the_statistics_alone(tmp_path):
    config = small(norm="dual_bn", epochs=2)
    one = train(dataclasses.replace(config, epochs=1), tmp_path).model("last").state_dict()
    two = train(dataclasses.replace(config, running_epochs=1), tmp_path).model("last").state_dict()
    moved = {name for name in one if not torch.equal(one[name], two[name])}
    assert moved and not any("running" in name or "num_batches" in name for name in moved)


@pytest.mark.parametrize("rule", ["copy", "average"])
def test_the_statistics_of_an_averaged_model_follow_the_rule_of_its_configuration(tmp_path, rule):
    run = train(small(norm="dual_bn", ema=0.9, ema_buffers=rule, epochs=1, held_out=0, validate_every=0), tmp_path)
    live, averaged = tensors(run), run.model("last").state_dict()
    names = [name for name in averaged if "running" in name]
    assert names and {torch.equal(averaged[name], live[f"model.{name}"]) for name in names} == {rule == "copy"}


def test_the_global_state_of_the_caller_is_unchanged(tmp_path):
    torch.manual_seed(5)
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    before = torch.get_rng_state(), torch.get_default_dtype(), handlers
    flags = torch.is_grad_enabled(), torch.backends.cuda.matmul.fp32_precision, torch.is_autocast_enabled("cpu")
    run = train(small(norm="dual_bn", precision="bf16", epochs=1), tmp_path)
    run.model()
    assert torch.equal(torch.get_rng_state(), before[0])
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    assert (torch.get_default_dtype(), handlers) == before[1:]
    assert flags == (
        torch.is_grad_enabled(),
        torch.backends.cuda.matmul.fp32_precision,
        torch.is_autocast_enabled("cpu"),
    )


def test_training_depends_on_the_seed_and_not_on_the_global_random_state(tmp_path):
    config = small(epochs=1, objective="standard")
    torch.manual_seed(1)
    one = train(config, tmp_path / "a", seed=3)
    torch.manual_seed(2)
    two = train(config, tmp_path / "b", seed=3)
    other = train(config, tmp_path / "b", seed=4)
    assert one.metrics() == two.metrics() != other.metrics()
    assert one.folder.name.endswith("-seed3") and one.config.seed == 3


def test_training_works_in_a_thread(tmp_path):
    runs = []
    thread = threading.Thread(target=lambda: runs.append(train(small(norm="dual_bn", epochs=1), tmp_path)))
    thread.start()
    thread.join()
    assert runs[0].metrics() == train(small(norm="dual_bn", epochs=1), tmp_path / "main").metrics()
