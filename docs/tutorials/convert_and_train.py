# %% [markdown]
# # Convert your own network and train it
#
# You have a network with batch norm and want to train it on clean *and* adversarial images
# (hybrid adversarial training), with one set of statistics for each. In this tutorial you
# convert the network in one line, train it in your own loop, evaluate both branches, and take
# one out again as a plain PyTorch module.
#
# ## A network of your own
#
# Nothing in it knows about `advnorm`. It takes images in [0, 1]; if your network needs
# normalized inputs, put the normalization inside.

# %%
import torch
from torch import nn

import advnorm


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        out = self.bn1(self.conv1(x)).relu()
        return (x + self.bn2(self.conv2(out))).relu()


def my_network():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        Block(16),
        nn.AvgPool2d(2),
        Block(16),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


torch.manual_seed(0)
model = my_network()

# %% [markdown]
# ## Convert it
#
# `convert_norm` replaces the norms in place and reports what it did. A norm that it cannot
# replace without changing the network raises an error instead.

# %%
plain = my_network()  # a copy with the same weights, to compare with
plain.load_state_dict(model.state_dict())

print(advnorm.convert_norm(model, "dual_bn"))

# %% [markdown]
# Every bank starts with the values of the norm that it replaces, so each branch computes
# exactly what the network computed before:

# %%
x = torch.rand(8, 1, 8, 8)
plain.eval(), model.eval()
for domain in advnorm.domains(model):
    with advnorm.route(model, domain):
        print(domain, torch.equal(model(x), plain(x)))

# %% [markdown]
# Without a route, the network cannot know which bank your images need, and raises an error:

# %%
try:
    model(x)
except advnorm.RouteError as error:
    print(error)

# %% [markdown]
# ## Train it in your own loop
#
# An objective runs the attack, forwards clean and adversarial images through their branches,
# and returns the loss with its parts. The rest is PyTorch as you know it. Create the
# optimizer after the conversion: the second bank has new parameters.

# %%
train = advnorm.data.load("digits", "train")
loader = advnorm.data.make_loader(train, batch_size=64, seed=0)
threat = advnorm.ThreatModel(norm="Linf", eps=0.15)
attack = advnorm.attacks.PGD(threat=threat, steps=5)

objective = advnorm.objectives.Hybrid(model, attack, clean_weight=0.5)
epochs = 10
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
schedule = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, 0.2, total_steps=epochs * loader.steps
)

model.train()
history = []
for epoch in range(epochs):
    for batch in loader.epoch(epoch):
        step = objective(batch.x, batch.y, index=batch.index)
        optimizer.zero_grad()
        step.loss.backward()
        optimizer.step()
        schedule.step()
        history.append({name: value.item() for name, value in step.terms.items()})
    print(epoch, {name: round(value, 3) for name, value in history[-1].items()})

# %% alt="Clean and adversarial cross-entropy along training"
import matplotlib.pyplot as plt

figure, axes = plt.subplots()
for name, label, colour in (
    ("clean_ce", "clean images", "#0072B2"),
    ("adv_ce", "adversarial images", "#D55E00"),
):
    axes.plot([row[name] for row in history], label=label, color=colour)
axes.set(xlabel="step", ylabel="cross-entropy")
axes.legend()
plt.show()

# %% [markdown]
# The two branches share every convolution. Only the numbers of their norms differ. Here is
# one norm after training:

# %% alt="Running means and weights of the two banks of one norm, by channel"
norm = model[3].bn1
figure, (left, right) = plt.subplots(1, 2)
for domain, colour, marker in (("clean", "#0072B2", "o"), ("adv", "#D55E00", "s")):
    left.plot(
        getattr(norm, f"running_mean_{domain}"),
        color=colour,
        marker=marker,
        linestyle="",
        label=domain,
    )
    right.plot(
        getattr(norm, f"weight_{domain}").detach(),
        color=colour,
        marker=marker,
        linestyle="",
        label=domain,
    )
left.set(title="statistics: running mean", xlabel="channel")
right.set(title="affine: weight γ", xlabel="channel")
right.legend(loc="lower right")
plt.show()

# %% [markdown]
# ## Evaluate both branches
#
# Evaluation does not care whether you left the model in train or eval mode. Give the branches
# by name:

# %%
test = advnorm.data.load("digits", "test")
result = advnorm.benchmark(
    model, test, threat, ["pgd10", "autoattack-steps20-queries200"], ["clean", "adv"], limit=150
)
print(result)

# %% [markdown]
# The clean branch is the more accurate one on clean images. The adversarial branch keeps its
# accuracy under attack. You get both from one training; report the branch that you deploy.
#
# ## Take a branch out
#
# `strip` returns an ordinary module without any routing, with the same outputs. Its state
# dict fits the network you started from:

# %%
deployed = advnorm.strip(model, route="adv").eval()
fresh = my_network()
fresh.load_state_dict(deployed.state_dict())

images = test.pixels(slice(0, 100))
with advnorm.route(model.eval(), "adv"):
    print("same outputs:", torch.allclose(deployed(images), model(images), atol=1e-6))
print("exports:", type(torch.export.export(deployed, (images,))).__name__)

# %% [markdown]
# ## Where next
#
# - The same training without your own loop, with checkpoints and resuming: [Train a
#   network](../guides/train.md)
# - Other plans, such as shared statistics with separate affine parameters:
#   [Norms](../reference/norms.md)
# - Why two banks at all: [Why one batch norm for two domains fails](two_domains.md)
