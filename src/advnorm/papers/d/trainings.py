"""The trainings and measurements of paper D that tables and figures share."""

from __future__ import annotations

from dataclasses import replace

from advnorm.config import AttackConfig, Config, Named
from advnorm.data.corruptions import EXTRA, list_corruptions
from advnorm.models.registry import IMAGENET_MEAN, IMAGENET_STD
from advnorm.papers.recipe import sgd
from advnorm.studies.protocols import on_imagenette
from advnorm.studies.registry import register_protocol
from advnorm.studies.study import Measure

NORMED = ("bn", "in", "ln", "gn")
NORM_NAMES = ("none", *NORMED)
#: Epochs of an early network. The paper names none; its warm-up on D_rand ends around epoch 25 (sec. 4.2).
EARLY, WARM_UP = 5, 20


DEVIATIONS = (
    "Table 4 is lost, and with it the epochs and learning rates of all networks but ResNet50: those of table 6 here, "
    "and 0.01 for VGG.",
)
CORRUPTED = (
    "Corruptions are made from the test images, without frost; the official arrays of CIFAR-10-C are not used, because "
    "they are not part of the data sets here."
)


def standard(model: str, data: str = "cifar10") -> Config:
    """Standard training with BN: SGD (app. B.1), with the settings of table 6 where the paper is silent.

    Table 4 is lost, and with it the epochs and learning rates of all networks but ResNet50. The others get table 6's
    epochs, and VGG its learning rate of 0.01, which also trains it without a norm. The attack is that of the evaluation
    (app. B.2).
    """
    deep = model == "resnet50"
    epochs = 350 if deep else 150
    return sgd(
        Named(model),
        Named(data),
        augment="crop_flip" if data == "cifar10" else "none",  # a mirrored digit is another digit
        objective=Named("standard"),
        threat="L2",
        eps=0.25,
        attack=AttackConfig(steps=10),
        epochs=epochs,
        lr=0.01 if model.startswith("vgg") else 0.1,
        milestones=(150.0, 250.0) if deep else (50.0, 100.0),
        snapshots=(EARLY, WARM_UP, epochs // 2, epochs),
    )


def robust(model: str) -> Config:
    """Adversarial training (Madry et al.) by l2-PGD (app. B.1). Table 5 is lost: eps and steps are chosen here."""
    return replace(standard(model), objective=Named("classical"), eps=0.5, attack=AttackConfig(steps=7, step_size=0.1))


def imagenet(model: str) -> Config:
    """ImageNet as in He et al. 2016 (app. B.1): batches of 256, decay 1e-4, and 90 epochs, which the paper omits.

    The paper uses torchvision's weights of VGG. Here VGG has one linear layer instead of three and is trained with
    torchvision's learning rate.
    """
    vgg = model.startswith("vgg")
    network = Named(model, mean=IMAGENET_MEAN, std=IMAGENET_STD) if vgg else Named(f"imagenet_{model}")
    return replace(
        standard(model),
        model=network,
        data=Named("imagenet", image_size=224),
        epochs=90,
        batch_size=256,
        lr=0.01 if vgg else 0.1,
        weight_decay=1e-4,
        milestones=(30.0, 60.0),
        snapshots=(EARLY, WARM_UP, 45, 90),
    )


#: PGD and PGD on the CW loss, 20 steps of 2.5 eps / steps (app. B.2), by the columns of tables 1 and 8.
PGD20 = (
    Measure(options={"threat": "L2", "eps": 0.25, "attacks": {"pgd l2 0.25": "pgd20", "cw l2 0.25": "cw20"}}),
    Measure(
        options={"threat": "Linf", "eps": "1/255", "attacks": {"pgd linf 1/255": "pgd20", "cw linf 1/255": "cw20"}}
    ),
)
FGSM = Measure(options={"threat": "Linf", "eps": "4/255", "attacks": {"fgsm linf 4/255": "fgsm"}})
#: 10 steps on 1000 images (app. B.2). The paper uses 100 of each class; here they are spread evenly over the test set.
PGD10 = Measure(options={"threat": "L2", "eps": 0.25, "attacks": {"pgd10": "pgd10"}, "limit": 1000})
#: All test images under the benchmark's corruptions without frost, which needs the arrays of CIFAR-10-C.
CORRUPTIONS = Measure(name="corruptions", options={"limit": None}, scale=100)
_WITH_SPECKLE = [name for name in list_corruptions() if name not in EXTRA or name == "speckle_noise"]
CORRUPTIONS_AND_SPECKLE = replace(CORRUPTIONS, options={**CORRUPTIONS.options, "corruptions": _WITH_SPECKLE})

# Its networks and batch size stay as they are.
register_protocol("D", "imagenette")(on_imagenette)
