"""Filters and samplers for batches of images: Gaussian and motion blur, bilinear sampling, zoom, box resizing.

Our own because a result must not depend on the batch or the device; library convolutions round to TF32 on a GPU.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def gaussian_weights(sigma: float, reach: int) -> Tensor:
    """Return ``exp(-i² / 2σ²)`` for i from -reach to reach, normalized to sum 1, in float64."""
    place = torch.arange(-reach, reach + 1, dtype=torch.float64)
    weights = (-(place**2) / (2 * sigma**2)).exp()
    return weights / weights.sum()


def gaussian_blur(x: Tensor, sigma: float, truncate: float, repeat_edge: bool | None) -> Tensor:
    """Apply a Gaussian filter cut off at ``truncate`` sigmas; mirror the border, or with None repeat the edge."""
    reach = int(truncate * sigma + 0.5)
    if reach == 0:
        return x
    for dim in (2, 3):
        size = x.shape[dim]
        place = torch.arange(-reach, size + reach, device=x.device)
        place = place.clamp(0, size - 1) if repeat_edge is None else _mirror_indices(place, size, repeat_edge)
        padded, x = x.index_select(dim, place), torch.zeros_like(x)
        for start, weight in enumerate(gaussian_weights(sigma, reach).tolist()):
            x += weight * padded.narrow(dim, start, size)
    return x


def pixel_grid(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return row and column of each pixel, ``(H, W)``."""
    rows, columns = torch.meshgrid(*(torch.arange(size, device=x.device) for size in x.shape[2:]), indexing="ij")
    return rows, columns


def gather_pixels(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return ``x[n, c, rows[n, h, w], columns[n, h, w]]``."""
    flat = (rows * x.shape[3] + columns).expand(len(x), -1, -1).flatten(1)
    return x.flatten(2).gather(2, flat[:, None].expand(-1, x.shape[1], -1)).view(*x.shape[:2], *rows.shape[-2:])


def _mirror_indices(place: Tensor, size: int, repeat_edge: bool) -> Tensor:
    """Mirror indices outside the image into it: ``b a | a b c``, or without repeating the edge ``c b | a b c``."""
    extra = 1 if repeat_edge else 0
    place = place.remainder(2 * size - 2 + 2 * extra)
    return torch.where(place < size, place, 2 * size - 2 + extra - place)


def sample_bilinear(x: Tensor, rows: Tensor, columns: Tensor, *, repeat_edge: bool) -> Tensor:
    """Return values between the pixels by bilinear interpolation; the border is mirrored."""
    height, width = x.shape[2:]
    top, left = rows.floor(), columns.floor()
    total = torch.zeros_like(x, dtype=torch.float64)
    for down in (0, 1):
        for right in (0, 1):
            weight = (1 - (rows - top - down).abs()) * (1 - (columns - left - right).abs())
            row = _mirror_indices(top.long() + down, height, repeat_edge)
            column = _mirror_indices(left.long() + right, width, repeat_edge)
            total += weight[:, None] * gather_pixels(x, row, column)
    return total.float()


def motion_filter(x: Tensor, radius: int, sigma: float, angle: Tensor) -> Tensor:
    """Apply ImageMagick's motion blur: half a Gaussian along each image's angle in degrees, on whole pixels."""
    rows, columns = pixel_grid(x)
    height, width = x.shape[2:]
    count = 2 * radius + 1
    weights = gaussian_weights(sigma, count - 1)[count - 1 :]
    weights = weights / weights.sum()
    angle = (angle * math.pi / 180).view(-1, 1, 1)
    total = torch.zeros_like(x)
    for number, weight in enumerate(weights.tolist()):
        row = (rows + (number * angle.sin() - 0.5).ceil().long()).clamp(0, height - 1)
        column = (columns + (number * angle.cos() - 0.5).ceil().long()).clamp(0, width - 1)
        total += weight * gather_pixels(x, row, column)
    return total


def zoom_center(x: Tensor, factor: float) -> Tensor:
    """Enlarge the center to the size of the image by linear interpolation that keeps the corner pixels."""
    sides = x.shape[2:]
    parts = [math.ceil(side / factor) for side in sides]
    for dim in (0, 1):
        x = x.narrow(dim + 2, (sides[dim] - parts[dim]) // 2, parts[dim])
    x = F.interpolate(x, size=[round(part * factor) for part in parts], mode="bilinear", align_corners=True)
    for dim in (0, 1):
        x = x.narrow(dim + 2, (x.shape[dim + 2] - sides[dim]) // 2, sides[dim])
    return x


def box_matrix(size: int, new: int) -> Tensor:
    """Return the matrix that resizes a side as PIL's BOX filter does: means of pixels with centers in the new pixel."""
    scale = size / new
    reach = max(scale, 1.0) / 2
    matrix = torch.zeros(new, size, dtype=torch.float64)
    for place in range(new):
        center = (place + 0.5) * scale
        first, last = max(int(center - reach + 0.5), 0), min(int(center + reach + 0.5), size)
        for pixel in range(first, last):
            if -0.5 < (pixel + 0.5 - center) / max(scale, 1.0) <= 0.5:
                matrix[place, pixel] = 1
    return matrix / matrix.sum(1, keepdim=True)
