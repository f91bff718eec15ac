"""Convert every network of the installed timm, torchvision and transformers, and check one network of each family."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from advnorm._core.errors import AdvnormError, first_line, raise_problems, unknown_name
from advnorm.bench.timing import MeasuredConditions
from advnorm.models import create_model
from advnorm.models.libraries import LIBRARIES, import_library, logits_of, torchvision_names, transformers_names
from advnorm.norms import RoutedNorm, route
from advnorm.surgery import convert_norm, strip
from advnorm.surgery.adapters import find_adapter

#: What becomes of an architecture.
OUTCOMES = ("converted", "no norms", "rejected", "not built")
#: Makes the networks of transformers small. Swin has a number of layers per stage instead.
SMALL: Mapping[str, Any] = {"num_hidden_layers": 2, "num_self_attends_per_block": 2}
#: Number of parameters above which the smallest network of a family is not run.
LARGEST = 150_000_000
#: Sides of the images that are tried on a network, the smallest first; the last one is its own.
SIDES = (64, 96, 128, 192, 224)


@dataclass(frozen=True, kw_only=True)
class FamilyCheck:
    """One network of a family: what holds after the conversion, or the error that stopped the check.

    ``routes``: the outputs on each route equal those before, bit for bit. ``stripped``: so do those of the stripped
    network, which has the classes of the original. ``loads``: its state dict loads into the original. ``mixed``: a
    concatenated batch gives the outputs of its parts, up to rounding; None if a norm gets more rows than samples.
    ``seconds``: CPU time of the check.
    """

    model: str
    norm: str
    side: int = 0
    routes: bool = False
    stripped: bool = False
    loads: bool = False
    mixed: bool | None = False
    seconds: float = 0.0
    error: str = ""

    @property
    def passed(self) -> bool:
        return self.routes and self.stripped and self.loads and self.mixed is not False


@dataclass(frozen=True, kw_only=True)
class SurgeryBenchmark(MeasuredConditions):
    """Numbers of networks by library and outcome, the failures with their reasons, and the checks by family."""

    versions: dict[str, str]
    seconds: float
    counts: dict[str, dict[str, int]]  # by library: the number of networks of each of OUTCOMES
    norms: dict[str, int]  # number of converted networks by norm
    failures: dict[str, str]
    families: dict[str, FamilyCheck] = field(default_factory=dict)


def bench_surgery(
    libraries: Sequence[str] | None = None,
    *,
    check: bool = True,
    on_row: Callable[[str], object] = lambda name: None,
) -> SurgeryBenchmark:
    """Build every architecture without memory, convert it to a dual norm that fits, and count the outcomes.

    ``check``: also run the smallest network of each family before and after.
    """
    libraries = LIBRARIES if libraries is None else libraries
    unknown = [unknown_name("library", name, LIBRARIES) for name in libraries if name not in LIBRARIES]
    raise_problems(unknown, "bad benchmark")
    start = time.monotonic()
    counts = {library: Counter() for library in libraries}
    norms: Counter[str] = Counter()
    failures: dict[str, str] = {}
    families: dict[str, tuple[int, str]] = {}
    for name in list_architectures(libraries):
        on_row(name)
        library = name.partition(":")[0]
        try:
            network = build_without_memory(name)
        except Exception as error:
            counts[library]["not built"] += 1
            failures[name] = f"not built: {first_line(error)}"
            continue
        norm = fitting_norm(network)
        if norm is None:
            counts[library]["no norms"] += 1
            continue
        family, size = family_of(name, network), sum(parameter.numel() for parameter in network.parameters())
        try:
            convert_norm(network, norm)
        except AdvnormError as error:
            counts[library]["rejected"] += 1
            failures[name] = first_line(error)
            continue
        counts[library]["converted"] += 1
        norms[norm] += 1
        families[family] = min(families.get(family, (size, name)), (size, name))
    checks = {}
    for family, (size, name) in families.items() if check else ():
        on_row(f"{family} ({name})")
        too_large = FamilyCheck(model=name, norm="", error=f"the smallest network has {size:,} parameters")
        checks[family] = too_large if size > LARGEST else check_conversion(name)
    return SurgeryBenchmark(
        device="cpu",
        versions={library: import_library(library).__version__ for library in libraries},
        seconds=round(time.monotonic() - start),
        counts={library: dict(count) for library, count in counts.items()},
        norms=dict(norms),
        failures=failures,
        families=checks,
    )


def list_architectures(libraries: Sequence[str] = LIBRARIES) -> Iterator[str]:
    """Names for ``create_model`` of all image classifiers of these libraries."""
    if "timm" in libraries:
        yield from (f"timm:{name}" for name in import_library("timm").list_models())
    if "torchvision" in libraries:
        yield from (f"torchvision:{name}" for name in torchvision_names())
    if "transformers" in libraries:  # two of them wrap a network of timm or a language model
        wrapped = ("timm_wrapper", "shieldgemma2")
        yield from (f"transformers:{name}" for name in transformers_names() if name not in wrapped)


def build_without_memory(name: str) -> nn.Module:
    """Build a network on the device ``meta``, or on the CPU if its constructor computes with tensors."""
    try:
        with torch.device("meta"):
            return _build(name)
    except (NotImplementedError, RuntimeError, TypeError, AdvnormError):
        return _build(name)


def _build(name: str) -> nn.Module:
    shrinks = name.startswith("transformers:") and "swin" not in name
    options: dict[str, Any] = {"arguments": dict(SMALL)} if shrinks else {}
    return create_model(name, num_classes=10, normalize=False, **options).network


def family_of(name: str, network: nn.Module) -> str:
    """Library and module of a network: ``timm efficientnet``."""
    return f"{name.partition(':')[0]} {type(network).__module__.rpartition('.')[2].removeprefix('modeling_')}"


def norm_layers(network: nn.Module) -> list[nn.Module]:
    """The layers of a network that :func:`convert_norm` knows."""
    return [module for module in network.modules() if find_adapter(type(module)) is not None]


def fitting_norm(network: nn.Module) -> str | None:
    """``dual_bn`` for a network with batch norms, else the dual form of its most frequent norm; None without norms."""
    families = Counter(
        adapter.kind.family
        for module in norm_layers(network)
        if (adapter := find_adapter(type(module))) and any(p is not None for p in module._parameters.values())
    )
    if not families:
        return None
    return "dual_bn" if "bn" in families else f"dual_affine_{families.most_common(1)[0][0]}"


def check_conversion(name: str) -> FamilyCheck:
    """Compare a network with its converted and its stripped form on random norms, weights and images."""
    torch.manual_seed(0)
    start, norm, side = time.process_time(), None, None
    try:
        network = _build(name).eval()
        _randomize(network)
        norm = fitting_norm(network)
        assert norm is not None
        x, expected = _forward(network)
        side = x.shape[-1]
        routed = copy.deepcopy(network)
        convert_norm(routed, norm)
        outputs = []
        for domain in ("clean", "adv"):
            with route(routed, domain):
                outputs.append(_logits(routed, x))
        plain = strip(routed, "adv")
        classes = [[type(module) for module in model.modules()] for model in (plain, network)]
        stripped = torch.equal(_logits(plain, x), expected) and classes[0] == classes[1]
        missing = network.load_state_dict(plain.state_dict(), strict=False)
        return FamilyCheck(
            model=name,
            norm=norm,
            side=side,
            routes=all(torch.equal(output, expected) for output in outputs),
            stripped=stripped,
            loads=not missing.missing_keys and not missing.unexpected_keys,
            mixed=_check_mixed(routed, x),
            seconds=round(time.process_time() - start, 2),
        )
    except Exception as error:
        return FamilyCheck(model=name, norm=norm or "", side=side or 0, error=first_line(error))


def _check_mixed(routed: nn.Module, x: Tensor) -> bool | None:
    """Whether a concatenated batch gives the outputs of its parts when the banks differ."""
    with torch.no_grad():
        for module in routed.modules():
            for name, value in module._parameters.items() if isinstance(module, RoutedNorm) else ():
                if value is not None and name.endswith("_adv"):
                    value.mul_(1.25)
    parts = []
    for domain, images in (("clean", x[:2]), ("adv", x[2:])):
        with route(routed, domain):
            parts.append(_logits(routed, images))
    expected = torch.cat(parts)
    try:
        with route(routed, {"clean": 2, "adv": 1}):
            mixed = _logits(routed, x)
    except AdvnormError as error:
        if error.code == "wrong_route":
            return None
        raise
    return bool((mixed - expected).abs().max() <= 1e-4 * expected.abs().max())


def _randomize(network: nn.Module) -> None:
    with torch.no_grad():
        for module in norm_layers(network):
            for value in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if value.is_floating_point():
                    value.copy_(torch.rand_like(value) * 0.5 + 0.75)


def _forward(network: nn.Module) -> tuple[Tensor, Tensor]:
    """Images of the smallest size that the network takes, and its logits."""
    own = getattr(network, "default_cfg", {}).get("input_size", (3, 224, 224))[-1]
    config = getattr(network, "config", None)
    sizes = [getattr(config, "image_size", own) if config is not None else own]
    error: Exception | None = None
    for side in (*SIDES, *(size if isinstance(size, int) else own for size in sizes)):
        x = torch.rand(3, 3, side, side)
        try:
            _logits(copy.deepcopy(network), x)  # Swin adapts its windows to the first images, even if it fails then
            return x, _logits(network, x)
        except Exception as found:
            error = found
    assert error is not None
    raise error


def _logits(network: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return logits_of(network(x))
