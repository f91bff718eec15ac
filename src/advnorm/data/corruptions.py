"""The common corruptions at five severities (Hendrycks & Dietterich 2019), computed on the device of the images.

Definitions and parameters are those of CIFAR-10-C, lengths in pixels of 32×32 images. Values are not rounded to bytes,
except by JPEG, which Pillow encodes on the CPU. Our own because the published code and its forks run on the CPU, one
image at a time, and need ImageMagick and old versions of NumPy. Frost needs photographs that we may not distribute; it
exists only in the arrays of CIFAR-10-C (``load("cifar10c", ...)``), as does spatter.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from advnorm._core.errors import ConfigError, Description, Problem, collect_problems, raise_problems, unknown_name
from advnorm._core.seeding import ImageNoise
from advnorm._core.settings import Seed, convert
from advnorm._core.tensors import dense_problems
from advnorm.data.image_filters import (
    box_matrix,
    gather_pixels,
    gaussian_blur,
    gaussian_weights,
    motion_filter,
    pixel_grid,
    sample_bilinear,
    zoom_center,
)

MIN_SIDE = 8  # the corruptions are not meaningful for smaller images
SEVERITIES = (1, 2, 3, 4, 5)
#: Corruptions that exist only in the arrays of CIFAR-10-C.
NOT_GENERATED = ("frost", "spatter")
#: Corruptions that its authors publish for validation, beside the fifteen of the benchmark.
EXTRA = ("speckle_noise", "gaussian_blur", "spatter", "saturate")


def corrupt(images: Tensor, corruption: str, severity: int, *, seed: int = 0, index: Tensor | None = None) -> Tensor:
    """Return images ``(N, C, H, W)`` in [0, 1] under a corruption of severity 1 to 5, as float32 in [0, 1].

    ``index`` is the position of each image in its data set. The noise of an image depends on the seed, the corruption,
    the severity and this position, so that it does not depend on the batch. ``list_corruptions()`` gives the names.
    """
    problems = severity_problems(severity) + dense_problems(images=images)
    if corruption in NOT_GENERATED:
        hint = f"read it from CIFAR-10-C: load('cifar10c', 'test', root, corruption={corruption!r}, severity=...)"
        problems.append(Problem("not_supported", f"{corruption} is not computed here", "corruption", hint=hint))
    elif not isinstance(corruption, str) or corruption not in GENERATED:
        problems.append(unknown_name("corruption", corruption, GENERATED))
    if images.dtype != torch.float32:
        message, got = "{field} must be float32 in [0, 1], such as data.pixels()", Description(images.dtype)
        problems.append(Problem(code="wrong_dtype", message=message, field="images", got=got))
    if images.dim() != 4 or images.shape[1] not in (1, 3) or min(images.shape[2:]) < MIN_SIDE:
        message = f"{{field}} must have shape (N, 1 or 3, H, W) with sides of at least {MIN_SIDE}"
        problems.append(Problem(code="wrong_shape", message=message, field="images", got=tuple(images.shape)))
    if index is not None and index.shape != images.shape[:1]:
        message = "{field} must have shape (N,), one integer for each image"
        problems.append(Problem(code="wrong_shape", message=message, field="index", got=tuple(index.shape)))
    with collect_problems(problems):
        convert("seed", Seed, seed)
    raise_problems(problems, "bad corruption")
    if not ((images >= 0) & (images <= 1)).all():
        hint = "check the data for NaN, or use images.clamp(0, 1)"
        raise ConfigError("out_of_range", "{field} must lie in [0, 1]", field="images", hint=hint)
    if index is None:
        index = torch.arange(len(images))
    noise = ImageNoise(seed, index.to(images.device)).fold("corruption").fold(corruption).fold(severity)
    function, levels = GENERATED[corruption]
    level = levels[severity - 1]
    return function(images, noise, *(level if isinstance(level, tuple) else (level,))).float().clamp(0, 1)


def severity_problems(severity: Any) -> list[Problem]:
    """Return a problem if a severity is not 1, 2, 3, 4 or 5."""
    if severity in SEVERITIES and not isinstance(severity, bool):
        return []
    return [Problem("out_of_range", "{field} must be 1, 2, 3, 4 or 5", "severity", got=severity)]


def list_corruptions() -> list[str]:
    """Return the names that :func:`corrupt` accepts in the order of the paper: noise, blur, weather, digital, extra."""
    return list(GENERATED)


# -- noise -------------------------------------------------------------------------------------------------------------


def gaussian_noise(x: Tensor, noise: ImageNoise, scale: float) -> Tensor:
    """``x + scale · N(0, 1)``."""
    return x + scale * noise.normal(x.shape[1:])


def shot_noise(x: Tensor, noise: ImageNoise, photons: float) -> Tensor:
    """``Poisson(x · photons) / photons``, by inverting the distribution function at a uniform draw."""
    uniform = (noise.bits(x.shape[1:]).double() + 0.5) * 2.0**-32
    rate = x.double() * photons
    low = torch.full_like(rate, -1)  # P(count <= low) < uniform <= P(count <= high)
    high = torch.full_like(rate, 2.0 * photons + 63)  # the tail beyond is below 2**-32 for every rate up to photons
    for _ in range(math.ceil(math.log2(2 * photons + 64))):
        middle = ((low + high) / 2).floor()
        reached = (middle >= 0) & (torch.special.gammaincc(middle.clamp_min(0) + 1, rate) >= uniform)
        low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
    return (high / photons).float()


def impulse_noise(x: Tensor, noise: ImageNoise, share: float) -> Tensor:
    """Set a share of the values to 0 or 1 with equal probability, independently for each channel."""
    extreme = (noise.signs(x.shape[1:], "which") + 1) / 2
    return torch.where(noise.uniform(x.shape[1:], "where") < share, extreme, x)


def speckle_noise(x: Tensor, noise: ImageNoise, scale: float) -> Tensor:
    """``x + x · scale · N(0, 1)``."""
    return x + x * scale * noise.normal(x.shape[1:])


# -- blur --------------------------------------------------------------------------------------------------------------


def defocus_blur(x: Tensor, noise: ImageNoise, radius: float, smooth: float) -> Tensor:
    """Convolve with a disk that a 3×3 Gaussian smooths; mirror the border without repeating the edge."""
    reach = math.ceil(radius) + 1
    place = torch.arange(-reach, reach + 1, dtype=torch.float64)
    disk = (place[:, None] ** 2 + place**2 <= radius**2).double()
    taps = gaussian_weights(smooth, 1)
    kernel = F.conv2d((disk / disk.sum())[None, None], (taps[:, None] * taps)[None, None], padding=1)[0, 0]
    padded = F.pad(x, (reach,) * 4, mode="reflect")
    # A sum of shifted images, because a GPU convolution may round to TF32 and depends on the batch.
    total = torch.zeros_like(x)
    for row, weights in enumerate(kernel.tolist()):
        for column, weight in enumerate(weights):
            total += weight * padded[:, :, row : row + x.shape[2], column : column + x.shape[3]]
    return total


def blur(x: Tensor, noise: ImageNoise, sigma: float) -> Tensor:
    """Apply a Gaussian filter that is cut off at 4 sigma and repeats the edge."""
    return gaussian_blur(x, sigma, truncate=4.0, repeat_edge=None)


def glass_blur(x: Tensor, noise: ImageNoise, sigma: float, passes: int) -> Tensor:
    """Blur, replace each pixel by one of its upper or left neighbors, blur again.

    The published code intends to swap pixels but swaps views, so that both pixels get the neighbor's value. It starts
    at the lower right, where upper and left neighbors are still unchanged, so that a gather gives the same result. The
    first two rows and columns stay unchanged.
    """
    rows, columns = pixel_grid(x)
    inside = (rows >= 2) & (columns >= 2)
    x = blur(x, noise, sigma)
    for number in range(passes):
        shift = noise.integers(2, (2, *x.shape[2:]), draw=number) * inside
        x = gather_pixels(x, rows - shift[:, 0], columns - shift[:, 1])
    return blur(x, noise, sigma)


def motion_blur(x: Tensor, noise: ImageNoise, radius: int, sigma: float) -> Tensor:
    """Blur with half a Gaussian along an angle drawn from [-45°, 45°)."""
    return motion_filter(x, radius, sigma, 90 * noise.uniform((), "angle").double() - 45)


def zoom_blur(x: Tensor, noise: ImageNoise, factors: int) -> Tensor:
    """Average the image and its zooms by 1, 1.01, 1.02, …"""
    step = 1.01 - 1  # as in np.arange: slightly more than 0.01, which decides how 32.5 pixels are rounded
    zooms = [zoom_center(x, 1 + number * step) for number in range(factors)]
    return (x + torch.stack(zooms).sum(0)) / (factors + 1)


# -- weather -----------------------------------------------------------------------------------------------------------


def snow(
    x: Tensor,
    noise: ImageNoise,
    mean: float,
    spread: float,
    zoom: float,
    threshold: float,
    radius: int,
    sigma: float,
    kept: float,
) -> Tensor:
    """Whiten the image; add zoomed noise above a threshold, blurred downwards, and its rotation by 180°."""
    flakes = zoom_center(mean + spread * noise.normal((1, *x.shape[2:])), zoom)
    flakes = torch.where(flakes < threshold, 0, flakes.clamp(0, 1))
    flakes = motion_filter(flakes, radius, sigma, 90 * noise.uniform((), "angle").double() - 135)
    shares = x.new_tensor([0.299, 0.587, 0.114]) if x.shape[1] == 3 else x.new_ones(1)
    grey = (x * shares.view(-1, 1, 1)).sum(1, keepdim=True)
    white = kept * x + (1 - kept) * torch.maximum(x, 1.5 * grey + 0.5)
    return white + flakes + flakes.flip(2, 3)


def fog(x: Tensor, noise: ImageNoise, amount: float, decay: float) -> Tensor:
    """``(x + amount · plasma) · m / (m + amount)`` with the largest value m of the image."""
    most = x.amax((1, 2, 3), keepdim=True)
    size = 1 << (max(x.shape[2:]) - 1).bit_length()
    haze = plasma(noise, size, decay)[:, None, : x.shape[2], : x.shape[3]]
    return (x + amount * haze) * most / (most + amount)


def plasma(noise: ImageNoise, size: int, decay: float) -> Tensor:
    """Return fractal heights in [0, 1], ``(N, size, size)``: diamond-square on a torus; size is a power of two."""
    heights = torch.zeros((len(noise), size, size), dtype=torch.float64, device=noise.device)
    step, wobble = size, 100.0

    def perturbed_mean(total: Tensor, draw: str) -> Tensor:
        uniform = noise.uniform(total.shape[1:], f"{draw}{step}").double()
        return total / 4 + wobble * wobble * (2 * uniform - 1)

    while step >= 2:
        half = step // 2
        corners = heights[:, ::step, ::step]
        down = corners + corners.roll(-1, 1)
        heights[:, half::step, half::step] = perturbed_mean(down + down.roll(-1, 2), "square")
        middles = heights[:, half::step, half::step]
        across = middles + middles.roll(1, 1) + corners + corners.roll(-1, 2)
        heights[:, ::step, half::step] = perturbed_mean(across, "across")
        along = middles + middles.roll(1, 2) + corners + corners.roll(-1, 1)
        heights[:, half::step, ::step] = perturbed_mean(along, "along")
        step, wobble = half, wobble / decay
    heights = heights - heights.amin((1, 2), keepdim=True)
    return (heights / heights.amax((1, 2), keepdim=True)).float()


def brightness(x: Tensor, noise: ImageNoise, amount: float) -> Tensor:
    """Add an amount to the value of HSV, the largest channel; hue and saturation stay unchanged."""
    value = x.amax(1, keepdim=True)
    brighter = (value + amount).clamp_max(1)
    return torch.where(value > 0, x * brighter / value.clamp_min(torch.finfo(x.dtype).tiny), brighter)


def saturate(x: Tensor, noise: ImageNoise, factor: float, amount: float) -> Tensor:
    """``factor · s + amount`` replaces the saturation s of HSV; hue and value stay. Grey has the hue of red.

    A channel is ``v - v · s · k``: the value v is the largest channel, and k in [0, 1] depends on the hue alone.
    """
    if x.shape[1] == 1:
        return x  # a value without hue
    value, spread = x.amax(1, keepdim=True), x.amax(1, keepdim=True) - x.amin(1, keepdim=True)
    red = x.new_tensor([0.0, 1.0, 1.0]).view(-1, 1, 1)
    hue = torch.where(spread > 0, (value - x) / spread, red)
    return value - torch.minimum(factor * spread + amount * value, value) * hue


# -- digital -----------------------------------------------------------------------------------------------------------


def contrast(x: Tensor, noise: ImageNoise, kept: float) -> Tensor:
    """``kept · (x - m) + m`` with the mean m of each channel."""
    mean = x.mean((2, 3), keepdim=True)
    return kept * (x - mean) + mean


def elastic_transform(x: Tensor, noise: ImageNoise, strength: float, sigma: float, affine: float) -> Tensor:
    """Apply a random affine map that moves three points by up to ``affine``, then smooth random shifts.

    Lengths are shares of the image sides.
    """
    height, width = x.shape[2:]
    rows, columns = (place.double() for place in pixel_grid(x))
    # Three corners around the center and their targets, as (row, column, 1): `back` maps targets to corners.
    sides = torch.tensor([height, width], dtype=torch.float64, device=x.device)
    square = min(height, width) // 3
    corners = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [-1.0, -1.0]], dtype=torch.float64, device=x.device)
    corners = (sides / 2).floor() + square * corners
    moved = corners + affine * sides * (2 * noise.uniform((3, 2), "affine").double() - 1)
    back = torch.linalg.solve(F.pad(moved, (0, 1), value=1.0), corners.expand_as(moved))
    places = torch.stack([rows, columns, torch.ones_like(rows)], -1).reshape(-1, 3) @ back
    places = places.view(-1, height, width, 2)
    x = sample_bilinear(x, places[..., 0], places[..., 1], repeat_edge=False)
    if not strength:
        return x
    shifts = 2 * noise.uniform((2, height, width), "shift") - 1
    shifts = strength * min(height, width) * gaussian_blur(shifts, sigma * min(height, width), 3.0, repeat_edge=True)
    return sample_bilinear(x, rows + shifts[:, 0].double(), columns + shifts[:, 1].double(), repeat_edge=True)


def pixelate(x: Tensor, noise: ImageNoise, kept: float) -> Tensor:
    """Resize to a share of the sides and back with a box filter."""
    height, width = x.shape[2:]
    small = box_matrix(height, int(height * kept)), box_matrix(width, int(width * kept))
    back = box_matrix(int(height * kept), height), box_matrix(int(width * kept), width)
    x = x.double()
    for down, across in (small, back):
        x = down.to(x) @ x @ across.to(x).T
    return x.float()


def jpeg_compression(x: Tensor, noise: ImageNoise, quality: int) -> Tensor:
    """Encode and decode as JPEG with Pillow on the CPU."""
    import numpy as np
    from PIL import Image

    pixels = (x * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    decoded = []
    for image in pixels:
        content = io.BytesIO()
        Image.fromarray(image.squeeze(-1) if image.shape[-1] == 1 else image).save(content, "JPEG", quality=quality)
        decoded.append(np.asarray(Image.open(content)).reshape(image.shape))
    return torch.from_numpy(np.stack(decoded)).permute(0, 3, 1, 2).to(x.device).float() / 255


#: The function of each corruption and its parameters at severities 1 to 5, as published for CIFAR-10-C: the file
#: ImageNet-C/create_c/make_cifar_c.py of github.com/hendrycks/robustness.
GENERATED: dict[str, tuple[Callable[..., Tensor], Sequence[Any]]] = {
    "gaussian_noise": (gaussian_noise, (0.04, 0.06, 0.08, 0.09, 0.10)),
    "shot_noise": (shot_noise, (500, 250, 100, 75, 50)),
    "impulse_noise": (impulse_noise, (0.01, 0.02, 0.03, 0.05, 0.07)),
    "defocus_blur": (defocus_blur, ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))),
    "glass_blur": (glass_blur, ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2))),
    "motion_blur": (motion_blur, ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))),
    "zoom_blur": (zoom_blur, (7, 12, 16, 21, 26)),  # up to 1.06, 1.11, 1.15, 1.20, 1.25: the rounding of np.arange
    "snow": (
        snow,
        (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
    ),
    "fog": (fog, ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))),
    "brightness": (brightness, (0.05, 0.1, 0.15, 0.2, 0.3)),
    "contrast": (contrast, (0.75, 0.5, 0.4, 0.3, 0.15)),
    "elastic_transform": (
        elastic_transform,
        ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
    ),
    "pixelate": (pixelate, (0.95, 0.9, 0.85, 0.75, 0.65)),
    "jpeg_compression": (jpeg_compression, (80, 65, 58, 50, 40)),
    "speckle_noise": (speckle_noise, (0.06, 0.1, 0.12, 0.16, 0.2)),
    "gaussian_blur": (blur, (0.4, 0.6, 0.7, 0.8, 1)),
    "saturate": (saturate, ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2))),
}
