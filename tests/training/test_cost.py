"""What a training costs by its settings: operations of a forward, and how many forwards an image takes."""

import pytest
import torch
from torch import nn

from advnorm import Config, create_model
from advnorm.config import Named
from advnorm.training.cost import forward_flops, passes, training_flops, training_passes


def by_hand(name: str, side: int) -> int:
    """Two operations per product of every convolution and linear layer."""
    network, found = create_model(name, 10, "bn").eval(), []

    def seen(module, _, out):
        if isinstance(module, nn.Conv2d):
            found.append(2 * module.weight.numel() * out[0, 0].numel())
        elif isinstance(module, nn.Linear):
            found.append(2 * module.weight.numel())

    for module in network.modules():
        module.register_forward_hook(seen)
    with torch.no_grad():
        network(torch.zeros(1, 3, side, side))
    return sum(found)


@pytest.mark.parametrize(("name", "side"), [("small_cnn", 8), ("resnet20", 32), ("vgg11", 32)])
def test_a_forward_costs_its_products(name, side):
    assert forward_flops(name, (3, side, side), 10) == by_hand(name, side)


@pytest.mark.parametrize(
    ("settings", "forwards"),
    [
        ({"objective": "standard"}, 3),
        ({"objective": "hybrid", "attack": {"steps": 10}}, 20 + 6),
        ({"objective": "hybrid", "attack": {"steps": 10, "restarts": 2}}, 40 + 6),
        ({"objective": Named("hybrid", clean_share=0.5), "attack": {"steps": 10}}, 20 + 4.5),
        ({"objective": "classical", "attack": {"steps": 7}}, 14 + 3),
        ({"objective": "trades", "attack": {"steps": 10}}, 20 + 6 + 1),
        ({"objective": "standard", "second_pass": "sam"}, 6),
        ({"objective": "standard", "second_pass": Named("apart", samples=0.5)}, 4.5),
        ({"objective": "standard", "second_pass": Named("apart", samples=64), "batch_size": 128}, 4.5),
        ({"objective": "standard", "regularizer": "ligs"}, 3 + 10),
    ],
)
def test_an_image_takes_so_many_forwards(settings, forwards):
    assert passes(Config(**settings)) == forwards


def test_steps_that_warm_up_cost_less():
    config = Config(objective="classical", attack={"steps": 4}, epochs=3, budget=2, steps_warmup_epochs=1)
    assert training_passes(config) == (2 * 2 + 3) + (2 * 3 + 3) + 4 * (2 * 4 + 3)


def test_epochs_without_their_second_pass_cost_less():
    config = Config(objective="standard", second_pass="awp", epochs=3, budget=2, second_pass_warmup_epochs=1)
    assert training_passes(config) == 2 * 3 + 4 * 6 and passes(config) == 6


def test_a_training_costs_all_its_epochs_and_nothing_is_known_of_images_that_are_not_counted():
    config = Config(data="cifar10", model="resnet20", objective="standard", epochs=5, budget=2)
    assert training_flops(config) == by_hand("resnet20", 32) * 50_000 * 10 * 3
    larger = Config(data=Named("imagenette", image_size=64), model="imagenet_resnet18", objective="standard", epochs=1)
    assert training_flops(larger) == pytest.approx(forward_flops("imagenet_resnet18", (3, 64, 64), 10) * 9_469 * 3)
    assert training_flops(Config(data=Named("imagefolder", image_size=64), model="imagenet_resnet18")) is None
