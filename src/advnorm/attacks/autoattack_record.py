"""The answer of AutoAttack, and the folder that a killed evaluation continues from."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from advnorm._core.errors import ConfigError
from advnorm._core.records import digest, interrupted_write, write_atomic, write_json
from advnorm.attacks.search import Found

if TYPE_CHECKING:
    from advnorm.attacks.autoattack import AutoAttack


@dataclass(frozen=True)
class Flag:
    """A reason to doubt the number."""

    name: str
    message: str


@dataclass(frozen=True, kw_only=True)
class AutoAttackResult:
    """The answer of an evaluation, with its conditions."""

    attack: AutoAttack
    #: Adversarial images; for robust ones the point nearest to one that was seen.
    x_adv: Tensor
    #: Which attack fooled an image: the position in ``stages``; 0 for ``clean``: wrong without attack; -1: robust.
    fooled_by: Tensor
    stages: tuple[str, ...]
    seconds: dict[str, float]
    #: Forwards in images, backwards not counted.
    forwards: dict[str, int]
    warnings: tuple[Flag, ...]
    batch_size: int
    #: Batch sizes for which memory did not suffice.
    halved: tuple[int, ...] = ()

    @property
    def robust(self) -> Tensor:
        """The verdict on each image."""
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
        return self.accuracy["clean"]

    @property
    def robust_accuracy(self) -> float:
        return self.robust.double().mean().item()

    def summary(self) -> dict[str, Any]:
        """What a record keeps as JSON, but for the time it took."""
        return {
            "attack": repr(self.attack),
            "images": len(self.x_adv),
            "accuracy": self.accuracy,
            "forwards": self.forwards,
            "warnings": [dataclasses.asdict(flag) for flag in self.warnings],
            "batch_size": self.batch_size,
            "halved": list(self.halved),
        }

    def __str__(self) -> str:
        lines = [f"AutoAttack {self.attack.version}, {self.attack.threat}, {len(self.x_adv)} images"]
        width = max(map(len, self.stages))
        for name, accuracy in self.accuracy.items():
            lines.append(f"  {name:{width}} {100 * accuracy:6.2f} %  {self.seconds.get(name, 0):8.1f} s")
        return "\n".join([*lines, *(f"  warning ({flag.name}): {flag.message}" for flag in self.warnings)])


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What an attack of the cascade found for some of the images; ``images`` are their places."""

    stage: str
    images: Tensor
    found: Found
    seconds: float
    forwards: int


class Record:
    """A folder: ``record.json`` (what was asked, at the end the answer), and the images in ``answer.safetensors``.

    While the evaluation runs it holds a file for each finished batch. Every file is written whole or not at all.
    """

    FORMAT = 2

    def __init__(self, folder: Path, asked: dict[str, Any]) -> None:
        self.folder, self.asked = folder, asked
        self._json = folder / "record.json"
        self._count = 0
        if not self._json.exists():
            if folder.exists() and not (folder.is_dir() and all(map(interrupted_write, folder.iterdir()))):
                raise ConfigError(f"{folder} is there and is no record of AutoAttack; give record= a folder of its own")
            write_json(self._json, {"format": self.FORMAT, "asked": asked})
        self._data = self._read()

    def __str__(self) -> str:
        return str(self.folder)

    def _read(self) -> dict[str, Any]:
        try:
            data = json.loads(self._json.read_text(encoding="utf-8"))
            found, known = dict(data["asked"]), data["format"] == self.FORMAT
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self._json} is corrupt ({error!r}); remove the folder to start anew") from None
        if not known:
            raise ConfigError(
                f"{self._json} is of another version of advnorm (format {data['format']!r}, here {self.FORMAT}); "
                "give record= another folder, or remove this one"
            )
        differing = [name for name in self.asked if name != "logits" and found.get(name) != self.asked[name]]
        if not differing:
            ours, theirs = (
                torch.tensor([[float(v) for v in row] for row in asked["logits"]]) for asked in (self.asked, found)
            )
            # A tolerance, since another device or batch size rounds differently.
            if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=1e-2, atol=1e-3):
                differing.append("model")
        if differing:
            raise ConfigError(
                f"{self._json} belongs to another evaluation (different: {', '.join(differing)}); "
                "give record= another folder, or remove this one"
            )
        return data

    def add(self, batch: Batch) -> None:
        """Keep a finished batch."""
        found = batch.found
        tensors = {
            "images": batch.images,
            "x_adv": found.x_adv,
            "fooled": found.fooled,
            "margin": found.margin,
            "zero_gradient": found.zero_gradient,
        }
        facts = {"stage": batch.stage, "seconds": batch.seconds, "forwards": batch.forwards}
        self._count += 1
        _write_tensors(self.folder / f"batch-{self._count:06}.safetensors", tensors, facts)

    def batches(self, stages: tuple[str, ...], device: torch.device) -> Iterator[Batch]:
        """The batches that an earlier process finished, in order."""
        for path in sorted(self.folder.glob("batch-*.safetensors")):
            tensors, facts = _read_tensors(path, device)
            stage = facts.pop("stage", None)
            if stage not in stages:
                raise ConfigError(f"{path} holds a batch of {stage!r}; this evaluation has {', '.join(stages)}")
            images = tensors.pop("images")
            self._count = int(path.stem.removeprefix("batch-"))
            yield Batch(stage=stage, images=images, found=Found(**tensors), **facts)

    def finish(self, result: AutoAttackResult) -> None:
        """Write the answer and remove the batches."""
        tensors = {"x_adv": result.x_adv, "fooled_by": result.fooled_by}
        _write_tensors(self.folder / "answer.safetensors", tensors, {})
        answer = {"result": result.summary(), "stages": list(result.stages), "seconds": result.seconds}
        write_json(self._json, {**self._data, "answer": answer})
        for path in self.folder.glob("batch-*.safetensors"):
            path.unlink()

    def answer(self, device: torch.device) -> dict[str, Any] | None:
        """What :class:`AutoAttackResult` needs, of an evaluation that is finished."""
        answer = self._data.get("answer")
        if answer is None:
            return None
        tensors, _ = _read_tensors(self.folder / "answer.safetensors", device)
        summary = answer["result"]
        return {
            **tensors,
            "stages": tuple(answer["stages"]),
            "seconds": answer["seconds"],
            "forwards": summary["forwards"],
            "warnings": tuple(Flag(**flag) for flag in summary["warnings"]),
            "batch_size": summary["batch_size"],
            "halved": tuple(summary["halved"]),
        }


def _write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """A safetensors file with facts and hashes in its header, whole or not at all."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    header = {"facts": json.dumps(facts), "digests": json.dumps({name: digest(v) for name, v in tensors.items()})}
    write_atomic(path, save(tensors, metadata=header))


def _read_tensors(path: Path, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            header = file.metadata()
        if json.loads(header["digests"]) != {name: digest(value) for name, value in tensors.items()}:
            raise ValueError("its content does not match its hash")
        facts = json.loads(header["facts"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is corrupt ({error}); remove the folder {path.parent} to start anew") from None
    return {name: value.to(device) for name, value in tensors.items()}, facts
