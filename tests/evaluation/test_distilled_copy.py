"""The distilled copy: it learns a model's answers, whatever their scale, and changes nothing else."""

import pytest
import torch
from torch import nn

import advnorm
from advnorm.attacks import predicting
from advnorm.evaluation import distilled_copy
from advnorm.evaluation.distilled_copy import distill
from advnorm.evaluation.plan import plan_evaluation
from support.attack_contract import assert_same, snapshot
from support.classifiers import Masked

THREAT = advnorm.ThreatModel(eps=0.2)
BLACK_BOX = {
    "logits": lambda z: z,
    "small logits": lambda z: 1e-4 * z,
    "large logits": lambda z: 1e5 * z,
    "probabilities": lambda z: z.softmax(1),
    "labels": lambda z: nn.functional.one_hot(z.argmax(1), 10).float(),
}


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(distilled_copy, "ROUNDS", 2)


def planned(model, data, limit=100, **options):
    return plan_evaluation(model, data, THREAT, "pgd10", limit=limit, gradients=False, **options)


@pytest.mark.parametrize("name", BLACK_BOX)
def test_a_copy_answers_as_the_model_does_around_the_images(short, undefended, data, name):
    model = Masked(undefended, before=torch.detach, after=BLACK_BOX[name])
    plan = planned(model, data)
    before = snapshot(model)
    copy = distill(plan, None)
    assert_same(before, snapshot(model))
    generator = torch.Generator().manual_seed(5)
    shift = THREAT.eps * (2 * torch.rand(plan.images.shape, generator=generator) - 1)
    points = (plan.images + shift).clamp(0, 1)
    with predicting(undefended) as predict:
        same = (copy(points).argmax(1) == predict(points).argmax(1)).double().mean()
    assert same > 0.8 and not copy.training
    if name == "logits":
        again = distill(plan, None).state_dict()
        assert all(torch.equal(value, again[key]) for key, value in copy.state_dict().items())


def test_large_images_get_a_convolutional_copy_and_vectors_a_perceptron(short, monkeypatch):
    monkeypatch.setattr(distilled_copy, "EPOCHS", 1)
    for shape, kind in (((3, 16, 16), "SmallCNN"), ((1, 8, 8), "Sequential"), ((20,), "Sequential")):
        torch.manual_seed(0)
        images, labels = torch.rand(8, *shape), torch.arange(8) % 3
        model = nn.Sequential(nn.Flatten(), nn.Linear(images[0].numel(), 3))
        copy = distill(planned(model, (images, labels), None), None)
        assert type(copy).__name__ == kind and copy(images).shape == (8, 3)


def test_answers_that_are_not_finite_teach_nothing(short, monkeypatch):
    monkeypatch.setattr(distilled_copy, "EPOCHS", 1)
    images, labels = torch.full((8, 1, 4, 4), 0.5), torch.arange(8) % 3
    model = nn.Sequential(nn.Flatten(), nn.Threshold(0.4999, torch.nan), nn.Linear(16, 3))
    copy = distill(planned(model, (images, labels), None), None)
    assert all(value.isfinite().all() for value in copy.state_dict().values())


def test_large_data_use_fewer_images(monkeypatch, short, undefended, data):
    monkeypatch.setattr(distilled_copy, "EPOCHS", 1)
    monkeypatch.setattr(distilled_copy, "MOST_PIXELS", 15 * 64 * 6)
    seen = []
    distill(planned(Masked(undefended, before=lambda x: seen.append(len(x)) or x), data), None)
    assert sum(seen) - sum(seen[:1]) <= 6 * 15


def test_a_branch_of_a_model_is_copied(short, dual, data):
    plan = plan_evaluation(dual, data, THREAT, "pgd10", ("clean", "adv"), limit=30, gradients=False)
    copies = [distill(plan, route) for route in ("clean", "adv")]
    points = data[0][:100]
    for route, copy in zip(("clean", "adv"), copies):
        with predicting(dual, route=route) as predict:
            expected = predict(points).argmax(1)
        assert (copy(points).argmax(1) == expected).double().mean() > 0.6
    assert not torch.equal(copies[0](points), copies[1](points))
