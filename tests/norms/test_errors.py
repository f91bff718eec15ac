"""Errors: the right class, the cure in the message, all problems at once, and nothing moved by a failed forward."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
import torch
from torch import nn

from advnorm import create_model, strip
from advnorm._core.errors import AdvnormError, ConfigError, RouteError
from advnorm.norms import (
    Plan,
    RoutedNorm,
    checkpoint_context,
    domains,
    likelihood,
    list_norms,
    make_norm,
    make_plan,
    pair,
    recalibrate,
    route,
    statistics,
    zero_perturbation,
)
from support.norm_oracles import (
    BANKED,
    FORWARDED,
    PAPER,
    along,
    build,
    changed,
    domains_of,
    parts_of,
    randomized,
    shares,
    snapshot,
)

ROUTED = [name for name, row in PAPER.items() if row.statistics in ("own", "other", "mixture") or row.affine == "own"]


@contextlib.contextmanager
def refused(kind: type[AdvnormError], *words: str, unchanged: nn.Module | None = None):
    """The block raises exactly ``kind``, its message holds every one of ``words``, and the module's state stays."""
    before = {} if unchanged is None else snapshot(unchanged)
    with pytest.raises(AdvnormError) as caught:
        yield
    assert type(caught.value) is kind
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    if unchanged is not None:
        assert changed(unchanged, before) == set()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: strip(None), "strip takes an nn.Module, got NoneType"),
        (lambda: domains("x"), "in an nn.Module, got str"),
        (lambda: zero_perturbation(3), "in an nn.Module, got int"),
        (lambda: likelihood(3), "in an nn.Module, got int"),
        (lambda: recalibrate(make_norm("bn", 4), None), "takes images, or an iterable of batches, got NoneType"),
        (lambda: make_norm("multi_bn", 4, domains=3), "domains is a list of names such as ['clean', 'adv'], got 3"),
        (lambda: create_model("small_cnn", norm_options=["a"]), "norm_options maps options to values"),
    ],
)
def test_things_of_another_kind_are_told_in_words(call, words):
    with refused(ConfigError, words):
        call()


def test_every_error_is_an_advnorm_error_and_a_builtin_one():
    assert issubclass(ConfigError, AdvnormError) and issubclass(ConfigError, ValueError)
    assert issubclass(RouteError, AdvnormError) and issubclass(RouteError, RuntimeError)


# -- names and options -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("dualbn", "did you mean 'dual_bn'"),
        ("DUAL_BN", "'dual_bn'"),
        ("tripple_bn", "did you mean 'triple_bn'"),
        ("xyz", "'cross_bn'"),
        (None, "'none'"),
        (3, "'bn'"),
    ],
)
@pytest.mark.parametrize("maker", [lambda name: make_norm(name, 4), make_plan], ids=["make_norm", "make_plan"])
def test_a_wrong_norm_name_is_answered_with_the_nearest_or_all(maker, name, hint):
    with refused(ConfigError, f"unknown norm {name!r}", hint):
        maker(name)


@pytest.mark.parametrize("name", list_norms())
def test_an_unknown_option_is_refused_by_every_norm(name):
    with refused(ConfigError, "momentun", "momentum"):
        build(name, momentun=0.2)


@pytest.mark.parametrize("name", [name for name in list_norms() if name != "cross_bn"])
def test_an_option_of_another_norm_is_refused_by_name(name):
    with refused(ConfigError, "other_gradient", name):
        build(name, other_gradient=True)
    if not name.endswith("gn"):
        with refused(ConfigError, "num_groups", name):
            build(name, num_groups=2)


@pytest.mark.parametrize("name", list_norms())
@pytest.mark.parametrize("channels", [0, -3])
def test_a_number_of_channels_below_one_is_refused(name, channels):
    with refused(ConfigError, "num_features", str(channels), "at least 1"):
        build(name, channels)


@pytest.mark.parametrize("name", list_norms())
@pytest.mark.parametrize("dim", [0, 4, "2d"])
def test_a_wrong_dim_is_refused(name, dim):
    with refused(ConfigError, "dim", repr(dim), "1, 2 or 3"):
        build(name, dim=dim)


def test_num_groups_must_divide_the_channels():
    for name in ("gn", "dual_affine_gn"):
        with refused(ConfigError, "num_groups", "divide", "6", "4"):
            make_norm(name, 6, num_groups=4)


@pytest.mark.parametrize("domains", [("clean",), ("a", "b", "c")])
@pytest.mark.parametrize("name", [name for name in list_norms() if name.startswith("dual_")])
def test_dual_norms_have_two_domains(name, domains):
    with refused(ConfigError, name, "2", "multi_bn"):
        make_norm(name, 4, domains=domains)


def test_norms_with_a_number_of_domains_say_which():
    with refused(ConfigError, "triple_bn", "3", "multi_bn"):
        make_norm("triple_bn", 4, domains=("a", "b"))
    with refused(ConfigError, "cross_bn", "two"):
        make_norm("cross_bn", 4, domains=("a", "b", "c"))
    with refused(ConfigError, "gmm_bn", "at least two"):
        make_norm("gmm_bn", 4, domains=("a",))


@pytest.mark.parametrize("name", list_norms())
def test_domains_given_as_one_string_are_refused(name):
    with refused(ConfigError, "list", "'clean'"):
        make_norm(name, 4, domains="clean")


@pytest.mark.parametrize(
    ("domains", "words"),
    [
        ((), ("at least one domain",)),
        (("clean", "clean"), ("name of its own",)),
        (("clean", "two words"), ("letters, digits", "two words")),
        (("clean", ""), ("letters, digits",)),
        (("clean", 3), ("letters, digits", "3")),
        (("clean", "clean", "a.b"), ("name of its own", "a.b")),  # both problems in one error
    ],
)
def test_bad_domain_names_are_refused(domains, words):
    with refused(ConfigError, *words):
        make_norm("multi_bn", 4, domains=domains)


def test_a_plan_that_does_not_fit_together_lists_all_its_problems():
    with refused(ConfigError, "'mine'", "normalized_by", "feeds", "affine"):
        Plan(name="mine", domains=("a", "b"), normalized_by=("a",), feeds=(), affine=("a", "b", "c"))
    with refused(ConfigError, "nothing feeds", "'c'"):
        Plan(name="mine", domains=("a", "b"), normalized_by=("a", "c"), feeds=("a", "b"), affine=("a", "b"))


# -- opening scopes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list_norms())
def test_a_wrong_domain_is_answered_with_the_nearest(name):
    norm = build(name)
    with refused(ConfigError, "unknown domain 'claen'", "did you mean 'clean'"):
        route(norm, "claen")
    with refused(ConfigError, "unknown domain 'adb'", "did you mean 'adv'", "unknown domain 'zzz'"):
        route(norm, {"clean": 1, "adb": 1, "zzz": 1})
    if name != "gmm_bn":  # cannot be paired at all
        with refused(ConfigError, "unknown domain 'Adv'"):
            pair(norm, statistics="clean", affine="Adv")


def test_a_domain_that_only_some_norms_know_is_refused():
    model = nn.Sequential(make_norm("triple_bn", 4), make_norm("dual_bn", 4))
    with refused(ConfigError, "unknown domain 'adv2'"):
        route(model, "adv2")


@pytest.mark.parametrize("counts", [-1, True, False, 2.0, "3", None, torch.tensor(2)], ids=repr)
def test_a_count_that_is_no_number_of_samples_is_refused(counts):
    with refused(ConfigError, "'adv'", "integer of at least 0", repr(counts)):
        route(make_norm("dual_bn", 4), {"clean": 2, "adv": counts})


def test_all_bad_counts_are_named_in_one_error():
    with refused(ConfigError, "'clean'", "-1", "'adv'", "True"):
        route(make_norm("dual_bn", 4), {"clean": -1, "adv": True})


@pytest.mark.parametrize("bad", [{}, None, 3, ["clean", "adv"], ("clean", 4), {"clean"}], ids=repr)
def test_something_that_is_no_route_is_refused_with_an_example(bad):
    with refused(ConfigError, "route", "{'clean': 128, 'adv': 128}"):
        route(make_norm("dual_bn", 4), bad)


@pytest.mark.parametrize(
    "scope",
    [
        lambda model: route(model, "adv"),
        lambda model: statistics(model, mode="running"),
        lambda model: pair(model, statistics="clean", affine="adv"),
    ],
    ids=["route", "statistics", "pair"],
)
def test_a_model_without_routed_norms_is_refused_with_the_cure(scope):
    with refused(ConfigError, "no routed norms", "convert_norm"):
        scope(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)))


def test_scopes_for_particular_norms_say_which():
    with refused(ConfigError, "no mixture norm", "gmm_bn"):
        likelihood(make_norm("dual_bn", 4))
    with refused(ConfigError, "mixture", "cannot be paired"):
        pair(make_norm("gmm_bn", 4), statistics="clean", affine="adv")
    for model in (nn.ReLU(), make_norm("ln", 4)):
        with refused(ConfigError, "no batch-fed routed norm", "convert_norm"):
            zero_perturbation(model)
    with refused(ConfigError, "no routed norms", "convert_norm"):
        checkpoint_context(nn.ReLU())()


@pytest.mark.parametrize("mode", ["frozen", "train", "eval", "Batch", "", 3, True], ids=repr)
def test_a_wrong_mode_is_refused(mode):
    with refused(ConfigError, "statistics mode", repr(mode), "batch"):
        statistics(make_norm("bn", 4), mode=mode)


def test_a_misspelt_mode_is_answered_with_the_nearest():
    with refused(ConfigError, "did you mean 'batch_frozen'"):
        statistics(make_norm("bn", 4), mode="batch-frozen")


@pytest.mark.parametrize("groups", [0, -2, 1.0, True, "2"], ids=repr)
def test_a_wrong_number_of_groups_is_refused(groups):
    with refused(ConfigError, "groups", "at least 1", repr(groups)):
        statistics(make_norm("bn", 4), groups=groups)


def test_all_problems_of_a_statistics_scope_are_named_in_one_error():
    with refused(ConfigError, "'runing'", "did you mean 'running'", "groups", "0", "layer9", "zero_perturbation"):
        statistics(make_norm("bn", 4), mode="runing", groups=0, perturbation={"layer9": {}})


def test_a_perturbation_for_another_norm_is_refused():
    other = zero_perturbation(nn.Sequential(make_norm("bn", 4)))
    with refused(ConfigError, "does not have", "0", "zero_perturbation"):
        statistics(make_norm("bn", 4), perturbation=other)


@pytest.mark.parametrize(
    ("deltas", "word"),
    [
        ({"adversarial": (torch.zeros(4), torch.zeros(4))}, "adversarial"),
        ({"adv": (torch.zeros(3), torch.zeros(3))}, "4"),
    ],
    ids=["bank", "channels"],
)
def test_a_perturbation_of_an_unknown_bank_or_of_another_width_is_refused(deltas, word):
    """A misspelt bank would be ignored in silence, and the attack would be none."""
    norm = make_norm("dual_bn", 4)
    with refused(ConfigError, word), route(norm, "adv"), statistics(norm, perturbation={"": deltas}):
        norm(torch.randn(3, 4, 2, 2))


def test_a_perturbation_maps_as_many_tensors_as_it_has():
    zero = zero_perturbation(make_norm("dual_bn", 4))
    with refused(ConfigError, "4 tensors", "3"):
        zero.ascend(zero.tensors[:3], 0.1)
    with refused(ConfigError, "radius", "-0.1"):
        zero.ascend(zero.tensors, -0.1)


# -- forwards --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", ROUTED)
def test_without_a_route_a_forward_says_how_to_set_one(name, training):
    norm = randomized(build(name)).train(training)
    x = torch.randn(4, 4, 2, 2)
    if name == "gmm_bn" and not training:
        assert norm(x).shape == x.shape  # at test time the mixture needs no route
        return
    domains = domains_of(name)
    counts = ", ".join(f"'{d}': n{i}" for i, d in enumerate(domains))
    with refused(
        RouteError, name, ", ".join(domains), f"route(model, '{domains[-1]}')", f"{{{counts}}}", unchanged=norm
    ):
        norm(x)


@pytest.mark.parametrize("name", list_norms())
def test_a_route_of_another_size_than_the_batch_is_refused(name):
    norm = randomized(build(name))
    counts = shares(name)
    total = sum(counts.values())
    for batch_size in (total - 1, total + 2, 1):
        words = (f"covers {total}", f"batch has {batch_size}", "sum to the batch size")
        with refused(RouteError, *words, unchanged=norm), along(norm, counts):
            norm(torch.randn(batch_size, 4, 2, 2))


@pytest.mark.parametrize("mode", ["batch", "running"])
@pytest.mark.parametrize("name", list_norms())
def test_an_empty_batch_is_refused(name, mode):
    norm = randomized(build(name))
    for counts in (domains_of(name)[0], dict.fromkeys(domains_of(name), 0)):
        with (
            refused(RouteError, "empty", "drop_last", unchanged=norm),
            route(norm, counts),
            statistics(norm, mode=mode),
        ):
            norm(torch.zeros(0, 4, 2, 2))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("lonely", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("name", [name for name in BANKED if PAPER[name].statistics != "mixed"])
def test_one_value_per_channel_of_a_domain_is_refused_before_any_bank_is_fed(name, lonely, groups):
    """The variance of one value is nothing to normalize by; the banks fed before the error would be off for good."""
    norm = randomized(build(name, dim=1))
    feeding = parts_of(name)[: len(domains_of(name))]
    counts = {part: groups if part == feeding[lonely] else 3 * groups for part in parts_of(name)}
    bank = feeding[lonely].removesuffix(FORWARDED)
    words = ("more than one value per channel", "at least two samples", "mode='running'", f"bank {bank!r}")
    scopes = along(norm, counts), statistics(norm, groups=groups)
    with refused(RouteError, *words, unchanged=norm), scopes[0], scopes[1]:
        norm(torch.randn(sum(counts.values()), 4))
    with along(norm, counts), statistics(norm, mode="running"):
        assert torch.isfinite(norm(torch.randn(sum(counts.values()), 4))).all()


@pytest.mark.parametrize("name", ["bn", "dual_affine_bn"])
def test_one_value_per_channel_in_all_is_refused(name):
    norm = randomized(build(name, dim=1))
    with refused(RouteError, "more than one value per channel", "mode='running'", unchanged=norm), route(norm, "adv"):
        norm(torch.randn(1, 4))
    with route(norm, {"clean": 1, "adv": 1}):  # one of each, and their statistics are mixed: two values
        assert norm(torch.randn(2, 4)).shape == (2, 4)


@pytest.mark.parametrize("name", [name for name in list_norms() if name.endswith(("gn", "in"))])
def test_one_value_per_group_of_channels_is_refused(name):
    """The built-in norm would return zeros, or an error of its own, by the size of the batch."""
    norm = build(name)
    for batch_size in (1, 3):
        with refused(RouteError, name, f"({batch_size}, 4, 1, 1)", "larger images"), route(norm, "adv"):
            norm(torch.randn(batch_size, 4, 1, 1))


@pytest.mark.parametrize("mode", ["batch", "batch_frozen"])
@pytest.mark.parametrize("name", ["cross_bn", "gmm_bn"])
def test_batch_statistics_of_a_domain_that_is_not_there_are_refused(name, mode):
    norm = randomized(build(name))
    x = torch.randn(6, 4, 2, 2)
    for counts, missing in (("adv", "clean"), ("clean", "adv"), ({"clean": 6, "adv": 0}, "adv"), ({"adv": 6}, "clean")):
        words = (name, f"statistics of {missing}", "'clean': n0, 'adv': n1", "mode='running'")
        with refused(RouteError, *words, unchanged=norm), route(norm, counts), statistics(norm, mode=mode):
            norm(x)
        with route(norm, counts), statistics(norm, mode="running"):
            assert torch.isfinite(norm(x)).all()


@pytest.mark.parametrize("mode", ["batch", "batch_frozen"])
def test_a_crossed_norm_needs_the_samples_whose_statistics_it_takes(mode):
    """Where some are forwarded, only those: the variances of crossed samples grow apart from norm to norm."""
    norm = randomized(make_norm("cross_bn", 4))
    x = torch.randn(8, 4, 2, 2)
    cure = "route(model, {'clean': n0, 'adv': n1}, forwarded={'clean': n0, 'adv': n1})"
    for routed, forwarded, missing in (
        ("adv", None, "clean"),
        ({"clean": 8}, None, "adv"),
        ({"clean": 4, "adv": 2}, {"clean": 2}, "adv"),
        ({"clean": 2, "adv": 4}, {"adv": 2}, "clean"),
        ("adv", {"adv": 4}, "clean"),
        ("adv", {"clean": 0, "adv": 4}, "clean"),
    ):
        words = ("cross_bn", f"statistics of {missing},", "forwarded for them", cure, "mode='running'")
        scope = route(norm, routed, forwarded=forwarded)
        with refused(RouteError, *words, unchanged=norm), scope, statistics(norm, mode=mode):
            norm(x)


def test_forwarded_samples_that_do_not_fit_the_batch_or_the_domains_are_refused():
    norm = randomized(make_norm("cross_bn", 4))
    for routed, forwarded, covered in (
        ({"clean": 2, "adv": 2}, {"clean": 2, "adv": 3}, 9),
        ("adv", {"clean": 10}, 10),
    ):
        words = (f"behind the forwarded {forwarded} covers {covered} samples", "the batch has 8")
        with refused(RouteError, *words, unchanged=norm), route(norm, routed, forwarded=forwarded):
            norm(torch.randn(8, 4, 2, 2))
    with refused(ConfigError, "unknown domain 'claen', did you mean 'clean'"):
        route(norm, "adv", forwarded={"claen": 4})
    with refused(ConfigError, "number of 'clean' samples", "-1"):
        route(norm, "adv", forwarded={"clean": -1})


@pytest.mark.parametrize("perturbed", [False, True])
@pytest.mark.parametrize("mode", ["batch", "batch_frozen"])
@pytest.mark.parametrize("name", BANKED)
def test_groups_that_do_not_divide_a_domains_share_are_refused(name, mode, perturbed):
    norm = randomized(build(name))
    counts = dict.fromkeys(parts_of(name), 4)
    counts[parts_of(name)[-1]] = 3
    counts[parts_of(name)[0]] += 1  # the whole batch would be divisible
    perturbation = zero_perturbation(norm) if perturbed else None
    scope = statistics(norm, mode=mode, groups=2, perturbation=perturbation)
    with refused(RouteError, "groups", "2", "divides", unchanged=norm), along(norm, counts), scope:
        norm(torch.randn(sum(counts.values()), 4, 2, 2))


@pytest.mark.parametrize("name", list_norms())
@pytest.mark.parametrize(
    ("dim", "shape", "cure"),
    [
        (1, (4, 4, 2, 2), "dim=2"),
        (1, (4,), "dim=1"),
        (2, (4, 4, 3), "dim=1"),
        (2, (4, 4), "dim=1"),
        (2, (4, 4, 2, 2, 2), "dim=3"),
        (3, (4, 4, 2, 2), "dim=2"),
    ],
)
def test_an_input_of_another_dimension_is_refused(name, dim, shape, cure):
    norm = randomized(build(name, dim=dim))
    with refused(ConfigError, name, str(shape), cure, unchanged=norm), route(norm, domains_of(name)[0]):
        norm(torch.randn(shape))


@pytest.mark.parametrize("name", list_norms())
def test_an_input_with_another_number_of_channels_is_refused(name):
    norm = randomized(build(name))
    with refused(ConfigError, "4 channels", "(4, 5, 2, 2)", unchanged=norm), route(norm, domains_of(name)[0]):
        norm(torch.randn(4, 5, 2, 2))


@pytest.mark.parametrize("name", BANKED)
def test_a_norm_without_running_statistics_refuses_mode_running(name):
    norm = build(name, track_running_stats=False)
    counts = shares(name)
    words = ("no running statistics", "track_running_stats=False", "batch_frozen")
    x = torch.randn(sum(counts.values()), 4, 2, 2)
    with along(norm, counts):
        with refused(RouteError, *words), statistics(norm, mode="running"):
            norm(x)
        trained, evaluated = norm.train()(x), norm.eval()(x)
    assert torch.equal(trained, evaluated)
    assert not list(norm.buffers())


def test_a_likelihood_without_a_domain_or_without_a_forward_is_refused():
    norm = randomized(make_norm("gmm_bn", 4)).eval()
    with likelihood(norm) as nll, refused(RouteError, "domain", "route", unchanged=norm):
        norm(torch.randn(4, 4, 2, 2))
    with refused(RouteError, "no mixture norm ran", "likelihood"):
        nll.loss()


def test_errors_read_as_sentences_without_dumps():
    """Every message met above is one paragraph: no newline, no tensor printed, under 600 characters."""
    norm: Any = make_norm("dual_bn", 4)
    messages = []
    for attempt in (
        lambda: norm(torch.randn(4, 4, 2, 2)),
        lambda: route(norm, {"clean": 1.5, "adv": -1}),
        lambda: make_norm("dualbn", 4),
        lambda: statistics(norm, mode="x", groups=0),
        lambda: RoutedNorm(0, make_plan("bn")),
    ):
        with pytest.raises(AdvnormError) as caught:
            attempt()
        messages.append(str(caught.value))
    assert len(messages) == 5
    for message in messages:
        assert len(message) < 600, message
        assert not re.search(r"\n|<function|object at 0x", message), message
