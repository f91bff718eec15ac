"""pytest examples/own_parts: the parts keep advnorm's promises."""

import own_parts  # noqa: F401
import pytest
import torch

import advnorm


def network():
    torch.manual_seed(0)
    return advnorm.create_model("small_cnn", norm="natural_bn", in_channels=1, normalize=False)


def test_noisy_images_update_the_bank_of_clean_images():
    model = network().train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with advnorm.route(model, "noise"):
        model(torch.rand(8, 1, 8, 8))
    changed = {
        name.rpartition("_")[2] for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])
    }
    assert changed == {"natural"}


def test_the_attack_stays_in_the_ball_and_leaves_the_model_alone():
    model, threat = network(), advnorm.ThreatModel(eps=0.1)
    x, y = torch.rand(8, 1, 8, 8), torch.arange(8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x_adv = advnorm.attacks.get("cosine5", threat=threat, route="adv")(model, x, y)
    assert (x_adv - x).abs().max() <= 0.1 and x_adv.min() >= 0 and x_adv.max() <= 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_wrong_weight_is_reported():
    with pytest.raises(advnorm.ConfigError) as error:
        advnorm.Config(norm="natural_bn", objective={"name": "three_domains", "adv_weight": 2})
    assert error.value.problems[0].code == "out_of_range"
