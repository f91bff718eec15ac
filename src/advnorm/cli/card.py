"""The verbs ``card`` and ``push``: share the model of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from advnorm.cli.command import print_command, say
from advnorm.cli.options import Checkpoint


def card(
    run: Annotated[Path, typer.Argument(help="Folder of a training run.")],
    out: Annotated[Path | None, typer.Option(help="Folder for card, configuration and weights. Default: RUN.")] = None,
    checkpoint: Checkpoint = None,
    name: Annotated[str | None, typer.Option(help="Name of the model. Default: the name of the run.")] = None,
) -> None:
    """Write the model card of a run, README.md, with the weights and the configuration that it describes.

    The card lists the evaluations and audits of these weights in the folder of the run. Example:
    `advnorm card runs/NAME --out my-model`
    """
    from advnorm.sharing.pretrained import save_pretrained
    from advnorm.training import Run

    folder = save_pretrained(Run.open(run), out or run, name=name, checkpoint=checkpoint)
    say(f"card: {folder / 'README.md'}")
    print_command("share it", "push", folder, f"USER/{name or run.resolve().name}")


def push(
    folder: Annotated[Path, typer.Argument(help="Folder of `advnorm card` or `advnorm.save_pretrained`.")],
    repo: Annotated[str, typer.Argument(help="USER/NAME on the Hugging Face Hub.")],
    private: Annotated[bool, typer.Option("--private", help="Create a private repository.")] = False,
) -> None:
    """Upload a saved model to the Hugging Face Hub: its card, its configuration and its weights.

    Needs `pip install 'advnorm[hub]'` and `hf auth login`. Example: `advnorm push my-model USER/my-model`
    """
    from advnorm.sharing import push as upload

    say(upload(folder, repo, private=private))
