"""The networks of the papers, each with any registered norm."""

# Imported for their registrations.
from advnorm.models import fixup_resnet, preact_resnet, resnet, small, vgg  # noqa: F401
from advnorm.models.layers import ImageClassifier, InputNorm
from advnorm.models.registry import MODELS, create_model, list_models, register_model

__all__ = ["MODELS", "ImageClassifier", "InputNorm", "create_model", "list_models", "register_model"]
