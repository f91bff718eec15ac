"""The networks of the papers, each with any registered norm: ``create_model(name, …)``, ``list_models()``."""

# Imported for their registrations.
from advnorm.models import fixup_resnet, preact_resnet, resnet, small, vgg, wide_resnet  # noqa: F401
from advnorm.models.layers import ACTIVATIONS, ImageClassifier, InputNorm, LayerFactory
from advnorm.models.registry import MODELS, ModelSpec, create_model, list_models

__all__ = [
    "ACTIVATIONS",
    "MODELS",
    "ImageClassifier",
    "InputNorm",
    "LayerFactory",
    "ModelSpec",
    "create_model",
    "list_models",
]
