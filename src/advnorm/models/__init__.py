"""The networks of the papers, each with any registered norm."""

# Imported for their registrations.
from advnorm.models import fixup_resnet, preact_resnet, resnet, small, vgg  # noqa: F401
from advnorm.models.layers import ImageClassifier, InputNorm
from advnorm.models.normalized import Normalized
from advnorm.models.registry import MODELS, create_model, list_models, register_model
from advnorm.models.weights import load_weights, save_weights

__all__ = [
    "MODELS",
    "ImageClassifier",
    "InputNorm",
    "Normalized",
    "create_model",
    "list_models",
    "load_weights",
    "register_model",
    "save_weights",
]
