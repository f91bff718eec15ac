"""The candidates of a search: fooled images are dropped, rejected candidates are replaced."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from advnorm._core.seeding import ImageNoise
from advnorm.attacks import APGD
from advnorm.attacks.model_access import predicting
from advnorm.attacks.search import CandidateGrid, ranked_targets
from advnorm.attacks.victim import VictimModel
from advnorm.threat import THREAT_NORMS, ThreatModel
from support.autoattack_models import Double


def noise_for(x: Tensor, seed: int = 0) -> ImageNoise:
    return ImageNoise(seed, torch.arange(len(x)))


def test_targets_are_the_most_likely_other_classes():
    logits = torch.tensor([[0.1, 3.0, 2.0, 1.0], [5.0, 1.0, 2.0, 3.0]])
    assert ranked_targets(logits, torch.tensor([1, 3]), 2).tolist() == [[2, 3], [0, 2]]
    assert ranked_targets(logits, torch.tensor([1, 3]), 9).shape == (2, 3)


@pytest.mark.parametrize("norm", THREAT_NORMS)
@pytest.mark.parametrize("targets", [0, 4])
def test_dropping_fooled_images_changes_nothing_but_the_work(trained, norm, targets, monkeypatch):
    t = trained[norm]
    model = Double(copy.deepcopy(t.model))
    x, y = t.first(60)
    results, work = [], []
    assert CandidateGrid.DROP == 0
    for share in (0.0, 0.25, 2.0):  # at once, a quarter of the rows together, never
        monkeypatch.setattr(CandidateGrid, "DROP", share)
        with predicting(model) as predict:
            victim = VictimModel(predict)
            attack = APGD(threat=t.threat, steps=25, loss="dlr", targets=targets)
            results.append(attack.search(victim, x, y, noise_for(x)))
            work.append(victim.backwards)
    for found in results[1:]:
        assert torch.equal(found.fooled, results[0].fooled)
        assert torch.equal(found.x_adv, results[0].x_adv)
    assert work[0] <= work[1] < work[2]


def test_a_rejected_candidate_is_replaced_by_the_next():
    x, y = torch.full((3, 1, 2, 2), 0.5), torch.zeros(3, dtype=torch.long)
    verdicts = iter([[False, True], [True]])
    victim = VictimModel(lambda x: torch.zeros(len(x), 2), search_predict=lambda x: x.flatten(1), tolerance=0.2)
    victim.misclassifies = lambda x, y: torch.tensor(next(verdicts))  # type: ignore[method-assign]
    grid = CandidateGrid(victim, ThreatModel(eps=0.1), x, y)
    grid.offer(x + 0.01, torch.tensor([0.1, -1.0, 0.3]))
    assert grid.verify().tolist() == [0, 2]
    grid.offer((x + 0.02)[[0, 2]], torch.tensor([0.15, 0.3]))
    grid.verify()
    found = grid.finish()
    assert found.fooled.tolist() == [True, True, False]
    assert torch.allclose((found.x_adv - x).flatten(1).amax(1), torch.tensor([0.02, 0.01, 0.01]))
