"""The gallery: declared truths, deterministic builds, and the audit's verdict on a handful of specimens."""

from functools import cache

import pytest
import torch

from advnorm.bench.audit import bench_audit, score
from advnorm.evaluation.gallery import SCALES, SPECIMENS, Parents, known_accuracy, list_specimens, part_of
from advnorm.evaluation.gallery.blind_defences import Forest, interval_bounds
from advnorm.evaluation.gallery.parents import PARENTS
from advnorm.threat import ThreatModel
from support.problems import raises_problem

EXPECTED = {"sound": "real", "false": "false", "undefended": "none"}


@cache
def shared_parents() -> Parents:
    return Parents()


def test_the_gallery_has_enough_specimens_of_each_truth_in_every_part():
    assert len(list_specimens()) >= 24
    for truth, least in (("sound", 7), ("false", 14), ("undefended", 3)):
        parts = [part_of(specimen) for specimen in list_specimens(truth)]
        assert len(parts) >= least and abs(parts.count("held_out") - parts.count("fitted")) <= 1
        assert parts.count("blind") >= 3
    assert all(specimen.why and specimen.name == name for name in SPECIMENS for specimen in [SPECIMENS.get(name)])


def test_parents_follow_from_the_seed_and_the_name():
    one, two = shared_parents(), Parents()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second = one.get("undefended"), two.get("undefended")
    assert torch.equal(before, torch.get_rng_state()) and one.get("undefended") is first
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values()))
    other = Parents(seed=1).get("undefended")
    assert not torch.equal(other.fc.weight, first.fc.weight)
    with raises_problem("unknown_name"):
        one.get("undefendet")


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("undefended", 30),
        ("mean_sparse", 30),
        *(pytest.param(n, 100, marks=pytest.mark.slow) for n in ("kwta", "random_resize", "perceptron_labels")),
    ],
)
def test_a_handful_of_specimens_gets_the_known_verdict(name, limit):
    specimen, row = SPECIMENS.get(name), bench_audit([name], limit=limit, parents=shared_parents()).rows[name]
    assert row.verdict == EXPECTED[specimen.truth], row
    if specimen.truth == "false":
        assert row.pgd10 - row.known > 0.2, "a usual attack reports far more than the truth"
        assert row.worst_case <= row.known + 2 / limit


def test_a_score_counts_verdicts_by_truth():
    result = bench_audit(["undefended"], limit=30, parents=shared_parents())
    (row,) = result.rows.values()
    rows = {
        "a": row,
        "b": type(row)(**{**vars(row), "truth": "false", "verdict": "false"}),
        "c": type(row)(**{**vars(row), "truth": "false", "verdict": "real"}),
        "d": type(row)(**{**vars(row), "truth": "sound", "verdict": "false"}),
    }
    found = score(rows)
    assert found["precision"] == found["recall"] == 0.5 and found["matrix"]["false"]["real"] == 1
    assert score({})["precision"] is None
    matrix = result.record()["scores"]["fitted"]["matrix"]
    assert matrix == {"undefended": {"real": 0, "false": 0, "inconclusive": 0, "none": 1}}


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"specimens": ["kwat"]}, "specimen"),
        ({"parts": ["blnd"]}, "part"),
        ({"data": "digit"}, "data"),
        ({"budget": "fast"}, "budget"),
    ],
)
def test_a_wrong_argument_is_reported_before_any_training(options, field):
    with raises_problem("unknown_name", field):
        bench_audit(**options)


def test_the_known_accuracy_of_a_linear_model_is_exact():
    """Two classes and one direction: an image is robust if its margin exceeds eps times the L1 norm of the weights."""
    weight = torch.tensor([[1.0, -2.0], [-1.0, 2.0]])
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        model[1].weight.copy_(weight)
    x = torch.rand(200, 1, 1, 2, generator=torch.Generator().manual_seed(0)) * 0.5 + 0.25
    y = model(x).argmax(1)
    z = x.flatten(1) @ weight.T
    eps = 0.1
    robust = (z.gather(1, y[:, None]) - z.gather(1, 1 - y[:, None]))[:, 0] > eps * (weight[0] - weight[1]).abs().sum()
    assert known_accuracy(model, None, x, y, ThreatModel(eps=eps)) == robust.double().mean().item()


@pytest.mark.parametrize("name", ["kernel_labels", "perceptron_labels", "naive_bayes", "quadratic_labels"])
def test_a_black_box_has_no_gradient_and_answers_as_the_function_that_its_expert_attacks(name):
    specimen, parents, (x, y) = SPECIMENS.get(name), shared_parents(), some_test_images()
    model, expert = specimen.build(parents), specimen.expert(parents)
    answers = model(x.clone().requires_grad_())
    assert not answers.requires_grad and (answers.argmax(1) == y).double().mean() > 0.85
    assert (answers.argmax(1) == expert(x).argmax(1)).double().mean() > 0.95
    assert (model(x.flip(0)).argmax(1) == answers.flip(0).argmax(1)).all()


@pytest.mark.slow
def test_the_held_out_half_meets_the_published_score():
    names = [specimen.name for specimen in list_specimens() if part_of(specimen) == "held_out"]
    rows = bench_audit(names).rows
    found = score(rows)
    assert found["matrix"]["sound"]["false"] == 0 and found["matrix"]["false"]["real"] == 0
    assert found["recall"] >= 0.9


def test_every_parent_and_scale_is_used():
    assert {"digits", "cifar10"} == set(SCALES) and len(PARENTS.names()) >= 15


@cache
def some_test_images() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = shared_parents().test_data
    return images[:40], labels[:40]


@pytest.mark.parametrize("name", ["forest", "hard_label", "decoy_gradient", "hash_noise", "patch_dictionary"])
def test_a_blind_false_specimen_is_accurate_and_falls_to_someone_who_knows_the_defence(name):
    specimen, parents, (x, y) = SPECIMENS.get(name), shared_parents(), some_test_images()
    model, expert = specimen.build(parents).eval(), specimen.expert(parents).eval()
    assert (model(x).argmax(1) == y).double().mean() > 0.85
    assert known_accuracy(model, expert, x, y, specimen.threat(parents.scale)) < 0.2


def test_interval_bounds_certify_what_strong_attacks_leave():
    specimen, parents, (x, y) = SPECIMENS.get("interval_trained"), shared_parents(), some_test_images()
    model, eps = specimen.build(parents), specimen.threat(parents.scale).eps
    low, high = interval_bounds(model, (x - eps).clamp(0, 1), (x + eps).clamp(0, 1))
    right = torch.nn.functional.one_hot(y, 10).bool()
    certified = (torch.where(right, low, high).argmax(1) == y).double().mean().item()
    assert 0.5 < certified <= known_accuracy(model, None, x, y, ThreatModel(eps=eps))


def test_the_forest_answers_as_scikit_learn_does():
    from sklearn.ensemble import RandomForestClassifier

    parents, (x, _) = shared_parents(), some_test_images()
    images, labels = parents.train_data
    fitted = RandomForestClassifier(5, max_depth=6, random_state=1).fit(images.flatten(1).numpy(), labels.numpy())
    expected = torch.from_numpy(fitted.predict_proba(x.flatten(1).numpy())).float()
    torch.testing.assert_close(Forest(fitted)(x), expected)
