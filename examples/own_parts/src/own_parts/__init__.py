"""Parts for advnorm. Importing the package registers them."""

from own_parts import attack, norm, objective  # noqa: F401
