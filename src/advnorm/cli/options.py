"""Options that several verbs share, each declared once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from advnorm.cli.command import KEY_VALUE, NUMBERS

Source = Annotated[
    str | None,
    typer.Argument(
        help="A .yaml, .json or .py file, or a cell of a study. The default is a quick configuration on digits."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar=KEY_VALUE, help="Change settings: --set norm=dual_bn epochs=30. Nested: attack.steps=20."
    ),
]
Checkpoint = Annotated[
    str | None,
    typer.Option(help="best (highest held-out score; default if it exists), last, or a snapshot such as epoch5."),
]
DataDir = Annotated[Path | None, typer.Option(help="Folder that contains the data set.")]
Eps = Annotated[str | None, typer.Option(help="Radius in pixel scale, for example 8/255. Default: the run's.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Use at most N images, spread evenly over the data.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda if available.")]
Seed = Annotated[int, typer.Option(help="Seed of the noise.")]
JsonCopy = Annotated[Path | None, typer.Option(help="Also write the record to this file.")]


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Options of ``evaluate`` and ``audit``: which weights, on which images, under which threat."""

    weights: Annotated[
        str | None,
        typer.Option(
            help="Weights of the model: a .safetensors or .pt file. FILE:ema or FILE:adv selects one of several sets."
        ),
    ] = None
    mean: Annotated[
        list[float] | None,
        typer.Option(metavar=NUMBERS, help="Mean to subtract from the images: one number, or one per channel."),
    ] = None
    std: Annotated[
        list[float] | None, typer.Option(metavar=NUMBERS, help="Standard deviation to divide the images by.")
    ] = None
    checkpoint: Checkpoint = None
    data: Annotated[
        str | None,
        typer.Option(
            help="Data set NAME (such as digits) or NAME:FOLDER, a folder of images, or a .npz or .safetensors file "
            "with x and y. Default: the run's."
        ),
    ] = None
    image_size: Annotated[
        int | None, typer.Option(min=1, help="Side length to which image files of --data are resized.")
    ] = None
    data_dir: DataDir = None
    eps: Annotated[
        str | None,
        typer.Option(help="Radius in pixel scale, for example 0.2. Default: the run's; without a run 8/255."),
    ] = None
    threat_norm: Annotated[str | None, typer.Option(help="Linf, L2 or L1. Default: the run's, else Linf.")] = None
    statistics: Annotated[str, typer.Option(help="Statistics of batch norms: running, batch or batch_frozen.")] = (
        "running"
    )
    limit: Limit = None
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Images per batch. Default: 512 on a GPU, 128 on the CPU.")
    ] = None
    device: Device = None
    seed: Seed = 0
    json: Annotated[
        Path | None,
        typer.Option(
            help="JSON file for the result. The same command resumes or reads it. Default for a run: in its folder."
        ),
    ] = None
