"""Training: what it computes, that a kill leaves no trace, and what it says when something is wrong."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import advnorm
from advnorm import Config, ConfigError, Run
from advnorm._core.exit_codes import PREEMPTED
from advnorm.cli.app import app
from advnorm.data import load, make_loader, split_held_out
from advnorm.objectives import OBJECTIVES
from advnorm.training import TrainingError, checkpoint, entry_point
from advnorm.training import loop as loop_module
from advnorm.training.averaging import EMA
from advnorm.training.build import build_model, describe_data
from advnorm.training.journal import Clock, Journal, format_epoch
from advnorm.training.loop import TrainingLoop
from advnorm.training.optimizer import norm_parameters
from advnorm.training.ranks import Ranks
from advnorm.training.validation import BATCH, Validation
from support import train_worker
from support.problems import raises_problem
from support.train_worker import PAIRS, SMALL, patched, state

SOURCE = str(Path(advnorm.__file__).parent.parent)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCE}


def small(**settings) -> Config:
    return Config.from_dict({**SMALL, **settings})


def train(config: Config, out: Path, **settings) -> Run:
    return advnorm.train(config, out=out, device="cpu", **settings)


def tensors(run: Run, name: str = "last") -> dict[str, torch.Tensor]:
    return checkpoint.load(run.checkpoints, name)[0]


def norm_for(name: str) -> str:
    return "cross_bn" if name == "cross" else "dual_bn"


# -- a kill leaves no trace --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deaths(tmp_path_factory) -> tuple[Path, dict[str, dict[str, list[int]]]]:
    """Runs that died in every way and went on, and the exit statuses of their processes."""
    folder = tmp_path_factory.mktemp("deaths")
    command = [sys.executable, train_worker.__file__, str(folder)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return folder, json.loads((folder / "codes.json").read_text())


@pytest.mark.parametrize(("case", "death"), PAIRS, ids=lambda value: value)
def test_a_run_that_died_ends_with_the_bits_of_one_that_did_not(deaths, case, death):
    folder, codes = deaths
    alone, other = (Run.open(folder / name / f"{case}-seed0") for name in ("alone", death))
    first = codes[case][death][0]
    wanted = {"alone": 0, "at_random_moments": -signal.SIGPROF}.get(
        death, PREEMPTED if death.startswith("by_sigterm") else -signal.SIGKILL
    )
    assert first == wanted and codes[case][death][-1] == 0
    expected, found = state(alone), state(other)
    assert len(alone.metrics()) == 3
    for part in expected:
        assert found[part] == expected[part], part
    assert sum(path.suffix == ".safetensors" for path in other.checkpoints.iterdir()) <= 2, "old checkpoints stay"


def test_a_run_that_died_after_its_last_checkpoint_leaves_no_older_one(tmp_path, monkeypatch):
    config = small(epochs=1, held_out=0, validate_every=0)  # where a best one is marked there is tidied up anyway

    def dies(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "_write_record", dies)
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path)
    (folder,) = tmp_path.glob("*/checkpoints")
    older = folder / "last-00000000-00000000.safetensors"
    older.write_bytes(b"of a save that was killed before it could tidy up")
    assert train(config, tmp_path).finished and not older.exists()


def test_the_cases_of_the_deaths_have_state_to_lose(deaths):
    folder, codes = deaths
    assert len(codes["hybrid"]["at_random_moments"]) > 4
    for statuses in codes.values():
        assert set(statuses["at_random_moments"]) == {-signal.SIGPROF, 0}
    hybrid, trades = (Run.open(folder / "alone" / f"{case}-seed0") for case in ("hybrid", "trades"))
    assert any(name.startswith("ema.") for name in tensors(hybrid))
    assert any(name.endswith("exp_avg_sq") for name in tensors(trades))
    scores = [row["held_out"]["score"] for row in hybrid.metrics()]
    assert sum(score > max(scores[:i], default=0) for i, score in enumerate(scores)) >= 2, "the best must move twice"


# -- what it computes --------------------------------------------------------------------------------------------------


def test_standard_training_equals_a_loop_by_hand(tmp_path):
    config = small(objective="standard", lr=0.05, weight_decay=0.01, milestones=[2], grad_clip=1.0, epochs=3)
    run = train(config, tmp_path)
    data = load("synthetic", "train", **config.data.options)
    part, _ = split_held_out(data, 16, 0)
    loader = make_loader(part, batch_size=12, seed=0, augment="none")
    torch.manual_seed(0)
    model = build_model(config, describe_data(data))
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
    model = build_model(config, describe_data(data))
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
    model = build_model(config, describe_data(data)).train()
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
    assert all(torch.equal(found[f"ema.{name}"], value) for name, value in average.state_dict()["average"].items())


def test_a_regularizer_and_a_second_pass_are_those_of_a_loop_by_hand(tmp_path):
    more = {"regularizer": {"name": "ligs", "weight": 0.5, "size": 0.1}, "second_pass": {"name": "apart", "samples": 6}}
    config = small(objective="standard", seed=3, epochs=1, held_out=0, validate_every=0, **more)
    run = train(config, tmp_path)
    data = load("synthetic", "train", **config.data.options)
    torch.manual_seed(3)
    model = build_model(config, describe_data(data)).train()
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


def test_what_a_model_draws_is_another_in_every_step_and_the_same_after_a_stop(tmp_path, monkeypatch):
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


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adagrad"])
@pytest.mark.parametrize("schedule", ["step", "cosine", "one_cycle", "constant"])
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


def test_classical_training_leaves_the_clean_banks_as_they_were_made_and_is_judged_by_the_others(tmp_path):
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


def test_some_held_out_images_are_of_every_class(tmp_path):
    data = load("synthetic", "train", size=80, classes=4, image_size=8, channels=1)
    data = data.take(data.labels.argsort(stable=True))  # as a folder has them
    ranks = Ranks(device=torch.device("cpu"))
    common = {"trained": ("clean",), "precision": "float32", "channels_last": False, "workers": 0}
    validation = Validation(data, small(validation_images=12), ranks, **common)
    (batch,) = validation.loader.epoch(0)
    assert batch.y.bincount().tolist() == [3, 3, 3, 3] and validation.images == 12
    (other,) = Validation(data, small(validation_images=12, seed=1), ranks, **common).loader.epoch(0)
    assert not torch.equal(other.x, batch.x)
    assert Validation(data, small(), ranks, **common).images == 80


def test_held_out_images_are_judged_alike_in_one_batch_and_in_many(monkeypatch):
    class Recording(nn.Sequential):
        def forward(self, x):
            if not torch.is_grad_enabled():
                seen.append(x)
            return super().forward(x)

    data, model = load("synthetic", "train", **small().data.options), Recording(nn.Flatten(), nn.Linear(64, 4))
    common = {"trained": ("clean",), "precision": "float32", "channels_last": False, "workers": 0}
    found = []
    for size in (64, 5):
        monkeypatch.setitem(BATCH, "cpu", size)
        seen, validation = [], Validation(data, small(eps=0.03), Ranks(device=torch.device("cpu")), **common)
        found.append((validation(model), torch.cat(seen[::2]), torch.cat(seen[1::2])))
    (one, clean, adv), (many, *images) = found
    assert one == many and 0 < one["pgd1"] < one["clean"]
    assert torch.equal(clean, images[0]) and torch.equal(adv, images[1]) and not torch.equal(clean, adv)


@pytest.mark.parametrize(("every", "judged"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (4, [4, 5]), (9, [5])])
def test_held_out_images_judge_every_so_many_epochs_and_the_last(tmp_path, every, judged):
    run = train(small(objective="standard", epochs=5, validate_every=every), tmp_path)
    assert [row["epoch"] for row in run.metrics() if "held_out" in row] == judged
    assert run.record["best"]["epoch"] in judged


def test_held_out_images_are_judged_in_float32_whatever_the_attack_is_searched_in():
    data = load("synthetic", "train", **small().data.options)
    settings = {"trained": ("clean", "adv"), "precision": "bf16", "channels_last": False, "workers": 0}
    validation = Validation(data, small(eps=0.15), Ranks(device=torch.device("cpu")), **settings)
    model, x, y = nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), data.pixels(), data.labels
    means = torch.stack([x[y == c].mean(0).flatten() for c in range(4)])
    model[1].weight.data, model[1].bias.data = means, 1000 - means.square().sum(1) / 2  # one and the same in bf16
    with torch.autocast("cpu", torch.bfloat16):
        x_adv, inside = validation.attack(model, x, y), validation(model)
    clean, adv = ((model(images).argmax(1) == y).double().mean().item() for images in (x, x_adv))
    assert validation(model) == inside == {"clean": clean, "pgd1": adv, "score": clean + adv}
    assert clean > adv > 0.3  # where all logits are equal, the first of four classes is right for a quarter


@pytest.mark.parametrize("rule", ["copy", "average"])
def test_the_statistics_of_an_averaged_model_follow_the_rule_of_its_configuration(tmp_path, rule):
    run = train(small(norm="dual_bn", ema=0.9, ema_buffers=rule, epochs=1, held_out=0, validate_every=0), tmp_path)
    live, averaged = tensors(run), run.model("last").state_dict()
    names = [name for name in averaged if "running" in name]
    assert names and {torch.equal(averaged[name], live[f"model.{name}"]) for name in names} == {rule == "copy"}


def test_the_global_state_of_the_user_is_as_before(tmp_path):
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


# -- runs and their models ---------------------------------------------------------------------------------------------


def test_best_and_last_are_the_models_of_their_epochs(tmp_path, monkeypatch):
    scores = iter([0.5, 0.9, 0.7])
    score = lambda *_: {"clean": 0.1, "pgd1": 0.1, "score": next(scores)}  # noqa: E731
    monkeypatch.setattr("advnorm.training.validation.Validation.__call__", score)
    run = train(small(norm="dual_bn", ema=0.5), tmp_path)
    assert run.record["best"]["epoch"] == 2 and run.record["last"]["epoch"] == 3
    best, last = run.model("best").state_dict(), run.model("last").state_dict()
    assert not torch.equal(best["fc.weight"], last["fc.weight"])
    assert all(torch.equal(best[name], value) for name, value in run.model().state_dict().items())
    kept = tensors(run, "best")
    for name in dict(run.model().named_parameters()):
        assert torch.equal(best[name], kept[f"ema.{name}"]) and not torch.equal(best[name], kept[f"model.{name}"])
    assert not run.model().training


def test_of_equal_scores_the_first_is_the_best(tmp_path, monkeypatch):
    scores = iter([0.5, 0.9, 0.9])
    score = lambda *_: {"clean": 0.1, "pgd1": 0.1, "score": next(scores)}  # noqa: E731
    monkeypatch.setattr("advnorm.training.validation.Validation.__call__", score)
    run = train(small(), tmp_path)
    assert run.record["best"]["epoch"] == 2 and checkpoint.load(run.checkpoints, "best")[1]["step"] == 8


@pytest.mark.parametrize("ema", [None, 0.5])
def test_snapshots_are_the_models_after_their_epochs(tmp_path, ema):
    whole = train(small(norm="dual_bn", ema=ema, snapshots=(1, 3)), tmp_path / "whole")
    assert whole.snapshots == {1: "epoch1", 3: "epoch3"}
    short = train(small(norm="dual_bn", ema=ema, schedule="constant", epochs=1), tmp_path / "short")
    long = train(small(norm="dual_bn", ema=ema, schedule="constant", snapshots=(1,)), tmp_path / "long")
    for one, other in ((whole.model("epoch3"), whole.model("last")), (long.model("epoch1"), short.model("last"))):
        assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())
    assert not torch.equal(whole.model("epoch1").fc.weight, whole.model("epoch3").fc.weight)
    with pytest.raises(ConfigError, match="no checkpoint 'epoch2'.*did you mean 'epoch"):
        whole.model("epoch2")
    twice = train(small(norm="dual_bn", epochs=2, budget=2, snapshots=(1, 2)), tmp_path / "twice")
    assert list(twice.snapshots) == [2, 4]


def test_checkpoints_within_the_next_epoch_leave_a_snapshot_alone(tmp_path):
    config = small(objective="standard", snapshots=(1, 2), validate_every=0)
    often = train(config, tmp_path / "often", checkpoint_minutes=0)
    rarely = train(config, tmp_path / "rarely")
    for name, step in (("epoch1", 4), ("epoch2", 8)):
        assert checkpoint.load(often.checkpoints, name)[1]["step"] == step
        one, other = (tensors(run, name) for run in (often, rarely))
        assert all(torch.equal(value, other[key]) for key, value in one.items())


def test_a_run_that_died_before_its_snapshot_was_kept_keeps_it_then(tmp_path, monkeypatch):
    config, save = small(snapshots=(1, 3)), checkpoint.save

    def dies(folder, name, *more):
        if name == "epoch1":
            raise KeyboardInterrupt
        return save(folder, name, *more)

    monkeypatch.setattr(checkpoint, "save", dies)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "died")
    monkeypatch.setattr(checkpoint, "save", save)
    died, whole = train(config, tmp_path / "died"), train(config, tmp_path / "whole")
    for which in ("epoch1", "epoch3", "last"):
        one, other = (run.model(which).state_dict() for run in (died, whole))
        assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_weights_come_from_a_run_or_a_file_and_must_fit(tmp_path):
    start = train(small(norm="dual_bn", epochs=1), tmp_path)
    file = checkpoint.save_weights(tmp_path / "w.safetensors", start.model(), {})
    tuned = [
        train(small(norm="dual_bn", epochs=1, train_only="norms", weights=str(weights)), tmp_path)
        for weights in (start.folder, file)
    ]
    assert tuned[0].metrics() == tuned[1].metrics()
    assert tuned[0].record["weights_fingerprint"] == tuned[1].record["weights_fingerprint"]
    assert "weights_fingerprint" not in start.record
    before, model = start.model("last"), tuned[0].model("last")
    norms = set(norm_parameters(model))
    for (name, old), (_, new) in zip(before.named_parameters(), model.named_parameters()):
        assert torch.equal(old, new) != (new in norms), name
    with pytest.raises(ConfigError, match="weight_clean is missing in the file"):
        train(small(norm="dual_bn", epochs=1, weights=str(train(small(epochs=1), tmp_path).folder)), tmp_path)
    file.unlink()
    assert train(tuned[1].config, tmp_path).finished, "a finished run needs its start no more"


def test_a_run_that_goes_on_does_not_need_its_start_any_more(tmp_path):
    file = checkpoint.save_weights(tmp_path / "w.safetensors", train(small(epochs=1), tmp_path).model("last"), {})
    config = small(epochs=1, weights=str(file))
    assert not train(config, tmp_path, max_minutes=0).finished
    file.unlink()
    assert train(config, tmp_path).finished


def test_other_weights_under_the_same_name_are_told_and_not_mixed_up(tmp_path):
    model = build_model(small(), describe_data(load("synthetic", "train", **small().data.options)))
    file = checkpoint.save_weights(tmp_path / "w.safetensors", model, {})
    config = small(epochs=1, weights=str(file))
    run = train(config, tmp_path, max_minutes=0)
    (run.checkpoints / "last.json").unlink()
    next(model.parameters()).data += 1
    checkpoint.save_weights(file, model, {})
    with pytest.raises(ConfigError, match="was started from other weights than"):
        train(config, tmp_path)


def test_a_head_per_domain_trains_end_to_end(tmp_path):
    run = train(small(norm="dual_bn", dual_head=True, epochs=1), tmp_path)
    model = run.model()
    heads = {name: value for name, value in model.state_dict().items() if re.search(r"weight_(clean|adv)$", name)}
    assert any(value.dim() == 2 for value in heads.values())
    assert "held_out" in run.record["best"]
    assert advnorm.strip(model, route="adv")(torch.rand(2, 1, 8, 8)).shape == (2, 4)


def test_a_finished_run_is_not_trained_again(tmp_path, monkeypatch):
    run = train(small(epochs=1), tmp_path)
    monkeypatch.setattr(entry_point, "TrainingLoop", None)
    assert train(small(epochs=1), tmp_path).metrics() == run.metrics()


def test_a_finished_run_is_read_though_its_checkpoints_are_gone(tmp_path):
    arguments(tmp_path)
    run = train(small(name="small"), tmp_path / "runs")
    shutil.rmtree(run.checkpoints)
    again = CliRunner().invoke(app, arguments(tmp_path))
    assert again.exit_code == 0 and "last: epoch 3" in again.output
    with pytest.raises(ConfigError, match="no checkpoint 'last'"):
        run.model()


def test_a_run_of_another_version_is_told_by_folder_and_version(tmp_path):
    run = train(small(epochs=1), tmp_path)
    path = run.folder / "run.json"
    content = json.loads(path.read_text())
    assert content["advnorm"] == advnorm.__version__
    for change, message in (
        ({"format": "advnorm.run/9", "advnorm": "9.0"}, r"is a run of advnorm 9\.0, in the format 'advnorm\.run/9'"),
        ({"config": {**content["config"], "future": 1}, "advnorm": "9.0"}, r"advnorm 9\.0, which .*'future'"),
    ):
        path.write_text(json.dumps({**content, **change}))
        for act in (lambda: train(small(epochs=1), tmp_path), run.model):
            with pytest.raises(ConfigError, match=message) as raised:
                act()
            assert str(run.folder) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("spoil", ["last.json", "the tensors"])
def test_a_damaged_checkpoint_is_told_with_the_way_to_start_anew(tmp_path, spoil):
    run = train(small(epochs=1), tmp_path, max_minutes=0)
    path = run.checkpoints / spoil if spoil == "last.json" else next(run.checkpoints.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ConfigError, match=f"damaged.*Deleting {run.folder} starts the run from the beginning"):
        train(small(epochs=1), tmp_path)


def test_the_configuration_in_a_run_trains_the_same_run(tmp_path):
    run = train(small(norm="dual_bn", epochs=1, eps="8/255"), tmp_path)
    again = train(advnorm.load_config(run.folder / "config.yaml"), tmp_path)
    assert again.folder == run.folder
    elsewhere = train(advnorm.load_config(run.folder / "config.yaml"), tmp_path / "elsewhere")
    assert elsewhere.metrics() == run.metrics()


def test_the_record_has_all_conditions(tmp_path):
    run = train(small(norm="cross_bn", epochs=3), tmp_path)
    record = run.record
    assert record["config"] == run.config.to_dict() and record["data"]["fingerprint"]
    assert record["layout"] == "concatenated" and record["attack"].startswith("PGD(threat=ThreatModel(norm='Linf'")
    assert record["routing"] == [
        {
            "norm": "cross_bn",
            "layers": 3,
            "domains": {
                "clean": {"normalized_by": "adv", "feed": "clean", "scaled_by": "clean"},
                "adv": {"normalized_by": "clean", "feed": "adv", "scaled_by": "adv"},
            },
        }
    ]
    assert {"torch", "device", "commit", "advnorm", "threads", "peak_memory"} <= set(record)
    assert record["validation_attack"].startswith("PGD(") and "steps=1," in record["validation_attack"]
    assert record["processes"] == 1 and record["steps"] == 12 and record["precision"] == "float32"
    assert record["seconds"] > record["first_step_seconds"] > 0 and record["images_per_second"] > 0
    assert record["last"] == run.metrics()[-1] and record["best"] in run.metrics()
    timing = [json.loads(row) for row in (run.folder / "timing.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in timing] == [1, 2, 3] and all(row["steps"] == 4 for row in timing)
    assert sum(row["seconds"] for row in timing) == pytest.approx(record["seconds"])
    log = (run.folder / "log.txt").read_text()
    assert "cross_bn in 3 layers: adv images: normalized by clean, feed adv, scaled by adv" in log
    assert "epoch   3  loss " in log and "held out: clean" in log and "finished after" in log


def test_the_clock_keeps_the_first_steps_apart(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("advnorm.training.journal.time.perf_counter", lambda: now[0])
    clock = Clock(torch.device("cpu"))
    for seconds in (10, 2, 2, 2, 2, 1, 1, 1):
        now[0] += seconds
        clock.step()
    clock.stop()
    now[0] += 100  # validation
    clock.start()
    now[0] += 1
    clock.step()
    clock.stop()
    assert clock.first_step == 10 and clock.total == 22 and clock.steps_per_second() == 1.0


def test_tensorboard_gets_the_numbers_of_every_epoch(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train(small(epochs=2), tmp_path, tensorboard=True)
    events = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2]
    assert "held_out/clean" in events.Tags()["scalars"]


def test_events_of_a_run_that_goes_on_are_dropped_from_where_it_does(tmp_path, monkeypatch):
    class Board:
        def __init__(self, _folder, purge_step):
            purged.append(purge_step)

        def add_scalar(self, name, _value, epoch):
            epochs.extend([epoch] if name == "loss" else [])

        def close(self):
            pass

    purged, epochs, run = [], [], None
    monkeypatch.setattr("advnorm.training.journal._summary_writer", lambda: Board)
    config = small(objective="standard", epochs=2, validate_every=0)
    while run is None or not run.finished:
        run = train(config, tmp_path, tensorboard=True, max_minutes=0)
    assert purged == [1, 1, 1, 1, 2, 2, 2, 2] and epochs == [1, 2]


# -- stopping before the end -------------------------------------------------------------------------------------------


def test_max_minutes_stops_at_a_checkpoint_and_the_same_call_goes_on(tmp_path):
    config = small(norm="dual_bn", ema=0.9)
    codes = []
    for _ in range(50):
        run = train(config, tmp_path, max_minutes=0)
        codes.append(run.finished)
        if run.finished:
            break
        with pytest.raises(ConfigError, match="not finished; the same train command"):
            _ = run.record
    assert codes == [False] * 14 + [True], "a step at a time, or an epoch that is judged: 12 steps and 3 epochs"
    alone = train(config, tmp_path / "alone")
    assert state(run) == state(alone)


def test_the_clock_of_a_run_that_goes_on_does_too(tmp_path):
    config, clocks, run = small(objective="standard", epochs=2, validate_every=0), [], None
    while run is None or not run.finished:
        run = train(config, tmp_path, max_minutes=0)
        clocks.append(checkpoint.load(run.checkpoints, "last")[1]["clock"])
    totals = [clock["total"] for clock in clocks]
    assert len(totals) == 8 and all(before < after for before, after in pairwise(totals))
    assert {clock["first_step"] for clock in clocks} == {run.record["first_step_seconds"]}
    assert run.record["seconds"] == totals[-1]


def test_a_stop_does_not_wait_until_the_held_out_images_are_judged(tmp_path, monkeypatch):
    config = small(norm="dual_bn", ema=0.9, validation_attack="pgd3")
    asked = []

    def told(loop) -> bool:  # in the midst of the second epoch's attack
        asked.append(loop.state.step)
        return asked.count(8) == 3

    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "_interrupts_validation", told)
        run = train(config, tmp_path)
    assert not run.finished and len(run.metrics()) == 1 and asked.count(8) == 3
    assert "stopped in the validation of epoch 2 of 3" in (run.folder / "log.txt").read_text()
    assert checkpoint.load(run.checkpoints, "last")[1]["step"] == 8
    assert state(train(config, tmp_path)) == state(train(config, tmp_path / "alone"))


@pytest.mark.parametrize("statistics", ["running", "batch", "batch_frozen"])
def test_judging_held_out_images_leaves_no_trace_in_the_model(tmp_path, statistics):
    models = []
    for every in (0, 1):
        config = small(
            attack={"steps": 1, "statistics": statistics}, validation_attack="training", validate_every=every
        )
        models.append(train(config, tmp_path / str(every)).model("last").state_dict())
    assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())


@pytest.mark.parametrize("lost", ["a line", "half a line", "all"])
def test_metrics_that_a_loss_of_power_took_come_back(tmp_path, lost):
    config, alone = small(), train(small(), tmp_path / "alone")
    run = Run(str(tmp_path / alone.folder.name))  # a name does as well as a path
    while len(run.metrics()) < 2:
        train(config, tmp_path, max_minutes=0)
    path = run.folder / "metrics.jsonl"
    whole = path.read_bytes()
    kept = {"a line": whole[: whole[:-1].rfind(b"\n") + 1], "half a line": whole[:-9], "all": b"\0" * len(whole)}
    path.write_bytes(kept[lost])
    timing = run.folder / "timing.jsonl"
    timing.write_bytes(timing.read_bytes() + b'{"epoch": 3, "steps"')
    train(config, tmp_path)
    assert path.read_bytes() == (alone.folder / "metrics.jsonl").read_bytes()
    assert [json.loads(row)["epoch"] for row in timing.read_text().splitlines()] == [1, 2, 3]


def test_a_run_that_goes_on_only_to_be_recorded_has_the_record_of_one_left_alone(tmp_path, monkeypatch):
    config = small(norm="bn", objective="classical", running_epochs=1, eps_warmup_epochs=3)
    alone = train(config, tmp_path / "alone").record

    def full(*_) -> None:
        raise OSError(28, "No space left")

    with monkeypatch.context() as patch:
        patch.setattr(loop_module, "write_json", full)
        with pytest.raises(TrainingError, match="No space left"):
            train(config, tmp_path)
    found = train(config, tmp_path).record
    seconds = ("seconds", "first_step_seconds", "images_per_second")
    assert {k: v for k, v in found.items() if k not in seconds} == {k: v for k, v in alone.items() if k not in seconds}
    assert all(found[name] > 0 for name in seconds)


def test_a_run_that_another_process_finished_meanwhile_is_not_recorded_again(tmp_path, monkeypatch):
    run = train(small(), tmp_path)
    record = (run.folder / "record.json").read_bytes()
    seen = iter([False, True])
    with monkeypatch.context() as patch:
        patch.setattr(Run, "finished", property(lambda _: next(seen, True)))
        patch.setattr(TrainingLoop, "run", lambda *_, **__: pytest.fail("it was trained again"))
        train(small(), tmp_path)
    assert (run.folder / "record.json").read_bytes() == record


def test_the_record_tells_every_place_that_a_run_was_computed_in(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        real = loop_module.environment
        patch.setattr(loop_module, "environment", lambda device: {**real(device), "torch": "2.11.0"})
        for _ in range(3):
            train(small(), tmp_path, max_minutes=0)
    pieces = train(small(), tmp_path).record["pieces"]
    assert [(piece["from_step"], piece["torch"]) for piece in pieces] == [(0, "2.11.0"), (3, torch.__version__)]
    assert all({"device", "commit", "advnorm", "processes"} <= piece.keys() for piece in pieces)


@pytest.mark.parametrize("scope", [torch.no_grad, torch.inference_mode])
def test_training_works_where_the_caller_takes_no_gradients(tmp_path, scope):
    with scope():
        run = train(small(epochs=1), tmp_path)
    assert run.metrics() == train(small(epochs=1), tmp_path / "plain").metrics()


def test_an_interrupt_leaves_the_last_checkpoint_and_the_lock_is_free(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "train_step", TrainingLoop.train_step)
        patched(TrainingLoop, "train_step", before=interrupt, at=6)
        with pytest.raises(KeyboardInterrupt):
            train(small(), tmp_path)
    run = Run.open(next(tmp_path.iterdir()))
    assert checkpoint.load(run.checkpoints, "last")[1]["step"] == 4
    assert train(small(), tmp_path).metrics() == train(small(), tmp_path / "alone").metrics()


def test_a_first_interrupt_waits_for_a_checkpoint_and_a_second_one_does_not(tmp_path, monkeypatch):
    def interrupts(times):
        return lambda *_: [os.kill(os.getpid(), signal.SIGINT) for _ in range(times)]

    step = TrainingLoop.train_step
    for times, saved in ((1, 6), (2, 4)):
        monkeypatch.setattr(TrainingLoop, "train_step", step)
        patched(TrainingLoop, "train_step", before=interrupts(times), at=6)
        with pytest.raises(KeyboardInterrupt):
            train(small(), tmp_path / str(times))
        run = Run.open(next((tmp_path / str(times)).iterdir()))
        assert checkpoint.load(run.checkpoints, "last")[1]["step"] == saved
        assert ("stopped at step 6" if times == 1 else "failed: Key") in (run.folder / "log.txt").read_text()
        monkeypatch.setattr(TrainingLoop, "train_step", step)
        assert train(small(), tmp_path / str(times)).finished


ON_DISK = {"data": {"name": "imagefolder", "image_size": 8}, "held_out": 4, "batch_size": 10, "augment": "flip"}


def images_on_disk(folder: Path) -> Path:
    from PIL import Image

    for number in range(24):
        path = folder / "train" / f"class{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 200 * (number % 2), 7)).save(path)
    return folder


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, PREEMPTED), (signal.SIGINT, 130)])
def test_a_signal_to_the_whole_process_group_stops_at_a_checkpoint(tmp_path, number, status):
    folder = images_on_disk(tmp_path / "images")
    (tmp_path / "run.yaml").write_text(small(**ON_DISK, epochs=10_000, name="grouped").to_yaml())
    command = [sys.executable, "-m", "advnorm", "train", "run.yaml", "--data-dir", str(folder), "--workers", "2"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        while not lines[-1].startswith("epoch   2  "):
            lines.append(process.stdout.readline())
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == status, out + err
    assert "Traceback" not in err and "same command" in out
    assert lines[0].strip() == "run: runs/grouped-seed0", "what is going on is told without a terminal too"
    assert "20000 steps of" in lines[2] and [line[:11] for line in lines[-2:]] == ["epoch   1  ", "epoch   2  "]
    assert checkpoint.exists(tmp_path / "runs/grouped-seed0/checkpoints", "last")


def test_images_on_disk_train_and_go_on_like_those_in_memory(tmp_path):
    config = small(**ON_DISK, epochs=1)
    settings = {"data_dir": images_on_disk(tmp_path / "images"), "workers": 1}
    alone = train(config, tmp_path / "alone", **settings)
    run = train(config, tmp_path, max_minutes=0, **settings)
    assert not run.finished and checkpoint.load(run.checkpoints, "last")[1]["step"] == 1
    assert state(train(config, tmp_path, **settings)) == state(alone)


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_ends_the_run_before_a_checkpoint_holds_it(tmp_path):
    config = small(norm="dual_bn", lr=1e30)
    with raises_problem("not_finite", kind=TrainingError):
        train(config, tmp_path, checkpoint_minutes=0)
    run = Run.open(next(tmp_path.iterdir()))
    if checkpoint.exists(run.checkpoints, "last"):
        assert all(value.isfinite().all() for value in tensors(run).values())
    assert not run.finished and not [row for row in run.metrics() if not math.isfinite(row["loss"])]
    assert "failed: the loss or a parameter is not finite" in (run.folder / "log.txt").read_text().splitlines()[-1]


def test_parameters_that_are_not_finite_are_found_though_the_loss_was(tmp_path, monkeypatch):
    def spoil(loop, *_):
        next(loop.model.parameters()).data.view(-1)[0] = math.nan

    monkeypatch.setattr(TrainingLoop, "_check_finite", TrainingLoop._check_finite)
    patched(TrainingLoop, "_check_finite", before=spoil, at=2)
    with pytest.raises(TrainingError, match="step 8 of 12"):
        train(small(), tmp_path)
    run = Run.open(next(tmp_path.iterdir()))
    assert checkpoint.load(run.checkpoints, "last")[1]["step"] == 4 and len(run.metrics()) == 1
    assert all(value.isfinite().all() for value in tensors(run).values())


def test_too_little_memory_is_told_with_the_cure(tmp_path, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nlong advice")

    monkeypatch.setattr(TrainingLoop, "train_step", TrainingLoop.train_step)
    patched(TrainingLoop, "train_step", before=full, at=5)
    with pytest.raises(TrainingError, match="out of memory: .*9 GiB.; lower batch_size") as raised:
        train(small(), tmp_path)
    assert "long advice" not in str(raised.value)
    assert checkpoint.load(next(tmp_path.iterdir()) / "checkpoints", "last")[1]["step"] == 4


FULL_DISK = """
import resource, sys
import advnorm
from support.train_worker import CASES
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
try:
    advnorm.train(CASES["hybrid"], out=sys.argv[1], device="cpu")
except advnorm.AdvnormError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("limit", [2000, 20_000], ids=["the description", "the checkpoint"])
def test_a_full_disk_is_one_readable_error_and_the_run_goes_on_later(tmp_path, limit):
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([SOURCE, str(Path(__file__).parent.parent)])}
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path), str(limit)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert re.match(r"(CheckpointError|TrainingError) .*(File too large).*intact", done.stdout), done.stdout
    run = train(train_worker.CASES["hybrid"], tmp_path)
    assert run.finished and len(run.metrics()) == 3


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"held_out": 64}, {}, "held_out must be a share"),
        ({"batch_size": 60}, {}, "batch_size 60 is larger than the 48 images"),
        ({"data": "cifar10"}, {}, "--data-dir"),
        ({"data": "cifar10"}, {"data_dir": "missing"}, "cifar"),
        ({"weights": "missing.safetensors"}, {}, "weights missing.safetensors: no such file or folder"),
        ({"weights": "."}, {}, "no training run"),
        ({"model": "vgg11"}, {}, "vgg11 with norm bn cannot take 12 images of 1×8×8: .*use another model"),
        ({"model": {"name": "resnet18", "width": 0.05}, "norm": "in"}, {}, "one value per group"),
        (
            {"model": {"name": "resnet18", "width": 0.05}, "batch_size": 1, "objective": "standard"},
            {},
            "cannot take 1 images",
        ),
        (
            {
                "model": {"name": "resnet18", "width": 0.05},
                "objective": "standard",
                "second_pass": {"name": "apart", "groups": 12},
            },
            {},
            "second_pass apart cannot take 12 images: .*change second_pass.samples, second_pass.groups",
        ),
        ({"regularizer": {"name": "ligs", "shift": "fgsm", "size": 2}}, {}, "size must lie in pixel scale"),
        ({}, {"device": "cuda"}, "device 'cuda:0' is not available"),
        ({}, {"device": "tpu"}, "unknown device 'tpu'"),
        ({}, {"max_minutes": -1, "checkpoint_minutes": math.nan}, "max_minutes .* got -1; checkpoint_minutes"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_is_told_before_anything_is_made(tmp_path, monkeypatch, settings, options, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=message) as raised:
        advnorm.train(small(**settings), **{"out": "runs", "device": "cpu", **options})
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_else_is_refused_and_stays_as_it_is(tmp_path):
    run = train(small(epochs=1, name="mine"), tmp_path)
    content = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"holds another run, which differs in lr \(0\.1, now 0\.2\)"):
        train(small(epochs=1, name="mine", lr=0.2), tmp_path)
    other = {**SMALL["data"], "seed": 1}
    with pytest.raises(ConfigError, match="data fingerprint"):
        train(small(epochs=1, name="mine", data=other), tmp_path)
    assert content == {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    foreign = tmp_path / "foreign-seed0"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match=r"holds no training run, but thesis\.tex"):
        train(small(epochs=1, name="foreign"), tmp_path)
    (tmp_path / "file-seed0").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        train(small(epochs=1, name="file"), tmp_path)
    assert sorted(path.name for path in foreign.iterdir()) == ["thesis.tex"]
    with pytest.raises(ConfigError, match="no training run"):
        Run.open(foreign)


def test_two_trainings_into_one_folder_at_once_are_refused(tmp_path, monkeypatch):
    errors = []

    def second(*_):
        thread = threading.Thread(target=meanwhile)
        thread.start()
        thread.join()

    def meanwhile():
        try:
            train(small(), tmp_path)
        except ConfigError as error:
            errors.append(str(error))

    monkeypatch.setattr(TrainingLoop, "train_step", TrainingLoop.train_step)
    patched(TrainingLoop, "train_step", before=second, at=2)
    assert train(small(), tmp_path).finished
    assert len(errors) == 1 and "another process is writing" in errors[0]


# -- the command -------------------------------------------------------------------------------------------------------


def arguments(tmp_path: Path, *more: str) -> list[str]:
    path = tmp_path / "small.yaml"
    path.write_text(small(name="small").to_yaml())
    return ["train", str(path), "--out", str(tmp_path / "runs"), "--device", "cpu", *more]


def test_a_run_that_goes_on_says_so(tmp_path, capfd):
    for _ in range(2):
        train(small(), tmp_path, max_minutes=0, progress=True)
    assert "resuming from step 1 of 12" in capfd.readouterr().out


def test_the_command_trains_stops_with_75_and_goes_on(tmp_path):
    stopped = CliRunner().invoke(app, arguments(tmp_path, "--max-minutes", "0"))
    assert stopped.exit_code == PREEMPTED and "stopped" in stopped.output
    done = CliRunner().invoke(app, arguments(tmp_path))
    assert done.exit_code == 0, done.output
    assert done.output.startswith("run: ") and done.output.count("\nepoch ") == 3
    assert "best: epoch" in done.output and "advnorm evaluate" in done.output
    again = CliRunner().invoke(app, ["train", str(tmp_path / "runs/small-seed0/config.yaml"), "--out", str(tmp_path)])
    assert again.exit_code == 0
    assert Run(tmp_path / "small-seed0").metrics() == Run(tmp_path / "runs/small-seed0").metrics()


def test_the_command_that_judges_works_as_it_is_printed(tmp_path):
    settings = ["norm=dual_bn", "data=imagefolder", "data.image_size=8", "held_out=4", "batch_size=10", "epochs=1"]
    folder = images_on_disk(tmp_path / "my images")
    (folder / "test").symlink_to("train")
    trained = arguments(tmp_path, "--data-dir", str(folder), "--workers", "0", "--set", *settings)
    done = CliRunner().invoke(app, list(trained))
    assert done.exit_code == 0, done.output
    words = shlex.split(done.output[done.output.index("judge it: ") :])[2:]
    assert words[:2] == ["advnorm", "evaluate"] and words[-2:] == ["--data-dir", str(folder)]
    judged = CliRunner().invoke(app, [*words[1:], "--attacks", "fgsm", "--device", "cpu"])
    assert judged.exit_code == 0, judged.output
    assert "branches: clean, adv; --route chooses" in judged.output


def test_the_command_speaks_of_its_own_options(tmp_path):
    for more, words in (((), "--data-dir"), (("--data-dir", str(tmp_path)), "--download")):
        out = CliRunner().invoke(app, list(arguments(tmp_path, *more, "--set", "data=cifar10")))
        assert isinstance(out.exception, ConfigError)
        assert words in str(out.exception)
    run = train(small(epochs=1), tmp_path)
    out = CliRunner().invoke(app, ["train", str(run.folder)])
    assert f"{run.folder} is a folder; its configuration is {run.folder}/config.yaml" in str(out.exception)


def test_a_bad_command_is_one_line_with_status_2_and_makes_nothing(tmp_path):
    command = [sys.executable, "-m", "advnorm", "train", "--set", "norm=dualbn", "epochs=0", "--out", "runs"]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: bad configuration: unknown norm 'dualbn', did you mean 'dual_bn'?; epochs")
    assert done.stderr.count("\n") == 1 and list(tmp_path.iterdir()) == []


def terminal(command: list[str], cwd: Path, act) -> tuple[int, str]:
    """Run a command in a terminal of 80 columns; ``act(process, text so far)`` may send signals."""
    lead, follow = pty.openpty()
    environment = {**ENVIRONMENT, "COLUMNS": "80", "LINES": "24", "TERM": "xterm-256color"}
    process = subprocess.Popen(command, cwd=cwd, env=environment, stdout=follow, stderr=follow, stdin=follow)
    os.close(follow)
    text, end = b"", time.monotonic() + 120
    while time.monotonic() < end:
        if select.select([lead], [], [], 0.1)[0]:
            try:
                text += os.read(lead, 65536)
            except OSError:
                break
        act(process, text.decode(errors="replace"))
    os.close(lead)
    return process.wait(timeout=30), text.decode()


def plain(text: str) -> str:
    """Without the codes that move the cursor and set colours."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_the_bar_fits_into_80_columns_and_an_interrupt_leaves_the_terminal_fine(tmp_path):
    def interrupt(process, text):
        if "left" in re.sub(r"-:--:-- left", "", plain(text)) and not sent:
            sent.append(process.send_signal(signal.SIGINT))

    sent: list[None] = []
    settings = ["norm=dual_bn", "epochs=400", "objective.kl_weight=1"]
    command = [sys.executable, "-m", "advnorm", *arguments(tmp_path, "--set", *settings)]
    code, text = terminal(command, tmp_path, interrupt)
    assert code == 130, text
    assert text.count("\x1b[?25h") == text.count("\x1b[?25l") == 1, "the cursor is hidden and shown again"
    lines = re.split(r"[\r\n]+", plain(text))
    assert max(map(len, lines)) <= 80 and "…" not in text
    bars = [part for part in lines if "left" in part]
    assert re.search(r"epoch \d+/400 .* +\d+/1600 \d:\d\d:\d\d left", bars[-1]), bars[-1]
    assert re.search(
        r"[\d,]+ images/s  loss \d\.\d{3}  clean_ce \d\.\d{3}  adv_ce \d\.\d{3}  kl \d\.\d{3}  clean \d+\.\d%",
        plain(text),
    )
    assert not [part for part in lines if re.fullmatch(r".*[a-z_]+ *", part) and "loss" in part], "a name at its end"
    assert "interrupted; " in text


def test_a_line_of_the_log_is_for_people():
    row = {"epoch": 7, "step": 70, "lr": 0.1, "loss": 1.23456, "adv_ce": 2.0, "adv_accuracy": 0.5}
    assert format_epoch(row, 5.25) == "epoch   7  loss 1.235  adv_ce 2.000  adv 50.0%  | 5.2 s"
    row["held_out"] = {"clean": 0.9, "pgd10": 0.4, "score": 1.3}
    assert format_epoch(row, 5.25).endswith("adv 50.0%  | held out: clean 90.0%  pgd10 40.0%  | 5.2 s")


def test_metrics_that_were_cut_short_are_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 1}\n{"epo')
    assert Run(tmp_path).metrics() == [{"epoch": 1}]
    assert Run(tmp_path / "none").metrics() == []
    journal = Journal(tmp_path, active=True)
    (tmp_path / "timing.jsonl").write_text('{"epoch": 1}\n{"ep')
    journal.restore([{"epoch": 1}])
    assert (tmp_path / "metrics.jsonl").read_text() == '{"epoch": 1}\n'
    assert (tmp_path / "timing.jsonl").read_text() == '{"epoch": 1}\n'


def test_a_closed_standard_output_does_not_stop_a_training(tmp_path):
    settings = [
        f"{key}={value}" for key, value in {"epochs": 1, "eps": 0.1, "attack.steps": 1, "name": "quiet"}.items()
    ]
    command = [sys.executable, "-m", "advnorm", "train", "--set", *settings, "--out", str(tmp_path), "--device", "cpu"]
    shell = ["sh", "-c", f"{shlex.join(command)} >&-"]
    done = subprocess.run(shell, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.returncode == 0 and Run(tmp_path / "quiet-seed0").finished, done.stderr
