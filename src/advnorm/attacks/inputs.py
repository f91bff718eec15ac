"""Validation of the images and labels of an attack, and of the first logits that a model returns for them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from advnorm._core.errors import AdvnormError, ConfigError, Description, Problem, first_line, raise_problems
from advnorm._core.tensors import dense_problems, pixel_conversion
from advnorm.attacks.model_access import Predict


def validate_batch(x: Tensor, y: Tensor) -> int:
    """Validate images and labels with one device synchronization; return the largest label."""
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        got = Description(f"{type(x).__name__} and {type(y).__name__}")
        raise ConfigError("wrong_type", "images and labels must be tensors", field="images", got=got)
    raise_problems(dense_problems(images=x, labels=y), "bad batch")
    problems = []
    if x.dtype != torch.float32:
        problems.append(_wrong("dtype", "images", "{field} must be float32", x.dtype, f"use {pixel_conversion(x)}"))
    if x.dim() < 2:
        hint = "add a batch dimension: x[None]"
        problems.append(_wrong("shape", "images", "{field} must have shape (N, ...)", tuple(x.shape), hint))
    problems += label_problems(x, y)
    if x.device != y.device:
        message = "images and {field} must be on the same device"
        problems.append(_wrong("device", "labels", message, f"{x.device} and {y.device}", "use y.to(x.device)"))
    if x.numel() == 0:
        hint = "skip empty batches, or check that the data set is not empty"
        problems.append(Problem(code="empty", field="images", message="the batch is empty", hint=hint))
    raise_problems(problems, "bad batch")
    low, high, least, most = torch.stack([v.double() for v in (*x.detach().aminmax(), *y.aminmax())]).tolist()
    raise_problems(image_range_problems(low, high) + negative_label_problems(least), "bad batch")
    return int(most)


def image_range_problems(low: float, high: float) -> list[Problem]:
    """Problems of images whose values range from ``low`` to ``high``: an attack would clip them to its box."""
    if low >= 0 and high <= 1:
        return []
    if not (math.isfinite(low) and math.isfinite(high)):
        hint = "check the data for NaN and infinite values"
    elif low < 0:
        hint = "input normalization belongs inside the model; attack the pixels"
    elif high > 2:
        hint = f"divide by {255 if high <= 255 else 65535}"
    else:
        hint = "remove rounding errors with x.clamp(0, 1)"
    got = Description(f"values from {low:g} to {high:g}")
    return [Problem(code="out_of_range", field="images", message="{field} must lie in [0, 1]", got=got, hint=hint)]


def label_problems(x: Tensor, y: Tensor) -> list[Problem]:
    """Problems with the dtype and shape of labels; needs no device synchronization."""
    problems = []
    if y.dtype != torch.int64:
        hint = f"use {'y.argmax(1)' if y.dim() == 2 else 'y.long()'}"
        problems.append(_wrong("dtype", "labels", "{field} must be int64", y.dtype, hint))
    if y.dim() != 1 or x.dim() == 0 or len(y) != len(x):
        message = f"{{field}} must have shape ({len(x) if x.dim() else 'N'},), one per image"
        problems.append(_wrong("shape", "labels", message, tuple(y.shape)))
    return problems


def negative_label_problems(least: float) -> list[Problem]:
    """Problems of labels whose minimum is ``least``."""
    hint, got = "drop or relabel ignored samples", Description(f"{least:g}")
    problem = Problem(code="out_of_range", field="labels", message="{field} must be at least 0", got=got, hint=hint)
    return [problem] if least < 0 else []


def validate_classes(largest: int, logits: Tensor, field: str = "labels") -> None:
    """Raise if the model has no logit for the largest of some classes."""
    if largest >= logits.shape[1]:
        message = f"{{field}} must be below the model's {logits.shape[1]} classes"
        raise ConfigError("out_of_range", message, field=field, got=largest, hint="classes are numbered from 0")


def validating_first_logits(
    predict: Predict, largest: int, clean: Tensor | None = None, *, field: str = "labels"
) -> Predict:
    """Return ``predict`` with a check of its first output: logits up to the class ``largest``, and no NaN.

    If the model raises an error there, one that names the shape of the images is raised.
    ``clean``: the clean images, if the first images that ``predict`` receives may be perturbed. NaN logits for
    perturbed images alone are a wrong prediction, not an error. ``field``: the argument that holds the classes.
    """
    first = True

    def validated(x: Tensor) -> Tensor:
        nonlocal first
        if not first:
            return predict(x)
        try:
            logits = predict(x)
        except (AdvnormError, torch.OutOfMemoryError):  # a smaller batch may fit
            raise
        except Exception as error:
            raise ConfigError.listing([model_failure(x, error)]) from error
        first = False
        raise_problems(dense_problems(logits=logits))
        validate_classes(largest, logits, field)
        if bool(logits.isnan().any()) and (clean is None or bool(predict(clean).isnan().any())):
            hint = "check the weights and the statistics (was the model ever trained?)"
            raise ConfigError("not_finite", "the model returns NaN {field}", field="logits", hint=hint)
        return logits

    return validated


def model_failure(x: Tensor, error: Exception) -> Problem:
    """The problem of a model that raises an error for its first images."""
    message = f"the model fails on images of shape {tuple(x.shape)} ({type(error).__name__}: {first_line(error)})"
    return Problem("wrong_shape", message, "model", hint="images are (N, channels, height, width) in [0, 1]")


def _wrong(what: str, field: str, message: str, got: object, hint: str = "") -> Problem:
    return Problem(code=f"wrong_{what}", field=field, message=message, got=Description(got), hint=hint)
