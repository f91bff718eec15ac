"""Sharing of models: weights, configuration and model card in one folder, and repositories on the Hugging Face Hub."""

from advnorm.sharing.pretrained import from_pretrained, push, save_pretrained

__all__ = ["from_pretrained", "push", "save_pretrained"]
