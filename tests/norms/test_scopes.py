"""Scopes: what they set, that nothing remains after them, and in which order they open and close."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import pickle
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from advnorm._core.errors import RouteError
from advnorm.norms import (
    domains,
    list_norms,
    make_norm,
    mixture_likelihood,
    pair_banks,
    route,
    routed_modules,
    statistics,
    zero_perturbation,
)
from advnorm.norms.state import UNSCOPED
from support.norm_cases import ROUTED, images, in_thread, network, rejects, scope_states
from support.norm_oracles import BANKED, MODES, PAPER, batch, build, changed, domains_of, randomized, snapshot

examples = settings(max_examples=40, deadline=None, derandomize=True, database=None)


@pytest.mark.parametrize("name", ROUTED)
def test_the_inner_route_wins_and_the_outer_one_comes_back(name):
    norm = randomized(build(name).double()).eval()
    x = batch({"all": 4})
    first, second, *_ = domains_of(name)
    with route(norm, first):
        outer = norm(x)
        with route(norm, second):
            inner = norm(x)
        assert torch.equal(norm(x), outer)
    if name != "gmm_bn":  # at test time a mixture weighs all banks, whatever the domain
        assert not torch.equal(inner, outer)
        with rejects("missing_route", "route", RouteError):
            norm(x)


def test_what_a_statistics_scope_does_not_give_it_inherits():
    norm = randomized(make_norm("dual_bn", 4).double())
    x, before = batch({"adv": 4}), snapshot(norm)
    delta = {"": {"adv": tuple(torch.full((4,), 0.1, dtype=torch.float64) for _ in range(2))}}
    with route(norm, "adv"):
        with statistics(norm, mode="batch_frozen", groups=2, perturbation=delta):
            together = norm(x)
        with statistics(norm, mode="batch_frozen"), statistics(norm, groups=2), statistics(norm, perturbation=delta):
            apart = norm(x)
        with statistics(norm, perturbation=delta), statistics(norm, groups=2, mode="batch_frozen"), route(norm, "adv"):
            turned = norm(x)
        with statistics(norm, mode="batch_frozen"):
            plain = norm(x)
    assert torch.equal(together, apart)
    assert torch.equal(together, turned)
    assert not torch.allclose(together, plain)
    assert changed(norm, before) == set()


def test_a_route_inside_a_pair_replaces_it_and_a_pair_inside_a_route_replaces_that():
    norm = randomized(make_norm("dual_bn", 4).double()).eval()
    x = batch({"all": 4})
    with route(norm, "adv"):
        adv = norm(x)
    with pair_banks(norm, statistics="clean", affine="adv"):
        mixed = norm(x)
        with route(norm, "adv"):
            assert torch.equal(norm(x), adv)
            with pair_banks(norm, statistics="clean", affine="adv"):
                assert torch.equal(norm(x), mixed)
            assert torch.equal(norm(x), adv)
        assert torch.equal(norm(x), mixed)
    assert not torch.equal(mixed, adv)


@pytest.mark.parametrize("name", list_norms())
def test_everything_is_restored_after_an_exception(name):
    model = network(name)
    outside = scope_states(model)
    first, second, *_ = domains_of(name)
    makers = [lambda: route(model, first), lambda: statistics(model, mode="running", groups=2)]
    if name in BANKED:
        makers.append(lambda: statistics(model, perturbation=zero_perturbation(model)))
    makers.append(
        lambda: mixture_likelihood(model) if name == "gmm_bn" else pair_banks(model, statistics=first, affine=second)
    )

    def fail_inside() -> None:
        with contextlib.ExitStack() as stack:
            for maker in makers:
                stack.enter_context(maker())
            assert scope_states(model) != outside
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        fail_inside()
    assert scope_states(model) == outside


def test_a_failed_forward_leaves_the_scope_usable():
    norm = make_norm("dual_bn", 4)
    with route(norm, {"clean": 2, "adv": 2}):
        with rejects("wrong_route", "route", RouteError):
            norm(torch.randn(5, 4, 2, 2))
        assert norm(torch.randn(4, 4, 2, 2)).shape == (4, 4, 2, 2)
    assert scope_states(norm) == scope_states(make_norm("dual_bn", 4))


def test_an_open_scope_cannot_be_entered_again_and_survives_the_attempt():
    norm = make_norm("dual_bn", 4)
    outside = scope_states(norm)
    scope = route(norm, "adv")
    with scope:
        inside = scope_states(norm)
        with rejects("already_open", kind=RouteError), scope:
            pass
        assert scope_states(norm) == inside
    assert scope_states(norm) == outside


def test_a_scope_of_a_part_touches_only_that_part():
    model, x = network("dual_bn"), images({"all": 4})
    before = snapshot(model)
    with (
        route(model, "clean"),
        route(model[1], "adv"),
        statistics(model[4], mode="batch"),
        statistics(model[4:], groups=2),
    ):
        model(x)
    names = ("running_mean", "running_var", "num_batches_tracked")
    assert changed(model, before) == {f"1.{k}_adv" for k in names} | {f"4.{k}_clean" for k in names}
    with route(model, "clean"), statistics(model[1], mode="running"):
        before = snapshot(model)
        model(x)
        assert changed(model, before) == {f"4.{k}_clean" for k in names}


def test_a_norm_that_a_model_holds_twice_is_set_and_restored_once():
    norm = make_norm("dual_bn", 4)
    model = nn.Sequential(norm, nn.ReLU(), norm)
    outside = scope_states(model)
    assert len(routed_modules(model)) == 1
    with route(model, "adv"):
        model(torch.randn(3, 4, 2, 2))
    assert scope_states(model) == outside
    assert norm.num_batches_tracked_adv == 2


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("name", list_norms())
def test_a_copy_made_inside_a_scope_starts_outside_of_it(name, clone):
    model = network(name)
    outside = scope_states(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(route(model, domains_of(name)[-1]))
        stack.enter_context(statistics(model, mode="running", groups=2))
        if name in BANKED:
            stack.enter_context(statistics(model, perturbation=zero_perturbation(model)))
        if name == "gmm_bn":
            stack.enter_context(mixture_likelihood(model))
        twin = clone(model)
        inside = scope_states(model)
        assert scope_states(twin) == outside
        assert scope_states(model) == inside != outside
    assert changed(twin, snapshot(model)) == set()
    assert scope_states(model) == outside


def test_domains_are_those_of_all_norms_in_order():
    assert domains(network("dual_bn")) == ("clean", "adv")
    assert domains(network("triple_bn")) == ("clean", "adv", "adv2")
    assert domains(make_norm("multi_bn", 4, domains=["day", "night"])) == ("day", "night")
    assert domains(nn.Linear(2, 2)) == ()
    assert list(routed_modules(network("dual_bn"))) == ["1", "4"]
    norm = make_norm("dual_bn", 4)
    assert routed_modules(norm) == {"": norm}


def test_forwarded_samples_belong_to_their_route_and_not_to_one_inside_or_before():
    norm, x = randomized(make_norm("dual_bn", 3).double()).eval(), images({"all": 5})

    def only(domain: str, rows: Tensor) -> Tensor:
        with route(copied, domain):
            return copied(rows)

    copied = copy.deepcopy(norm)
    adv, parts = only("adv", x), torch.cat([only("clean", x[:2]), only("adv", x[2:])])
    with route(norm, "adv"):
        assert torch.equal(norm(x), adv)
    with route(norm, "adv", forwarded={"clean": 2}):
        assert torch.equal(norm(x), parts)
        with route(norm, "adv"):
            assert torch.equal(norm(x), adv)
        assert torch.equal(norm(x), parts)


def test_groups_are_formed_again_for_a_batch_like_the_one_before():
    norm, x = randomized(make_norm("bn", 3).double()), images({"clean": 4, "adv": 2})
    fresh = copy.deepcopy(norm)
    with route(norm, {"clean": 4, "adv": 2}), statistics(norm, mode="batch_frozen"):
        norm(x)
        with statistics(norm, groups=2):
            found = norm(x)
        whole = norm(x)
    with route(fresh, {"clean": 4, "adv": 2}), statistics(fresh, mode="batch_frozen", groups=2):
        assert torch.equal(found, fresh(x))
    assert not torch.equal(found, whole)


@examples
@given(
    choices=st.lists(st.sampled_from(["clean", "adv", "both", "pair", "groups", *MODES]), max_size=6),
    fail=st.booleans(),
)
def test_any_nest_of_scopes_ends_where_it_began(choices, fail):
    model = nn.Sequential(make_norm("dual_bn", 2), make_norm("dual_affine_ln", 2))
    outside = scope_states(model)
    trail = []

    def scope(choice: str):
        if choice in MODES:
            return statistics(model, mode=choice)
        if choice == "groups":
            return statistics(model, groups=3)
        if choice == "pair":
            return pair_banks(model, statistics="clean", affine="adv")
        return route(model, {"clean": 1, "adv": 2} if choice == "both" else choice)

    try:
        with contextlib.ExitStack() as stack:
            for choice in choices:
                stack.enter_context(scope(choice))
                trail.append(scope_states(model))
            if fail:
                raise KeyError
    except KeyError:
        assert fail
    assert scope_states(model) == outside
    assert len(trail) == len(choices)


def test_a_generator_that_closes_late_raises_and_leaves_nothing():
    model = network("dual_bn")

    def held():
        with route(model, "adv"):
            yield

    generator = held()
    next(generator)
    with route(model, "clean"):
        with rejects("wrong_order", kind=RouteError):
            generator.close()
        with statistics(model, mode="running"):
            assert all(m.state.route == (("clean", None),) for m in routed_modules(model).values())
    assert all(m.state == type(m.state)() and m.scopes == () for m in routed_modules(model).values())
    with rejects("missing_route", "route", RouteError):
        model(images({"clean": 4}))


def test_tasks_that_share_a_model_raise():

    model = network("dual_bn")

    async def task(domain, begin, opened, finish):
        await begin.wait()
        with route(model, domain):
            opened.set()
            await finish.wait()

    async def both():
        start, first, second, over = (asyncio.Event() for _ in range(4))
        start.set()
        inner = asyncio.create_task(task("adv", first, second, over))
        outcome = (await asyncio.gather(task("clean", start, first, second), return_exceptions=True))[0]
        over.set()
        return [outcome, *await asyncio.gather(inner, return_exceptions=True)]

    outcomes = asyncio.run(both())
    assert isinstance(outcomes[0], RouteError) and outcomes[1] is None
    assert all(m.state == type(m.state)() for m in routed_modules(model).values())


@pytest.mark.parametrize("name", list_norms())
def test_a_forward_of_another_thread_inside_a_scope_is_rejected(name):
    norm = build(name)
    before = snapshot(norm)
    with route(norm, domains_of(name)[0]), statistics(norm, mode="running"):
        with rejects("wrong_thread", kind=RouteError):
            in_thread(lambda: norm(torch.randn(4, 4, 2, 2)))
        norm(torch.randn(4, 4, 2, 2))
    assert changed(norm, before) == set()


@pytest.mark.parametrize("name", list_norms())
def test_a_scope_of_another_thread_is_rejected_and_leaves_ours_unchanged(name):
    norm = build(name)
    with route(norm, domains_of(name)[0]):
        inside = scope_states(norm)
        with rejects("wrong_thread", kind=RouteError):
            in_thread(lambda: route(norm, domains_of(name)[-1]).__enter__())
        assert scope_states(norm) == inside
    with route(norm, domains_of(name)[0]):
        pass


def test_threads_that_race_for_a_model_are_served_or_rejected_and_leave_nothing_behind(monkeypatch):
    model = nn.Sequential(*(make_norm("dual_bn", 2) for _ in range(3)))
    served, torn = [], []

    def slowly() -> int:  # lets other threads run between the check of the model and the change
        time.sleep(0.002)
        return threading.get_ident()

    monkeypatch.setattr("advnorm.norms.scopes.threading", SimpleNamespace(get_ident=slowly))

    def race(domain: str) -> None:
        for _ in range(10):
            with contextlib.suppress(RouteError), route(model, domain):
                time.sleep(0.001)
                torn.extend(norm for norm in model if norm.state.route != ((domain, None),))
                served.append(domain)

    threads = [threading.Thread(target=race, args=(domain,)) for domain in ("clean", "adv", "clean", "adv")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert served and not torn
    assert all(norm.state == UNSCOPED and not norm.scopes for norm in model)


def test_threads_may_take_turns_and_may_have_copies():
    norm = make_norm("dual_bn", 4)
    x = torch.randn(4, 4, 2, 2)

    def forward(model: nn.Module) -> Tensor:
        with route(model, "adv"), statistics(model, mode="running"):
            return model(x)

    ours = forward(norm)
    assert torch.equal(in_thread(lambda: forward(norm)), ours)
    with route(norm, "clean"):
        assert torch.equal(in_thread(lambda: forward(copy.deepcopy(norm))), ours)
    single = make_norm("bn", 4).eval()
    assert torch.equal(in_thread(lambda: single(x)), single(x))


@pytest.mark.parametrize("name", [name for name in BANKED if name != "gmm_bn"])
def test_pair_takes_the_statistics_of_one_domain_and_the_affine_parameters_of_another(name):
    x = batch({"all": 4})
    row = PAPER[name]
    for statistics_of in domains_of(name):
        for affine_of in domains_of(name):
            norm = randomized(build(name).double())
            state = snapshot(norm)
            ns = "" if row.statistics == "mixed" else f"_{statistics_of}"
            ap = f"_{affine_of}" if row.affine == "own" else ""
            plain = nn.BatchNorm2d(4).double()
            names = {k: k + (ap if k in ("weight", "bias") else ns) for k in plain.state_dict()}
            plain.load_state_dict({key: state[value] for key, value in names.items()})
            if row.affine == "sandwich":
                weight, bias = (state[f"own_{key}_{affine_of}"] for key in ("weight", "bias"))
                plain.weight.data *= weight
                plain.bias.data = weight * plain.bias.data + bias
            with pair_banks(norm, statistics=statistics_of, affine=affine_of):
                with statistics(norm, mode="running"):
                    torch.testing.assert_close(norm(x), plain.eval()(x), rtol=1e-10, atol=1e-12)
                assert changed(norm, state) == set()
                with statistics(norm, mode="batch_frozen"):
                    y = norm(x)
                assert changed(norm, state) == set()
                with statistics(norm, mode="batch"):
                    torch.testing.assert_close(norm(x), y)
            torch.testing.assert_close(y, plain.train()(x), rtol=1e-10, atol=1e-12)
            updated = {"running_mean" + ns, "running_var" + ns, "num_batches_tracked" + ns}
            assert changed(norm, state) == updated
            for key in updated:
                torch.testing.assert_close(norm.state_dict()[key], plain.state_dict()[key.removesuffix(ns)])


@pytest.mark.parametrize("name", ["dual_affine_ln", "dual_affine_gn", "dual_affine_in", "ln", "none"])
def test_pair_of_a_per_sample_norm_chooses_the_affine_parameters(name):
    norm = randomized(build(name).double())
    x = batch({"all": 4})
    with pair_banks(norm, statistics="clean", affine="adv"):
        y = norm(x)
    with route(norm, "adv"):
        assert torch.equal(norm(x), y)


def test_pair_perturbs_the_bank_it_names():
    norm = randomized(make_norm("dual_bn", 4).double())
    x = batch({"all": 4})
    deltas = {
        b: tuple(torch.full((4,), v, dtype=torch.float64) for _ in range(2)) for b, v in (("clean", 0.1), ("adv", 0.9))
    }
    with (
        pair_banks(norm, statistics="clean", affine="adv"),
        statistics(norm, mode="running", perturbation={"": deltas}),
    ):
        y = norm(x)
    mean, var = (t.view(4, 1, 1) for t in (norm.running_mean_clean, norm.running_var_clean))
    z = 1.1 * (x - 1.1 * mean) / (var + norm.eps).sqrt()
    torch.testing.assert_close(y, z * norm.weight_adv.view(4, 1, 1) + norm.bias_adv.view(4, 1, 1))
