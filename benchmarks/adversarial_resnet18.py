"""Train the network of `advnorm bench autoattack`: ResNet-18, PGD-10 adversarial training on CIFAR-10.

    python benchmarks/adversarial_resnet18.py --data-dir DATA --out resnet18_eps8.safetensors --epochs 15

    advnorm evaluate benchmarks.adversarial_resnet18:network --weights resnet18_eps8.safetensors --data cifar10:DATA \\
        --attacks autoattack autoattack-bf16 --json evaluation.json

A shortened one-cycle schedule with large batches on one GPU; the output file contains the recipe as metadata.
"""

import argparse
import json
import time

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import advnorm
from advnorm._core.seeding import ImageNoise
from advnorm.attacks import PGD, attacked
from advnorm.data import cifar10


def augmented(images, generator):
    """Crop (padding 4) and flip at random on the device; uint8 in, float32 in [0, 1] out."""
    count, device = len(images), images.device
    padded = F.pad(images, (4, 4, 4, 4))
    rows = torch.randint(0, 9, (count, 1), device=device, generator=generator) + torch.arange(32, device=device)
    columns = torch.randint(0, 9, (count, 1), device=device, generator=generator) + torch.arange(32, device=device)
    flip = torch.rand(count, 1, device=device, generator=generator) < 0.5
    columns = torch.where(flip, columns.flip(1), columns)
    batch = torch.arange(count, device=device)[:, None, None]
    cropped = padded.permute(0, 2, 3, 1)[batch, rows[:, :, None], columns[:, None, :]]
    return cropped.permute(0, 3, 1, 2).float().div(255).contiguous(memory_format=torch.channels_last)


def network():
    """Return the network to train."""
    return advnorm.create_model("resnet18", norm="bn")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--eps", default="8/255")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--limit", type=int, default=50_000, help="images, for a quick trial")
    parser.add_argument("--half", action="store_true", help="round the weights to half precision, kept as float32")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(options.seed)
    images, labels = (value[: options.limit].to(device) for value in cifar10(options.data_dir, "train"))
    model = network().to(device, memory_format=torch.channels_last)
    attack = PGD(threat=advnorm.ThreatModel(eps=options.eps), steps=options.steps, step_size="2/255", seed=options.seed)
    forward = torch.compile(model, dynamic=False) if device.type == "cuda" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    per_epoch = len(images) // options.batch_size
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=options.epochs * per_epoch)
    generator = torch.Generator(device).manual_seed(options.seed)
    model.train()
    started = time.perf_counter()
    for epoch in range(options.epochs):
        total = torch.zeros((), device=device)
        for chosen in torch.randperm(len(images), device=device, generator=generator).split(options.batch_size)[
            :per_epoch
        ]:
            x, y = augmented(images[chosen], generator), labels[chosen]
            noise = ImageNoise(options.seed, chosen).fold(epoch)
            with torch.autocast(device.type, torch.bfloat16):
                with attacked(model):
                    x_adv = attack.perturb(lambda points: forward(points).float(), x, y, noise).detach()
                loss = F.cross_entropy(forward(x_adv).float(), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.detach()
        print(
            f"epoch {epoch + 1:3d}  loss {total.item() / per_epoch:.4f}  {time.perf_counter() - started:7.1f} s",
            flush=True,
        )
    recipe = {**vars(options), "seconds": round(time.perf_counter() - started, 1), "torch": torch.__version__}
    recipe.pop("data_dir"), recipe.pop("out")
    state = {name: value.contiguous().cpu() for name, value in model.state_dict().items()}
    if options.half:
        state = {name: value.half().float() if value.is_floating_point() else value for name, value in state.items()}
    save_file(state, options.out, metadata={"recipe": json.dumps(recipe), "epochs": str(options.epochs)})


if __name__ == "__main__":
    main()
