"""Trainings of a few steps on a few synthetic images."""

from __future__ import annotations

import os
from pathlib import Path

import torch

import advnorm
from advnorm import Config, Run
from advnorm.training import checkpoint
from support.train_worker import SMALL

SOURCE = str(Path(advnorm.__file__).parent.parent)

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCE}


def small(**settings) -> Config:
    return Config.from_dict({**SMALL, **settings})


def train(config: Config, out: Path, **settings) -> Run:
    return advnorm.train(config, out=out, device="cpu", **settings)


def tensors(run: Run, name: str = "last") -> dict[str, torch.Tensor]:
    return checkpoint.load(run.checkpoints, name)[0]


def norm_for(name: str) -> str:
    return "cross_bn" if name == "cross" else "dual_bn"


ON_DISK = {"data": {"name": "imagefolder", "image_size": 8}, "held_out": 4, "batch_size": 10, "augment": "flip"}


def images_on_disk(folder: Path) -> Path:
    from PIL import Image

    for number in range(24):
        path = folder / "train" / f"class{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 200 * (number % 2), 7)).save(path)
    return folder


def arguments(tmp_path: Path, *more: str) -> list[str]:
    path = tmp_path / "small.yaml"
    path.write_text(small(name="small").to_yaml())
    return ["train", str(path), "--out", str(tmp_path / "runs"), "--device", "cpu", *more]
