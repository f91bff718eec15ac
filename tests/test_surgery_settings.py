"""Surgery around what others hold: wrappers, kept modules, settings of norms that stay."""

import copy

import pytest
import torch
from torch import nn

from advnorm import (
    ConfigError,
    SurgeryError,
    convert_head,
    convert_norm,
    create_model,
    domains,
    make_norm,
    route,
    strip,
)
from advnorm.norms import RoutedNorm

X = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def net():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))


def test_keep_leaves_everything_below_a_name_and_knows_second_names():
    model = nn.ModuleDict({"a": nn.Sequential(nn.ReLU(), nn.BatchNorm2d(3)), "b": nn.BatchNorm2d(3)})
    model["c"] = model["b"]
    report = convert_norm(model, "dual_bn", keep=["a", "c"])
    assert not report.replaced and report.kept == {"a.1": "as asked", "b": "as asked"}
    assert type(model["a"][1]) is nn.BatchNorm2d and type(model["c"]) is nn.BatchNorm2d


def test_a_conversion_that_finds_nothing_says_so():
    assert "nothing was converted" in str(convert_norm(nn.Sequential(nn.Linear(2, 2)), "dual_bn"))
    assert "nothing was converted" in str(convert_norm(nn.Sequential(nn.LayerNorm(2)), "dual_bn"))


@pytest.mark.parametrize("convert", [lambda m: convert_norm(m, "dual_bn"), convert_head])
def test_a_wrapped_model_is_refused(convert):
    with pytest.raises(SurgeryError, match="wrapped in DataParallel.*convert first, then wrap"):
        convert(nn.DataParallel(net()))
    with pytest.raises(ConfigError, match=r"takes an nn\.Module, got str"):
        convert("net")


def test_settings_of_a_routed_norm_are_changed_in_place():
    model = net()
    convert_norm(model, "dual_bn")
    norm = model[1]
    report = convert_norm(model, "dual_bn", sync=True, momentum=0.5)
    assert model[1] is norm and norm.sync and norm.momentum == 0.5
    assert report.kept == {"1": "routed already, now with momentum=0.5, sync=True"}
    assert convert_norm(model, "dual_bn", sync=True).kept == {"1": "routed already"}


def test_other_domains_are_refused_by_what_differs():
    model = net()
    convert_norm(model, "dual_bn", domains=("a", "b"))
    with pytest.raises(SurgeryError, match="routed already as dual_bn over a, b"):
        convert_norm(model, "dual_bn")


class Group:
    """Stands for a process group, which cannot be copied."""

    def __deepcopy__(self, memo):
        raise TypeError("cannot pickle ProcessGroup")


def test_the_process_group_goes_from_norm_to_norm_and_into_copies():
    model, group = net(), Group()
    convert_norm(model, "bn", sync=True, process_group=group)
    convert_norm(model, "dual_bn")
    assert model[1].sync and model[1].process_group is group
    assert copy.deepcopy(model)[1].process_group is group
    assert type(strip(model, "adv")[1]) is nn.BatchNorm2d


@pytest.mark.parametrize("option", [{"affine": False}, {"dtype": torch.float64}, {"track_running_stats": False}])
def test_what_the_replaced_norm_decides_cannot_be_asked_for(option):
    with pytest.raises(ConfigError, match=f"{next(iter(option))} is taken from the norm that is replaced"):
        convert_norm(net(), "dual_bn", **option)


def test_strip_unwraps():
    model = net().eval()
    convert_norm(model, "dual_bn")
    for wrapped in (torch.compile(model, backend="eager"), nn.DataParallel(model)):
        plain = strip(wrapped, "adv")
        assert type(plain) is nn.Sequential and list(plain.state_dict()) == list(net().state_dict())
    model = net()
    convert_norm(model, "gmm_bn")
    model[1] = make_norm("gmm_bn", 4, track_running_stats=False)
    with pytest.raises(SurgeryError, match="without running statistics"):
        strip(model)


def test_a_head_takes_the_domains_of_the_norms():
    model = create_model("small_cnn", norm="triple_bn")
    convert_head(model)
    assert domains(model) == ("clean", "adv", "adv2") == model.fc.plan.domains
    with pytest.raises(SurgeryError, match="fc is routed already, over clean, adv, adv2"):
        convert_head(model, domains=("clean", "adv"))


def test_a_replaced_group_norm_keeps_its_answers_on_single_positions():
    model = nn.Sequential(nn.GroupNorm(4, 4)).eval()
    x = torch.rand(2, 4, 1, 1)
    expected = model(x)
    convert_norm(model, "dual_affine_gn")
    with route(model, "adv"):
        assert torch.equal(model(x), expected)


def test_a_report_names_our_own_norms_by_their_names():
    model = create_model("small_cnn", norm="ln")
    assert set(convert_norm(model, "dual_affine_ln").replaced.values()) == {"ln -> dual_affine_ln"}


def test_an_old_checkpoint_without_batch_counts_loads():
    built_in, routed = nn.BatchNorm2d(4), make_norm("bn", 4)
    state = {key: value for key, value in built_in.state_dict().items() if key != "num_batches_tracked"}
    routed.load_state_dict(state)
    assert routed.num_batches_tracked == 0
    with pytest.raises(RuntimeError, match="running_var"):
        routed.load_state_dict({key: value for key, value in state.items() if key != "running_var"})


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("gn", 8), {"num_groups": 0}, "num_groups must be an integer of at least 1, got 0"),
        (("gn", 8), {"num_groups": -1}, "num_groups must be an integer of at least 1, got -1"),
        (("gn", 8), {"num_groups": 2.0}, r"num_groups must be an integer of at least 1, got 2\.0"),
        (("gn", 8), {"num_groups": "2"}, "num_groups must be an integer of at least 1, got '2'"),
        (("gn", 8), {"num_groups": 3}, "num_groups must divide the 8 channels"),
        (("bn", 8.0), {}, r"num_features must be an integer of at least 1, got 8\.0"),
        (("bn", 0), {"eps": -1}, "num_features.*eps must be a number of at least 0, got -1"),
        (("bn", 8), {"momentum": 5}, r"momentum must lie in \[0, 1\]"),
        (("bn", 8), {"momentum": "a"}, r"momentum must lie in \[0, 1\]"),
    ],
)
def test_wrong_settings_of_a_norm_are_all_told(arguments, options, message):
    with pytest.raises(ConfigError, match=message):
        make_norm(*arguments, **options)


def test_wrong_settings_reach_the_user_of_a_model_too():
    with pytest.raises(ConfigError, match="num_groups must be an integer of at least 1, got -1"):
        create_model("small_cnn", norm="gn", norm_options={"num_groups": -1})
    with pytest.raises(ConfigError, match="num_classes must be an integer, got True"):
        create_model("small_cnn", num_classes=True)
    with pytest.raises(ConfigError, match="normalize=False leaves mean and std out"):
        create_model("resnet20", normalize=False, mean=0.5, std=0.5)


@pytest.mark.parametrize("name", ["bn", "dual_bn", "gmm_bn", "cross_bn"])
def test_an_average_of_weights_has_a_rule_for_the_banks(name):
    """Average the buffers with the weights, or re-estimate them; the built-in ``update_bn`` sees no routed norm."""
    from torch.optim.swa_utils import AveragedModel

    torch.manual_seed(0)
    model = create_model("small_cnn", norm=name)
    average = AveragedModel(model, use_buffers=True)
    snapshots = []
    for step in range(3):
        forwarded = {"clean": 3, "adv": 3} if name == "cross_bn" else None
        with route(model, {"clean": 3, "adv": 3}, forwarded=forwarded):
            model(torch.rand(12 if forwarded else 6, 3, 16, 16) + step)
        average.update_parameters(model)
        snapshots.append({key: value.double() for key, value in model.state_dict().items()})
    for key, value in average.module.state_dict().items():
        if "num_batches" in key:  # an integer, whose average torch rounds down
            continue
        expected = sum(snapshot[key] for snapshot in snapshots) / 3
        torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)
    with route(average, "adv"):
        average.eval()(torch.rand(2, 3, 16, 16))
    assert all(isinstance(m, RoutedNorm) for n, m in average.module.named_modules() if n.startswith("bn"))
