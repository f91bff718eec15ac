# %% [markdown]
# # Reproduce a table and add your own row
#
# Every table of the five papers is a *study*: trainings, measurements, the printed numbers,
# and the paper's claim as a check. In this tutorial you look at table 3 of paper A, compare
# the printed numbers with measured ones, run the machinery in seconds, and add a row of your
# own.
#
# ## What the paper says
#
# Paper A asks which part of dual batch norm matters. Setup1 shares the statistics and
# separates the affine parameters; Setup2 does the opposite. `show` prints the table and the
# claim:

# %%
# !advnorm show A/table3

# %% [markdown]
# ## What we measured
#
# A *record* holds the numbers of one training with all conditions. The repository keeps
# records under `results/`; run this in its root. They were made with the `fast` protocol, a shortened schedule: a
# recipe of its own, not the paper's. Compare both:

# %%
from advnorm import studies
from advnorm.studies.results import evaluate_study
from advnorm.studies.store import RecordStore

study = studies.STUDIES.get("A/table3")
values, conclusion, problems = evaluate_study(study, RecordStore("results"), protocol="fast")

pairs = [
    (number, sum(found) / len(found))
    for number in study.numbers
    if (found := values.get((number.cell, number.value)))
]
print(len(pairs), "of", len(study.numbers), "printed numbers were measured")

# %% alt="Printed against measured accuracy of table 3, by attack"
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(5.2, 4.2))
axes.plot([0, 100], [0, 100], color="grey", linestyle=":", zorder=0)
for metric, label in (("clean", "clean"), ("pgd10", "PGD-10"), ("autoattack", "AutoAttack")):
    chosen = [
        (number.printed, value) for number, value in pairs if number.column.endswith(metric)
    ]
    axes.plot(*zip(*chosen), "o", label=label)
axes.set(xlabel="printed in the paper (%)", ylabel="measured, fast protocol (%)")
axes.legend()
plt.show()

# %% [markdown]
# On the dotted line both agree. The points off the line are the interesting ones: the
# schedule decides how large an effect is. The claim of the paper is a list of clauses, and
# each can be checked on the measured numbers:

# %%
for clause in conclusion.clauses:
    print("holds" if clause.held else "FAILS", "-", clause.text)
print("verdict:", conclusion.verdict)

# %% [markdown]
# ## Run it
#
# `advnorm study A/table3 --protocol fast --data-dir data` trains and measures all cells on a
# GPU, and resumes after an interruption. A smoke test checks in seconds that every part
# works. Its numbers mean nothing:

# %%
# !advnorm study A/table3/dual_bn/eps16 --smoke

# %% [markdown]
# ## Add your own row
#
# A row is a configuration. Take one of the paper's and change a visible line. Here are two
# rows, and where they differ:

# %%
from advnorm.config import explain

single, dual = (studies.get(f"A/table3/{name}/eps16") for name in ("single", "dual_bn"))
print(
    [
        (key, value)
        for (key, value, _), other in zip(explain(dual), explain(single))
        if value != other[1]
    ]
)

# %% [markdown]
# Your row: what if clean and adversarial images share everything, but the norm is a group
# norm with separate affine parameters? To see it on this page, all rows train on digits with
# a small network. On CIFAR-10 you would leave out the last line:

# %%
from dataclasses import replace


def row(norm):
    config = replace(single, norm=norm)
    return small(config)


def small(config):
    """The same method on digits, for the CPU."""
    digits = {
        "model": "small_cnn",
        "data": "digits",
        "augment": "none",
        "eps": 0.3,
        "attack": {"steps": 5},
    }
    return replace(
        config, **digits, epochs=10, batch_size=64, schedule="one_cycle", milestones=(), lr=0.2
    )


rows = {
    "single BN": row("bn"),
    "Dual BN": row("dual_bn"),
    "own: dual affine GN": row("dual_affine_gn"),
}

# %% [markdown]
# Train and measure each of them with the attacks of the table, through the adversarial
# branch:

# %%
import advnorm

test = advnorm.data.load("digits", "test")
threat = advnorm.ThreatModel(eps=0.3)
attacks = {"PGD-10": "pgd10", "AutoAttack": "autoattack-steps20-queries200"}
table = {}
for name, config in rows.items():
    model = advnorm.train(config, seed=0, out="runs").model("last")
    branch = None if config.norm == "bn" else "adv"
    result = advnorm.benchmark(model, test, threat, list(attacks.values()), branch, limit=200)
    table[name] = list(result.accuracies[branch or "default"].values())[:3]
    print(
        f"{name:20}",
        "  ".join(
            f"{label} {value:.0%}" for label, value in zip(("clean", *attacks), table[name])
        ),
    )

# %% alt="Clean, PGD-10 and AutoAttack accuracy of the three rows on digits"
figure, axes = plt.subplots(figsize=(7, 3.4))
for offset, (index, label) in zip((-0.27, 0, 0.27), enumerate(("clean", *attacks))):
    axes.bar(
        [place + offset for place in range(3)],
        [100 * values[index] for values in table.values()],
        0.25,
        label=label,
    )
axes.set_xticks(range(3), table)
axes.set(ylabel="accuracy (%)")
axes.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.18))
plt.show()

# %% [markdown]
# Digits are not CIFAR-10, and one seed is not a result. For the real row:
#
# ```console
# $ advnorm train A/table3/single/eps16 --set norm=dual_affine_gn --data-dir data --out results/runs
# $ advnorm evaluate results/runs/NAME --attacks pgd10-step2 autoattack --route clean adv --data-dir data
# ```
#
# To make it a study with its own name, printed numbers and a claim, follow [Add a
# study](../guides/add_study.md).
