"""A rank of a plain loop in two processes: its weights and images after some steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from advnorm.bench.plain_loops import HYBRID, PlainLoop
from advnorm.bench.training_modes import load_images
from advnorm.config import Named
from advnorm.training.ranks import Ranks
from support.ranks import join_ranks


def train_rank(rank: int, folder: str) -> None:
    join_ranks(rank, 2, str(Path(folder, "init")))
    config = replace(HYBRID, model=Named("small_cnn"), batch_size=8, data=Named("synthetic", size=64))
    config = replace(config, attack=replace(config.attack, steps=1))
    ranks = Ranks(device=torch.device("cpu"), rank=rank, world=2)
    plain = PlainLoop(config, load_images(config, None), ranks, print, careful=True)
    before, seen, step = plain.model.conv2.weight.detach().clone(), [], plain.step
    plain.step = lambda x, y: seen.append(x) or step(x, y)
    plain.run(2)
    weights = {name: value.detach() for name, value in plain.model.named_parameters()}
    torch.save({"before": before, "weights": weights, "images": torch.cat(seen)}, Path(folder, f"rank{rank}.pt"))
    dist.destroy_process_group()
