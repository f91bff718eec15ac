"""A norm for three domains: clean and noisy images share their statistics, adversarial images have their own."""

from advnorm.norms import Plan, register_norm


@register_norm(
    "natural_bn",
    domains=("clean", "noise", "adv"),
    num_domains=3,
    summary="clean and noisy images share statistics, own affine per domain",
)
def natural_plan(name: str, domains: tuple[str, ...]) -> Plan:
    banks = ("natural", "natural", "adv")
    return Plan(name=name, domains=domains, normalized_by=banks, feeds=banks, affine=domains)
