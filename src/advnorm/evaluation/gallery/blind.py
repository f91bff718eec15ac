"""The blind part of the gallery: kinds that the audit was not developed with.

The truth of each was checked with the attacks of :mod:`advnorm.evaluation.gallery.truth` and with the usual attacks,
before the first audit. Neither the audit nor its limits were changed afterwards.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from advnorm.evaluation.gallery import blind_defences, defences, specimens
from advnorm.evaluation.gallery.parents import PARENTS, Parents, Recipe, Scale, parent
from advnorm.evaluation.gallery.specimens import (
    FRAGILE,
    MADRY,
    PLAIN,
    ensemble,
    large_eps,
    small_eps,
    stack,
    trained,
)
from advnorm.models import create_model
from advnorm.objectives import Classical
from advnorm.threat import ThreatModel

# -- parents -----------------------------------------------------------------------------------------------------------


def _l1(scale: Scale) -> ThreatModel:
    return ThreatModel(norm="L1", eps=2 * scale.l2_eps)


def _pixels(p: Parents) -> int:
    return p.train_data[0][0].numel()


@parent("interval_trained")
def interval_trained(p: Parents) -> nn.Module:
    """The loss of the worst logits that interval bounds allow; the box grows in the first half of the training."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(_pixels(p), 256), nn.ReLU(), nn.Linear(256, 10)).to(p.device)
    epochs, images = 20 * p.scale.epochs, len(p.train_data[0])

    def loss(x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        eps = p.scale.small_eps * min(1.0, 2 * (int(index[0]) // images + 1) / epochs)
        low, high = blind_defences.interval_bounds(model, (x - eps).clamp(0, 1), (x + eps).clamp(0, 1))
        right = F.one_hot(y, 10).bool()
        return F.cross_entropy(model(x), y) + F.cross_entropy(torch.where(right, low, high), y)

    return p.fit(model, loss, epochs=epochs, peak=0.05)


@parent("mixup")
def mixup(p: Parents) -> nn.Module:
    model = p.network(width=2.0)

    def loss(x: Tensor, y: Tensor, _: Tensor) -> Tensor:
        share = float(torch.rand(()))
        mixed = model(share * x + (1 - share) * x.flip(0))
        return share * F.cross_entropy(mixed, y) + (1 - share) * F.cross_entropy(mixed, y.flip(0))

    return p.fit(model, loss, epochs=3 * p.scale.epochs)


@parent("output_code")
def output_code(p: Parents) -> nn.Module:
    code = blind_defences.OutputCode().to(p.device)
    bits = create_model(p.scale.model, num_classes=16, in_channels=p.train_data[0].shape[1]).to(p.device)
    loss = nn.SoftMarginLoss()
    p.fit(bits, lambda x, y, _: loss(2 * bits(x), code.code[y]), epochs=2 * p.scale.epochs)
    return nn.Sequential(bits, code)


@parent("forest")
def forest(p: Parents) -> nn.Module:
    from sklearn.ensemble import RandomForestClassifier

    images, labels = p.train_data
    fitted = RandomForestClassifier(20, max_depth=8, random_state=p.seed).fit(images.flatten(1).numpy(), labels.numpy())
    return blind_defences.Forest(fitted).to(p.device)


_RECIPES: dict[str, Recipe] = {
    # One step from a random start at a small radius (Wong et al. 2020).
    "fast_at": lambda p: p.objective(
        Classical(p.network(norm="gn"), p.pgd(p.scale.small_eps, steps=1)), epochs=2 * p.scale.epochs
    ),
    "pgd_at_l1": lambda p: p.objective(
        Classical(p.network(), p.pgd(_l1(p.scale).eps, "L1", steps=10)), epochs=2 * p.scale.epochs
    ),
    "linear": lambda p: p.standard(
        nn.Sequential(nn.Flatten(), nn.Linear(_pixels(p), 10)).to(p.device), epochs=5 * p.scale.epochs
    ),
    "label_smoothing": lambda p: p.standard(p.network(), smoothing=0.3),
    "wrong_classes": lambda p: p.standard(p.network(), label=lambda y: (y + 1) % 10),
    "nearest_neighbours": lambda p: blind_defences.NearestNeighbours(*p.train_data).to(p.device),
}
for _name, _recipe in _RECIPES.items():
    PARENTS.add(_name, _recipe)

sound = partial(specimens.sound, blind=True)
false = partial(specimens.false, blind=True)
undefended = partial(specimens.undefended, blind=True)

# -- sound -------------------------------------------------------------------------------------------------------------

sound(
    "interval_trained",
    "trained on interval bounds, which certify its answers in Linf (Gowal et al. 2018)",
    threat=small_eps,
)
sound("pgd_at_l1", MADRY, threat=_l1)
sound(
    "fast_at",
    "one step from a random start at a small radius, where it does not overfit to the step (Wong et al. 2020)",
    threat=small_eps,
)
sound(
    "mean_of_sound",
    "the mean log-probabilities of two sound networks, without a vote that hides gradients",
    ensemble(defences.mean_logits, "pgd_at", "trades"),
)

# -- undefended --------------------------------------------------------------------------------------------------------

undefended("linear", PLAIN, threat=large_eps)
undefended("label_smoothing", PLAIN)
undefended("mixup", PLAIN)

undefended(
    "output_code",
    "output codes trained on clean images (Verma & Swami 2019); PGD-10 finds that they are not robust",
    "output_code",
    lambda p: nn.Sequential(
        next(p.get("output_code").children()), blind_defences.OutputCode(saturated=False).to(p.device)
    ),
)
undefended(
    "mixup_inference",
    "mixtures with random images at test time (Pang et al. 2020); PGD-10 finds that it is not robust",
    lambda p: blind_defences.MixupInference(p.get("mixup"), p.train_data[0].to(p.device)),
    "mixup",
)

# -- false -------------------------------------------------------------------------------------------------------------

false(
    "nearest_neighbours",
    "a vote of training images, without a gradient (broken by Sitawarin & Wagner 2019)",
    "nearest_neighbours",
    trained("nearest_neighbours", defences.softened),
)
false(
    "forest",
    "a random forest trained on clean images, without a gradient; attacks on smooth trees transfer",
    "forest",
    trained("forest", defences.softened),
)
false(
    "hard_label",
    "an undefended network that returns only its predicted class",
    stack("undefended", blind_defences.hard_label),
    "undefended",
)
false(
    "decoy_gradient",
    "the answers of an undefended network with the gradients of a network for other labels",
    lambda p: blind_defences.DecoyGradient(p.get("undefended"), p.get("wrong_classes")),
    "undefended",
)
false(
    "anti_adversary",
    "moves each image towards its predicted class (Alfarra et al. 2022), so wrong answers stay (Croce et al. 2022)",
    lambda p: blind_defences.AntiAdversary(p.get("undefended"), 0.75 * p.scale.eps),
    "undefended",
)
false(
    "hash_noise",
    "noise that follows from the bits of the image; " + FRAGILE,
    lambda p: stack(
        partial(blind_defences.hash_noise, height=2 * p.scale.eps),
        "noise_trained_strongly",
        defences.scaled_logits(1e4),
    )(p),
    "noise_trained_strongly",
)
false(
    "activation_pruning",
    "random pruning of activations (Dhillon et al. 2018; broken by Athalye et al. 2018)",
    trained(
        "undefended_wide",
        lambda model: defences.replace_activations(model, lambda: defences.Function(blind_defences.activation_pruning)),
    ),
    "undefended_wide",
)
false(
    "patch_dictionary",
    "patches replaced by the nearest known patches (Guo et al. 2018; broken by Athalye et al. 2018); " + FRAGILE,
    lambda p: nn.Sequential(
        blind_defences.PatchDictionary(p.train_data[0].to(p.device), 256), p.get("undefended_wide")
    ),
    "undefended_wide",
)
