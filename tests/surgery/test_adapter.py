"""Adapters: a foreign norm class that does more than normalize is converted and given back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from advnorm import ConfigError, SurgeryError, convert_norm, route, strip
from advnorm.surgery import register_adapter
from advnorm.surgery.adapters import ADAPTERS
from support.problems import raises_problem


class BatchNormAct(nn.BatchNorm2d):
    """A batch norm with an activation, as in timm."""

    def __init__(self, *args, act: nn.Module | None = None, **options) -> None:
        super().__init__(*args, **options)
        self.act = act or nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


class ScaledLayerNorm(nn.LayerNorm):
    """A layer norm of the channels of images, with a parameter of its own."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1) * self.scale


@pytest.fixture
def adapted(monkeypatch):
    monkeypatch.setitem(ADAPTERS, BatchNormAct, None)  # removed again afterwards
    register_adapter(BatchNormAct, "batch_norm_2d", after=("act",))


def test_a_registered_class_becomes_a_routed_norm_with_its_other_parts_and_comes_back(adapted):
    model, x = nn.Sequential(BatchNormAct(3, act=nn.Softplus())).eval(), torch.randn(4, 3, 2, 2)
    nn.init.constant_(model[0].running_mean, 0.3)
    expected = model(x)
    report = convert_norm(model, "dual_bn")
    assert report.replaced == {"0": "BatchNormAct -> dual_bn"}
    with route(model, "adv"):
        assert torch.equal(model(x), expected)
    plain = strip(model, "adv")
    assert type(plain[0]) is BatchNormAct and torch.equal(plain(x), expected)
    assert list(plain.state_dict()) == list(nn.Sequential(BatchNormAct(3)).state_dict())


def test_a_class_that_does_more_than_normalize_stays_a_norm_of_its_kind(adapted):
    model = nn.Sequential(nn.BatchNorm2d(3), BatchNormAct(3))
    with raises_problem("not_supported", "1", SurgeryError):
        convert_norm(model, "dual_affine_ln")
    assert type(model[0]) is nn.BatchNorm2d


@pytest.mark.parametrize("treated", [True, False])
def test_an_own_per_sample_class_runs_its_own_forward(treated, monkeypatch):
    if not treated:
        monkeypatch.setitem(ADAPTERS, ScaledLayerNorm, None)
        register_adapter(ScaledLayerNorm, "layer_norm")
    model, x = nn.Sequential(ScaledLayerNorm(3)), torch.randn(5, 3, 2, 2)
    expected = model(x)
    convert_norm(model, "dual_affine_ln", treat_as={ScaledLayerNorm: "layer_norm"} if treated else None)
    nn.init.constant_(model[0].weight_adv, 2.0)
    with route(model, "clean"):
        assert torch.equal(model(x), expected)
    with route(model, {"clean": 2, "adv": 3}):
        torch.testing.assert_close(model(x), torch.cat([expected[:2], 2 * expected[2:]]))
    plain = strip(model, "clean")
    assert type(plain[0]) is ScaledLayerNorm and torch.equal(plain(x), expected)
    assert plain.state_dict().keys() == nn.Sequential(ScaledLayerNorm(3)).state_dict().keys()


def test_a_batch_norm_can_be_treated_as_the_built_in_one():
    class Mine(nn.BatchNorm2d):
        pass

    model, x = nn.Sequential(Mine(3)), torch.randn(4, 3, 2, 2)
    with raises_problem("not_supported", "0", SurgeryError) as caught:
        convert_norm(model, "dual_bn")
    assert "treat_as={Mine: 'batch_norm_2d'}" in caught.value.problems[0].hint
    convert_norm(model, "dual_bn", treat_as={Mine: "batch_norm_2d"})
    with route(model, "adv"):
        assert torch.equal(model(x), nn.BatchNorm2d(3)(x))
    assert type(strip(model, "adv")[0]) is Mine


def test_wrong_adapters_are_rejected():
    with raises_problem("unknown_name", "kind", ConfigError):
        register_adapter(BatchNormAct, "batchnorm")
    with raises_problem("unknown_name", "treat_as", ConfigError):
        convert_norm(nn.Sequential(nn.BatchNorm2d(2)), "dual_bn", treat_as={BatchNormAct: "bn"})
    with raises_problem("wrong_type", "treat_as", ConfigError):
        convert_norm(nn.Sequential(nn.BatchNorm2d(2)), "dual_bn", treat_as="batch_norm_2d")
    with raises_problem("wrong_type", "norm_class", ConfigError):
        register_adapter("BatchNormAct", "batch_norm_2d")
    with raises_problem("conflict", "after", ConfigError):
        register_adapter(ScaledLayerNorm, "layer_norm", after=("act",))


def test_a_forward_with_more_than_its_input_is_rejected():
    class Conditional(nn.LayerNorm):
        def forward(self, x, condition=None):
            return super().forward(x)

    with raises_problem("not_supported", "0", SurgeryError):
        convert_norm(nn.Sequential(Conditional(3)), "ln", treat_as={Conditional: "layer_norm"})


def test_a_batch_norm_with_parts_that_its_adapter_does_not_name_is_rejected(adapted):
    model = nn.Sequential(BatchNormAct(3))
    model[0].drop = nn.Dropout()
    with raises_problem("not_supported", "0", SurgeryError):
        convert_norm(model, "dual_bn")


def test_error_names_children_and_lists_norms_once():
    """A network with many norms of one class gives one sentence, with the call that registers the class."""

    class WithActivation(nn.BatchNorm2d):
        def __init__(self, channels):
            super().__init__(channels)
            self.act = nn.ReLU()

        def forward(self, x):
            return self.act(super().forward(x))

    layers = [layer for _ in range(3) for layer in (WithActivation(8), nn.Conv2d(8, 8, 3))]
    for treat_as in (None, {WithActivation: "batch_norm_2d"}):
        with pytest.raises(SurgeryError) as caught:
            convert_norm(nn.Sequential(*layers), "dual_bn", treat_as=treat_as)
        call = "register_adapter(WithActivation, 'batch_norm_2d', after=('act',))"
        assert [problem.field for problem in caught.value.problems] == ["0", "2", "4"]
        assert str(caught.value).count(call) == 1 and "0, 2, 4: WithActivation" in str(caught.value)
