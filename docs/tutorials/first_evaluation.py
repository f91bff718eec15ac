# %% [markdown]
# # Your first honest evaluation
#
# You have a classifier, and somebody asks how robust it is. In this tutorial you answer with
# a number that survives a second look. You train two small networks on handwritten digits,
# attack them, measure their robust accuracy with a weak and a strong attack, and check that
# the measurement itself is sound. Everything runs on a CPU in less than a minute.
#
# ## Data and a first network
#
# The digits are embedded: 8×8 grey images with values in [0, 1]. Attacks and threat models
# always work on this pixel scale.

# %% alt="Ten handwritten digits of 8 by 8 pixels"
import matplotlib.pyplot as plt

import advnorm

test = advnorm.data.load("digits", "test")
x, y = test.pixels(slice(0, 200)), test.labels[:200]

figure, panels = plt.subplots(1, 10, figsize=(7, 0.9))
for panel, image in zip(panels, x):
    panel.imshow(image[0], cmap="gray_r", vmin=0, vmax=1)
    panel.axis("off")
plt.show()

# %% [markdown]
# A training is one configuration. This one is ordinary training, without any attack:

# %%
config = advnorm.Config(
    model="small_cnn", objective="standard", eps=0.2, epochs=6, batch_size=64, validate_every=0
)
standard = advnorm.train(config, out="runs").model("last")

# %% [markdown]
# ## What may the attacker do?
#
# A robustness number means nothing without its *threat model*. Ours allows to change every
# pixel by up to 0.2 (the Linf norm). On CIFAR-10 the usual radius is 8/255; digits are so
# simple that they need a larger one to be interesting.

# %%
threat = advnorm.ThreatModel(norm="Linf", eps=0.2)
attack = advnorm.attacks.PGD(threat=threat, steps=10)
x_adv = attack(standard, x, y)

print("largest change of a pixel:", (x_adv - x).abs().max().item())

# %% [markdown]
# The attack returns images inside ball and box, exactly, and leaves the network as it was.
# Look at what it does:

# %% alt="Digits, the perturbation that PGD found, and the perturbed digits with the wrong answers of the network"
answers = standard(x_adv).argmax(1)
figure, panels = plt.subplots(3, 10, figsize=(7, 2.6))
for column in range(10):
    for row, (image, limits) in enumerate(
        [(x, (0, 1)), (x_adv - x, (-0.2, 0.2)), (x_adv, (0, 1))]
    ):
        colours = "coolwarm" if row == 1 else "gray_r"
        panels[row, column].imshow(
            image[column, 0], cmap=colours, vmin=limits[0], vmax=limits[1]
        )
        panels[row, column].axis("off")
    right = answers[column] == y[column]
    panels[2, column].set_title(
        answers[column].item(),
        color="#0072B2" if right else "#D55E00",
        fontsize=9,
        loc="center",
        y=-0.35,
    )
plt.show()

# %% [markdown]
# The last row shows the answers of the network, wrong ones in orange. A human still reads the
# digits without effort.
#
# ## A network trained for it
#
# Adversarial training replaces each training image by an adversarial one. In a configuration
# that is one visible word:

# %%
from dataclasses import replace

robust = advnorm.train(replace(config, objective="classical", epochs=10), out="runs").model(
    "last"
)

# %% [markdown]
# ## Measure: clean, weak attack, strong attack
#
# `benchmark` attacks the same images with several attacks and counts an image as robust only
# if a strict float32 forward still classifies it correctly. Its *union* is the worst case
# over all attacks: the number to report. We shorten AutoAttack a little, because the network
# is tiny; for a paper, write `autoattack`.

# %%
attacks = ["fgsm", "pgd10", "autoattack-steps20-queries200"]
results = {
    "standard": advnorm.benchmark(standard, (x, y), threat, attacks),
    "adversarial": advnorm.benchmark(robust, (x, y), threat, attacks),
}
for name, result in results.items():
    print(name)
    print(result)

# %% [markdown]
# Without an attack the two networks are about equally good. Under attack the adversarially
# trained one keeps more than half of its answers, and the standard one almost none. Read the
# rows from top to bottom: the attacks become stronger. FGSM, a single step, flatters
# both networks, so never report it alone.
#
# ## How sure is that number?
#
# These are 200 images. The interval of a share is wide, so draw it. A difference inside the
# intervals is not a result.

# %% alt="Accuracy of both networks without attack, under FGSM, PGD-10 and AutoAttack, with intervals"
import numpy as np
from scipy.stats import binomtest

names = ["clean", "FGSM", "PGD-10", "AutoAttack"]
figure, axes = plt.subplots()
for offset, (label, result) in zip((-0.2, 0.2), results.items()):
    accuracy = list(result.accuracies["default"].values())[:4]
    intervals = [
        binomtest(round(200 * share), 200).proportion_ci(method="wilson") for share in accuracy
    ]
    below = [share - interval.low for share, interval in zip(accuracy, intervals)]
    above = [interval.high - share for share, interval in zip(accuracy, intervals)]
    axes.bar(
        np.arange(4) + offset,
        accuracy,
        0.38,
        label=f"{label} training",
        yerr=[below, above],
        capsize=3,
    )
axes.set_xticks(range(4), names)
axes.set_ylabel("accuracy")
axes.legend()
plt.show()

# %% [markdown]
# ## Is the measurement itself sound?
#
# An attack can fail for the wrong reason. Two curves show it. With growing eps, accuracy must
# fall to chance (dotted) or below: at eps 1 the attacker may draw any image, and an attacker
# who knows the label does worse than guessing. With more steps, accuracy must level off:
# otherwise the attack has not converged.

# %% alt="Robust accuracy falls to zero with eps and levels off with more steps"
radii = (0.05, 0.1, 0.2, 0.3, 0.4)
against_eps = advnorm.accuracy_against_eps(robust, (x, y), threat, radii, "pgd10")
against_steps = advnorm.accuracy_against_steps(robust, (x, y), threat, (1, 2, 5, 10, 20))

figure, (left, right) = plt.subplots(1, 2, sharey=True)
left.plot((0, *radii), [against_eps.result.accuracy(), *against_eps.robust_accuracies()], "o-")
left.axhline(0.1, color="grey", linestyle=":")
left.set(xlabel="eps", ylabel="robust accuracy", ylim=(0, 1))
right.plot(against_steps.values, against_steps.robust_accuracies(), "o-")
right.set(xlabel="steps of PGD", xscale="log")
plt.show()

# %% [markdown]
# Both curves behave. For a verdict with all signs of masked gradients, run an audit; the
# tutorial [Is this defence real?](fake_defences.md) shows what it finds in networks that
# cheat.
#
# ## What to report
#
# - the threat model: norm and eps, in pixel scale
# - every attack with its steps, and the union over all of them
# - the number of images, and the interval that follows from it
# - for a network with several branches, the branch: nobody knows at test time where an image
#   comes from
#
# `benchmark(..., record="result.json")` writes all of this beside the result of every image.
# The same call reads it back, and an interrupted evaluation resumes from it. In the shell,
# the same evaluation is one line:

# %%
# !advnorm evaluate runs/*classical* --checkpoint last --limit 200 --attacks pgd10 autoattack-steps20-queries200
