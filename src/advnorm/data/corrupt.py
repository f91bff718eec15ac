"""The common corruptions at five severities (Hendrycks & Dietterich 2019), made on the device of the images.

Definitions and parameters are those of CIFAR-10-C, lengths in pixels of 32×32. Its arrays hold bytes; here nothing is
rounded, except by JPEG, which PIL makes on the CPU. Frost is laid over photographs that are not ours to give: it is in
the arrays alone (``load("cifar10c", ...)``), as are the four extra corruptions.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from advnorm._core.errors import did_you_mean, raise_all
from advnorm._core.seeding import ImageNoise
from advnorm.data.corruptions import CORRUPTIONS

LEAST_SIDE = 8  # a corruption of a smaller image means nothing
SEVERITIES = (1, 2, 3, 4, 5)


def corrupt(images: Tensor, corruption: str, severity: int, *, seed: int = 0, index: Tensor | None = None) -> Tensor:
    """Images ``(N, C, H, W)`` in [0, 1] under a corruption of severity 1 to 5, float32 in [0, 1].

    ``index`` is each image's place in its data set: its noise depends on that, the seed, the corruption and the
    severity, so not on the batch. ``list_corruptions()`` names those that can be made.
    """
    problems = []
    if corruption not in GENERATED:
        if corruption in CORRUPTIONS:
            problems.append(
                f"{corruption} cannot be made from the images alone; it is in the arrays of CIFAR-10-C: "
                f"load('cifar10c', 'test', root, corruption='{corruption}', severity=...)"
            )
        else:
            problems.append(f"unknown corruption {corruption!r}{did_you_mean(corruption, GENERATED)}")
    if isinstance(severity, bool) or severity not in SEVERITIES:
        problems.append(f"severity is 1, 2, 3, 4 or 5, got {severity!r}")
    if images.dtype != torch.float32:
        problems.append(f"images are float32 in [0, 1], got {images.dtype}; of a data set take data.pixels()")
    if images.dim() != 4 or images.shape[1] not in (1, 3) or min(images.shape[2:]) < LEAST_SIDE:
        problems.append(
            f"images have the shape (N, 1 or 3, H, W) with sides of at least {LEAST_SIDE}, got {tuple(images.shape)}"
        )
    if index is not None and index.shape != images.shape[:1]:
        problems.append(f"index gives one integer per image, got {tuple(index.shape)} for {len(images)} images")
    raise_all(problems, "bad corruption")
    if index is None:
        index = torch.arange(len(images))
    noise = ImageNoise(seed, index.to(images.device)).fold("corruption").fold(corruption).fold(severity)
    function, levels = GENERATED[corruption]
    level = levels[severity - 1]
    return function(images, noise, *(level if isinstance(level, tuple) else (level,))).float().clamp(0, 1)


def list_corruptions() -> list[str]:
    """Names that :func:`corrupt` takes, in the order of the paper: noise, blur, weather, digital."""
    return list(GENERATED)


# -- noise -------------------------------------------------------------------------------------------------------------


def gaussian_noise(x: Tensor, noise: ImageNoise, scale: float) -> Tensor:
    """``x + scale · N(0, 1)``."""
    return x + scale * noise.normal(x.shape[1:])


def shot_noise(x: Tensor, noise: ImageNoise, photons: float) -> Tensor:
    """``Poisson(x · photons) / photons``, by inverting the distribution function at a uniform number."""
    uniform = (noise.bits(x.shape[1:]).double() + 0.5) * 2.0**-32
    rate = x.double() * photons
    low = torch.full_like(rate, -1)  # P(count <= low) < uniform <= P(count <= high)
    high = torch.full_like(rate, 2.0 * photons + 63)  # beyond it lies less than 2**-32, for any rate up to photons
    for _ in range(math.ceil(math.log2(2 * photons + 64))):
        middle = ((low + high) / 2).floor()
        reached = (middle >= 0) & (torch.special.gammaincc(middle.clamp_min(0) + 1, rate) >= uniform)
        low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
    return (high / photons).float()


def impulse_noise(x: Tensor, noise: ImageNoise, share: float) -> Tensor:
    """A share of the values is set to 0 or 1 with equal chance; channels apart."""
    extreme = (noise.signs(x.shape[1:], "which") + 1) / 2
    return torch.where(noise.uniform(x.shape[1:], "where") < share, extreme, x)


# -- blur --------------------------------------------------------------------------------------------------------------


def defocus_blur(x: Tensor, noise: ImageNoise, radius: float, smooth: float) -> Tensor:
    """Convolution with a disk, itself smoothed by a 3×3 Gaussian; the border is mirrored without repeating the edge."""
    reach = math.ceil(radius) + 1
    place = torch.arange(-reach, reach + 1, dtype=torch.float64)
    disk = (place[:, None] ** 2 + place**2 <= radius**2).double()
    taps = gaussian_taps(smooth, 1)
    kernel = F.conv2d((disk / disk.sum())[None, None], (taps[:, None] * taps)[None, None], padding=1)[0, 0]
    padded = F.pad(x, (reach,) * 4, mode="reflect")
    # A sum of shifted images: a convolution on a GPU may round to TF32, and differently for another batch.
    total = torch.zeros_like(x)
    for row, weights in enumerate(kernel.tolist()):
        for column, weight in enumerate(weights):
            total += weight * padded[:, :, row : row + x.shape[2], column : column + x.shape[3]]
    return total


def glass_blur(x: Tensor, noise: ImageNoise, sigma: float, passes: int) -> Tensor:
    """Smoothed, then each pixel takes the value of one of its neighbours up and left, then smoothed again.

    The published code means to swap pixels, but swaps views, so that both end with the neighbour's value. It walks from
    the lower right, where a pixel's upper and left neighbours are still as they were: a gather. The first two rows and
    columns stay.
    """
    rows, columns = _grid(x)
    inside = (rows >= 2) & (columns >= 2)
    x = smoothed(x, sigma, truncate=4.0, repeat_edge=None)
    for number in range(passes):
        shift = noise.integers(2, (2, *x.shape[2:]), draw=number) * inside
        x = _gathered(x, rows - shift[:, 0], columns - shift[:, 1])
    return smoothed(x, sigma, truncate=4.0, repeat_edge=None)


def motion_blur(x: Tensor, noise: ImageNoise, radius: int, sigma: float) -> Tensor:
    """A tail of Gaussian weights along an angle drawn from [-45°, 45°)."""
    return _along(x, radius, sigma, 90 * noise.uniform((), "angle").double() - 45)


def zoom_blur(x: Tensor, noise: ImageNoise, factors: int) -> Tensor:
    """The mean of the image and of its zooms by 1, 1.01, 1.02, …"""
    step = 1.01 - 1  # as np.arange has it: a bit more than 0.01, which decides how 32.5 pixels are rounded
    zooms = [_zoomed(x, 1 + number * step) for number in range(factors)]
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
    """Zoomed noise above a threshold, blurred downwards, added as it is and turned by 180°, on a whitened image."""
    flakes = _zoomed(mean + spread * noise.normal((1, *x.shape[2:])), zoom)
    flakes = torch.where(flakes < threshold, 0, flakes.clamp(0, 1))
    flakes = _along(flakes, radius, sigma, 90 * noise.uniform((), "angle").double() - 135)
    shares = x.new_tensor([0.299, 0.587, 0.114]) if x.shape[1] == 3 else x.new_ones(1)
    grey = (x * shares.view(-1, 1, 1)).sum(1, keepdim=True)
    white = kept * x + (1 - kept) * torch.maximum(x, 1.5 * grey + 0.5)
    return white + flakes + flakes.flip(2, 3)


def fog(x: Tensor, noise: ImageNoise, amount: float, decay: float) -> Tensor:
    """``(x + amount · plasma) · m / (m + amount)`` with the image's largest value m."""
    most = x.amax((1, 2, 3), keepdim=True)
    size = 1 << (max(x.shape[2:]) - 1).bit_length()
    haze = plasma(noise, size, decay)[:, None, : x.shape[2], : x.shape[3]]
    return (x + amount * haze) * most / (most + amount)


def plasma(noise: ImageNoise, size: int, decay: float) -> Tensor:
    """Fractal heights in [0, 1], ``(N, size, size)``, by diamonds and squares on a torus; size is a power of two."""
    heights = torch.zeros((len(noise), size, size), dtype=torch.float64, device=noise.device)
    step, wobble = size, 100.0

    def wobbled(total: Tensor, draw: str) -> Tensor:
        uniform = noise.uniform(total.shape[1:], f"{draw}{step}").double()
        return total / 4 + wobble * wobble * (2 * uniform - 1)

    while step >= 2:
        half = step // 2
        corners = heights[:, ::step, ::step]
        down = corners + corners.roll(-1, 1)
        heights[:, half::step, half::step] = wobbled(down + down.roll(-1, 2), "square")
        middles = heights[:, half::step, half::step]
        across = middles + middles.roll(1, 1) + corners + corners.roll(-1, 2)
        heights[:, ::step, half::step] = wobbled(across, "across")
        along = middles + middles.roll(1, 2) + corners + corners.roll(-1, 1)
        heights[:, half::step, ::step] = wobbled(along, "along")
        step, wobble = half, wobble / decay
    heights = heights - heights.amin((1, 2), keepdim=True)
    return (heights / heights.amax((1, 2), keepdim=True)).float()


def brightness(x: Tensor, noise: ImageNoise, amount: float) -> Tensor:
    """The value of HSV, the largest of the channels, plus an amount; hue and saturation stay."""
    value = x.amax(1, keepdim=True)
    brighter = (value + amount).clamp_max(1)
    return torch.where(value > 0, x * brighter / value.clamp_min(torch.finfo(x.dtype).tiny), brighter)


# -- digital -----------------------------------------------------------------------------------------------------------


def contrast(x: Tensor, noise: ImageNoise, kept: float) -> Tensor:
    """``kept · (x - m) + m`` with the mean m of each channel."""
    mean = x.mean((2, 3), keepdim=True)
    return kept * (x - mean) + mean


def elastic_transform(x: Tensor, noise: ImageNoise, strength: float, sigma: float, affine: float) -> Tensor:
    """A random affine map (three points move by up to ``affine``), then smooth random shifts; in parts of the sides."""
    height, width = x.shape[2:]
    rows, columns = (place.double() for place in _grid(x))
    # Three corners around the centre and where they go, as (row, column, 1): `back` maps the latter to the former.
    sides = torch.tensor([height, width], dtype=torch.float64, device=x.device)
    square = min(height, width) // 3
    corners = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [-1.0, -1.0]], dtype=torch.float64, device=x.device)
    corners = (sides / 2).floor() + square * corners
    moved = corners + affine * sides * (2 * noise.uniform((3, 2), "affine").double() - 1)
    back = torch.linalg.solve(F.pad(moved, (0, 1), value=1.0), corners.expand_as(moved))
    places = torch.stack([rows, columns, torch.ones_like(rows)], -1).reshape(-1, 3) @ back
    places = places.view(-1, height, width, 2)
    x = _sampled(x, places[..., 0], places[..., 1], repeat_edge=False)
    if not strength:
        return x
    shifts = 2 * noise.uniform((2, height, width), "shift") - 1
    shifts = strength * min(height, width) * smoothed(shifts, sigma * min(height, width), 3.0, repeat_edge=True)
    return _sampled(x, rows + shifts[:, 0].double(), columns + shifts[:, 1].double(), repeat_edge=True)


def pixelate(x: Tensor, noise: ImageNoise, kept: float) -> Tensor:
    """Resized to a part of its sides and back, by means over boxes."""
    height, width = x.shape[2:]
    small = _boxes(height, int(height * kept)), _boxes(width, int(width * kept))
    back = _boxes(int(height * kept), height), _boxes(int(width * kept), width)
    x = x.double()
    for down, across in (small, back):
        x = down.to(x) @ x @ across.to(x).T
    return x.float()


def jpeg_compression(x: Tensor, noise: ImageNoise, quality: int) -> Tensor:
    """Written and read as JPEG, by PIL on the CPU."""
    import numpy as np
    from PIL import Image

    pixels = (x * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    read = []
    for image in pixels:
        content = io.BytesIO()
        Image.fromarray(image.squeeze(-1) if image.shape[-1] == 1 else image).save(content, "JPEG", quality=quality)
        read.append(np.asarray(Image.open(content)).reshape(image.shape))
    return torch.from_numpy(np.stack(read)).permute(0, 3, 1, 2).to(x.device).float() / 255


# -- filters and samplers ----------------------------------------------------------------------------------------------


def gaussian_taps(sigma: float, reach: int) -> Tensor:
    """Weights ``exp(-i² / 2σ²)`` for i from -reach to reach, of sum 1, in float64."""
    place = torch.arange(-reach, reach + 1, dtype=torch.float64)
    weights = (-(place**2) / (2 * sigma**2)).exp()
    return weights / weights.sum()


def smoothed(x: Tensor, sigma: float, truncate: float, repeat_edge: bool | None) -> Tensor:
    """A Gaussian filter cut off at ``truncate`` sigmas; the border is mirrored, or with None the edge goes on."""
    reach = int(truncate * sigma + 0.5)
    if reach == 0:
        return x
    for dim in (2, 3):
        size = x.shape[dim]
        place = torch.arange(-reach, size + reach, device=x.device)
        place = place.clamp(0, size - 1) if repeat_edge is None else _mirrored(place, size, repeat_edge)
        padded, x = x.index_select(dim, place), torch.zeros_like(x)
        for start, weight in enumerate(gaussian_taps(sigma, reach).tolist()):
            x += weight * padded.narrow(dim, start, size)
    return x


def _grid(x: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of each pixel, ``(H, W)``."""
    rows, columns = torch.meshgrid(*(torch.arange(size, device=x.device) for size in x.shape[2:]), indexing="ij")
    return rows, columns


def _gathered(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """``x[n, c, rows[n, h, w], columns[n, h, w]]``."""
    flat = (rows * x.shape[3] + columns).expand(len(x), -1, -1).flatten(1)
    return x.flatten(2).gather(2, flat[:, None].expand(-1, x.shape[1], -1)).view(*x.shape[:2], *rows.shape[-2:])


def _mirrored(place: Tensor, size: int, repeat_edge: bool) -> Tensor:
    """Places outside of the image mirrored into it: ``b a | a b c``, or without repeating the edge ``c b | a b c``."""
    extra = 1 if repeat_edge else 0
    place = place.remainder(2 * size - 2 + 2 * extra)
    return torch.where(place < size, place, 2 * size - 2 + extra - place)


def _sampled(x: Tensor, rows: Tensor, columns: Tensor, *, repeat_edge: bool) -> Tensor:
    """Values between the pixels, by bilinear weights; the border is mirrored."""
    height, width = x.shape[2:]
    top, left = rows.floor(), columns.floor()
    total = torch.zeros_like(x, dtype=torch.float64)
    for down in (0, 1):
        for right in (0, 1):
            weight = (1 - (rows - top - down).abs()) * (1 - (columns - left - right).abs())
            row = _mirrored(top.long() + down, height, repeat_edge)
            column = _mirrored(left.long() + right, width, repeat_edge)
            total += weight[:, None] * _gathered(x, row, column)
    return total.float()


def _along(x: Tensor, radius: int, sigma: float, angle: Tensor) -> Tensor:
    """ImageMagick's motion blur: half a Gaussian along each image's angle (degrees), from whole pixels; edges go on."""
    rows, columns = _grid(x)
    height, width = x.shape[2:]
    count = 2 * radius + 1
    weights = gaussian_taps(sigma, count - 1)[count - 1 :]
    weights = weights / weights.sum()
    angle = (angle * math.pi / 180).view(-1, 1, 1)
    total = torch.zeros_like(x)
    for number, weight in enumerate(weights.tolist()):
        row = (rows + (number * angle.sin() - 0.5).ceil().long()).clamp(0, height - 1)
        column = (columns + (number * angle.cos() - 0.5).ceil().long()).clamp(0, width - 1)
        total += weight * _gathered(x, row, column)
    return total


def _zoomed(x: Tensor, factor: float) -> Tensor:
    """The centre, enlarged to the size of the image, linear between pixels that keep the corners where they are."""
    sides = x.shape[2:]
    parts = [math.ceil(side / factor) for side in sides]
    for dim in (0, 1):
        x = x.narrow(dim + 2, (sides[dim] - parts[dim]) // 2, parts[dim])
    x = F.interpolate(x, size=[round(part * factor) for part in parts], mode="bilinear", align_corners=True)
    for dim in (0, 1):
        x = x.narrow(dim + 2, (x.shape[dim + 2] - sides[dim]) // 2, sides[dim])
    return x


def _boxes(size: int, new: int) -> Tensor:
    """The matrix that resizes a side as PIL's BOX does: means of the pixels whose centres lie in the new pixel."""
    scale = size / new
    reach = max(scale, 1.0) / 2
    matrix = torch.zeros(new, size, dtype=torch.float64)
    for place in range(new):
        centre = (place + 0.5) * scale
        first, last = max(int(centre - reach + 0.5), 0), min(int(centre + reach + 0.5), size)
        for pixel in range(first, last):
            if -0.5 < (pixel + 0.5 - centre) / max(scale, 1.0) <= 0.5:
                matrix[place, pixel] = 1
    return matrix / matrix.sum(1, keepdim=True)


#: For each corruption the function and its parameters at the severities 1 to 5, as published for CIFAR-10-C.
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
}
