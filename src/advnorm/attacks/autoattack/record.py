"""The result of a cascade, and the folder from which a killed evaluation resumes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from advnorm._core.errors import ConfigError
from advnorm._core.records import digest, interrupted_write, require_regular, write_atomic, write_json
from advnorm._core.shapes import read_record, with_digest
from advnorm.attacks.autoattack.settings import CascadeSettings
from advnorm.attacks.search import SearchResult


@dataclass(frozen=True)
class ReliabilityWarning:
    """A reason to doubt the robust accuracy."""

    name: str
    message: str


@dataclass(frozen=True, kw_only=True)
class CascadeResult:
    """The result of an evaluation, with its conditions."""

    attack: CascadeSettings
    #: Adversarial images; for robust images the candidate nearest to the decision boundary.
    x_adv: Tensor
    #: The attack that fooled each image, as a position in ``stages``; 0 (``clean``): wrong without attack; -1: robust.
    fooled_by: Tensor
    stages: tuple[str, ...]
    seconds: dict[str, float]
    #: Number of forwards and of backwards of each stage, in images.
    forwards: dict[str, int]
    backwards: dict[str, int]
    warnings: tuple[ReliabilityWarning, ...]
    batch_size: int
    #: Batch sizes that ran out of memory.
    halved: tuple[int, ...] = ()

    @property
    def robust(self) -> Tensor:
        """Whether each image resists all attacks."""
        return self.fooled_by < 0

    @property
    def accuracy(self) -> dict[str, float]:
        """Clean accuracy, then robust accuracy after each attack of the cascade."""
        return {
            name: ((self.fooled_by < 0) | (self.fooled_by > place)).double().mean().item()
            for place, name in enumerate(self.stages)
        }

    @property
    def clean_accuracy(self) -> float:
        """Accuracy without an attack."""
        return self.accuracy["clean"]

    @property
    def robust_accuracy(self) -> float:
        """Accuracy after all attacks."""
        return self.robust.double().mean().item()

    def summary(self) -> dict[str, Any]:
        """The JSON of a record, without seconds."""
        return {
            "attack": repr(self.attack),
            "images": len(self.x_adv),
            "accuracy": self.accuracy,
            "forwards": self.forwards,
            "backwards": self.backwards,
            "warnings": [dataclasses.asdict(warning) for warning in self.warnings],
            "batch_size": self.batch_size,
            "halved": list(self.halved),
        }

    def __str__(self) -> str:
        lines = [f"{self.attack.title}, {self.attack.threat}, {len(self.x_adv)} images"]
        width = max(map(len, self.stages))
        for name, accuracy in self.accuracy.items():
            lines.append(f"  {name:{width}} {100 * accuracy:6.2f} %  {self.seconds.get(name, 0):8.1f} s")
        return "\n".join([*lines, *(f"  warning ({warning.name}): {warning.message}" for warning in self.warnings)])


@dataclass(frozen=True, kw_only=True)
class StageBatch:
    """The result of one stage for some of the images; ``images`` are their positions."""

    stage: str
    images: Tensor
    found: SearchResult
    seconds: float
    forwards: int
    backwards: int


class CascadeAnswer(TypedDict):
    """The result of a finished cascade in ``record.json``."""

    result: dict[str, Any]
    stages: list[str]
    seconds: dict[str, float]


class CascadeRequest(TypedDict):
    """The request in ``record.json``; its other entries are compared as they are."""

    logits: list[list[str]]


class CascadeFile(TypedDict):
    """``record.json``."""

    asked: CascadeRequest
    answer: NotRequired[CascadeAnswer]
    digest: str


class CascadeRecord:
    """A folder that holds the request and, at the end, the result of a cascade.

    ``record.json`` holds the request and the numbers, ``answer.safetensors`` the images.

    While the evaluation runs, the folder holds a file for each finished batch. Every file is written atomically.
    """

    FORMAT = 3

    def __init__(self, folder: Path, request: dict[str, Any]) -> None:
        self.folder, self.request = folder, request
        self._json = folder / "record.json"
        self._count = 0
        if not self._json.exists():
            if folder.exists() and not (folder.is_dir() and all(map(interrupted_write, folder.iterdir()))):
                message, hint = f"{folder} is not the record of a cascade", "set record= to a new folder"
                raise ConfigError("already_exists", message, field="record", hint=hint)
            write_json(self._json, with_digest({"format": self.FORMAT, "asked": request}))
        self._data = self._read()

    def _read(self) -> dict[str, Any]:
        hint = "give record= another folder, or remove this one"
        data = read_record(self._json, CascadeFile, self.FORMAT, hint)
        found = data["asked"]
        differing = [name for name in self.request if name != "logits" and found.get(name) != self.request[name]]
        if not differing:
            ours, theirs = (
                torch.tensor([[float(v) for v in row] for row in asked["logits"]]) for asked in (self.request, found)
            )
            # With a tolerance, since another device or batch size rounds differently.
            if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=1e-2, atol=1e-3):
                differing.append("model")
        if differing:
            message = f"{self._json} belongs to another evaluation (different: {', '.join(differing)})"
            raise ConfigError("conflict", message, field="record", hint=hint)
        return data

    def add(self, batch: StageBatch) -> None:
        """Write a finished batch."""
        tensors = {name: value for name, value in vars(batch.found).items() if value is not None}
        tensors["images"] = batch.images
        facts = {name: getattr(batch, name) for name in ("stage", "seconds", "forwards", "backwards")}
        self._count += 1
        _write_tensors(self.folder / f"batch-{self._count:06}.safetensors", tensors, facts)

    def batches(self, stages: tuple[str, ...], device: torch.device) -> Iterator[StageBatch]:
        """Yield the batches that an earlier process finished, in order."""
        for path in sorted(self.folder.glob("batch-*.safetensors")):
            tensors, facts = _read_tensors(path, device)
            stage = facts.pop("stage", None)
            if stage not in stages:
                message = f"{path} must hold a batch of one of the stages {', '.join(stages)}"
                raise ConfigError("conflict", message, field="record", got=stage)
            images = tensors.pop("images")
            self._count = int(path.stem.removeprefix("batch-"))
            yield StageBatch(stage=stage, images=images, found=SearchResult(**tensors), **facts)

    def finish(self, result: CascadeResult) -> None:
        """Write the answer and remove the batches."""
        tensors = {"x_adv": result.x_adv, "fooled_by": result.fooled_by}
        _write_tensors(self.folder / "answer.safetensors", tensors, {})
        answer = {"result": result.summary(), "stages": list(result.stages), "seconds": result.seconds}
        write_json(self._json, with_digest({**self._data, "answer": answer}))
        for path in self.folder.glob("batch-*.safetensors"):
            path.unlink()

    def load_result(self, attack: CascadeSettings, device: torch.device) -> CascadeResult | None:
        """Return the result of a finished evaluation, else None."""
        answer = self._data.get("answer")
        if answer is None:
            return None
        tensors, _ = _read_tensors(self.folder / "answer.safetensors", device)
        summary = answer["result"]
        return CascadeResult(
            attack=attack,
            **tensors,
            stages=tuple(answer["stages"]),
            seconds=answer["seconds"],
            forwards=summary["forwards"],
            backwards=summary["backwards"],
            warnings=tuple(ReliabilityWarning(**warning) for warning in summary["warnings"]),
            batch_size=summary["batch_size"],
            halved=tuple(summary["halved"]),
        )


def _write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write a safetensors file with facts and hashes in its header, atomically."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    header = {"facts": json.dumps(facts), "digests": json.dumps({name: digest(v) for name, v in tensors.items()})}
    write_atomic(path, save(tensors, metadata=header))


def _read_tensors(path: Path, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(require_regular(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            header = file.metadata()
        if json.loads(header["digests"]) != {name: digest(value) for name, value in tensors.items()}:
            raise ValueError("the content does not match the hash")
        facts = json.loads(header["facts"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        message, hint = f"{path} is damaged ({error})", f"remove the folder {path.parent} to start again"
        raise ConfigError("damaged_file", message, field="record", hint=hint) from None
    return {name: value.to(device) for name, value in tensors.items()}, facts
