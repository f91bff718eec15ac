"""Verdicts on claims: resampled values, rules on hand-made cases, and what would decide."""

import json
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta, kstest, t

from advnorm.studies.claims import Clause, mean
from advnorm.studies.decision import decide_claim
from advnorm.studies.uncertainty import (
    RESAMPLES,
    SEED_DEVIATION,
    SEED_FREEDOM,
    ImageResults,
    MeasuredValues,
    Sample,
    _reweighted,
    collect_samples,
)

RECORDS = Path(__file__).parents[2] / "results" / "records"
ACCURACIES = st.floats(0, 100).map(lambda value: round(value, 2))


def measured(*, images=10_000, unit=100.0, **accuracies):
    """Values of the cell ``cell``, each over one or several seeds."""
    lists = {name: value if isinstance(value, tuple) else (value,) for name, value in accuracies.items()}
    return MeasuredValues({("cell", name): Sample(found, unit, images) for name, found in lists.items()})


def higher(values):
    yield Clause.higher("one is higher", mean(values, "cell", "one"), mean(values, "cell", "other"))


def high_and_comparable(values):
    one, other = mean(values, "cell", "one"), mean(values, "cell", "other")
    yield Clause.robust("one is robust", one)
    yield Clause.far_higher("one is far higher", one, other)
    yield Clause.significantly_higher("significantly", one, other)
    yield Clause.almost_no_robustness("the other has none", other)


@pytest.mark.parametrize(
    ("one", "other", "verdict"),
    [
        (50.0, 40.0, "supported"),
        (40.0, 50.0, "contradicted"),
        (50.0, 49.5, "undecided"),
        (49.5, 50.0, "undecided"),
        ((50.0, 50.2, 49.9), (47.0, 47.1, 47.2), "supported"),
        ((55.0, 40.0, 50.0), (47.0, 47.1, 47.2), "undecided"),  # the seeds disagree
    ],
)
def test_a_clause_is_decided_if_it_holds_for_other_images_and_seeds(one, other, verdict):
    assert decide_claim("A/table9", higher, measured(one=one, other=other)).verdict == verdict


def test_few_images_leave_a_claim_undecided_that_many_decide():
    verdicts = [
        decide_claim("x", higher, measured(images=n, one=52.0, other=48.0)).verdict for n in (100, 1000, 10_000)
    ]
    assert verdicts == ["undecided", "undecided", "supported"]


def test_an_undecided_claim_says_what_would_decide():
    needs = decide_claim("x", higher, measured(images=1_000_000, one=50.0, other=49.2)).needs
    assert needs.endswith(("more seed", "more seeds"))
    assert "more than 10 seeds" in decide_claim("x", higher, measured(images=1000, one=50.0, other=49.2)).needs

    def both(values):
        yield from higher(values)
        yield Clause("another cell", mean(values, "missing", "one") > 0)

    found = decide_claim("x", both, measured(one=50.0, other=40.0), cells=["cell", "missing", "third"])
    assert (found.verdict, found.needs, found.missing) == ("undecided", "2 more cells", ("missing", "one"))
    assert decide_claim("x", both, measured(one=40.0, other=50.0)).verdict == "contradicted"
    assert decide_claim("x", both, MeasuredValues({})).verdict == "not run"


@pytest.mark.parametrize("other", [49.6, 49.5, 49.4, 49.3, 49.2, 49.1])
def test_the_seeds_that_would_decide_are_the_fewest(other):
    values = measured(images=10_000_000, one=50.0, other=other)

    def share(seeds):
        one, two = (sample.resampled_means(key, seeds)[:RESAMPLES] for key, sample in values.samples.items())
        return (one > two).mean()

    fewest = next(seeds for seeds in range(2, 11) if share(seeds) >= 0.975)
    assert share(1) < 0.975
    expected = f"{fewest - 1} more seed{'s' if fewest > 2 else ''}"
    assert decide_claim("x", higher, values).needs == expected


def test_numbers_of_one_network_without_an_interval_decide_nothing():
    values = measured(unit=None, images=None, one=5.0, other=1.0)
    (clause,) = (found := decide_claim("x", higher, values)).clauses
    assert found.verdict == "undecided" and found.needs == "1 more seed" and clause.one_network and clause.held
    several = measured(unit=None, images=None, one=(5.0, 5.1), other=(1.0, 1.1))
    assert decide_claim("x", higher, several).verdict == "supported"

    def mixed(values):
        distance = mean(values, "cell", "distance")
        yield Clause(f"accuracy: {mean(values, 'cell', 'one'):.1f}", mean(values, "cell", "one") > 10)
        yield Clause(f"distance: {distance:.3g}", distance > 1)

    both = MeasuredValues({**measured(one=50.0).samples, ("cell", "distance"): Sample((3.0,))})
    assert [clause.one_network for clause in decide_claim("x", mixed, both).clauses] == [False, True]


@settings(max_examples=40, deadline=None)
@given(ACCURACIES, ACCURACIES, st.floats(0, 30), st.sampled_from([100, 1000, 10_000]))
def test_a_number_that_moves_away_never_turns_a_verdict_into_supported(one, other, step, images):
    for check in (higher, high_and_comparable):
        before = decide_claim("x", check, measured(images=images, one=one, other=other)).verdict
        for moved in ({"one": max(one - step, 0.0), "other": other}, {"one": one, "other": min(other + step, 100.0)}):
            after = decide_claim("x", check, measured(images=images, **moved)).verdict
            assert after != "supported" or before == "supported"


@settings(max_examples=60, deadline=None)
@given(st.floats(0, 100), st.floats(0, 100), st.integers(1, 20_000))
def test_a_larger_number_gives_larger_resampled_numbers(one, other, images):
    low, high = (Sample((value,), 100.0, images).resampled_means(("c", "v")) for value in sorted((one, other)))
    assert (low <= high + 1e-9).all() and ((low >= 0) & (high <= 100)).all()


@settings(max_examples=60, deadline=None)
@given(st.floats(0, 100), st.integers(1, 1000), st.integers(2, 50))
def test_more_images_never_widen_an_interval(accuracy, images, factor):
    few, many = (Sample((accuracy,), 100.0, n).interval for n in (images * 100, images * 100 * factor))
    assert many[1] - many[0] <= few[1] - few[0] + 1e-9


def test_the_resampled_accuracies_cover_the_true_one():
    draw = np.random.default_rng(0)
    truth, images, covered = 0.3, 500, 0
    for trial in range(300):
        network = truth + draw.normal() * SEED_DEVIATION / 100
        found = 100 * draw.binomial(images, network) / images
        means = Sample((found,), 100.0, images).resampled_means(("c", str(trial)))[:RESAMPLES]
        low, high = np.quantile(means, [0.025, 0.975])
        covered += low <= 100 * truth <= high
    assert 0.92 <= covered / 300 <= 0.985


def test_numbers_over_seeds_have_students_interval():
    values = (3.0, 4.0, 3.5)
    means = Sample(values).resampled_means(("c", "v"))[:RESAMPLES]
    at = (0.5 / RESAMPLES, 1 - 0.5 / RESAMPLES)
    expected = statistics.fmean(values) + t.ppf(at, 2) * statistics.stdev(values) / 3**0.5
    assert (means.min(), means.max()) == pytest.approx(tuple(expected))


def test_accuracies_over_seeds_have_students_interval_with_the_pooled_deviation():
    values = (50.0, 52.0, 51.0, 49.5)
    at = (0.5 / RESAMPLES, 1 - 0.5 / RESAMPLES)
    for unit in (100.0, 1.0):  # in percent, or a fraction
        found = tuple(value * unit / 100 for value in values)
        means = Sample(found, unit).resampled_means(("c", "v"))[:RESAMPLES]
        freedom = SEED_FREEDOM + 3
        pooled = (SEED_FREEDOM * SEED_DEVIATION**2 + 3 * statistics.variance(values)) / freedom
        expected = statistics.fmean(values) + t.ppf(at, freedom) * (pooled / 4) ** 0.5
        assert 100 * np.array([means.min(), means.max()]) / unit == pytest.approx(expected)


def test_the_declared_deviation_between_seeds_is_that_of_the_records():
    paths = sorted((RECORDS / "A/table3/single/eps16").glob("fast-seed*.json"))[:3]
    samples = collect_samples([json.loads(path.read_text()) for path in paths]).samples.values()
    pooled = statistics.fmean(sample.spread**2 for sample in samples) ** 0.5
    assert {len(sample.values) for sample in samples} == {3} and 2 * len(samples) == SEED_FREEDOM
    assert round(pooled, 1) == SEED_DEVIATION


def test_the_images_of_old_records_follow_from_their_measurements():
    def kinds(name):
        values = collect_samples([json.loads((RECORDS / name / "fast-seed0.json").read_text())])
        return {(sample.unit, sample.images) for sample in values.samples.values()}

    assert kinds("A/table3/dual_bn/eps16") == {(100.0, 10_000)}
    assert kinds("A/table5/dual_bn/eps16") == {(100.0, 1000)}
    assert kinds("A/fig4/dual_bn/eps16") == {(None, None)}
    assert (1.0, 1000) in kinds("C/table2/cifar10/eps16/mat_cat_0.5")


def test_seeds_on_different_numbers_of_images_count_as_on_the_fewest():
    path = RECORDS / "A/table3/single/eps8/paper-seed0.json"
    record = json.loads(path.read_text())
    measure = next(one for one in record["measures"] if one.get("name", "benchmark") == "benchmark")
    few = {**record, "outcomes": [], "measures": [{**measure, "options": {**measure["options"], "limit": 500}}]}
    (whole, both) = (
        collect_samples(seeds).samples["single/eps8", "shared/clean"] for seeds in ([record], [record, few])
    )
    assert whole.images == 10_000 and both.images == 500 and len(both.values) == 2


def results_of(correct, data="cifar10", first=0):
    correct = np.asarray(correct, bool)
    return ImageResults(data, first + np.arange(len(correct)), correct)


def draw():
    return np.random.default_rng(5)


@pytest.mark.parametrize(("right", "images"), [(0, 50), (7, 50), (120, 200), (200, 200), (1, 1)])
def test_reweighted_images_give_jeffreys_posterior(right, images):
    """Several data sets, because each has one set of weights."""
    correct = np.arange(images) < right
    sets = [_reweighted(results_of(correct, str(number)), np.random.default_rng(number)) for number in range(8)]
    assert kstest(np.concatenate(sets), beta(right + 0.5, images - right + 0.5).cdf).pvalue > 1e-3


def test_accuracies_on_the_same_images_are_resampled_together():
    correct = np.random.default_rng(0).random(400) < 0.4
    fewer = correct & (np.arange(400) >= 3)
    assert correct[:3].sum() > 0
    same, one, other, elsewhere = (
        _reweighted(results, np.random.default_rng(seed))
        for seed, results in enumerate(
            [results_of(correct), results_of(correct), results_of(fewer), results_of(correct, "svhn")]
        )
    )
    alone = np.std(same)
    assert np.std(same - one) < 0.1 * alone, "half an image of each kind is not shared"
    lost = int(correct[:3].sum())
    assert np.mean(same - other) == pytest.approx(lost / 400, rel=0.3) and np.std(same - other) < 0.3 * alone
    assert np.std(same - elsewhere) > 1.2 * alone


def test_an_image_has_the_same_weight_whatever_the_other_images():
    correct = np.arange(100) % 3 == 0
    few = _reweighted(results_of(correct[40:60], "one", first=40), draw())
    _reweighted(results_of(np.ones(5000), "one"), draw())
    assert (_reweighted(results_of(correct[40:60], "one", first=40), draw()) == few).all()


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.data())
def test_one_more_correct_image_raises_every_resampled_accuracy(correct, data):
    place = data.draw(st.integers(0, len(correct) - 1))
    low, high = ([*correct[:place], kind, *correct[place + 1 :]] for kind in (False, True))
    low, high = (
        Sample((100 * np.mean(one),), 100.0, len(one), (results_of(one),)).resampled_means(("c", "v"))[:RESAMPLES]
        for one in (low, high)
    )
    assert (low <= high).all()


def test_a_curve_that_loses_no_image_is_flat_in_every_set():
    """PGD-500 and PGD-2000 fool the same 126 of 200 images. Apart, 200 images would not decide about five percent."""
    correct = np.arange(200) < 74

    def values(paired):
        results = (results_of(correct),) if paired else ()
        samples = {("cell", name): Sample((37.0,), 100.0, 200, results) for name in ("pgd500", "pgd2000")}
        return MeasuredValues(samples)

    def check(found):
        before, after = (found["cell", name][0] for name in ("pgd500", "pgd2000"))
        yield Clause("flat", after >= 0.95 * before)

    assert [decide_claim("x", check, values(paired)).verdict for paired in (True, False)] == ["supported", "undecided"]


@given(st.lists(st.booleans(), min_size=2, max_size=40), st.data())
@settings(max_examples=30)
def test_images_that_move_away_from_a_claim_never_make_it_supported(correct, data):
    """``one`` loses correct images and ``other`` gains some: "one is above other" does not become supported."""
    other = np.asarray(data.draw(st.lists(st.booleans(), min_size=len(correct), max_size=len(correct))))
    fewer = np.asarray(correct) & np.asarray(
        data.draw(st.lists(st.booleans(), min_size=len(correct), max_size=len(correct)))
    )

    def check(found):
        yield Clause("above", found["cell", "one"][0] > found["cell", "other"][0])

    def verdict(**found):
        samples = {
            ("cell", name): Sample((100 * float(np.mean(bits)),), 100.0, len(bits), (results_of(bits),))
            for name, bits in found.items()
        }
        return decide_claim("x", check, MeasuredValues(samples)).verdict

    before = verdict(one=np.asarray(correct), other=other)
    after = verdict(one=fewer, other=other | np.asarray(correct))
    assert after != "supported" or before == "supported"


def test_results_that_contradict_the_number_or_name_no_data_are_not_used():
    path = RECORDS / "E" / "fig2" / "adv" / "pgd30" / "imagenette-seed0.json"
    record = json.loads(path.read_text())
    key = ("adv/pgd30", "shared/pgd2000")
    assert collect_samples([record]).samples[key].results
    moved = {**record, "values": {**record["values"], "shared/pgd2000": 50.0}}
    assert not collect_samples([moved]).samples[key].results and collect_samples([moved]).samples[key].images == 200
    run = {**record["run"], "config": {**record["run"]["config"], "data": None}}
    assert not collect_samples([{**record, "run": run}]).samples[key].results
    assert not collect_samples([record, {**record, "outcomes": []}]).samples[key].results, "one seed lacks them"


def test_a_huge_row_needs_no_memory():
    far = ImageResults("cifar10", np.array([3, 99_999_999]), np.array([True, False]))
    assert 0 < _reweighted(far, draw()).mean() < 1
