"""Feature data sets (paper D, eq. 2, 3): shards on disk with the recipe that made them, and their reader.

``root/<split>/recipe.json`` describes how the images are made; ``root/<split>/00000.safetensors`` and so on hold them.
A shard is complete or absent. The number of a shard determines which images it holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

from advnorm._core.errors import ConfigError, Problem, raise_problems
from advnorm._core.records import digest, write_atomic, write_json
from advnorm._core.shapes import read_record, with_digest
from advnorm.data.image_data import FolderData, ImageData
from advnorm.data.published_files import reading
from advnorm.data.registry import register_dataset

FORMAT = "advnorm.features/1"
#: The label that an image is trained with, or the class of the image from which its optimization started.
Labels = Literal["target", "start"]


class FeatureRecipe(TypedDict):
    """``recipe.json``."""

    name: str
    split: str
    images: int
    num_classes: int
    shard_size: int
    source: dict[str, Any]
    recipe: NotRequired[dict[str, Any]]
    digest: str


@dataclass(frozen=True)
class FeatureFolder:
    """One split of a feature data set on disk."""

    path: Path

    @property
    def exists(self) -> bool:
        """Whether a recipe has been written."""
        return (self.path / "recipe.json").is_file()

    @property
    def recipe(self) -> dict[str, Any]:
        """How the images are made, from which data, and their number."""
        raise_problems(self._recipe_problems())
        return read_record(self.path / "recipe.json", FeatureRecipe, FORMAT, "choose another folder, or make it again")

    @property
    def name(self) -> str:
        """The name of the set; it contains the class offset if that is not 1, and so do the runs on the set."""
        name, made = self.recipe["name"], self.recipe.get("recipe", {})
        offset = made.get("offset", 1) if made.get("towards") == "next" else 1
        return name if offset == 1 else f"{name}(offset={offset})"

    def check_recipe(self, recipe: Mapping[str, Any]) -> None:
        """Raise if the folder holds a set of another recipe; write nothing.

        ``made_with`` (versions, device) may differ between the processes that make the shards of one set.
        """
        if not self.exists:
            return
        existing = self.recipe
        differences = [
            f"{key} ({existing.get(key)!r}, now {recipe.get(key)!r})"
            for key in sorted({*existing, *recipe} - {"made_with", "format", "digest"})
            if existing.get(key) != recipe.get(key)
        ]
        if differences:
            message = f"{self.path} holds another feature data set, which differs in {', '.join(differences)}"
            raise ConfigError("already_exists", message, field="root", hint="choose another folder, or delete it")

    def create(self, recipe: Mapping[str, Any]) -> None:
        """Write the recipe if none exists; raise if the folder holds another one."""
        self.check_recipe(recipe)
        if not self.exists:
            write_json(self.path / "recipe.json", with_digest({"format": FORMAT, **recipe}))

    def missing_shards(self) -> list[int]:
        """Return the numbers of the shards that do not exist yet."""
        return [number for number in shard_rows(self.recipe) if not self._shard(number).is_file()]

    def problems(self) -> list[Problem]:
        """Return why the set cannot be read: no recipe, or missing shards."""
        problems = self._recipe_problems()
        if problems or not (missing := self.missing_shards()):
            return problems
        message = f"{self.path} is not finished: {len(missing)} of {len(shard_rows(self.recipe))} shards are missing"
        hint = "repeat the same extract_features call to resume; every part makes its own shards"
        return [Problem(code="missing_file", message=message, field="root", hint=hint)]

    def _recipe_problems(self) -> list[Problem]:
        if self.exists:
            return []
        root, split = self.path.parent, self.path.name
        hint = "make it with advnorm.analysis.extract_features, or name the folder that holds the splits"
        train = FeatureFolder(root / "train")
        if split != "train" and train.exists:
            hint = (
                f"add the ordinary {split} images; the features were made from {train.recipe['source']['name']}, in "
                f"Python: advnorm.data.add_split({str(root)!r}, advnorm.data.load(NAME, {split!r}, FOLDER))"
            )
        message = f"no feature data set at {self.path} (no recipe.json)"
        return [Problem(code="missing_file", message=message, field="root", hint=hint)]

    def write_shard(self, number: int, images: Tensor, labels: Tensor, starts: Tensor) -> None:
        """Write a shard atomically: images in [0, 1], their labels, and the classes of their start images."""
        tensors = {
            "images": images.detach().float().cpu().contiguous(),
            "labels": labels.long().cpu(),
            "starts": starts.long().cpu().clone(),  # may be the labels themselves
        }
        write_atomic(self._shard(number), safetensors.torch.save(tensors, {"digest": digest(*tensors.values())}))

    def load(self, labels: Labels = "target") -> ImageData:
        """Return the whole split; raise if shards are missing or damaged."""
        raise_problems(self.problems())
        recipe = self.recipe
        parts = [self._read_shard(number, rows.stop - rows.start) for number, rows in shard_rows(recipe).items()]
        return ImageData(
            name=self.name,
            split=recipe["split"],
            images=torch.cat([part["images"] for part in parts]),
            labels=torch.cat([part["labels" if labels == "target" else "starts"] for part in parts]),
            num_classes=recipe["num_classes"],
        )

    def _shard(self, number: int) -> Path:
        return self.path / f"{number:05d}.safetensors"

    def _read_shard(self, number: int, count: int) -> dict[str, Tensor]:
        path = self._shard(number)
        with reading(path), safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in ("images", "labels", "starts")}
            if (file.metadata() or {}).get("digest") != digest(*tensors.values()) or len(tensors["labels"]) != count:
                raise ValueError("its content does not match its hash or its number; delete it")
        return tensors


def describe_set(data: ImageData, name: str, *, shard_size: int, **more: Any) -> dict[str, Any]:
    """Return the recipe of a set that has an image for each image of ``data``."""
    return {
        "name": name,
        "split": data.split,
        "images": len(data),
        "num_classes": data.num_classes,
        "shard_size": shard_size,
        "source": {"name": data.name, "split": data.split, "fingerprint": data.fingerprint},
        **more,
    }


def shard_rows(recipe: Mapping[str, Any]) -> dict[int, slice]:
    """Return the rows of the whole set that each shard of a recipe holds."""
    total, size = recipe["images"], recipe["shard_size"]
    return {number: slice(start, min(start + size, total)) for number, start in enumerate(range(0, total, size))}


def parse_set_name(name: str) -> tuple[str, int]:
    """Return the name in the recipe and the class offset of a set (see :attr:`FeatureFolder.name`)."""
    match = re.fullmatch(r"(.+)\(offset=(-?\d+)\)", name)
    return (match[1], int(match[2])) if match else (name, 1)


def missing_features(root: Path, split: str, **_options: Any) -> list[Problem]:
    """Return a problem if a feature data set does not exist or is not finished."""
    return FeatureFolder(root / split).problems()


@register_dataset("features", summary="features extracted from a model (paper D)", missing=missing_features)
def read_features(root: Path | str, split: str = "train", *, labels: Labels = "target") -> ImageData:
    """Read a split of a feature data set; ``labels="start"`` gives the class of each image's start image."""
    return FeatureFolder(Path(root) / split).load(labels)


def add_split(root: Path | str, data: ImageData | FolderData) -> FeatureFolder:
    """Add ordinary images to extracted ones: networks trained on features are evaluated on real test images."""
    data = data.in_memory()
    folder = FeatureFolder(Path(root) / data.split)
    folder.create(describe_set(data, data.name, shard_size=len(data)))
    if folder.missing_shards():
        folder.write_shard(0, data.pixels(), data.labels, data.labels)
    return folder
