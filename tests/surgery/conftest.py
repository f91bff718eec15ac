"""Fixtures of the tests of surgery."""

import pytest
import torch

from support.surgery_models import trained


@pytest.fixture(scope="module")
def resnet():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", num_labels=5
    )
    return trained(transformers.ResNetForImageClassification(config), 4, 3, 32, 32)
