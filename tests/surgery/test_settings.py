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


def test_eps_and_momentum_go_from_norm_to_norm_and_back():
    for momentum in (0.3, None):
        model = nn.Sequential(nn.BatchNorm2d(4, eps=0.01, momentum=momentum))
        convert_norm(model, "dual_bn")
        assert (model[0].eps, model[0].momentum) == (0.01, momentum)
        plain = strip(model, "adv")[0]
        assert (plain.eps, plain.momentum) == (0.01, momentum)
    assert strip(make_norm("gmm_bn", 4, eps=0.01)).eps == 0.01
    assert strip(make_norm("gn", 4, eps=0.01)).eps == 0.01


def test_an_asked_eps_or_momentum_wins_over_that_of_the_replaced_norm():
    model = nn.Sequential(nn.BatchNorm2d(4, eps=0.01, momentum=0.3), make_norm("bn", 4, eps=0.01, momentum=0.3))
    convert_norm(model, "dual_bn", eps=0.02, momentum=None)
    assert [(norm.eps, norm.momentum) for norm in model] == [(0.02, None)] * 2


@pytest.mark.parametrize("old", [nn.BatchNorm2d(4), make_norm("bn", 4)], ids=["built_in", "ours"])
def test_every_bank_of_three_has_tensors_of_its_own_with_the_old_values(old):
    with torch.no_grad():
        for tensor in old.state_dict().values():
            tensor.add_(2)
    model = nn.Sequential(copy.deepcopy(old))
    convert_norm(model, "triple_bn")
    state = model[0].state_dict()
    assert len({value.data_ptr() for value in state.values()}) == len(state) == 3 * 5
    for key, value in old.state_dict().items():
        assert all(torch.equal(state[f"{key}_{domain}"], value) for domain in ("clean", "adv", "adv2"))


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


@pytest.mark.parametrize("family", ["gn", "ln", "in"])
def test_a_per_sample_norm_of_ours_goes_on_to_check_its_input_when_it_is_routed(family):
    model = nn.Sequential(make_norm(family, 4))
    assert list(convert_norm(model, f"dual_affine_{family}").replaced) == ["0"]
    with route(model, "adv"), pytest.raises(ConfigError, match="takes inputs with 4 dimensions"):
        model(torch.rand(2, 4, 5))


def test_an_instance_norm_with_running_statistics_stays():
    model = nn.Sequential(nn.InstanceNorm2d(4, affine=True, track_running_stats=True))
    assert list(convert_norm(model, "in").kept) == ["0"]
    assert type(model[0]) is nn.InstanceNorm2d


@pytest.mark.parametrize("name", ["ln", "dual_affine_ln"])
def test_layer_norms_of_the_last_dimensions_are_converted_once(name):
    model = nn.Sequential(nn.LayerNorm((6, 6), bias=False))
    convert_norm(model, name)
    norm = model[0]
    assert convert_norm(model, name).kept == {"0": "routed already"}
    assert model[0] is norm


def test_hooks_before_loading_are_given_the_plain_module_of_a_lone_norm_too():
    norm, seen = make_norm("dual_bn", 4), []
    norm.register_load_state_dict_pre_hook(lambda module, *_: seen.append(module))
    plain = strip(norm, "adv")
    plain.load_state_dict(plain.state_dict())
    assert seen == [plain]


def test_a_linked_copy_shares_every_tensor_of_its_branch():
    model = create_model("small_cnn", norm="dual_bn")
    own = {value.data_ptr() for value in model.state_dict().values()}
    assert {value.data_ptr() for value in strip(model, "adv", linked=True).state_dict().values()} <= own
    assert not {value.data_ptr() for value in strip(model, "adv").state_dict().values()} & own


def test_settings_stay_when_another_module_is_refused():
    class Mine(nn.BatchNorm2d):
        pass

    model = nn.Sequential(make_norm("dual_bn", 4), Mine(4))
    with pytest.raises(SurgeryError, match="Mine is a subclass of BatchNorm2d"):
        convert_norm(model, "dual_bn", momentum=0.5, sync=True)
    assert model[0].momentum == 0.1 and not model[0].sync


def test_a_head_is_the_last_linear_layer_or_the_one_that_is_named():
    layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
    assert list(convert_head(copy.deepcopy(layers)).replaced) == ["2"]
    assert list(convert_head(copy.deepcopy(layers), name="0").replaced) == ["0"]


def test_synchronization_ends_when_asked():
    model = nn.Sequential(nn.SyncBatchNorm(4), make_norm("bn", 4, sync=True))
    convert_norm(model, "dual_bn", sync=False)
    assert [norm.sync for norm in model] == [False, False]


def test_keep_takes_one_name_too():
    model = nn.ModuleDict({"first": nn.BatchNorm2d(3), "second": nn.BatchNorm2d(3)})
    report = convert_norm(model, "dual_bn", keep="first")
    assert list(report.kept) == ["first"] and list(report.replaced) == ["second"]


def test_a_batch_norm_becomes_as_many_groups_as_asked():
    model = nn.Sequential(nn.BatchNorm2d(8))
    convert_norm(model, "gn", num_groups=2)
    assert model[0].num_groups == strip(model)[0].num_groups == 2


@pytest.mark.parametrize("name", ["none", "gmm_bn", "dual_affine_ln"])
def test_hooks_and_mode_of_every_kind_of_norm_are_those_of_its_plain_module(name):
    norm, calls = make_norm(name, 4).eval(), []
    norm.register_forward_hook(lambda module, args, out: calls.append(type(module)))
    plain = strip(norm, "adv")
    plain(torch.rand(2, 4, 3, 3))
    assert calls == [type(plain)] and not plain.training
