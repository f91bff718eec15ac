# %% [markdown]
# # From one process to many
#
# A training that works in one process should give the same network in many. With batch norm
# this is not obvious: each process sees a part of the batch, and the parts have other
# statistics than the whole. In this tutorial you train with `torchrun` in two processes on
# the CPU, compare with one process, and run a study on Ray. On a machine with GPUs the
# commands are the same.
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

# %% alt="Loss by epoch for one process, two synchronized and two unsynchronized processes"
import matplotlib.pyplot as plt

runs = {
    name: advnorm.Run.open(f"runs/{name}-seed0") for name in ("one", "two", "unsynchronized")
}
figure, axes = plt.subplots(figsize=(7, 3))
for (name, run), style in zip(runs.items(), ("-", "--", ":")):
    axes.plot(
        [row["epoch"] for row in run.metrics()],
        [row["loss"] for row in run.metrics()],
        style,
        label=name,
    )
axes.set(xlabel="epoch", ylabel="training loss")
axes.set_xticks([row["epoch"] for row in run.metrics()])
axes.legend()
plt.show()

# %% [markdown]
# One process and two synchronized processes lie on top of each other. How close are they?

# %%
for row, other in zip(runs["one"].metrics(), runs["two"].metrics()):
    print(f"epoch {row['epoch']}: loss {row['loss']:.4f} and {other['loss']:.4f}")

# %% [markdown]
# The difference comes from rounding: sums over two halves are added in another order. It
# grows slowly, because PGD takes the sign of a gradient, and a gradient near zero can flip.
# Attacks communicate nothing, and gradients are reduced once per step.
#
# ## In your own loop
#
# An objective is an `nn.Module` that contains the whole step, attack included. Wrap it in DDP
# as a whole and convert the network with `sync=True`:

# %%
# !cat examples/distributed_loop.py

# %%
# !torchrun --nproc-per-node 2 examples/distributed_loop.py

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
