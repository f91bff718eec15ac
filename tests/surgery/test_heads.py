"""Convert the classifier to one linear layer per domain."""

import copy

import torch
from torch import nn

from advnorm import ConfigError, RouteError, SurgeryError, convert_head, create_model, domains, route, strip
from support.problems import raises_problem
from support.surgery_models import X, logits, trained


def test_a_dual_head_routes_and_comes_back():
    model = trained(strip(create_model("small_cnn")), 4, 3, 32, 32)
    original = copy.deepcopy(model)
    report = convert_head(model)
    assert report.replaced == {"fc": "Linear -> dual_linear"}
    for domain in ("clean", "adv"):
        with route(model, domain):
            assert torch.equal(model(X), original(X))
    with torch.no_grad():
        model.fc.weight_adv.add_(1.0)
        model.fc.bias_adv.sub_(1.0)
    with route(model, {"clean": 1, "adv": 3}):
        both = model(X)
    with route(model, "clean"):
        torch.testing.assert_close(both[:1], model(X)[:1])
    with route(model, "adv"):
        torch.testing.assert_close(both[1:], model(X)[1:])
        adversarial = model(X)
    plain = strip(model, "adv")
    assert torch.equal(plain(X), adversarial) and type(plain.fc) is nn.Linear
    original.load_state_dict(plain.state_dict())
    with raises_problem("missing_route", "route", RouteError):
        model(X)
    assert convert_head(model).kept == {"fc": "already routed"}


def test_a_head_is_found_in_a_transformers_model(resnet):
    model = copy.deepcopy(resnet)
    report = convert_head(model)
    assert list(report.replaced) == ["classifier.1"]
    with route(model, "adv"):
        assert torch.equal(logits(model, X), logits(resnet, X))


def test_heads_that_cannot_be_converted_are_rejected():
    with raises_problem("not_supported", "model", SurgeryError):
        convert_head(nn.Sequential(nn.Conv2d(3, 4, 1)))
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Linear(4, 2))
    with raises_problem("wrong_type", "0", SurgeryError):
        convert_head(model, name="0")
    with raises_problem("unknown_name", "name", ConfigError):
        convert_head(model, name="3")
    with raises_problem("conflict", "domains", ConfigError):
        convert_head(model, domains=("adv", "adv"))
    with raises_problem("wrong_type", "domains", ConfigError):
        convert_head(model, domains="adv")


def test_a_head_takes_the_domains_of_the_norms():
    model = create_model("small_cnn", norm="triple_bn")
    convert_head(model)
    assert domains(model) == ("clean", "adv", "adv2") == model.fc.plan.domains
    with raises_problem("conflict", "fc", SurgeryError):
        convert_head(model, domains=("clean", "adv"))


def test_every_head_of_three_has_tensors_of_its_own_with_the_old_values():
    model = nn.Sequential(nn.Linear(3, 4))
    old = copy.deepcopy(model[0].state_dict())
    convert_head(model, domains=("a", "b", "c"))
    state = model[0].state_dict()
    assert len({value.data_ptr() for value in state.values()}) == len(state) == 3 * 2
    assert all(torch.equal(state[f"{key}_{domain}"], old[key]) for key in old for domain in "abc")


def test_a_head_adds_the_bias_of_its_own_domain():
    model = nn.Sequential(nn.Linear(3, 4))
    convert_head(model)
    with torch.no_grad():
        model[0].bias_adv.add_(1)
    x = torch.rand(2, 3)
    with route(model, "clean"):
        clean = model(x)
    with route(model, "adv"):
        torch.testing.assert_close(model(x), clean + 1)


def test_a_head_is_the_last_linear_layer_or_the_one_that_is_named():
    layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
    assert list(convert_head(copy.deepcopy(layers)).replaced) == ["2"]
    assert list(convert_head(copy.deepcopy(layers), name="0").replaced) == ["0"]
