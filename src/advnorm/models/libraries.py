"""Networks of timm, torchvision and transformers, built without any download."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from advnorm._core.errors import ConfigError, first_line, unknown_name
from advnorm._core.torchvision_operators import prepare_torchvision
from advnorm.models.layers import InputNorm, LayerFactory
from advnorm.models.weights import load_weights

#: Prefixes of model names, ``timm:resnet18``.
LIBRARIES = ("timm", "torchvision", "transformers")
#: Arguments of the libraries that would download weights or read them by running code.
_WEIGHTS = ("checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "weights", "weights_backbone")
#: Options of these networks; ``arguments`` go to the library's own function or configuration.
LIBRARY_OPTIONS: Mapping[str, Any] = {"img_size": int | None, "pretrained": str | None, "arguments": dict[str, Any]}


def import_library(name: str) -> Any:
    """Import timm, torchvision or transformers."""
    if find_spec(name) is None:
        raise ConfigError("missing_package", f"{name} is not installed", "model", hint="pip install 'advnorm[models]'")
    prepare_torchvision()
    return importlib.import_module(name)


def split_name(name: Any) -> tuple[str, str] | None:
    """Library and model of a name such as ``timm:resnet18``; None for other names."""
    library, _, model = name.partition(":") if isinstance(name, str) else ("", "", "")
    return (library, model) if library in LIBRARIES else None


def validate_name(name: str) -> None:
    """Raise if a library does not have this network."""
    library, model = split_name(name) or ("", "")
    module = import_library(library)
    if library == "timm" and not module.is_model(model):
        raise ConfigError.listing([unknown_name("timm model", model, module.list_models(), field="model")])
    if library == "torchvision" and model not in torchvision_names():
        raise ConfigError.listing([unknown_name("torchvision model", model, torchvision_names(), field="model")])
    if library == "transformers":
        _transformers_config(model)


def library_models(name: object) -> list[str]:
    """Return the names with a library for a network that is named without one: ``timm:efficientnet_b0``."""
    found: list[str] = []
    for library in ("timm", "torchvision") if isinstance(name, str) and ":" not in name else ():
        with suppress(Exception):  # the library is not installed, or has no such network
            validate_name(f"{library}:{name}")
            found.append(f"{library}:{name}")
    return found


def torchvision_names() -> list[str]:
    """Names of the image classifiers of torchvision."""
    models = import_library("torchvision").models
    return models.list_models(module=models)


def transformers_names() -> list[str]:
    """Model types of the image classifiers of transformers."""
    import_library("transformers")
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    return list(auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES)


def input_statistics(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of the images that a network expects: those of its weights, else ImageNet's."""
    library, model = split_name(name) or ("", "")
    found = import_library("timm").get_pretrained_cfg(model) if library == "timm" else None
    if found is not None:
        return tuple(found.mean), tuple(found.std)
    return (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def logits_of(outputs: Any) -> Tensor:
    """The logits among the outputs of a network: those of that name, else the first tensor."""
    if isinstance(outputs, tuple | list | dict):
        return outputs.logits if hasattr(outputs, "logits") else outputs[0]  # pyright: ignore
    return outputs  # a tensor, or what stands for it while the network is traced


class LibraryModel(nn.Module):
    """A network of a library with its input normalization inside, so that it takes images in [0, 1]; gives logits."""

    #: The arguments of ``create_model`` that build this network again.
    recipe: dict[str, Any]

    def __init__(self, network: nn.Module, layers: LayerFactory) -> None:
        super().__init__()
        mean, std = layers.mean, layers.std
        self.input_norm = None if mean is None or std is None else InputNorm(mean, std)
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return logits_of(self.network(x if self.input_norm is None else self.input_norm(x)))


def build_library_model(
    layers: LayerFactory,
    *,
    name: str,
    img_size: int | None = None,
    pretrained: str | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> LibraryModel:
    """Build a network of a library. ``pretrained``: a file of weights on disk, for its own number of classes."""
    library, model = split_name(name) or ("", "")
    module, options = import_library(library), dict(arguments or {})
    weights = [key for key in options if key in _WEIGHTS]
    if weights:
        message, hint = "{field} cannot name weights", "use pretrained with a file on disk"
        raise ConfigError("conflict", message, field="arguments", got=weights, hint=hint)
    if img_size is not None:
        options["img_size" if library == "timm" else "image_size"] = img_size
    build = {"timm": _build_timm, "torchvision": _build_torchvision, "transformers": _build_transformers}[library]
    try:
        network = build(module, model, layers, pretrained, options)
    except ConfigError:
        raise
    except (TypeError, ValueError, AssertionError, RuntimeError, ImportError) as error:
        message, hint = f"{library} cannot build {model}: {first_line(error)}", "check img_size and arguments"
        raise ConfigError("not_supported", message, field="model", hint=hint) from error
    return LibraryModel(network, layers)


def _build_timm(
    timm: Any, name: str, layers: LayerFactory, pretrained: str | None, options: dict[str, Any]
) -> nn.Module:
    if pretrained is None:
        return timm.create_model(name, num_classes=layers.num_classes, in_chans=layers.in_channels, **options)
    network = timm.create_model(name, in_chans=layers.in_channels, **options)
    load_weights(network, pretrained)
    network.reset_classifier(layers.num_classes)
    return network


def _build_torchvision(
    torchvision: Any, name: str, layers: LayerFactory, pretrained: str | None, options: dict[str, Any]
) -> nn.Module:
    if layers.in_channels != 3:
        message, hint = "the networks of torchvision take images of 3 channels", "timm's networks take any number"
        raise ConfigError("not_supported", message, field="in_channels", got=layers.in_channels, hint=hint)
    if pretrained is None:
        return torchvision.models.get_model(name, weights=None, num_classes=layers.num_classes, **options)
    network = torchvision.models.get_model(name, weights=None, **options)
    load_weights(network, pretrained)
    *_, (last, head) = ((n, module) for n, module in network.named_modules() if isinstance(module, nn.Linear))
    parent, _, own_name = last.rpartition(".")
    setattr(network.get_submodule(parent), own_name, nn.Linear(head.in_features, layers.num_classes))
    return network


def _build_transformers(
    transformers: Any, name: str, layers: LayerFactory, pretrained: str | None, options: dict[str, Any]
) -> nn.Module:
    config = _transformers_config(name)
    if "image_size" in options and not hasattr(config, "image_size"):  # the other libraries raise this themselves
        raise TypeError(f"{type(config).__name__} has no image_size")
    options |= {"num_labels": layers.num_classes, "num_channels": layers.in_channels}
    for key, value in options.items():
        setattr(config, key, value)
    config.architectures = config.architectures or []  # some types have several classes; the first one is the plain one
    auto = transformers.AutoModelForImageClassification
    if Path(name, "model.safetensors").is_file():
        fixed = {"local_files_only": True, "use_safetensors": True, "ignore_mismatched_sizes": True}
        return auto.from_pretrained(name, config=config, trust_remote_code=False, **fixed)
    network = auto.from_config(config, trust_remote_code=False)
    if pretrained is not None:
        load_weights(network, pretrained)
    return network


def _transformers_config(name: str) -> Any:
    """The configuration in a folder or a ``.json`` file, or the default one of a model type."""
    transformers = import_library("transformers")
    path = Path(name)
    if path.is_dir() or path.suffix == ".json":
        file = path / "config.json" if path.is_dir() else path
        try:
            return transformers.AutoConfig.from_pretrained(str(file), local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            message, hint = f"{file} is not a configuration of transformers: {first_line(error)}", "name a folder"
            raise ConfigError("not_readable", message, field="model", hint=hint) from error
    if name not in transformers_names():
        known = transformers_names()
        raise ConfigError.listing([unknown_name("model type or folder of transformers", name, known, field="model")])
    return transformers.AutoConfig.for_model(name)
