"""Every recipe is a valid configuration and trains, here two steps on small images with a thin network."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from advnorm.bench.recipe import plan_variants
from advnorm.config import load_config
from advnorm.training.cost import passes
from support.small_runs import train

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
SMALL = [
    "data={name: synthetic, size: 24, classes: 10, image_size: 32, channels: 3}",
    "held_out=8",
    "batch_size=8",
    "epochs=1",
    "warmup_epochs=0",
    "steps_warmup_epochs=0",
    "second_pass_warmup_epochs=0",
    "validate_every=1",
    "attack.steps=1",
]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_valid_and_trains_two_steps(path, tmp_path):
    recipe = load_config(path)
    small = SMALL if recipe.model.name.startswith("timm:") else [*SMALL, "model.width=0.125"]
    run = train(load_config(path, [*small, f"monitor={min(4, recipe.monitor)}"]), tmp_path)
    (row,) = run.metrics()
    assert row["step"] == 2 and torch.tensor(row["loss"]).isfinite()
    assert run.config.objective == recipe.objective and run.config.norm == recipe.norm
    assert run.config.second_pass == recipe.second_pass and ("monitor" in row) == bool(recipe.monitor)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_what_an_image_costs(path):
    """The number of passes in its comment, which is the cost after all warm-ups."""
    found = re.search(r"(?:(\d+) passes per image and epoch\.| = (\d+); pgd_at)", path.read_text())
    if found is not None:
        assert passes(load_config(path)) == int(found[1] or found[2])
    assert found is not None or path.stem in ("cifar10_eps16", "advprop_imagenette")


def test_the_variants_that_the_speedrun_names_are_valid():
    path = next(path for path in RECIPES if path.stem == "speedrun")
    words = shlex.split(re.sub(r"\n#", " ", path.read_text().partition("# advnorm")[2].partition("\nmodel:")[0]))
    variants = words[words.index("--variant") + 1 :]
    assert len(plan_variants(path, [], variants)) == len(variants) + 1 > 5


def test_recipes_choose_by_held_out_images():
    for path in RECIPES:
        recipe = load_config(path)
        assert recipe.held_out and recipe.validate_every, path.stem
