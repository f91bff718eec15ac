"""mixup and CutMix against their definitions."""

import numpy as np
import pytest
import torch

import advnorm
from advnorm.config.fields import TrainingSettings
from advnorm.data import load, make_loader
from advnorm.objectives import OBJECTIVES, Objective, ObjectiveOutput, register_objective
from advnorm.training.build import build_model, data_properties
from advnorm.training.mixing import mix_batch
from support.problems import raises_problem
from support.small_runs import small, train

X = torch.rand(6, 3, 8, 10, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 3, 0, 1])


def draw(kind, step, **settings):
    return mix_batch(TrainingSettings(mix=kind, **{"seed": 3, **settings}), X, Y, classes=4, step=step)


@pytest.mark.parametrize("step", range(5))
def test_mixup_is_the_same_convex_combination_of_images_and_labels(step):
    images, labels = draw("mixup", step)
    share = np.random.default_rng([3, step]).beta(1.0, 1.0)
    for i in range(6):
        expected = share * X[i].double() + (1 - share) * X[i - 1].double()
        torch.testing.assert_close(images[i].double(), expected, rtol=0, atol=1e-6)
        weights = np.zeros(4)
        weights[Y[i]] += share
        weights[Y[i - 1]] += 1 - share
        np.testing.assert_allclose(labels[i].numpy(), weights, atol=1e-6)


@pytest.mark.parametrize("step", range(20))
def test_cutmix_takes_one_box_from_the_neighbour_and_weighs_labels_by_what_is_left(step):
    images, labels = draw("cutmix", step)
    foreign = (images != X).any(1)
    assert (foreign == foreign[:1]).all()  # one box for the batch
    rows, columns = foreign[0].any(1).nonzero(), foreign[0].any(0).nonzero()
    if len(rows):
        box = foreign[0, rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        assert box.all()
        assert torch.equal(images[:, :, foreign[0]], X.roll(1, 0)[:, :, foreign[0]])
    left = 1 - foreign[0].double().mean()
    own = torch.tensor([labels[i, Y[i]] for i in range(6)]).double()
    torch.testing.assert_close(own, left.expand(6), rtol=0, atol=1e-6)
    torch.testing.assert_close(labels.sum(1), torch.ones(6))


def test_a_box_of_cutmix_has_the_drawn_share_and_lies_anywhere():
    covered, whole = torch.zeros(8, 10), 0
    for step in range(300):
        foreign = (draw("cutmix", step)[0] != X).any(1)[0]
        covered += foreign
        rows, columns = foreign.any(1).nonzero(), foreign.any(0).nonzero()
        if len(rows) and rows.min() > 0 and rows.max() < 7 and columns.min() > 0 and columns.max() < 9:
            side = np.sqrt(1 - np.random.default_rng([3, step]).beta(1.0, 1.0))  # nothing of the box is cut off
            assert (len(rows), len(columns)) == (round(8 * side), round(10 * side))
            whole += 1
    assert whole > 20
    for axis in (0, 1):
        first, last = covered.sum(axis)[[0, -1]].tolist()
        assert 0.7 < first / last < 1.4  # no side is favoured


def test_draws_depend_on_seed_and_step_alone():
    torch.manual_seed(1)
    first = draw("mixup", 4)
    torch.manual_seed(2)
    assert all(torch.equal(a, b) for a, b in zip(first, draw("mixup", 4)))
    assert not torch.equal(first[0], draw("mixup", 5)[0])
    assert not torch.equal(first[0], draw("mixup", 4, seed=4)[0])


def test_without_mixing_images_and_labels_are_as_they_were():
    images, labels = draw("none", 0)
    assert images is X and labels is Y


def test_alpha_spreads_the_shares():
    near_half = [np.random.default_rng([0, step]).beta(50.0, 50.0) for step in range(50)]
    shares = [float(draw("mixup", step, mix_alpha=50.0, seed=0)[1][0, 0]) for step in range(50)]
    np.testing.assert_allclose(shares, near_half, atol=1e-6)  # the neighbour of image 0 has another label


@pytest.mark.parametrize("settings", [["mix=mixup"], ["mix=cutmix", "second_pass=apart", "label_smoothing=0.1"]])
def test_a_training_with_mixed_images_runs_and_repeats(settings, tmp_path):
    data = "data={name: synthetic, size: 64, image_size: 8}"
    config = advnorm.Config().with_overrides(
        ["objective=standard", data, "epochs=1", "batch_size=16", "validate_every=0", "held_out=0", *settings]
    )
    rows = [advnorm.train(config, out=tmp_path / name).metrics() for name in ("a", "b")]
    assert rows[0] == rows[1] and rows[0][0]["loss"] > 0


def test_mixed_images_and_labels_are_those_of_a_loop_by_hand(tmp_path):
    settings = {"mix": "mixup", "mix_alpha": 0.5, "seed": 3, "held_out": 0, "validate_every": 0}
    data = {"name": "synthetic", "size": 48, "image_size": 8, "channels": 1, "classes": 4}
    config = advnorm.Config.from_dict(
        {"objective": "standard", "model": "small_cnn", "data": data, "epochs": 2, "batch_size": 12, **settings}
    )
    run = advnorm.train(config, out=tmp_path, device="cpu")
    images = load(split="train", **data)
    torch.manual_seed(3)
    model = build_model(config, data_properties(images)).train()
    objective = advnorm.objectives.Standard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    loader = make_loader(images, batch_size=12, seed=3, augment="none")
    for epoch, row in enumerate(run.metrics()):
        right = []
        for place, batch in enumerate(loader.epoch(epoch)):
            x, y = mix_batch(config, batch.x, batch.y, classes=4, step=4 * epoch + place)
            step = objective(x, y, index=batch.index)
            optimizer.zero_grad()
            step.loss.backward()
            optimizer.step()
            right.append((step.logits["clean"].argmax(1) == y.argmax(1)).double().mean().item())
        assert row["clean_accuracy"] == pytest.approx(np.mean(right), rel=1e-12)
    trained = run.model().state_dict()
    assert all(torch.equal(trained[name], value) for name, value in model.state_dict().items())


def test_a_budget_multiplies_epochs_and_all_that_counts_in_epochs():
    config = advnorm.Config(epochs=10, milestones=(5.0, 7.5), running_epochs=1, eps_warmup_epochs=2, budget=2)
    scaled = config.scaled()
    assert (scaled.epochs, scaled.milestones, scaled.running_epochs, scaled.eps_warmup_epochs) == (20, (10, 15), 2, 4)
    assert scaled.budget == 1 and scaled.scaled() == scaled
    assert advnorm.Config(epochs=10).digest != advnorm.Config(epochs=10, budget=2).digest


# -- with adversarial images -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
@pytest.mark.parametrize("objective", ["hybrid", "classical", "trades"])
def test_mixed_images_are_attacked_with_the_label_of_the_larger_share(kind, objective):
    torch.manual_seed(0)
    model = advnorm.create_model("small_cnn", num_classes=4, norm="dual_bn")
    attack = advnorm.attacks.PGD(threat=advnorm.ThreatModel(eps=0.1), steps=2)
    loss = OBJECTIVES.get(objective)(model, attack, label_smoothing=0.1)
    images, labels = draw(kind, 2)
    index = torch.arange(len(images))
    assert labels.dim() == 2
    batch = loss.craft_batch(images, labels, index)
    hard = loss.craft_batch(images, labels.argmax(1), index)
    assert torch.equal(batch.x_adv, hard.x_adv) and torch.equal(batch.y, labels)
    found = loss.compute_loss(batch)
    logits = found.logits["adv"].double()
    smooth = 0.9 * labels.double() + 0.1 / 4
    expected = -(smooth * logits.log_softmax(1)).sum(1).mean()  # soft cross-entropy
    if objective != "trades":
        torch.testing.assert_close(found.terms["adv_ce"].double(), expected, rtol=1e-5, atol=1e-6)
    found.loss.backward()


def test_a_training_mixes_adversarial_images(tmp_path):
    run = train(small(norm="dual_bn", mix="cutmix", epochs=1), tmp_path)
    assert {"clean_ce", "adv_ce"} <= set(run.metrics()[-1])


def test_an_objective_that_needs_hard_labels_is_an_error_before_a_file_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(OBJECTIVES, "_entries", dict(OBJECTIVES._entries))

    @register_objective("hard_labels")
    class HardLabels(Objective):
        domains = ("adv",)

        def compute_loss(self, batch, execution):
            logits = self.domain_logits({"adv": batch.x_adv}, execution=execution)
            loss = -logits["adv"].gather(1, batch.y[:, None]).mean()
            return ObjectiveOutput(loss, logits, {}, {"adv": batch.y})

    with raises_problem("wrong_shape"):
        train(small(norm="bn", objective="hard_labels", mix="mixup"), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
