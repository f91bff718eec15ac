# %% [markdown]
# # Why one batch norm for two domains fails
#
# Hybrid adversarial training feeds a network with clean and adversarial images. With a single
# batch norm the network then looks robust under PGD, and much of that robustness is false. In
# this tutorial you watch it happen on digits, and look inside: at the statistics, the affine
# parameters, and the gap between the two domains.
#
# ## Two networks, one line apart
#
# Both train on the same batches with the same attack. One has a single batch norm, the other
# a bank for each domain.

# %%
from dataclasses import replace

import matplotlib.pyplot as plt

import advnorm
from advnorm import analysis

config = advnorm.Config(
    norm="bn",
    objective="hybrid",
    eps=0.35,
    attack={"steps": 5},
    epochs=20,
    batch_size=64,
    lr=0.2,
    schedule="one_cycle",
    validate_every=0,
)
single = advnorm.train(config, out="runs").model("last")
dual = advnorm.train(replace(config, norm="dual_bn"), out="runs").model("last")

# %% [markdown]
# ## What the attacks say
#
# Measure each network with PGD-10, the attack most papers use in training, and with
# AutoAttack. The difference is *false robustness*.

# %%
threat = advnorm.ThreatModel(eps=0.35)
test = advnorm.data.load("digits", "test")
strong = "autoattack-steps20-queries300"
results = {
    "one batch norm": advnorm.benchmark(
        single, test, threat, ["pgd10", strong], limit=300
    ).accuracies["default"],
    "dual, adversarial branch": advnorm.benchmark(
        dual, test, threat, ["pgd10", strong], "adv", limit=300
    ).accuracies["adv"],
}

# %% alt="Accuracy under PGD-10 and AutoAttack: the single batch norm loses a larger share"
figure, axes = plt.subplots(figsize=(7, 2.2))
for row, accuracy in enumerate(results.values()):
    axes.barh(
        row,
        accuracy["pgd10"],
        0.6,
        color="#fbe7da",
        edgecolor="#D55E00",
        hatch="///",
        linewidth=0,
    )
    axes.barh(row, accuracy[strong], 0.6, color="#0072B2")
    kept = accuracy[strong] / accuracy["pgd10"]
    axes.text(
        accuracy["pgd10"] + 0.005,
        row,
        f"clean {accuracy['clean']:.0%}, keeps {kept:.0%} of PGD-10",
        va="center",
        fontsize=9,
    )
axes.set_yticks(range(2), results)
axes.invert_yaxis()
axes.grid(visible=False, axis="y")
axes.set(xlabel="accuracy: blue under AutoAttack, hatched under PGD-10 only", xlim=(0, 0.75))
plt.show()

# %% [markdown]
# The single batch norm has the higher *clean* accuracy. That is the warning sign: it found a
# way to answer clean images well without paying for robustness. Both networks are tiny and
# eps is huge for digits, so do not read the numbers as a result about methods. The papers'
# CIFAR-10 experiments are in [Benchmarks](../reference/benchmarks.md).
#
# ## Look at the statistics
#
# Take clean images, and adversarial ones made with the attack of the training. At the second
# norm of the dual network, compare the mean and deviation of its input for 12 channels:

# %%
x, y = test.pixels(slice(0, 300)), test.labels[:300]
attack = advnorm.attacks.PGD(threat=threat, steps=10)
with advnorm.route(dual, "adv"):
    x_adv = attack(dual, x, y)

# %% alt="Mean, deviation, bias and weight of twelve channels for clean and adversarial images"
analysis.channel_statistics(dual, {"clean": x, "adv": x_adv}, channels=12).figure()

# %% [markdown]
# Read the legend like this: `NS` are normalization statistics, with the affine bank above and
# the images below; `AP` are affine parameters. Two things stand out:
#
# - The statistics of the two domains differ, even under the same affine bank.
# - The *affine parameters* of the two branches differ as well. Nothing forces them to: they
#   are learned. Paper A finds that they matter most.
#
# ## Look at the gap, layer by layer
#
# The distance between two kinds of images at a layer is the Wasserstein distance of their
# channels' Gaussians. Noise of the same size is the yardstick: how far does a perturbation
# move the statistics if it is not adversarial?

# %%
noise = advnorm.attacks.get("noise-uniform", threat=threat)
gaps = {}
for name, model, route in (
    ("one batch norm", single, None),
    ("dual, adversarial branch", dual, "adv"),
):
    crafted = advnorm.attacks.PGD(threat=threat, steps=10, route=route)(model, x, y)
    noisy = noise(model, x, y)
    gaps[name] = analysis.domain_gap(
        model, x, crafted, others={"noise": noisy}, labels=y, route=route
    )
    print(
        name,
        {"-".join(pair): round(value, 2) for pair, value in gaps[name].relative_sums.items()},
    )

# %% alt="Relative distance between clean and adversarial images by layer, for both networks"
figure, axes = plt.subplots(figsize=(7, 3))
for (name, gap), marker in zip(gaps.items(), "os"):
    for pair, colour in ((("clean", "adv"), "#D55E00"), (("clean", "noise"), "#E69F00")):
        distances = {
            layer: distance.total for layer, distance in gap.relative_layers[pair].items()
        }
        style = {"color": colour, "marker": marker, "linestyle": "-" if marker == "o" else "--"}
        axes.plot(distances.keys(), distances.values(), **style, label=f"{name}: {pair[1]}")
axes.set(xlabel="norm layer", ylabel="relative distance to clean images", yscale="log")
axes.legend()
plt.show()

# %% [markdown]
# With one batch norm, adversarial images drift away from the clean ones from layer to layer.
# In the adversarial branch of the dual network they stay closer. Noise of the same size moves
# the statistics too: part of the gap is the size of the perturbation, not its direction.
#
# ## See it in one channel
#
# A norm divides by one deviation and subtracts one mean. Take the channel of `bn2` whose
# statistics differ most between the domains, draw the values that arrive there, and the
# Gaussian that the norm assumes:

# %%
import torch


def arriving(model, images, route):
    """The input of bn2 for these images, with the values of each channel in one row."""
    seen = []
    hook = model.bn2.register_forward_pre_hook(lambda norm, inputs: seen.append(inputs[0]))
    with torch.no_grad(), advnorm.route(model, route):
        model(images)
    hook.remove()
    return seen[0].transpose(0, 1).flatten(1)


# %% alt="Values of one channel for clean and adversarial images, with the Gaussians of one bank and of two banks"
crafted = attack(single, x, y)
cases = (
    ("one bank", single, {"clean": (x, "shared"), "adv": (crafted, "shared")}),
    ("two banks", dual, {"clean": (x, "clean"), "adv": (x_adv, "adv")}),
)
figure, panels = plt.subplots(1, 2, sharey=True)
for axes, (title, model, inputs) in zip(panels, cases):
    values = {domain: arriving(model, images, domain) for domain, (images, _) in inputs.items()}
    channel = (values["clean"].std(1) - values["adv"].std(1)).abs().argmax()
    low, high = torch.cat([rows[channel] for rows in values.values()]).quantile(
        torch.tensor([0.01, 0.99])
    )
    places = torch.linspace(low, high, 60)
    for (domain, (_, bank)), colour in zip(inputs.items(), ("#0072B2", "#D55E00")):
        axes.hist(
            values[domain][channel],
            places,
            density=True,
            color=colour,
            alpha=0.35,
            label=f"{domain} images",
        )
        mean, variance = model.bn2.statistics_bank(bank)[:2]
        gaussian = torch.distributions.Normal(mean[channel], variance[channel].sqrt())
        line = "black" if bank == "shared" else colour
        axes.plot(places, gaussian.log_prob(places).exp(), color=line, label=f"bank {bank}")
    axes.set(title=f"{title}, channel {channel}", xlabel="input of bn2", yticks=[])
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(dict(zip(labels, handles)).values(), dict(zip(labels, handles)))
plt.show()

# %% [markdown]
# On the left, one Gaussian must serve both kinds of images. On the right each has its own.
# `analysis.projection` shows whole layers instead of one channel, as points in a plane.
#
# ## Which part does the work?
#
# Swap the parts at test time. `swap_table` evaluates the dual network with the statistics of
# one domain and the affine parameters of the other:

# %% alt="Accuracy with default, swapped and recalibrated statistics"
analysis.swap_table(
    dual, x, y, {"pgd10": advnorm.attacks.PGD(threat=threat, steps=10)}, x_adv=x_adv
).figure()

# %% [markdown]
# ## Where next
#
# - The setups in between, with only one part separate: `dual_affine_bn` and `dual_stats_bn`
#   in [Norms](../reference/norms.md)
# - The other remedy, a KL term: `advnorm.Config(objective="kl")`
# - [What false robustness is](../explanation/false_robustness.md), and how an audit decides
