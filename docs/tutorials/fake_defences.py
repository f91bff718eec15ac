# %% [markdown]
# # Is this defence real?
#
# Three people bring you a robust classifier. All three report a high accuracy under PGD-10.
# None of them is robust. In this tutorial you audit their models, read the evidence, and
# break each of them with attacks on the network inside.
#
# ## The suspects
#
# All of them wrap the *same* ordinary network, which was never trained for robustness. A
# fourth one was: it is the control.

# %%
import torch
from torch import nn

import advnorm

config = advnorm.Config(
    objective="standard", eps=0.2, epochs=6, batch_size=64, validate_every=0
)
network = advnorm.train(config, out="runs").model("last")
trained = advnorm.train(
    config.with_overrides(["objective=classical", "epochs=12"]), out="runs"
).model("last")

# %% [markdown]
# **Suspect 1, the overconfident one.** It returns probabilities, and very sharp ones: 1 for
# one class, 0 for all others.


# %%
class Overconfident(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        return (100 * self.network(x)).softmax(1)


# %% [markdown]
# **Suspect 2, the quantized one.** It rounds its input pixels first: small perturbations vanish.


# %%
class Quantized(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        return self.network((3 * x).round() / 3)


# %% [markdown]
# **Suspect 3, the rippled one.** It adds a tiny, very fine ripple to every pixel. Nobody sees
# it, but the slope of the ripple is everywhere.


# %%
class Rippled(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        return self.network(x + 0.02 * torch.sin(2000 * x))


suspects = {
    "overconfident": Overconfident(network),
    "quantized": Quantized(network),
    "rippled": Rippled(network),
    "adversarially trained": trained,
}

# %% [markdown]
# ## What PGD-10 says
#
# The number that their authors report:

# %%
threat = advnorm.ThreatModel(eps=0.2)
test = advnorm.data.load("digits", "test")
for name, model in {"undefended": network, **suspects}.items():
    result = advnorm.benchmark(model, test, threat, "pgd10", limit=200)
    print(f"{name:22} clean {result.accuracy():.0%}   PGD-10 {result.accuracy('pgd10'):.0%}")

# %% [markdown]
# ## Audit them
#
# `audit` runs a ladder of attacks, from noise to attacks without gradients. If it finds
# rounding, random outputs or gradients that change from point to point, it adds attacks that
# replace or average the gradient. It also measures signs of masked gradients. Then it decides:

# %%
verdicts = {}
for name, model in suspects.items():
    verdicts[name] = advnorm.audit(model, test, threat, budget="quick", limit=50)
    print(f"== {name}: {verdicts[name].summary()}\n")

# %% alt="Ladder of attacks for the four models: accuracy falls for the fake ones and holds for the trained one"
import re

import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(7, 4.4))
for name, verdict in verdicts.items():
    rungs = [rung for rung in verdict.ladder if not rung.skipped]
    attacks = [
        re.sub(r"-(steps|queries|targets|restarts)\d+", "", rung.attack) for rung in rungs
    ]
    worst = [rung.worst for rung in rungs]
    axes.plot(worst, attacks, "o-", label=f"{name}: {verdict.verdict}")
axes.axvline(verdict.chance, color="grey", linestyle=":", label="chance")
axes.set(xlabel="worst case so far", xlim=(-0.02, 1.02))
axes.invert_yaxis()
axes.legend(loc="lower right")
plt.show()

# %% [markdown]
# Each line is one model, and each step down adds an attack. The fake defences fall off a
# cliff as soon as an attack arrives that does not need what they hide. The trained network
# loses a little and then holds.
#
# ## Read the evidence
#
# A verdict comes with every measurement, its expected value, and whether it decided. For the
# overconfident model:

# %%
for item in verdicts["overconfident"].evidence:
    if not item.ok:
        print(f"{item.weight:8} {item.text}: {item.value:.3g}, expected {item.expected}")

# %% [markdown]
# ## Break them yourself
#
# The advice of the audit names what to try next. For the first two suspects it asks for a
# *surrogate*: the model without the part that hides the gradient. For the rippled one the audit
# found no such part, so it only advises on training. You have seen its code and know better:
# all three contain the bare network. Attack the surrogate, and evaluate the images on the
# model:

# %%
images, labels = test.pixels(slice(0, 200)), test.labels[:200]
x_adv = advnorm.attacks.PGD(threat=threat, steps=10)(network, images, labels)
for name in ("overconfident", "quantized", "rippled"):
    correct = suspects[name](x_adv).argmax(1) == labels
    print(
        f"{name:14} keeps {correct.float().mean():.0%} on images that were made for the bare network"
    )

# %% alt="Digits, and their adversarial versions with the wrong answers of the quantized model"
figure, panels = plt.subplots(2, 8, figsize=(7, 2.2))
for column, image in enumerate(range(8)):
    for row, shown in enumerate((images, x_adv)):
        panels[row, column].imshow(shown[image, 0], cmap="gray_r", vmin=0, vmax=1)
        panels[row, column].axis("off")
    answer = suspects["quantized"](x_adv[image : image + 1]).argmax().item()
    wrong = answer != labels[image]
    panels[1, column].set_title(
        answer, color="#D55E00" if wrong else "#0072B2", fontsize=9, loc="center", y=-0.32
    )
plt.show()

# %% [markdown]
# The lower row shows what the quantized model answers.
#
# The audit takes a surrogate too, and adds it to its ladder:

# %%
verdict = advnorm.audit(
    suspects["rippled"], test, threat, budget="quick", limit=50, surrogate=network
)
print(f"worst case without surrogate: {verdicts['rippled'].worst_case:.0%}")
print(f"worst case with surrogate: {verdict.worst_case:.0%}")

# %% [markdown]
# ## What to remember
#
# - A high accuracy under PGD is where an evaluation starts, not where it ends.
# - *False* means that stronger attacks removed the robustness. *Inconclusive* means that the
#   audit cannot call it real: there are signs of masking, or there are too few images.
# - An audit can prove that robustness is false. It cannot prove that it is real: *real* says
#   that no evidence against it was found. [How verdicts are
#   formed](../explanation/verdicts.md) lists the rules.
#
# A fourth trick is popular: random outputs. The attacker never sees the same network twice,
# so every result is one draw of many. The audit then averages the gradient over many draws
# (`apgd-eot`), and an image counts as robust if most of nine draws are correct.
#
# In the shell, `advnorm audit` does the same for a training run (`NAME` is its folder in
# `runs`), or for a function that returns your model:
#
# ```console
# $ advnorm audit runs/NAME --json verdict.json --plot verdict.png
# $ advnorm audit my_module:build_model --weights w.safetensors --data test.npz --eps 8/255
# ```
