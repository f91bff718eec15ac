"""The stored banks of a model against its buffers and parameters."""

import pytest
import torch
from torch import nn

import advnorm
from advnorm.analysis import affine_parameters, stored_statistics
from advnorm.analysis.banks import default_layer, norm_layers
from support.problems import raises_problem


def test_banks_are_read_by_domain(digits):
    model = digits.networks["dual_bn"]
    stored, affine = stored_statistics(model, "adv")["bn2"], affine_parameters(model, "adv")["bn2"]
    state = model.state_dict()
    assert torch.equal(stored.mean.float(), state["bn2.running_mean_adv"])
    torch.testing.assert_close(stored.std.square().float(), state["bn2.running_var_adv"])
    assert torch.equal(affine.bias.float(), state["bn2.bias_adv"])
    assert torch.equal(affine.weight.float(), state["bn2.weight_adv"])
    plain = nn.Sequential(nn.BatchNorm2d(3))
    assert torch.equal(stored_statistics(plain)["0"].std, torch.ones(3, dtype=torch.float64))
    with raises_problem("missing_route", "domain"):
        stored_statistics(model)
    with pytest.raises(advnorm.ConfigError):
        affine_parameters(model, "advv")
    with raises_problem("not_supported", "model"):
        stored_statistics(digits.networks["none"])
    assert affine_parameters(nn.Sequential(nn.RMSNorm(4)))["0"].bias.tolist() == [0.0] * 4


def test_the_default_layer_is_the_second_norm_of_the_first_block():
    assert default_layer(advnorm.create_model("preact_resnet18", num_classes=10)) == "layer1.0.bn2"
    assert default_layer(advnorm.create_model("small_cnn", num_classes=10)) == "bn2"
    assert list(norm_layers(nn.Sequential(nn.BatchNorm1d(2)))) == ["0"]
