"""The embedded digits."""

import torch

from advnorm.data import digits, load
from support.problems import raises_problem


def test_the_split_depends_on_the_seed_only():
    train, labels = digits("train")
    test, _ = digits("test")
    assert train.shape == (1348, 1, 8, 8) and test.shape == (449, 1, 8, 8) and labels.dtype == torch.int64
    assert train.min() >= 0 and train.max() == 1
    assert torch.equal(train, digits("train")[0]) and not torch.equal(train, digits("train", seed=1)[0])
    everything = torch.cat([train, test]).flatten(1)
    assert len(everything.unique(dim=0)) == len(
        torch.cat(digits("train", seed=1)[:1] + digits("test", seed=1)[:1]).flatten(1).unique(dim=0)
    )
    with raises_problem("unknown_name", "split"):
        digits("val")
    for share in (-0.2, 0, 0.0001, 0.9999, 1, 1.5, float("nan"), "0.2"):
        code = "out_of_range" if isinstance(share, int | float) and share == share else "wrong_type"
        with raises_problem(code, "test_share"):
            load("digits", "test", test_share=share)
    assert len(load("digits", "test", test_share=0.5)) == 898
    assert torch.equal(load("digits", "train", seed=1).images, digits("train", seed=1)[0])
