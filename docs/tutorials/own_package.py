# %% [markdown]
# # Write your own norm, attack and objective
#
# Research means adding what does not exist yet. In this tutorial you look at a small package
# with a norm, an attack and an objective of its own, install it, and use its parts by name:
# in Python, in a configuration, and in every command. All its files are in the repository, in
# the folder `examples/own_parts`. You need not type them; copy the folder to start your own
# package. Run the commands in the root of the repository.

# %%
# !find examples/own_parts/ -name '*.py' -o -name '*.toml' | sort

# %% [markdown]
# ## A norm is a plan
#
# A [plan](../explanation/concepts.md#plans) assigns banks to domains. This one has
# three domains. Clean and noisy images share their statistics, adversarial images have their
# own, and all have their own affine parameters:

# %%
# !cat examples/own_parts/src/own_parts/norm.py

# %% [markdown]
# That is all. Forward, synchronization over processes, compilation, surgery and export come
# with the plan.
#
# ## An attack is one method
#
# `perturb` gets `predict`, a function from images to logits, the images `x`, their labels `y`,
# and `noise`. `noise` draws random numbers for each image. They depend on the seed of the
# attack and on the position of the image in the data set, not on the batch, so that a result
# is the same for every batch size. Here `random_start` uses them; `noise.uniform(shape)` and
# `noise.normal(shape)` give one tensor of that shape per image. The base class checks the
# inputs, projects the result into ball and box, and restores the model. Settings are declared
# with help and range, so that a wrong value raises a readable error:

# %%
# !cat examples/own_parts/src/own_parts/attack.py

# %% [markdown]
# ## An objective is a loss over domains
#
# `domain_logits` forwards the images of all domains in one batch, each through its own
# branch. An objective returns its loss, and for each domain the logits and their labels;
# `terms` are logged in every epoch:

# %%
# !cat examples/own_parts/src/own_parts/objective.py

# %% [markdown]
# ## Install it
#
# The package needs two more files. `pyproject.toml` contains its name and its entry point for
# `advnorm`; `__init__.py` imports the parts, which registers them:

# %%
# !cat examples/own_parts/pyproject.toml

# %%
# !cat examples/own_parts/src/own_parts/__init__.py

# %% [markdown]
# Here the package goes to a folder of its own; with yours you would write `pip install .`:

# %%
# !pip install --quiet --no-deps --no-build-isolation --target packages examples/own_parts/

# %%
import sys

sys.path.insert(0, "packages")

import own_parts

import advnorm

print(own_parts.__doc__)
print([name for name in advnorm.list_norms() if name.startswith("natural")])
print(advnorm.norms.make_plan("natural_bn"))

# %% [markdown]
# ## Use it
#
# The names now work everywhere. First in a training:

# %%
config = advnorm.Config(
    norm="natural_bn",
    objective={"name": "three_domains", "adv_weight": 0.5},
    eps=0.2,
    attack={"steps": 5},
    epochs=10,
    batch_size=64,
    validate_every=0,
)
run = advnorm.train(config, out="runs")
print(
    {name: round(value, 3) for name, value in run.metrics()[-1].items() if name.endswith("_ce")}
)

# %% [markdown]
# A wrong setting is found before anything runs, in your parts as in ours:

# %%
try:
    advnorm.Config(norm="natural_bn", objective={"name": "three_domains", "adv_weight": 2})
except advnorm.ConfigError as error:
    print(error)

# %% [markdown]
# Then in an evaluation. Your attack takes part like any other, with steps in its name, and
# the benchmark reports each branch:

# %%
test = advnorm.data.load("digits", "test")
threat = advnorm.ThreatModel(eps=0.2)
model = run.model("last")
result = advnorm.benchmark(
    model, test, threat, ["pgd20", "cosine20"], ["clean", "noise", "adv"], limit=200
)
print(result)

# %% alt="Robust accuracy by steps for PGD and for the own attack"
import matplotlib.pyplot as plt

steps = (1, 2, 5, 10, 20)
figure, axes = plt.subplots(figsize=(7, 3))
for family, label in (
    ("pgd", "PGD, constant steps"),
    ("cosine", "own attack, shrinking steps"),
):
    found = advnorm.benchmark(
        model, test, threat, [f"{family}{n}" for n in steps], "adv", limit=200
    )
    axes.plot(steps, [found.accuracy(f"{family}{n}") for n in steps], "o-", label=label)
axes.set(xlabel="steps", ylabel="robust accuracy", xscale="log")
axes.set_xticks(steps, steps)
axes.legend()
plt.show()

# %% [markdown]
# ## In the shell
#
# The entry point `advnorm.plugins` in `pyproject.toml` makes every command find an installed
# package. Code that is not installed needs `advnorm --import FILE.py …`, or the environment
# variable `ADVNORM_IMPORT`:

# %%
# !PYTHONPATH=packages advnorm ls norms 'natural*'

# %%
# !PYTHONPATH=packages advnorm evaluate runs/*natural_bn* --attacks cosine10 --route adv --limit 100

# %% [markdown]
# ## Test it
#
# The package has three tests: the right bank is updated, the attack keeps its contract, a
# wrong setting is reported. Write yours the same way, beside `pyproject.toml`:

# %%
# !cat examples/own_parts/test_own_parts.py

# %%
# !PYTHONPATH=packages python -m pytest -q -p no:cacheprovider examples/own_parts/test_own_parts.py

# %% [markdown]
# ## Where next
#
# [Register your own parts](../guides/extend.md) also covers models, data sets and adapters
# for norm classes of other libraries.
