"""Corruptions against their published definitions, written here with NumPy, SciPy and Pillow."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import hsv_to_rgb, rgb_to_hsv
from PIL import Image
from scipy import ndimage, stats

from advnorm._core.errors import ConfigError
from advnorm._core.seeding import ImageNoise
from advnorm.data.corruptions import EXTRA, GENERATED, corrupt, list_corruptions, pixelate, plasma
from support.problems import raises_problem

NAMES = list_corruptions()
RANDOM = {
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "glass_blur",
    "motion_blur",
    "snow",
    "fog",
    "elastic_transform",
    "speckle_noise",
}


@pytest.fixture(scope="module")
def photos():
    """Smooth images with edges, in [0, 1], as bytes / 255."""
    generator = torch.Generator().manual_seed(3)
    coarse = torch.rand(6, 3, 5, 5, generator=generator)
    images = torch.nn.functional.interpolate(coarse, size=(32, 32), mode="bicubic").clamp(0, 1)
    images[:, :, 10:20, 8:24] = torch.rand(6, 3, 1, 1, generator=generator)
    return (images * 255).round() / 255


def noise_of(name, severity, count, seed=0):
    return ImageNoise(seed, torch.arange(count)).fold("corruption").fold(name).fold(severity)


def as_numpy(x):
    """(N, H, W, C) in float64."""
    return x.permute(0, 2, 3, 1).double().numpy()


def assert_images_equal(found, expected, atol=2e-6):
    np.testing.assert_allclose(as_numpy(found), expected, atol=atol)


# -- what holds for all ------------------------------------------------------------------------------------------------


def test_all_but_frost_and_spatter_are_computed():
    assert len(NAMES) == 17 and not {"frost", "spatter"} & {*NAMES}
    assert [name for name in NAMES if name in EXTRA] == ["speckle_noise", "gaussian_blur", "saturate"]
    assert all(len(levels) == 5 for _, levels in GENERATED.values())


#: The published parameters again, severity by severity, in the order of NAMES (zoom: how many zooms are averaged).
# fmt: off
PUBLISHED = (
    [0.04, 500, 0.01, (0.3, 0.4), (0.05, 1), (6, 1), 7, (0.1, 0.2, 1, 0.6, 8, 3, 0.95), (0.2, 3), 0.05, 0.75,
     (0, 0, 0.08), 0.95, 80, 0.06, 0.4, (0.3, 0)],
    [0.06, 250, 0.02, (0.4, 0.5), (0.25, 1), (6, 1.5), 12, (0.1, 0.2, 1, 0.5, 10, 4, 0.9), (0.5, 3), 0.1, 0.5,
     (0.05, 0.2, 0.07), 0.9, 65, 0.1, 0.6, (0.1, 0)],
    [0.08, 100, 0.03, (0.5, 0.6), (0.4, 1), (6, 2), 16, (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9), (0.75, 2.5), 0.15, 0.4,
     (0.08, 0.06, 0.06), 0.85, 58, 0.12, 0.7, (1.5, 0)],
    [0.09, 75, 0.05, (1, 0.2), (0.25, 2), (8, 2), 21, (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85), (1, 2), 0.2, 0.3,
     (0.1, 0.04, 0.05), 0.75, 50, 0.16, 0.8, (2, 0.1)],
    [0.1, 50, 0.07, (1.5, 0.1), (0.4, 2), (9, 2.5), 26, (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8), (1.5, 1.75), 0.3, 0.15,
     (0.1, 0.03, 0.03), 0.65, 40, 0.2, 1, (2.5, 0.2)],
)
# fmt: on


def test_the_parameters_are_the_published_ones():
    for place, published in enumerate(PUBLISHED):
        assert [levels[place] for _, levels in GENERATED.values()] == published, f"severity {place + 1}"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 8, 8), (3, 11, 17)])
def test_images_stay_in_range_and_keep_shape_and_type(name, shape):
    x = torch.rand(3, *shape)
    x[0] = (x[0] > 0.5).float()
    for severity in (1, 5):
        found = corrupt(x, name, severity)
        assert found.shape == x.shape and found.dtype == torch.float32
        assert found.min() >= 0 and found.max() <= 1 and not found.isnan().any()


@pytest.mark.parametrize("name", NAMES)
def test_an_image_does_not_depend_on_its_batch(name, photos):
    whole = corrupt(photos, name, 4, seed=5)
    few = corrupt(photos[[4, 1]], name, 4, seed=5, index=torch.tensor([4, 1]))
    assert torch.equal(few, whole[[4, 1]])


@pytest.mark.parametrize("name", NAMES)
def test_the_noise_depends_on_the_seed_and_the_image(name, photos):
    same = photos[:1].expand(2, -1, -1, -1)
    first, again = corrupt(same, name, 3, seed=1), corrupt(same, name, 3, seed=1)
    assert torch.equal(first, again)
    assert torch.equal(first, corrupt(same, name, 3, seed=2)) == (name not in RANDOM)
    assert torch.equal(first[0], first[1]) == (name not in RANDOM)


#: Severities in the order of growing damage, where the published parameters do not grow: motion blur keeps its sigma
#: from 3 to 4, glass blur smooths less from 3 to 4, pixelate has other grids, an elastic map moves its points less, and
#: saturate removes colour up to 2 and adds it from 3 on.
UNORDERED = {"motion_blur": (1, 2, 3, 5), "glass_blur": (1, 4), "pixelate": (1, 5), "elastic_transform": (5, 1)}
UNORDERED |= {"saturate": (3, 4, 5)}


@pytest.mark.parametrize("name", NAMES)
def test_damage_grows_with_severity(name):
    coarse = torch.rand(30, 3, 12, 12)
    x = torch.nn.functional.interpolate(coarse, size=(32, 32), mode="bicubic").clamp(0, 1)
    levels = UNORDERED.get(name, range(1, 6))
    damage = [float((corrupt(x, name, severity) - x).square().mean()) for severity in levels]
    assert damage == sorted(damage) and damage[0] < damage[-1]


def test_the_random_state_and_the_images_stay_unchanged(photos):
    before, state = photos.clone(), torch.get_rng_state()
    for name in NAMES:
        corrupt(photos, name, 2)
    assert torch.equal(photos, before) and torch.equal(torch.get_rng_state(), state)


def test_a_corruption_that_needs_photographs_raises_and_points_to_the_arrays():
    with raises_problem("not_supported", "corruption"):
        corrupt(torch.rand(1, 3, 8, 8), "frost", 1)


def test_all_problems_are_reported_at_once():
    with pytest.raises(ConfigError) as error:
        corrupt(torch.zeros(2, 2, 4, 4, dtype=torch.uint8), "motion", 6, index=torch.arange(3))
    assert [(problem.code, problem.field) for problem in error.value.problems] == [
        ("out_of_range", "severity"),
        ("unknown_name", "corruption"),
        ("wrong_dtype", "images"),
        ("wrong_shape", "images"),
        ("wrong_shape", "index"),
    ]
    with raises_problem("unknown_name", "corruption"):
        corrupt(torch.rand(1, 3, 8, 8), {"name": "fog"}, 1)
    for seed in (None, 1.5, [], len, True):
        with raises_problem("wrong_type", "seed"):
            corrupt(torch.rand(1, 3, 8, 8), "fog", 1, seed=seed)
    with raises_problem("wrong_layout", "images"):
        corrupt(torch.rand(1, 3, 8, 8).to_sparse(), "fog", 1)
    for seed in (-1, 2**31):
        with raises_problem("out_of_range", "seed"):
            corrupt(torch.rand(1, 3, 8, 8), "fog", 1, seed=seed)
    for value in (math.nan, -0.1, 1.1):
        with raises_problem("out_of_range", "images"):
            corrupt(torch.full((1, 3, 8, 8), value), "fog", 1)
    with raises_problem("wrong_shape", "images"):
        corrupt(torch.tensor(0.5), "fog", 1, index=torch.arange(1))


@pytest.mark.parametrize(
    "name", ["defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "pixelate", "contrast", "gaussian_blur"]
)
def test_corruptions_that_move_or_average_pixels_keep_a_constant_image(name):
    x = torch.full((2, 3, 32, 32), 0.4)
    for severity in range(1, 6):
        torch.testing.assert_close(corrupt(x, name, severity), x, atol=1e-6, rtol=0)
        torch.testing.assert_close(corrupt(x, "elastic_transform", severity), x, atol=1e-6, rtol=0)


# -- each against its definition ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("severity", "scale"), [(1, 0.04), (5, 0.10)])
def test_gaussian_noise_has_its_deviation(severity, scale):
    x = torch.full((40, 3, 32, 32), 0.5)
    added = (corrupt(x, "gaussian_noise", severity) - x).double()
    assert abs(float(added.mean())) < 5 * scale / math.sqrt(added.numel())
    assert float(added.std()) == pytest.approx(scale, rel=0.01)


@pytest.mark.parametrize(("severity", "photons"), [(1, 500), (3, 100), (5, 50)])
def test_shot_noise_is_poissons_quantile_at_a_uniform_number(severity, photons, photos):
    x = photos.clone()
    x[:, :, 0] = 0
    found = corrupt(x, "shot_noise", severity)
    uniform = (noise_of("shot_noise", severity, len(x)).bits(x.shape[1:]).double() + 0.5) * 2.0**-32
    counts = stats.poisson.ppf(uniform.numpy(), x.double().numpy() * photons)
    np.testing.assert_allclose(found.double().numpy(), np.clip(counts / photons, 0, 1), atol=1e-6)
    assert (found[:, :, 0] == 0).all()


def test_speckle_noise_grows_with_the_pixel(photos):
    for severity, scale in enumerate([0.06, 0.1, 0.12, 0.16, 0.2], 1):
        normal = as_numpy(noise_of("speckle_noise", severity, len(photos)).normal(photos.shape[1:]))
        expected = np.clip(as_numpy(photos) * (1 + scale * normal), 0, 1)
        assert_images_equal(corrupt(photos, "speckle_noise", severity), expected)


@pytest.mark.parametrize("severity", range(1, 6))
def test_gaussian_blur_is_scipys_filter(severity, photos):
    sigma = [0.4, 0.6, 0.7, 0.8, 1][severity - 1]
    expected = ndimage.gaussian_filter(as_numpy(photos), (0, sigma, sigma, 0), mode="nearest", truncate=4)
    assert_images_equal(corrupt(photos, "gaussian_blur", severity), expected)


def test_impulse_noise_sets_its_share_of_values_to_black_or_white():
    x = torch.full((60, 3, 32, 32), 0.5)
    found = corrupt(x, "impulse_noise", 5)
    changed = found != 0.5
    assert float(changed.double().mean()) == pytest.approx(0.07, rel=0.05)
    assert set(found[changed].tolist()) == {0.0, 1.0}
    assert float(found[changed].double().mean()) == pytest.approx(0.5, abs=0.02)
    assert not torch.equal(changed[:, 0], changed[:, 1])


@pytest.mark.parametrize("severity", range(1, 6))
def test_defocus_blur_is_a_correlation_with_a_smoothed_disk(severity, photos):
    radius, smooth = [(0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)][severity - 1]
    across, down = np.meshgrid(np.arange(-8, 9), np.arange(-8, 9))
    disk = (across**2 + down**2 <= radius**2).astype(float)
    taps = np.exp(-np.array([1.0, 0, 1]) / (2 * smooth**2))
    kernel = ndimage.correlate(disk / disk.sum(), np.outer(taps, taps) / taps.sum() ** 2, mode="constant")
    expected = ndimage.correlate(as_numpy(photos), kernel[None, :, :, None], mode="mirror")
    assert_images_equal(corrupt(photos, "defocus_blur", severity), expected)


@pytest.mark.parametrize("severity", range(1, 6))
def test_glass_blur_is_the_published_walk_over_the_pixels(severity, photos):
    sigma, passes = [(0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2)][severity - 1]
    noise = noise_of("glass_blur", severity, len(photos))
    expected = []
    for image, draws in zip(as_numpy(photos), zip(*(noise.integers(2, (2, 32, 32), n) for n in range(passes)))):
        x = ndimage.gaussian_filter(image, (sigma, sigma, 0), mode="nearest", truncate=4)
        for shift in draws:
            for row in range(31, 1, -1):
                for column in range(31, 1, -1):
                    other = row - int(shift[0, row, column]), column - int(shift[1, row, column])
                    x[row, column], x[other] = x[other], x[row, column]  # of views: no swap
        expected.append(ndimage.gaussian_filter(x, (sigma, sigma, 0), mode="nearest", truncate=4))
    assert_images_equal(corrupt(photos, "glass_blur", severity), np.stack(expected))


def magick_motion_blur(image, radius, sigma, angle):
    """ImageMagick's ``MotionBlurImage``, pixel by pixel."""
    width = 2 * math.ceil(radius) + 1
    kernel = np.exp(-(np.arange(width) ** 2) / (2 * sigma**2))
    kernel /= kernel.sum()
    sine, cosine = width * math.sin(math.radians(angle)), width * math.cos(math.radians(angle))
    found = np.zeros_like(image)
    for number in range(width):
        right = math.ceil(number * cosine / math.hypot(sine, cosine) - 0.5)
        down = math.ceil(number * sine / math.hypot(sine, cosine) - 0.5)
        rows = np.clip(np.arange(image.shape[0]) + down, 0, image.shape[0] - 1)
        columns = np.clip(np.arange(image.shape[1]) + right, 0, image.shape[1] - 1)
        found += kernel[number] * image[np.ix_(rows, columns)]
    return found


@pytest.mark.parametrize("severity", range(1, 6))
def test_motion_blur_is_image_magicks(severity, photos):
    radius, sigma = [(6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)][severity - 1]
    angles = 90 * noise_of("motion_blur", severity, len(photos)).uniform((), "angle").double() - 45
    assert angles.min() >= -45 and angles.max() < 45 and len(angles.unique()) == len(photos)
    expected = [magick_motion_blur(image, radius, sigma, angle) for image, angle in zip(as_numpy(photos), angles)]
    assert_images_equal(corrupt(photos, "motion_blur", severity), np.stack(expected))


def clipped_zoom(image, factor):
    side = image.shape[0]
    part = math.ceil(side / factor)
    top = (side - part) // 2
    zoomed = ndimage.zoom(image[top : top + part, top : top + part], (factor, factor, 1), order=1)
    trim = (zoomed.shape[0] - side) // 2
    return zoomed[trim : trim + side, trim : trim + side]


@pytest.mark.parametrize("severity", range(1, 6))
def test_zoom_blur_is_the_mean_of_scipys_zooms(severity, photos):
    factors = np.arange(1, [1.06, 1.11, 1.16, 1.21, 1.26][severity - 1], 0.01)
    expected = [(x + sum(clipped_zoom(x, factor) for factor in factors)) / (len(factors) + 1) for x in as_numpy(photos)]
    assert_images_equal(corrupt(photos, "zoom_blur", severity), np.stack(expected))


@pytest.mark.parametrize("severity", range(1, 6))
def test_snow_is_zoomed_blurred_noise_on_a_whitened_image(severity, photos):
    mean, spread, zoom, threshold, radius, sigma, kept = GENERATED["snow"][1][severity - 1]
    noise = noise_of("snow", severity, len(photos))
    angles = 90 * noise.uniform((), "angle").double() - 135
    expected = []
    for image, normal, angle in zip(as_numpy(photos), noise.normal((32, 32)).double().numpy(), angles):
        flakes = clipped_zoom((mean + spread * normal)[..., None], zoom)
        flakes[flakes < threshold] = 0
        flakes = magick_motion_blur(np.clip(flakes, 0, 1), radius, sigma, float(angle))
        grey = (image @ [0.299, 0.587, 0.114])[..., None]
        white = kept * image + (1 - kept) * np.maximum(image, grey * 1.5 + 0.5)
        expected.append(np.clip(white + flakes + np.rot90(flakes, 2), 0, 1))
    assert_images_equal(corrupt(photos, "snow", severity), np.stack(expected))


def test_the_plasma_of_fog_is_made_by_diamonds_and_squares_on_a_torus():
    size, decay = 8, 2.5
    noise = ImageNoise(0, torch.arange(2))
    found = plasma(noise, size, decay)
    for image in range(2):
        height = np.zeros((size, size))
        step, wobble = size, 100.0
        while step >= 2:
            half, count = step // 2, size // step
            draws = {
                kind: 2 * noise.uniform((count, count), f"{kind}{step}")[image].double().numpy() - 1
                for kind in ("square", "across", "along")
            }

            def mean(neighbours, kind, i, j, draws=draws, wobble=wobble, height=height):
                return sum(height[r % size, c % size] for r, c in neighbours) / 4 + wobble**2 * draws[kind][i, j]

            for i in range(count):
                for j in range(count):
                    r, c = i * step, j * step
                    corners = [(r, c), (r + step, c), (r, c + step), (r + step, c + step)]
                    height[r + half, c + half] = mean(corners, "square", i, j)
            for i in range(count):
                for j in range(count):
                    r, c = i * step, j * step
                    beside = [(r + half, c + half), (r - half, c + half), (r, c), (r, c + step)]
                    height[r, c + half] = mean(beside, "across", i, j)
                    below = [(r + half, c + half), (r + half, c - half), (r, c), (r + step, c)]
                    height[r + half, c] = mean(below, "along", i, j)
            step, wobble = half, wobble / decay
        height -= height.min()
        np.testing.assert_allclose(found[image].double().numpy(), height / height.max(), atol=1e-6)


def test_fog_adds_plasma_and_keeps_the_largest_value(photos):
    for severity, (amount, decay) in enumerate(GENERATED["fog"][1], 1):
        haze = plasma(noise_of("fog", severity, len(photos)), 32, decay).double().numpy()[..., None]
        most = as_numpy(photos).max((1, 2, 3), keepdims=True)
        expected = np.clip((as_numpy(photos) + amount * haze) * most / (most + amount), 0, 1)
        assert_images_equal(corrupt(photos, "fog", severity), expected)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(severity=st.integers(1, 5), seed=st.integers(0, 1000), dark=st.booleans())
def test_brightness_raises_the_value_of_hsv(severity, seed, dark):
    x = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    if dark:
        x[:, :, :4] = 0
    hsv = rgb_to_hsv(as_numpy(x))
    hsv[..., 2] = np.clip(hsv[..., 2] + [0.05, 0.1, 0.15, 0.2, 0.3][severity - 1], 0, 1)
    assert_images_equal(corrupt(x, "brightness", severity), hsv_to_rgb(hsv), atol=1e-6)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(severity=st.integers(1, 5), seed=st.integers(0, 1000), grey=st.booleans())
def test_saturate_scales_the_saturation_of_hsv(severity, seed, grey):
    x = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    if grey:
        x[:, :, :4], x[:, :, 0] = x[:, :1, :4], 0
    factor, amount = [(0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)][severity - 1]
    hsv = rgb_to_hsv(as_numpy(x))
    hsv[..., 1] = np.clip(factor * hsv[..., 1] + amount, 0, 1)
    assert_images_equal(corrupt(x, "saturate", severity), hsv_to_rgb(hsv), atol=1e-6)
    assert torch.equal(corrupt(x[:, :1], "saturate", severity), x[:, :1])


def test_contrast_pulls_each_channel_to_its_mean(photos):
    for severity, kept in enumerate([0.75, 0.5, 0.4, 0.3, 0.15], 1):
        x = as_numpy(photos)
        mean = x.mean((1, 2), keepdims=True)
        assert_images_equal(corrupt(photos, "contrast", severity), np.clip((x - mean) * kept + mean, 0, 1))


@pytest.mark.parametrize("severity", range(1, 6))
def test_an_elastic_transform_is_an_affine_map_and_smooth_shifts(severity, photos):
    strength, sigma, affine = (32 * part for part in GENERATED["elastic_transform"][1][severity - 1])
    noise = noise_of("elastic_transform", severity, len(photos))
    moves = affine * (2 * noise.uniform((3, 2), "affine").double().numpy() - 1)
    shifts = 2 * noise.uniform((2, 32, 32), "shift").double().numpy() - 1
    corners = np.array([[26.0, 26], [6, 26], [6, 6]])
    grid = np.stack(np.meshgrid(np.arange(32.0), np.arange(32.0), indexing="ij"))
    expected = []
    for image, move, shift in zip(as_numpy(photos), moves, shifts):
        # The forward map by least squares on the three points; the image is read at its inverse.
        forward = np.linalg.lstsq(np.c_[corners, np.ones(3)], corners + move, rcond=None)[0]
        back = np.linalg.inv(forward[:2].T)
        places = np.tensordot(back, grid - forward[2][:, None, None], 1)
        x = np.stack([ndimage.map_coordinates(c, places, order=1, mode="mirror") for c in image.transpose(2, 0, 1)])
        if strength:
            smooth = np.stack([ndimage.gaussian_filter(s, sigma, mode="reflect", truncate=3) for s in shift])
            x = np.stack([ndimage.map_coordinates(c, grid + strength * smooth, order=1, mode="reflect") for c in x])
        expected.append(np.clip(x.transpose(1, 2, 0), 0, 1))
    assert_images_equal(corrupt(photos, "elastic_transform", severity), np.stack(expected), atol=1e-5)


@pytest.mark.parametrize("severity", range(1, 6))
def test_pixelate_is_pillows_box_filter_down_and_up(severity, photos):
    side = int(32 * [0.95, 0.9, 0.85, 0.75, 0.65][severity - 1])
    expected = []
    for image in photos:
        channels = [Image.fromarray(channel.numpy()) for channel in image]  # as floats, so that nothing is rounded
        channels = [c.resize((side, side), Image.Resampling.BOX) for c in channels]
        expected.append(np.stack([np.array(c.resize((32, 32), Image.Resampling.BOX)) for c in channels], -1))
    assert_images_equal(corrupt(photos, "pixelate", severity), np.stack(expected))


def test_pixelate_leaves_no_checkerboard_of_a_checkerboard():
    board = (torch.arange(32)[:, None] + torch.arange(32)).remainder(2).float().expand(1, 1, 32, 32)
    halved = pixelate(board, None, 0.5)
    torch.testing.assert_close(halved, torch.full_like(board, 0.5))


def test_jpeg_is_pillows_at_the_published_quality(photos):
    import io

    for severity, quality in enumerate([80, 65, 58, 50, 40], 1):
        content = io.BytesIO()
        image = Image.fromarray((as_numpy(photos[:1])[0] * 255).round().astype(np.uint8))
        image.save(content, "JPEG", quality=quality)
        expected = np.array(Image.open(content)) / 255
        assert_images_equal(corrupt(photos[:1], "jpeg_compression", severity), expected[None])
    grey = corrupt(photos[:1, :1], "jpeg_compression", 3)
    assert grey.shape == (1, 1, 32, 32) and float((grey - photos[:1, :1]).abs().mean()) < 0.1


@pytest.mark.parametrize("name", ["defocus_blur", "motion_blur", "gaussian_blur"])
def test_an_impulse_becomes_weights_of_sum_one(name):
    x = torch.zeros(1, 1, 33, 33)
    x[0, 0, 16, 16] = 1
    for severity in range(1, 6):
        spread = corrupt(x, name, severity)
        assert float(spread.sum()) == pytest.approx(1, abs=1e-5) and (spread > 0).sum() > (severity == 5)
