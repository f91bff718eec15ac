"""Images, labels, models and settings that raise, with the fix, before any computation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from advnorm import attacks
from support.attack_contract import LINF, SMALL, Returns, assert_same, pictures, snapshot
from support.problems import raises_problem


def quantized(x: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)


@pytest.mark.filterwarnings("ignore:.*quantized tensor", "ignore:.*nested tensors")
@pytest.mark.parametrize(
    ("change", "code", "field", "hint"),
    [
        (lambda x, y: ((x * 255), y), "out_of_range", "images", "divide by 255"),
        (lambda x, y: ((x * 65535), y), "out_of_range", "images", "divide by 65535"),
        (lambda x, y: ((x * 255).byte(), y), "wrong_dtype", "images", "x.float() / 255"),
        (lambda x, y: (x.double(), y), "wrong_dtype", "images", "x.float()"),
        (lambda x, y: (x * 4 - 2, y), "out_of_range", "images", "inside the model"),
        (lambda x, y: (x + 1e-6, y), "out_of_range", "images", "x.clamp(0, 1)"),
        (lambda x, y: (x / 0 * 0, y), "out_of_range", "images", "NaN"),
        (lambda x, y: (x / 0, y), "out_of_range", "images", "infinite"),
        (lambda x, y: (-x / 0, y), "out_of_range", "images", "infinite"),
        (lambda x, y: (x > 0.5, y), "wrong_dtype", "images", "use x.float()"),
        (lambda x, y: (x * 1j, y), "wrong_dtype", "images", "x.real.float()"),
        (lambda x, y: (x.to_sparse(), y), "wrong_layout", "images", "to_dense"),
        (lambda x, y: (x.to("meta"), y), "wrong_layout", "images", "no values"),
        (lambda x, y: (x, y.to("meta")), "wrong_layout", "labels", "no values"),
        (lambda x, y: (torch.nested.as_nested_tensor(list(x)), y), "wrong_layout", "images", "torch.stack"),
        (lambda x, y: (quantized(x), y), "wrong_layout", "images", "dequantize"),
        (lambda x, y: (x[:, :2], y), "wrong_shape", "model", "channels"),
        (lambda x, y: (x, y.int()), "wrong_dtype", "labels", "y.long()"),
        (lambda x, y: (x, nn.functional.one_hot(y).float()), "wrong_dtype", "labels", "y.argmax(1)"),
        (lambda x, y: (x, y[:3]), "wrong_shape", "labels", ""),
        (lambda x, y: (x, y - 20), "out_of_range", "labels", "ignored samples"),
        (lambda x, y: (x, y + 10), "out_of_range", "labels", "numbered from 0"),
        (lambda x, y: (x[:0], y[:0]), "empty", "images", ""),
        (lambda x, y: (x.numpy(), y), "wrong_type", "images", ""),
    ],
)
def test_a_bad_batch_raises_with_the_fix(change, code, field, hint):
    x, y = pictures()
    before = snapshot(SMALL)
    with raises_problem(code, field) as caught:
        attacks.PGD(threat=LINF)(SMALL, *change(x, y))
    found = caught.value.problems[0].hint
    assert hint in found and (not hint.endswith("float()") or found.endswith(hint))
    assert_same(before, snapshot(SMALL))


def test_all_problems_of_a_batch_are_reported_at_once():
    with raises_problem("wrong_dtype", "images") as caught:
        attacks.PGD(threat=LINF)(SMALL, torch.zeros(2, 3, 8, 8).byte(), torch.zeros(3))
    found = [(problem.code, problem.field) for problem in caught.value.problems]
    assert found == [("wrong_dtype", "images"), ("wrong_dtype", "labels"), ("wrong_shape", "labels")]


@pytest.mark.parametrize(
    ("wrap", "code"),
    [
        (lambda z: (z, z), "wrong_type"),
        (lambda z: {"out": z}, "wrong_type"),
        (lambda z: z[:, 0], "wrong_shape"),
        (lambda z: z[:, :1], "wrong_shape"),
        (lambda z: z * torch.nan, "not_finite"),
        (lambda z: z * 1j, "wrong_dtype"),
        (lambda z: z.to_sparse(), "wrong_layout"),
        (lambda z: z.detach(), "no_gradient"),
    ],
)
def test_a_model_without_usable_logits_raises(wrap, code):
    with raises_problem(code, "logits"):
        attacks.PGD(threat=LINF)(Returns(wrap), *pictures())


@pytest.mark.parametrize("name", ["pgd2", "autoattack-steps1-queries1", "square-queries5"])
@pytest.mark.parametrize("model", [nn.Linear(3, 4), nn.Sequential(nn.Flatten(), nn.Linear(7, 4))])
def test_a_model_that_fails_on_the_images_is_a_problem_of_the_model(name, model):
    with raises_problem("wrong_shape", "model"):
        attacks.get(name, threat=LINF)(model, *pictures())


def test_running_out_of_memory_in_the_first_forward_is_no_problem_of_the_model():
    def wrap(z):
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        attacks.PGD(threat=LINF)(Returns(wrap), *pictures())


def test_a_function_is_not_a_model():
    with raises_problem("wrong_type", "model"):
        attacks.PGD(threat=LINF)(lambda x: x, *pictures())  # type: ignore[arg-type]


@pytest.mark.parametrize("index", [torch.arange(3), torch.tensor(3), torch.zeros(8, 1), range(8), 5])
def test_an_index_is_a_tensor_with_a_number_per_image(index):
    with raises_problem("wrong_shape", "index"):
        attacks.PGD(threat=LINF)(SMALL, *pictures(), index=index)


def test_all_problems_of_the_settings_are_reported_at_once():
    with raises_problem("wrong_type", "threat") as caught:
        attacks.PGD(threat="8/255", seed=0.5, route=1, statistics="eval")  # type: ignore[arg-type]
    assert {problem.field for problem in caught.value.problems} == {"threat", "seed", "route", "statistics"}
