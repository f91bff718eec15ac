"""Classifiers of scikit-learn, which compute in NumPy: they have no gradient, and BPDA finds no module to replace.

Each is an ordinary function without a defence. Its expert attacks the same function, written in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from advnorm.evaluation.gallery.defences import Function
from advnorm.evaluation.gallery.parents import Parents
from advnorm.evaluation.gallery.specimens import false

#: Largest number of training images: a kernel machine solves a linear system of this size.
MOST_IMAGES = 5000


class ByNumPy(nn.Module):
    """The answers of a fitted estimator to flat images; ``label_only``: 1 for the predicted class, 0 for the others."""

    def __init__(self, answer: Callable[[Any], Any], *, label_only: bool = False) -> None:
        super().__init__()
        self.answer, self.label_only = answer, label_only

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.from_numpy(self.answer(x.detach().flatten(1).cpu().numpy())).to(x)
        return F.one_hot(scores.argmax(1), scores.shape[1]).to(x) if self.label_only else scores


def _scores(function: Callable[[Tensor], Tensor]) -> nn.Module:
    """A function of flat images."""
    return nn.Sequential(nn.Flatten(), Function(function))


def _training_data(p: Parents) -> tuple[Any, Any]:
    images, labels = (part[:MOST_IMAGES] for part in p.train_data)
    return images.flatten(1).double().numpy(), labels.numpy()


def _kernel_machine(p: Parents) -> tuple[Any, nn.Module]:
    from sklearn.kernel_ridge import KernelRidge

    x, y = _training_data(p)
    width = 12.8 / x.shape[1]
    fitted = KernelRidge(kernel="rbf", gamma=width, alpha=0.01).fit(  # pyright: ignore[reportArgumentType]
        x, np.eye(10)[y]
    )
    centres, weight = (torch.tensor(part).float().to(p.device) for part in (x, fitted.dual_coef_))
    return fitted.predict, _scores(lambda v: 20 * torch.exp(-width * torch.cdist(v, centres) ** 2) @ weight)


def _perceptron(p: Parents) -> tuple[Any, nn.Module]:
    from sklearn.neural_network import MLPClassifier

    x, y = _training_data(p)
    fitted = MLPClassifier((64, 64), max_iter=300, random_state=p.seed).fit(x, y)
    layers: list[nn.Module] = [nn.Flatten()]
    for weight, bias in zip(fitted.coefs_, fitted.intercepts_):
        layers += [nn.Linear(*weight.shape), nn.ReLU()]
        layers[-2].load_state_dict({"weight": torch.tensor(weight.T), "bias": torch.tensor(bias)})
    return fitted.predict_proba, nn.Sequential(*layers[:-1]).to(p.device)


def _naive_bayes(p: Parents) -> tuple[Any, nn.Module]:
    from sklearn.naive_bayes import GaussianNB

    fitted = GaussianNB(var_smoothing=0.05).fit(*_training_data(p))
    mean, variance = (torch.tensor(part).float().to(p.device) for part in (fitted.theta_, fitted.var_))
    return fitted.predict_proba, _scores(lambda v: -(((v[:, None] - mean) ** 2 / variance) + variance.log()).sum(2) / 2)


def _quadratic(p: Parents) -> tuple[Any, nn.Module]:
    from sklearn.discriminant_analysis import QuadraticDiscriminantAnalysis

    fitted = QuadraticDiscriminantAnalysis(reg_param=0.3).fit(*_training_data(p))
    classes = [
        tuple(torch.tensor(part).float().to(p.device) for part in parts)
        for parts in zip(fitted.means_, fitted.rotations_, fitted.scalings_)
    ]
    return fitted.predict_proba, _scores(
        lambda v: torch.stack(
            [-(((v - mean) @ axes) ** 2 / size + size.log()).sum(1) / 2 for mean, axes, size in classes], 1
        )
    )


for _name, _fit, _label_only, _what in (
    ("kernel_labels", _kernel_machine, True, "a kernel machine that returns only its predicted class"),
    ("perceptron_labels", _perceptron, True, "a perceptron that returns only its predicted class"),
    ("naive_bayes", _naive_bayes, False, "naive Bayes with its probabilities, most of which are 0 or 1"),
    ("quadratic_labels", _quadratic, True, "quadratic discriminants that return only the predicted class"),
):
    false(
        _name,
        f"{_what}, by NumPy without a gradient; attacks on the same function in PyTorch transfer",
        lambda p, fit=_fit, label_only=_label_only: ByNumPy(fit(p)[0], label_only=label_only),
        lambda p, fit=_fit: fit(p)[1],
    )
