"""The blind part of the gallery: kinds that the audit was not developed with.

The truth of each was checked with the attacks of :mod:`advnorm.evaluation.gallery.truth` and with the usual attacks,
before the first audit. Neither the audit nor its limits were changed afterwards.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from advnorm.evaluation.gallery.blind_defences import (
    ActivationPruning,
    AntiAdversary,
    DecoyGradient,
    Forest,
    HardLabel,
    HashNoise,
    MeanLogits,
    MixupInference,
    NearestNeighbours,
    OutputCode,
    PatchDictionary,
    interval_bounds,
)
from advnorm.evaluation.gallery.defences import ScaledLogits, replace_activations, softened
from advnorm.evaluation.gallery.parents import Parents, Scale, parent
from advnorm.evaluation.gallery.specimens import FRAGILE, MADRY, PLAIN, add_specimen, large_eps, small_eps, trained
from advnorm.models import create_model
from advnorm.objectives import Classical
from advnorm.threat import ThreatModel

# -- parents -----------------------------------------------------------------------------------------------------------


def _l1(scale: Scale) -> ThreatModel:
    return ThreatModel(norm="L1", eps=2 * scale.l2_eps)


def _first(model: nn.Module) -> nn.Module:
    return next(model.children())


def _pixels(p: Parents) -> int:
    return p.train_data[0][0].numel()


@parent("interval_trained")
def interval_trained(p: Parents) -> nn.Module:
    """The loss of the worst logits that interval bounds allow; the box grows in the first half of the training."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(_pixels(p), 256), nn.ReLU(), nn.Linear(256, 10)).to(p.device)
    epochs, images = 20 * p.scale.epochs, len(p.train_data[0])

    def loss(x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        eps = p.scale.small_eps * min(1.0, 2 * (int(index[0]) // images + 1) / epochs)
        low, high = interval_bounds(model, (x - eps).clamp(0, 1), (x + eps).clamp(0, 1))
        right = F.one_hot(y, 10).bool()
        return F.cross_entropy(model(x), y) + F.cross_entropy(torch.where(right, low, high), y)

    return p.fit(model, loss, epochs=epochs, peak=0.05)


@parent("fast_at")
def fast_at(p: Parents) -> nn.Module:
    """One step from a random start at a small radius (Wong et al. 2020)."""
    return p.objective(Classical(p.network(norm="gn"), p.pgd(p.scale.small_eps, steps=1)), epochs=2 * p.scale.epochs)


@parent("pgd_at_l1")
def pgd_at_l1(p: Parents) -> nn.Module:
    return p.objective(Classical(p.network(), p.pgd(_l1(p.scale).eps, "L1", steps=10)), epochs=2 * p.scale.epochs)


@parent("linear")
def linear(p: Parents) -> nn.Module:
    return p.standard(nn.Sequential(nn.Flatten(), nn.Linear(_pixels(p), 10)).to(p.device), epochs=5 * p.scale.epochs)


@parent("label_smoothing")
def label_smoothing(p: Parents) -> nn.Module:
    model = p.network()
    return p.fit(model, lambda x, y, _: F.cross_entropy(model(x), y, label_smoothing=0.3))


@parent("mixup")
def mixup(p: Parents) -> nn.Module:
    model = p.network(width=2.0)

    def loss(x: Tensor, y: Tensor, _: Tensor) -> Tensor:
        share = float(torch.rand(()))
        mixed = model(share * x + (1 - share) * x.flip(0))
        return share * F.cross_entropy(mixed, y) + (1 - share) * F.cross_entropy(mixed, y.flip(0))

    return p.fit(model, loss, epochs=3 * p.scale.epochs)


@parent("wrong_classes")
def wrong_classes(p: Parents) -> nn.Module:
    """Every class gets the label of the next one."""
    model = p.network()
    return p.fit(model, lambda x, y, _: F.cross_entropy(model(x), (y + 1) % 10))


@parent("output_code")
def output_code(p: Parents) -> nn.Module:
    code = OutputCode().to(p.device)
    bits = create_model(p.scale.model, num_classes=16, in_channels=p.train_data[0].shape[1]).to(p.device)
    loss = nn.SoftMarginLoss()
    p.fit(bits, lambda x, y, _: loss(2 * bits(x), code.code[y]), epochs=2 * p.scale.epochs)
    return nn.Sequential(bits, code)


@parent("nearest_neighbours")
def nearest_neighbours(p: Parents) -> nn.Module:
    images, labels = p.train_data
    return NearestNeighbours(images.to(p.device), labels.to(p.device))


@parent("forest")
def forest(p: Parents) -> nn.Module:
    from sklearn.ensemble import RandomForestClassifier

    images, labels = p.train_data
    fitted = RandomForestClassifier(20, max_depth=8, random_state=p.seed).fit(images.flatten(1).numpy(), labels.numpy())
    return Forest(fitted).to(p.device)


# -- sound -------------------------------------------------------------------------------------------------------------

add_specimen(
    "interval_trained",
    "sound",
    "trained on interval bounds, which certify its answers in Linf (Gowal et al. 2018)",
    trained("interval_trained"),
    blind=True,
    threat=small_eps,
)
add_specimen("pgd_at_l1", "sound", MADRY, trained("pgd_at_l1"), blind=True, threat=_l1)
add_specimen(
    "fast_at",
    "sound",
    "one step from a random start at a small radius, where it does not overfit to the step (Wong et al. 2020)",
    trained("fast_at"),
    blind=True,
    threat=small_eps,
)
add_specimen(
    "mean_of_sound",
    "sound",
    "the mean log-probabilities of two sound networks, without a vote that hides gradients",
    lambda p: MeanLogits([p.get("pgd_at"), p.get("trades")]),
    blind=True,
)

# -- undefended --------------------------------------------------------------------------------------------------------

add_specimen("linear", "undefended", PLAIN, trained("linear"), blind=True, threat=large_eps)
add_specimen("label_smoothing", "undefended", PLAIN, trained("label_smoothing"), blind=True)
add_specimen("mixup", "undefended", PLAIN, trained("mixup"), blind=True)

add_specimen(
    "output_code",
    "undefended",
    "output codes trained on clean images (Verma & Swami 2019); PGD-10 finds that they are not robust",
    trained("output_code"),
    lambda p: nn.Sequential(_first(p.get("output_code")), OutputCode(saturated=False).to(p.device)),
    blind=True,
)
add_specimen(
    "mixup_inference",
    "undefended",
    "mixtures with random images at test time (Pang et al. 2020); PGD-10 finds that it is not robust",
    lambda p: MixupInference(p.get("mixup"), p.train_data[0].to(p.device)),
    trained("mixup"),
    blind=True,
)

# -- false -------------------------------------------------------------------------------------------------------------

add_specimen(
    "nearest_neighbours",
    "false",
    "a vote of training images, without a gradient (broken by Sitawarin & Wagner 2019)",
    trained("nearest_neighbours"),
    lambda p: softened(p.get("nearest_neighbours")),
    blind=True,
)
add_specimen(
    "forest",
    "false",
    "a random forest trained on clean images, without a gradient; attacks on smooth trees transfer",
    trained("forest"),
    lambda p: softened(p.get("forest")),
    blind=True,
)
add_specimen(
    "hard_label",
    "false",
    "an undefended network that returns only its predicted class",
    lambda p: nn.Sequential(p.get("undefended"), HardLabel()),
    trained("undefended"),
    blind=True,
)
add_specimen(
    "decoy_gradient",
    "false",
    "the answers of an undefended network with the gradients of a network for other labels",
    lambda p: DecoyGradient(p.get("undefended"), p.get("wrong_classes")),
    trained("undefended"),
    blind=True,
)
add_specimen(
    "anti_adversary",
    "false",
    "moves each image towards its predicted class (Alfarra et al. 2022), so wrong answers stay (Croce et al. 2022)",
    lambda p: AntiAdversary(p.get("undefended"), 0.75 * p.scale.eps),
    trained("undefended"),
    blind=True,
)
add_specimen(
    "hash_noise",
    "false",
    "noise that follows from the bits of the image; " + FRAGILE,
    lambda p: nn.Sequential(HashNoise(2 * p.scale.eps), p.get("noise_trained_strongly"), ScaledLogits(1e4)),
    trained("noise_trained_strongly"),
    blind=True,
)
add_specimen(
    "activation_pruning",
    "false",
    "random pruning of activations (Dhillon et al. 2018; broken by Athalye et al. 2018)",
    lambda p: replace_activations(p.get("undefended_wide"), lambda: ActivationPruning(0.5)),
    trained("undefended_wide"),
    blind=True,
)
add_specimen(
    "patch_dictionary",
    "false",
    "patches replaced by the nearest known patches (Guo et al. 2018; broken by Athalye et al. 2018); " + FRAGILE,
    lambda p: nn.Sequential(PatchDictionary(p.train_data[0].to(p.device), 256), p.get("undefended_wide")),
    trained("undefended_wide"),
    blind=True,
)
