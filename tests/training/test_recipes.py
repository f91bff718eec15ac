"""Every recipe is a valid configuration and trains, here two steps on small images with a thin network."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from advnorm.config import load_config
from support.small_runs import train

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
SMALL = [
    "data.name=synthetic",
    "data.size=24",
    "data.classes=10",
    "data.image_size=32",
    "data.channels=3",
    "held_out=8",
    "batch_size=8",
    "epochs=1",
    "validate_every=1",
    "attack.steps=1",
    "model.width=0.125",
]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_valid_and_trains_two_steps(path, tmp_path):
    recipe = load_config(path)
    run = train(load_config(path, SMALL), tmp_path)
    (row,) = run.metrics()
    assert row["step"] == 2 and torch.tensor(row["loss"]).isfinite()
    assert run.config.objective == recipe.objective and run.config.norm == recipe.norm
