"""Which norms a conversion replaces, keeps or rejects, and how it is configured."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import advnorm
from advnorm import ConfigError, SurgeryError, convert_head, convert_norm, create_model, make_norm, route, strip
from support.problems import raises_problem
from support.surgery_models import X, net


class Gate(nn.Module):
    def forward(self, x):
        return x


def _own_forward(module):
    module.forward = lambda x: 2 * x


def _gated(module):
    module.gate = Gate()


class Group:
    """Stands for a process group, which cannot be copied."""

    def __deepcopy__(self, memo):
        raise TypeError("cannot pickle ProcessGroup")


def test_keep_leaves_everything_below_a_name_and_accepts_second_names():
    model = nn.ModuleDict({"a": nn.Sequential(nn.ReLU(), nn.BatchNorm2d(3)), "b": nn.BatchNorm2d(3)})
    model["c"] = model["b"]
    report = convert_norm(model, "dual_bn", keep=["a", "c"])
    assert not report.replaced and report.kept == {"a.1": "named in keep", "b": "named in keep"}
    assert type(model["a"][1]) is nn.BatchNorm2d and type(model["c"]) is nn.BatchNorm2d


def test_keep_takes_one_name_too():
    model = nn.ModuleDict({"first": nn.BatchNorm2d(3), "second": nn.BatchNorm2d(3)})
    report = convert_norm(model, "dual_bn", keep="first")
    assert list(report.kept) == ["first"] and list(report.replaced) == ["second"]


def test_settings_of_a_routed_norm_are_changed_in_place():
    model = net()
    convert_norm(model, "dual_bn")
    norm = model[1]
    report = convert_norm(model, "dual_bn", sync=True, momentum=0.5)
    assert model[1] is norm and norm.sync and norm.momentum == 0.5
    assert report.kept == {"1": "already routed, now with momentum=0.5, sync=True"}
    assert convert_norm(model, "dual_bn", sync=True).kept == {"1": "already routed"}
    assert convert_norm(model, "dual_bn").kept == {"1": "already routed"} and norm.sync
    assert convert_norm(model, "dual_bn", sync=False).kept == {"1": "already routed, now with sync=False"}
    assert not norm.sync


def test_settings_of_a_norm_that_stays_are_validated():
    model = nn.Sequential(nn.BatchNorm2d(4))
    convert_norm(model, "dual_bn")
    with raises_problem("out_of_range", "momentum"):
        convert_norm(model, "dual_bn", momentum=5, eps=-1.0)
    assert model[0].momentum == 0.1
    for norm in (nn.GroupNorm(4, 8), advnorm.make_norm("gn", 8)):
        model = nn.Sequential(norm)
        assert convert_norm(model, "gn", num_groups=norm.num_groups)
        with raises_problem("not_supported", "0", SurgeryError):
            convert_norm(model, "gn", num_groups=2)
    model = nn.Sequential(nn.BatchNorm2d(8), nn.BatchNorm2d(12), nn.BatchNorm2d(20))
    with raises_problem("not_supported", kind=SurgeryError) as caught:
        convert_norm(model, "gn", num_groups=8)
    assert [problem.field for problem in caught.value.problems] == ["1", "2"]


def test_a_norm_with_other_domains_is_rejected():
    model = net()
    convert_norm(model, "dual_bn", domains=("a", "b"))
    with raises_problem("not_supported", "1", SurgeryError):
        convert_norm(model, "dual_bn")


@pytest.mark.parametrize("option", [{"affine": False}, {"dtype": torch.float64}, {"track_running_stats": False}])
def test_options_that_the_replaced_norm_determines_are_rejected(option):
    with raises_problem("conflict", next(iter(option)), ConfigError):
        convert_norm(net(), "dual_bn", **option)


@pytest.mark.parametrize(
    ("name", "options", "field"),
    [
        ("dual_bn", {"domains": ("a", "b", "c")}, "domains"),
        ("dual_bn", {"momentums": 0.2}, "momentums"),
        ("bn", {"other_gradient": True}, "other_gradient"),
        ("dual_bn", {"keep": ["9"]}, "keep"),
    ],
)
def test_wrong_arguments_are_rejected_by_name(name, options, field):
    model = nn.Sequential(nn.BatchNorm2d(3))
    with pytest.raises(ConfigError) as caught:
        convert_norm(model, name, **options)
    assert [problem.field for problem in caught.value.problems] == [field]
    assert type(model[0]) is nn.BatchNorm2d


def test_eps_and_momentum_go_from_norm_to_norm_and_back():
    for momentum in (0.3, None):
        model = nn.Sequential(nn.BatchNorm2d(4, eps=0.01, momentum=momentum))
        convert_norm(model, "dual_bn")
        assert (model[0].eps, model[0].momentum) == (0.01, momentum)
        plain = strip(model, "adv")[0]
        assert (plain.eps, plain.momentum) == (0.01, momentum)
    assert strip(make_norm("gmm_bn", 4, eps=0.01)).eps == 0.01
    assert strip(make_norm("gn", 4, eps=0.01)).eps == 0.01


def test_a_requested_eps_or_momentum_wins_over_that_of_the_replaced_norm():
    model = nn.Sequential(nn.BatchNorm2d(4, eps=0.01, momentum=0.3), make_norm("bn", 4, eps=0.01, momentum=0.3))
    convert_norm(model, "dual_bn", eps=0.02, momentum=None)
    assert [(norm.eps, norm.momentum) for norm in model] == [(0.02, None)] * 2


def test_synchronization_can_be_switched_off():
    model = nn.Sequential(nn.SyncBatchNorm(4), make_norm("bn", 4, sync=True))
    convert_norm(model, "dual_bn", sync=False)
    assert [norm.sync for norm in model] == [False, False]


def test_sync_batch_norm_converts_to_synchronized_statistics():
    model = nn.Sequential(nn.SyncBatchNorm(3))
    convert_norm(model, "dual_bn")
    assert model[0].sync
    model = nn.Sequential(nn.BatchNorm2d(3))
    convert_norm(model, "dual_bn", sync=True)
    assert model[0].sync


def test_a_batch_norm_becomes_as_many_groups_as_requested():
    model = nn.Sequential(nn.BatchNorm2d(8))
    convert_norm(model, "gn", num_groups=2)
    assert model[0].num_groups == strip(model)[0].num_groups == 2


def test_settings_stay_when_another_module_is_rejected():
    class Mine(nn.BatchNorm2d):
        pass

    model = nn.Sequential(make_norm("dual_bn", 4), Mine(4))
    with raises_problem("not_supported", "1", SurgeryError):
        convert_norm(model, "dual_bn", momentum=0.5, sync=True)
    assert model[0].momentum == 0.1 and not model[0].sync


def test_the_process_group_goes_from_norm_to_norm_and_into_copies():
    model, group = net(), Group()
    convert_norm(model, "bn", sync=True, process_group=group)
    convert_norm(model, "dual_bn")
    assert model[1].sync and model[1].process_group is group
    assert copy.deepcopy(model)[1].process_group is group
    assert type(strip(model, "adv")[1]) is nn.BatchNorm2d


def test_a_conversion_without_effect_is_an_error_that_names_what_fits():
    with raises_problem("no_norm", "model", SurgeryError):
        convert_norm(nn.Sequential(nn.Linear(2, 2)), "dual_bn")
    model = nn.Sequential(nn.LayerNorm(2), nn.RMSNorm(2))
    with raises_problem("no_norm_of_kind", "norm", SurgeryError) as caught:
        convert_norm(model, "dual_bn")
    assert caught.value.problems[0].hint == "use dual_affine_ln or dual_affine_rms"
    with raises_problem("no_norm_of_kind", "norm", SurgeryError) as caught:
        convert_norm(model, "bn")
    assert caught.value.problems[0].hint == "use ln or rms"
    assert list(convert_norm(nn.Sequential(nn.BatchNorm2d(2)), "dual_bn", keep=["0"]).kept) == ["0"]


class OwnNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize(
    ("norm", "fix"),
    [
        (nn.LayerNorm(2, elementwise_affine=False), "no parameters"),
        (nn.InstanceNorm2d(2), "no parameters"),
        (OwnNorm(), "register_adapter(OwnNorm"),
    ],
)
def test_a_conversion_without_effect_never_proposes_itself(norm, fix):
    with raises_problem("no_norm_of_kind", "norm", SurgeryError) as caught:
        convert_norm(nn.Sequential(norm), "dual_affine_in" if isinstance(norm, nn.InstanceNorm2d) else "dual_affine_ln")
    assert fix in caught.value.problems[0].hint and "use dual" not in caught.value.problems[0].hint


def test_norms_of_ours_that_do_not_fit_are_named_by_their_plan():
    with raises_problem("no_norm_of_kind", "norm", SurgeryError) as caught:
        convert_norm(create_model("small_cnn", norm="gn"), "dual_bn")
    assert "3 gn" in str(caught.value) and caught.value.problems[0].hint.startswith("use dual_affine_gn")


def test_a_model_whose_norms_are_hidden_in_a_list_gets_an_error_that_names_them():
    model = nn.Sequential(nn.ReLU())
    model.steps = [nn.BatchNorm2d(3)]
    with raises_problem("no_norm", "model", SurgeryError) as caught:
        convert_norm(model, "dual_bn")
    assert caught.value.problems[0].hint.startswith("steps.0: ")


def test_each_layer_gets_the_norm_of_the_first_pattern_that_matches():
    model = create_model("small_cnn", norm="bn")
    report = convert_norm(model, {"bn2": "dual_bn", "*": "bn"})
    assert report.replaced == {"bn2": "bn -> dual_bn"} and set(report.kept.values()) == {"already routed"}
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(nn.BatchNorm2d(3), nn.GroupNorm(3, 3)), nn.BatchNorm2d(3))
    report = convert_norm(model, {"1.*": "triple_bn", "0": "bn"})
    assert report.replaced == {"0": "BatchNorm2d -> bn", "1.0": "BatchNorm2d -> triple_bn"}
    assert report.kept == {"1.1": "GroupNorm is not replaced by triple_bn", "2": "no pattern matches"}
    assert report.domains == model[0].plan.domains == ("clean", "adv", "adv2")
    with route(model, {"clean": 1, "adv": 1, "adv2": 1}):
        assert model.eval()(torch.rand(3, 3, 2, 2)).shape == (3, 3, 2, 2)
    assert [type(module) for module in strip(model, "adv2")] == [nn.BatchNorm2d, nn.Sequential, nn.BatchNorm2d]


@pytest.mark.parametrize(
    ("norms", "code", "field"),
    [
        ({"nowhere*": "dual_bn", "*": "bn"}, "no_norm", "norm"),
        ({"0": "dual_bn", "1": "dual_bn"}, "no_norm_of_kind", "norm"),
        ({"0": "dual_bn", "1": "dual"}, "unknown_name", "norm"),
        ({"0": "dual_bn", "1": "triple_bn"}, "conflict", "norm"),
        ({}, "wrong_type", "norm"),
        (["dual_bn"], "wrong_type", "norm"),
    ],
)
def test_wrong_patterns_are_rejected_and_nothing_changes(norms, code, field):
    model = nn.Sequential(nn.BatchNorm2d(3), nn.GroupNorm(3, 3))
    with pytest.raises((SurgeryError, ConfigError)) as caught:
        convert_norm(model, norms)
    assert (caught.value.problems[0].code, caught.value.problems[0].field) == (code, field)
    assert [*map(type, model)] == [nn.BatchNorm2d, nn.GroupNorm]


@pytest.mark.parametrize("convert", [lambda m: convert_norm(m, "dual_bn"), convert_head])
def test_a_wrapped_model_is_rejected(convert):
    with raises_problem("not_supported", "model", SurgeryError):
        convert(nn.DataParallel(net()))
    with raises_problem("wrong_type", "model", ConfigError):
        convert("net")


def test_a_subclass_is_rejected_by_name_and_nothing_changes():
    class BatchNormAct(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(x).relu()

    model = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(BatchNormAct(3)))
    with raises_problem("not_supported", "1.0", SurgeryError):
        convert_norm(model, "dual_bn")
    assert type(model[0]) is nn.BatchNorm2d
    report = convert_norm(model, "dual_bn", keep=["1.0"])
    assert report.kept == {"1.0": "named in keep"} and list(report.replaced) == ["0"]
    assert type(model[1][0]) is BatchNormAct


def test_parametrized_and_lazy_norms_are_rejected():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.LazyBatchNorm2d())
    nn.utils.parametrizations.weight_norm(model[0], "weight", dim=None)
    with raises_problem("not_supported", kind=SurgeryError) as caught:
        convert_norm(model, "bn")
    assert [problem.field for problem in caught.value.problems] == ["0", "1"]


@pytest.mark.parametrize("change", [_own_forward, _gated, lambda module: prune.l1_unstructured(module, "weight", 1)])
def test_a_module_that_has_more_than_its_class_is_rejected_by_name_and_nothing_changes(change):
    model = nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.Linear(4, 2))
    change(model[1])
    change(model[2])
    with raises_problem("not_supported", "1", SurgeryError):
        convert_norm(model, "dual_bn")
    assert type(model[0]) is nn.BatchNorm2d
    with raises_problem("not_supported", "2", SurgeryError):
        convert_head(model)


def test_statistics_that_a_norm_evaluates_with_and_does_not_update_are_rejected():
    model = nn.Sequential(nn.BatchNorm2d(3))
    model[0].track_running_stats = False
    with raises_problem("not_supported", "0", SurgeryError):
        convert_norm(model, "dual_bn")
    model[0].track_running_stats = True
    model[0].running_mean = None
    with raises_problem("not_supported", "0", SurgeryError):
        convert_norm(model, "dual_bn")


def test_a_subclass_that_the_name_does_not_replace_stays():
    class Mine(nn.LayerNorm):
        pass

    model = nn.Sequential(nn.BatchNorm1d(4), Mine(4))
    assert convert_norm(model, "dual_bn").kept == {"1": "Mine, a subclass of LayerNorm, is not replaced by dual_bn"}
    model = nn.Sequential(nn.BatchNorm1d(4), Mine(4))
    with raises_problem("not_supported", "1", SurgeryError):
        convert_norm(model, "ln")


def test_a_routed_norm_does_not_become_another():
    model = nn.Sequential(nn.BatchNorm2d(3))
    convert_norm(model, "dual_bn")
    with raises_problem("not_supported", "0", SurgeryError):
        convert_norm(model, "cross_bn")
    model = nn.Sequential(nn.BatchNorm2d(3))
    convert_norm(model, "cross_bn")
    with raises_problem("not_supported", "0", SurgeryError):
        convert_norm(model, "cross_bn", other_gradient=False)


def test_a_model_that_is_itself_a_norm_is_rejected():
    with raises_problem("not_supported", "model", SurgeryError):
        convert_norm(nn.BatchNorm2d(3), "dual_bn")


def test_norms_of_domains_that_a_routed_head_does_not_have_are_rejected():
    model = create_model("small_cnn", norm="bn")
    plain = strip(model)
    convert_head(plain)
    before = {name: type(module) for name, module in plain.named_modules()}
    with raises_problem("conflict", "fc", SurgeryError):
        convert_norm(plain, "dual_bn", domains=("a", "b"))
    assert before == {name: type(module) for name, module in plain.named_modules()}
    convert_norm(plain, "triple_bn")
    with route(plain, "adv"):
        plain.eval()(X)
