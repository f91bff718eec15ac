"""Hybrid training in your own loop and several processes: torchrun --nproc-per-node 2 examples/distributed_loop.py

With --fsdp every process keeps only its part of the weights.
"""

import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import advnorm


def train(rank, world):
    torch.manual_seed(0)  # the same weights in every process
    model = advnorm.create_model("small_cnn", norm="bn", in_channels=1, normalize=False)
    advnorm.convert_norm(model, "dual_bn", sync=True)

    attack = advnorm.attacks.PGD(threat=advnorm.ThreatModel(eps=0.2), steps=5)
    if "--fsdp" in sys.argv:
        objective = advnorm.objectives.Hybrid(fully_shard(model), attack)
    else:
        objective = DistributedDataParallel(advnorm.objectives.Hybrid(model, attack))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    digits = advnorm.data.load("digits", "train")
    loader = advnorm.data.make_loader(digits, batch_size=128, rank=rank, world=world)

    for epoch in range(2):
        for batch in loader.epoch(epoch):
            step = objective(batch.x, batch.y, index=batch.index)
            optimizer.zero_grad()
            step.loss.backward()
            optimizer.step()
        if rank == 0:
            print(epoch, {name: round(value.item(), 3) for name, value in step.terms.items()})


dist.init_process_group("gloo")  # "nccl" on GPUs
train(dist.get_rank(), dist.get_world_size())
time.sleep(0.5)  # Gloo's threads free the last collective; a process that ends before that aborts
dist.destroy_process_group()
