"""Laws of growth: the fit against NumPy's least squares and against laws that hold exactly."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from advnorm.bench.growth import Law, fit, fit_laws

RECORDS = Path(__file__).parents[2] / "results" / "bench"


def row(seconds: float, *, memory: float | None = None, **settings: object) -> dict:
    """A row of a record whose step takes these seconds."""
    fixed = {"model": "small_cnn", "mode": "eager", "batch_size": 8, "attack_steps": 10, "image_size": 32}
    conditions = {**fixed, "processes": 1, "settings": {}, **settings}
    return {**conditions, "images_per_second": conditions["batch_size"] / seconds, "memory": memory}


def test_exact_laws_are_found_again():
    x = [32.0, 64.0, 128.0, 224.0]
    assert fit(x, [0.003 * value**1.7 for value in x], "power") == pytest.approx((0.003, 1.7, 0), abs=1e-12)
    assert fit(x, [5 + 0.25 * value for value in x], "affine") == pytest.approx((5, 0.25, 0), abs=1e-12)


def test_a_fit_minimizes_the_squared_relative_errors():
    generator = np.random.default_rng(0)
    x = np.array([1.0, 2.0, 5.0, 10.0, 20.0])
    y = (3 + 2 * x) * np.exp(0.1 * generator.standard_normal(5))
    a, b, error = fit(x, y, "affine")
    (expected, slope), *_ = np.linalg.lstsq(np.stack([1 / y, x / y], 1), np.ones(5))
    assert (a, b) == pytest.approx((expected, slope))
    assert error == pytest.approx(np.abs((expected + slope * x) / y - 1).max()) and error > 0.01
    a, b, error = fit(x, y, "power")
    (log_a, expected), *_ = np.linalg.lstsq(np.stack([np.ones(5), np.log(x)], 1), np.log(y))
    assert (a, b) == pytest.approx((np.exp(log_a), expected))
    assert error == pytest.approx(np.abs(np.exp(log_a) * x**expected / y - 1).max())


def test_every_setting_with_three_values_has_a_law_with_the_others_fixed():
    rows = [row(0.1 + 0.02 * steps, attack_steps=steps) for steps in (1, 5, 10)]
    rows += [row(1e-4 * size**2, image_size=size, memory=3.0 * size, mode="compiled") for size in (64, 32, 224)]
    rows += [row(0.3 * width**1.5, settings={"model.width": width, "norm": "bn"}) for width in (0.5, 1, 2)]
    rows += [row(8 / 2**count, processes=2**count, settings={"norm": "ln"}) for count in (0, 1)]  # two values: no law
    laws = {(law.axis, law.quantity): law for law in fit_laws(rows)}
    assert len(laws) == len(fit_laws(rows)) == 4
    steps, width = laws["attack_steps", "seconds"], laws["model.width", "seconds"]
    sizes = [laws["image_size", "seconds"], laws["image_size", "memory"]]
    assert (steps.form, steps.a, steps.b) == ("affine", pytest.approx(0.1), pytest.approx(0.02))
    assert [(law.axis, law.quantity, law.a, law.b) for law in sizes] == [
        ("image_size", "seconds", pytest.approx(1e-4), pytest.approx(2)),
        ("image_size", "memory", pytest.approx(3), pytest.approx(1)),
    ]
    assert sizes[0].values == (32, 64, 224)
    assert sizes[0].fixed["mode"] == "compiled" and "image_size" not in sizes[0].fixed
    assert (width.axis, width.b, width.fixed["norm"]) == ("model.width", pytest.approx(1.5), "bn")
    assert sizes[0].formula == "ms = 0.1 · x^2.00" and steps.formula == "ms = 100 + 20 · x"


def test_two_values_have_no_law_however_often_they_were_measured():
    assert fit_laws([row(seconds, attack_steps=steps) for seconds, steps in ((0.1, 1), (0.2, 5), (0.21, 5))]) == []


def test_in_a_grid_every_law_has_one_value_of_the_other_setting():
    sizes, steps = (8, 16, 32), (1, 5, 10)
    rows = [row(0.01 * size * (1 + count), batch_size=size, attack_steps=count) for size in sizes for count in steps]
    laws = fit_laws(rows)
    along = {
        axis: [(law.fixed[other], law.a, law.b) for law in laws if law.axis == axis]
        for axis, other in (("batch_size", "attack_steps"), ("attack_steps", "batch_size"))
    }
    assert along["batch_size"] == [(count, pytest.approx(0.01 * (1 + count)), pytest.approx(1)) for count in steps]
    assert along["attack_steps"] == [(size, pytest.approx(0.01 * size), pytest.approx(0.01 * size)) for size in sizes]


def test_settings_that_are_no_sizes_have_no_law():
    seeds = [row(1.0, settings={"seed": seed, "eps": 0.1 * seed, "data.bias": seed - 1}) for seed in range(3)]
    zero = [row(1.0, settings={"model.width": width}) for width in (0, 1, 2)]
    assert fit_laws([*seeds, *zero]) == []


def test_the_first_number_in_a_name_is_the_depth():
    names = {"wrn_10_2": 10, "wrn_16_2": 16, "wrn_28_2": 28}
    [law] = fit_laws([row(0.01 * depth, model=name) for name, depth in names.items()])
    assert (law.axis, law.fixed["model"], law.b) == ("depth", "wrn_N_2", pytest.approx(1))
    assert fit_laws([row(1, model=name) for name in ("resnet18", "vgg16", "wrn_28_10")]) == []


def test_older_records_have_laws_too():
    rows = [
        row
        for name in ("growth_h200_steps", "train_h200")
        for row in json.loads((RECORDS / f"{name}.json").read_text())["rows"]
        if row["mode"] == "compiled" and row["batch_size"] == 512
    ]
    assert {law.axis for law in fit_laws(rows)} == {"attack_steps"}
    assert all(isinstance(law, Law) and law.error < 0.2 for law in fit_laws(rows))
