"""Combinations of settings."""

import pytest

from advnorm import Config
from advnorm.config.sweep import sweep_configs
from support.problems import raises_problem


def test_every_combination_is_made_and_the_last_setting_varies_fastest():
    found = sweep_configs(Config(epochs=3), ["norm=bn,dual_bn", "eps=8/255,0.1", "seed=0,1"])
    expected = [(norm, eps, seed) for norm in ("bn", "dual_bn") for eps in ("8/255", 0.1) for seed in (0, 1)]
    assert [(config.norm, config.eps, config.seed) for config in found] == expected
    assert {config.epochs for config in found} == {3}
    assert sweep_configs(Config(), []) == [Config()]


def test_commas_inside_brackets_belong_to_a_value_and_repetitions_count_once():
    found = sweep_configs(Config(epochs=9), ["milestones=[3,6],[4],[4]", "model={name: small_cnn, width: 2},small_cnn"])
    assert [(config.milestones, dict(config.model.options)) for config in found] == [
        ((3, 6), {"width": 2}),
        ((3, 6), {}),
        ((4,), {"width": 2}),
        ((4,), {}),
    ]


@pytest.mark.parametrize("text", ["norm=", "norm", "=bn", "norm=bn,", "norm=,bn", "milestones=[1,2", "bn,dual_bn"])
def test_a_text_that_is_no_list_of_values_is_rejected(text):
    with raises_problem("wrong_type", "sweep"):
        sweep_configs(Config(), [text])


def test_the_problems_of_all_combinations_come_in_one_error_and_once():
    with raises_problem("unknown_name", "norm") as caught:
        sweep_configs(Config(), ["norm=bn,dualbn", "eps=8,0.1", "seed=0,1"])
    assert sorted(problem.field for problem in caught.value.problems) == ["eps", "norm"]


def test_a_name_serves_several_seeds_but_not_several_settings():
    assert len(sweep_configs(Config(name="mine"), ["seed=0,1"])) == 2
    with raises_problem("conflict", "name"):
        sweep_configs(Config(name="mine"), ["norm=bn,dual_bn"])
