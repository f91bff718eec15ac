"""Data sets of features extracted from a model (paper D, eq. 2, 3): shards on disk with their recipe, and the reader.

``root/<split>/recipe.json`` says how the images are made, ``root/<split>/00000.safetensors`` and so on hold them. A
shard is there whole or not at all, whoever made it; which images are in it is known from its number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

from advnorm._core.errors import ConfigError, did_you_mean
from advnorm._core.records import digest, read_json, write_json, write_whole
from advnorm.data.files import reading
from advnorm.data.sets import ImageData

FORMAT = "advnorm.features/1"
#: What a set is trained with, and the class of the image that each of its images was made from.
Labels = Literal["target", "start"]


@dataclass(frozen=True)
class FeatureFolder:
    """One split of a feature data set on disk."""

    path: Path

    @property
    def recipe(self) -> dict[str, Any]:
        """How the images are made, from what, and how many there are."""
        file = self.path / "recipe.json"
        if not self.claimed:
            root, split = self.path.parent, self.path.name
            cure = "make it with advnorm.analysis.extract_features, or name the folder that holds the splits"
            train = FeatureFolder(root / "train")
            if split != "train" and train.claimed:
                cure = (
                    f"put the ordinary {split} images beside the features, which were made from "
                    f"{train.recipe['source']['name']}, in Python: advnorm.data.add_split({str(root)!r}, "
                    f"advnorm.data.load(NAME, {split!r}, FOLDER))"
                )
            raise ConfigError(f"no feature data set at {self.path} (no recipe.json); {cure}")
        recipe = read_json(file)
        if recipe.get("format") != FORMAT:
            raise ConfigError(f"{file} is no recipe of this version of advnorm; choose another folder")
        return recipe

    @property
    def claimed(self) -> bool:
        """Whether there is a recipe, and with it a set."""
        return (self.path / "recipe.json").is_file()

    @property
    def name(self) -> str:
        """What the set is called; one that leads to another class than the next says so, and so do the runs on it."""
        name, made = self.recipe["name"], self.recipe.get("recipe", {})
        offset = made["offset"] if made.get("towards") == "next" else 1
        return name if offset == 1 else f"{name}(offset={offset})"

    def check(self, recipe: Mapping[str, Any]) -> None:
        """Refuse a folder that holds a set of another recipe; changes nothing.

        ``made_with`` (versions, device) may differ between the processes that make the shards of one set.
        """
        if self.claimed:
            found = self.recipe
            keys = {*found, *recipe} - {"made_with", "format"}
            differ = [
                f"{key} ({found.get(key)!r}, now {recipe.get(key)!r})"
                for key in sorted(keys)
                if found.get(key) != recipe.get(key)
            ]
            if differ:
                raise ConfigError(
                    f"{self.path} holds another feature data set, which differs in {', '.join(differ)}; choose another "
                    "folder, or delete it"
                )

    def claim(self, recipe: Mapping[str, Any]) -> None:
        """Write the recipe where there is none; a folder that holds another one is refused."""
        self.check(recipe)
        if not self.claimed:
            write_json(self.path / "recipe.json", {"format": FORMAT, **recipe})

    def shards(self) -> dict[int, slice]:
        """The rows of the whole set that each shard holds."""
        return shards_of(self.recipe)

    def missing(self) -> list[int]:
        """Numbers of the shards that are not there yet."""
        return [number for number in self.shards() if not self._file(number).is_file()]

    def write(self, number: int, images: Tensor, labels: Tensor, starts: Tensor) -> None:
        """Write a shard, whole or not at all: images in [0, 1], what they are labelled, and their start's class."""
        tensors = {
            "images": images.detach().float().cpu().contiguous(),
            "labels": labels.long().cpu(),
            "starts": starts.long().cpu().clone(),  # may be the labels themselves
        }
        write_whole(self._file(number), safetensors.torch.save(tensors, {"digest": digest(*tensors.values())}))

    def data(self, labels: Labels = "target") -> ImageData:
        """The whole split; refused with the shards that are missing or damaged."""
        recipe, missing = self.recipe, self.missing()
        if missing:
            few = ", ".join(map(str, missing[:5])) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise ConfigError(
                f"{self.path} is not finished: of {len(self.shards())} shards these are missing: {few}; the same "
                "extract_features call goes on, and its other parts make theirs"
            )
        parts = [self._read(number, rows.stop - rows.start) for number, rows in self.shards().items()]
        return ImageData(
            name=self.name,
            split=recipe["split"],
            images=torch.cat([part["images"] for part in parts]),
            labels=torch.cat([part["labels" if labels == "target" else "starts"] for part in parts]),
            num_classes=recipe["num_classes"],
        )

    def _file(self, number: int) -> Path:
        return self.path / f"{number:05d}.safetensors"

    def _read(self, number: int, count: int) -> dict[str, Tensor]:
        path = self._file(number)
        with reading(path), safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in ("images", "labels", "starts")}
            if (file.metadata() or {}).get("digest") != digest(*tensors.values()) or len(tensors["labels"]) != count:
                raise ValueError("its content does not match its hash or its place; delete it")
        return tensors


def shards_of(recipe: Mapping[str, Any]) -> dict[int, slice]:
    """The rows of the whole set that each shard of a recipe holds."""
    total, size = recipe["images"], recipe["shard_size"]
    return {number: slice(start, min(start + size, total)) for number, start in enumerate(range(0, total, size))}


def name_and_offset(name: str) -> tuple[str, int]:
    """A set's name as in its recipe, and how many classes further it leads (see :attr:`FeatureFolder.name`)."""
    found = re.fullmatch(r"(.+)\(offset=(-?\d+)\)", name)
    return (found[1], int(found[2])) if found else (name, 1)


def features(root: Path | str, split: str = "train", *, labels: Labels = "target") -> ImageData:
    """A split of a feature data set; with ``labels="start"`` the class of the image that each one was made from."""
    if labels not in get_args(Labels):
        raise ConfigError(f"unknown labels {labels!r}{did_you_mean(labels, get_args(Labels))}")
    return FeatureFolder(Path(root) / split).data(labels)


def add_split(root: Path | str, data: ImageData) -> FeatureFolder:
    """Put ordinary images beside extracted ones: a network trained on features is judged on real test images."""
    if not isinstance(data, ImageData):
        raise ConfigError(f"add_split takes ImageData, got {type(data).__name__}; see in_memory()")
    folder = FeatureFolder(Path(root) / data.split)
    folder.claim(
        {
            "name": data.name,
            "split": data.split,
            "images": len(data),
            "num_classes": data.num_classes,
            "shard_size": len(data),
            "source": {"name": data.name, "split": data.split, "fingerprint": data.fingerprint},
        }
    )
    if folder.missing():
        folder.write(0, data.pixels(), data.labels, data.labels)
    return folder
