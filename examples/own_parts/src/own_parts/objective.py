"""Training on clean, noisy and adversarial images, each through its own branch."""

from typing import Annotated

from advnorm.attacks import RandomNoise
from advnorm.config import Setting
from advnorm.objectives import Objective, ObjectiveOutput, register_objective


@register_objective("three_domains")
class ThreeDomains(Objective):
    """``(1 - w) · (clean + noisy) / 2 + w · adversarial`` cross-entropy."""

    domains = ("clean", "noise", "adv")
    summary = "clean, noisy and adversarial cross-entropy"

    adv_weight: Annotated[float, Setting("Weight of the adversarial images.", "[0, 1]")] = 0.5

    def compute_loss(self, batch, execution) -> ObjectiveOutput:
        noisy = RandomNoise(threat=self.attack.threat, route="noise")(self.model, batch.x, batch.y, index=batch.index)
        images = {"clean": batch.x, "noise": noisy, "adv": batch.x_adv}
        logits = self.domain_logits(images, execution=execution)
        terms = {f"{domain}_ce": self.cross_entropy(logits[domain], batch.y) for domain in images}
        natural = (terms["clean_ce"] + terms["noise_ce"]) / 2
        loss = (1 - self.adv_weight) * natural + self.adv_weight * terms["adv_ce"]
        detached = {name: term.detach() for name, term in terms.items()}
        labels = dict.fromkeys(images, batch.y)
        return ObjectiveOutput(loss=loss, logits=logits, terms=detached, labels=labels)
