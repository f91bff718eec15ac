"""Adapters: a foreign norm class that does more than normalize is converted and given back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from advnorm import SurgeryError, convert_norm, route, strip
from advnorm.norms import RoutedNorm
from advnorm.surgery import register_adapter
from advnorm.surgery.adapters import ADAPTERS, BatchNormAdapter
from support.problems import raises_problem


class BatchNormAct(nn.BatchNorm2d):
    """A batch norm with an activation, as in timm."""

    def __init__(self, *args, act: nn.Module | None = None, **options) -> None:
        super().__init__(*args, **options)
        self.act = act or nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


class RoutedNormAct(RoutedNorm):
    act: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


@pytest.fixture
def adapted(monkeypatch):
    for name, value in ADAPTERS.items():
        monkeypatch.setitem(ADAPTERS, name, value)

    @register_adapter(BatchNormAct)
    class BatchNormActAdapter(BatchNormAdapter):
        routed_class = RoutedNormAct
        parts = ("act",)

    yield
    del ADAPTERS[BatchNormAct]


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
