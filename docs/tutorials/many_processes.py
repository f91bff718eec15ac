# %% [markdown]
# # From one process to many
#
# A training that works in one process should give the same network in many. With batch norm
# this is not obvious: each process sees a part of the batch, and the parts have other
# statistics than the whole. In this tutorial you train with `torchrun` in two processes on
# the CPU, compare with one process, shard a network with FSDP, and run a study on Ray. On a
# machine with GPUs the commands are the same. Run them in the root of the repository.
#
# ## One process

# %%
from pathlib import Path

import advnorm

config = advnorm.Config(norm="dual_bn", eps=0.2, attack={"steps": 5}, epochs=3, batch_size=128)
Path("config.yaml").write_text(config.to_yaml())

one = advnorm.train(config.with_overrides(["name=one"]), out="runs", device="cpu")
print(one.folder, [round(row["loss"], 3) for row in one.metrics()])

# %% [markdown]
# ## Two processes
#
# `torchrun` starts the same command twice. `batch_size` still counts the images of all
# processes together, so both runs see the same batches. `sync_statistics=true` computes the
# statistics of each bank over all processes:

# %%
# !torchrun --nproc-per-node 2 -m advnorm train config.yaml --set name=two sync_statistics=true --device cpu

# %% [markdown]
# Without it, every process normalizes with its own half of the batch. That is a different
# method, with noisier statistics:

# %%
# !torchrun --nproc-per-node 2 -m advnorm train config.yaml --set name=unsynchronized --device cpu

# %%
runs = {
    name: advnorm.Run.open(f"runs/{name}-seed0") for name in ("one", "two", "unsynchronized")
}
losses = {name: [row["loss"] for row in run.metrics()] for name, run in runs.items()}
for name, values in losses.items():
    print(f"{name:14}", *(f"{value:.6f}" for value in values))

# %% [markdown]
# How far are two processes from one?

# %% alt="Difference of the training loss from one process: smaller with synchronized statistics"
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(7, 3))
for name, label in (("two", "synchronized"), ("unsynchronized", "not synchronized")):
    apart = [abs(value - one) for value, one in zip(losses[name], losses["one"])]
    axes.plot(range(1, len(apart) + 1), apart, "o-", label=f"two processes, {label}")
axes.set(xlabel="epoch", ylabel="difference from one process", yscale="log")
axes.set_xticks(range(1, len(apart) + 1))
axes.legend()
plt.show()

# %% [markdown]
# With synchronized statistics, the difference comes from rounding: sums over two halves are
# added in another order. It grows during training, because PGD takes the sign of a gradient,
# and a gradient near zero can flip. Attacks communicate nothing, and gradients are reduced
# once per step.
#
# ## In your own loop
#
# An objective is an `nn.Module` that contains the whole step, attack included. Convert the
# network with `sync=True`. With DDP, wrap the objective as a whole. With FSDP, shard the
# network:

# %%
# !cat examples/distributed_loop.py

# %%
# !torchrun --nproc-per-node 2 examples/distributed_loop.py

# %% [markdown]
# FSDP divides weights, gradients and the optimizer's state over the processes, for networks
# that are too large for one GPU. Each forward gathers the weights, also those of the attack.
# In a training run, `--set parallel=fsdp` does it. The losses are the same:

# %%
# !torchrun --nproc-per-node 2 examples/distributed_loop.py --fsdp

# %% [markdown]
# ## Many trainings instead of a large one
#
# A study has many cells, and each cell is a training that fits on one device. Ray distributes
# them over the devices of a cluster. Without an address it starts a local one:

# %%
# !advnorm study A/table6 --smoke --launcher ray

# %% [markdown]
# On a cluster, add `--address`, and put `--out` and `--data-dir` on a file system that all
# nodes see. Two commands with the same `--out` share the work.
#
# ## On many machines
#
# `torchrun` connects machines as well; `advnorm train` needs nothing else. All processes must
# see the folder `--out`:
#
# ```console
# $ torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \
#     -m advnorm train recipes/cifar10_eps16.yaml --set sync_statistics=true --data-dir /shared/data --out /shared/runs
# ```
#
# A run that is interrupted resumes with the same command. [Train with several
# processes](../guides/distributed.md) lists what depends on the number of processes and what
# does not.
