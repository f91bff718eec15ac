"""The monitor of training: it warns of false robustness and of one-step overfitting, and is silent otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from advnorm import Config, attacks
from advnorm.evaluation.report_data import collect_results
from advnorm.report.runs import build_runs_page
from advnorm.training import validation
from advnorm.training.monitor import describe_alarm
from support.problems import raises_problem
from support.small_runs import small, train

DIGITS = {
    "model": "small_cnn",
    "data": "digits",
    "held_out": 200,
    "monitor": 200,
    "augment": "none",
    "eps": 0.3,
    "batch_size": 128,
    "schedule": "one_cycle",
    "lr": 0.2,
    "precision": "float32",
}


def monitored(tmp_path, training_data=None, **settings):
    config = Config.from_dict({**DIGITS, "validate_every": settings["epochs"], **settings})
    run = train(config, tmp_path, data=training_data)
    return run, run.metrics()[-1]["monitor"], (run.folder / "log.txt").read_text()


def two_cues(n=1400, size=8):
    """Images of four classes with a large pattern that is right for 62.5 % of them, and a faint one that always is.

    An attack at 16/255 removes the faint pattern (12/255) and not the large one (48/255). Clean accuracy needs the
    faint pattern, and robustness must ignore it. A single branch can only seem to do both, by hiding its gradients.
    """
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(n) % 4
    large = torch.nn.functional.interpolate(torch.eye(4).reshape(4, 1, 2, 2) * 2 - 1, size=(size, size))
    faint = torch.rand((4, 1, size, size), generator=generator).sub(0.5).sign()
    shown = torch.where(torch.rand(n, generator=generator) < 0.5, y, torch.randint(4, (n,), generator=generator))
    noise = torch.randn((n, 1, size, size), generator=generator)
    return (128 + 48 * large[shown] + 12 * faint[y] + noise) / 255, y


@pytest.mark.parametrize("seed", [0, 1])
def test_hybrid_training_at_16_255_is_flagged_with_a_single_bn_and_silent_with_a_dual_one(seed, tmp_path):
    settings = {"eps": "16/255", "attack": {"steps": 3, "step_size": "8/255"}, "epochs": 30, "seed": seed}
    runs = {
        norm: monitored(tmp_path / norm, objective="hybrid", norm=norm, training_data=two_cues(), **settings)
        for norm in ("bn", "dual_bn")
    }
    run, single, log = runs["bn"]
    assert single["alarm"] == 1 and single["pgd10"] > 0.2 and single["quick"] < 0.1
    assert "warning: false robustness" in log and "| monitor: training attack" in log
    (table,) = monitor_tables(tmp_path / "bn")
    assert table["rows"] == [
        [f"{run.folder.name}, epoch 30"],
        [single["training"], single["pgd10"], single["quick"]],
    ]
    run, dual, log = runs["dual_bn"]
    assert dual["alarm"] == 0 and dual["quick"] > 0.5 and run.metrics()[-1]["held_out"]["clean"] > 0.9
    assert "warning" not in log and not monitor_tables(tmp_path / "dual_bn")


def monitor_tables(folder):
    tables = build_runs_page(collect_results(folder))["tables"]
    return [table for table in tables if table["title"] == "Warnings of the monitor"]


RECORDS = sorted(
    path
    for study in ("A/table2", "A/table3", "A/table8", "C/table1")
    for path in (Path(__file__).parents[2] / "results" / "records" / study).rglob("*.json")
)


@pytest.mark.parametrize("images", [200, 10_000])
@pytest.mark.parametrize("path", RECORDS, ids=lambda path: "/".join(path.parts[-5:-1]) + path.stem)
def test_on_cifar10_only_the_single_bn_of_paper_a_at_16_255_is_flagged(path, images):
    """The networks of paper C differ little under PGD-10 and AutoAttack, although their norm is a single BN."""
    record = json.loads(path.read_text())
    values = record["values"]
    for branch in {key.split("/")[0] for key in values}:
        found = {name: values[f"{branch}/{name}"] / 100 for name in ("pgd10", "autoattack")}
        flagged = describe_alarm(found, "autoattack", images) is not None
        assert flagged == (record["study"] == "A/table3" and record["cell"] == "single/eps16"), (branch, found)


def test_there_are_records_of_both_norms():
    assert {"single", "dual_bn"} <= {path.parts[-3] for path in RECORDS}


def test_one_step_training_that_collapses_is_flagged(tmp_path):
    attack = {"steps": 1, "step_size": 0.3, "start": "clean"}
    _, found, log = monitored(tmp_path, objective="classical", norm="bn", attack=attack, epochs=25)
    assert found["alarm"] == 1 and found["training"] - found["quick"] > 0.3
    assert "warning: " in log


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        ({"pgd10": 0.30, "quick": 0.0}, "false"),
        ({"pgd10": 0.30, "quick": 0.08, "training": 0.32}, None),  # 0.25 left, with slack 0.31
        ({"pgd10": 0.01, "quick": 0.0, "training": 0.9}, "catastrophic"),
        ({"pgd10": 0.12, "quick": 0.0, "training": 0.12}, None),
        ({"pgd10": 0.52, "quick": 0.44, "training": 0.55}, None),
        ({"pgd10": 0.0, "quick": 0.0}, None),
    ],
)
def test_the_rule_needs_a_gap_and_a_small_rest(found, kind):
    text = describe_alarm(found, "quick", 100)
    assert (text is None) if kind is None else text.startswith(kind)
    for slack in (1, 2):
        more = {**found, "quick": found["quick"] + slack / 100}
        assert kind is not None or describe_alarm(more, "quick", 100) is None


@pytest.mark.parametrize(
    ("settings", "code", "field"),
    [
        ({"monitor": 8, "validate_every": 0}, "conflict", "monitor"),
        ({"monitor_attack": "pgd50"}, "conflict", "monitor_attack"),
        ({"monitor": 8, "monitor_attack": "quik"}, "unknown_name", "monitor_attack.attack"),
        ({"monitor": -1}, "out_of_range", "monitor"),
        ({"monitor": 17, "held_out": 16}, "conflict", "monitor"),
    ],
)
def test_wrong_settings_are_reported_before_training(settings, code, field):
    with raises_problem(code, field):
        small(**settings)


def test_every_validation_has_the_monitors_numbers(tmp_path):
    run = train(small(monitor=8, epochs=2), tmp_path)
    assert all(0 <= row["monitor"]["quick"] <= 1 and row["monitor"]["alarm"] in (0, 1) for row in run.metrics())


def test_the_monitor_forwards_no_clean_images(tmp_path, monkeypatch):
    """Validation has counted them: each validation of the monitor only predicts the attacked images."""
    routes = []

    def predicting(model, *, route):
        routes.append(route)
        return attacks.predicting(model, route=route)

    monkeypatch.setattr(validation, "predicting", predicting)
    train(small(objective="hybrid", norm="dual_bn", monitor=8, epochs=1), tmp_path)
    assert routes == ["adv", "clean", "adv", "adv", "adv"]
