"""Noise per image: an independent integer oracle, statistics, and independence from everything but the image."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest
import torch
from scipy import stats

from advnorm._core import seeding
from advnorm._core.seeding import ImageNoise
from support.problems import raises_problem

WORD = 2**32 - 1
DRAWS = {
    "uniform": lambda noise: noise.uniform((3, 5), 1),
    "normal": lambda noise: noise.normal((3, 5), 1),
    "integers": lambda noise: noise.integers(10, (3, 5), 1),
    "signs": lambda noise: noise.signs((3, 5), 1),
    "bits": lambda noise: noise.bits((3, 5), 1),
}
#: Every way into the kernels of a GPU.
ON_DEVICES = DRAWS | {
    "uniform over images": lambda noise: noise.uniform((3, 32, 32), "start"),
    "uniform numbers": lambda noise: noise.uniform(()),
    "a tag per image": lambda noise: noise.fold(2**33 * torch.arange(len(noise), device=noise.device)).bits((7,)),
    "a tag on the device": lambda noise: noise.fold(torch.tensor(2**40 + 3, device=noise.device)).bits((2,), -9),
    "a last block that is not full": lambda noise: noise.uniform((3000,), 2**34),
    "no numbers": lambda noise: noise.bits((0, 3)),
    "no images": lambda noise: noise.select(torch.zeros(0, dtype=torch.int64, device=noise.device)).bits((4,)),
    "small integers": lambda noise: noise.fold(torch.arange(len(noise), device=noise.device).int() - 5).bits((2,)),
    "every other tag": lambda noise: noise.fold(torch.arange(2 * len(noise), device=noise.device)[::2]).bits((2,)),
    "a truth": lambda noise: noise.fold(torch.ones(1, dtype=torch.bool, device=noise.device)).bits((2,)),
    "a number of the host": lambda noise: noise.fold(torch.tensor(-(2**40))).bits((2,)),
    "some images": lambda noise: noise.select(torch.arange(len(noise), device=noise.device) % 3 == 1).bits((2,), "x"),
}


def mixed(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & WORD
    x = ((x ^ (x >> 15)) * 0x735A2D97) & WORD
    return x ^ (x >> 15)


def folded(key: tuple[int, int], tag: int | str) -> tuple[int, int]:
    if isinstance(tag, str):
        tag = int.from_bytes(hashlib.blake2b(tag.encode(), digest_size=8).digest(), "little")
    low, high = key
    for word in (tag & WORD, (tag >> 32) & WORD):
        low = mixed((low + word) & WORD)
        high = mixed(high ^ mixed((low + 0x9E3779B9) & WORD))
    return low, high


def oracle_bits(seed: int, index: int, tags: list[int | str], count: int) -> list[int]:
    """The same hash in Python's integers."""
    key = 0x243F6A88, 0x85A308D3
    for tag in (seed, index, *tags):
        key = folded(key, tag)
    return [mixed(mixed((counter + key[0]) & WORD) ^ key[1]) for counter in range(count)]


@pytest.mark.parametrize("seed", [0, 1, 2**40 + 7, -3])
@pytest.mark.parametrize("tags", [[0], ["start", 4], [2**35, "x", 0]])
def test_bits_equal_the_hash_in_plain_integers(seed, tags):
    index = [0, 1, 49_999, 2**33]
    noise = ImageNoise(seed, torch.tensor(index))
    for tag in tags[:-1]:
        noise = noise.fold(tag)
    got = noise.bits((2, 4), tags[-1]).reshape(len(index), -1).tolist()
    assert got == [oracle_bits(seed, i, tags, 8) for i in index]


def test_golden_numbers_never_change():
    noise = ImageNoise(0, torch.tensor([0, 1]))
    assert noise.bits((3,)).tolist() == [[1909635507, 2613581238, 3129586480], [1177604373, 3470904936, 2042164618]]
    golden = [[-0.17017611861228943, 0.587952733039856], [-1.5896461009979248, -0.5713440179824829]]
    torch.testing.assert_close(noise.normal((2,)), torch.tensor(golden), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", DRAWS)
def test_an_image_keeps_its_noise_in_any_batch_order_and_selection(kind):
    index = torch.arange(100, 164)
    whole = DRAWS[kind](ImageNoise(3, index).fold("a"))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(DRAWS[kind](ImageNoise(3, index[order]).fold("a")), whole[order])
    assert torch.equal(DRAWS[kind](ImageNoise(3, index).select(order[:7]).fold("a")), whole[order[:7]])
    mask = whole.flatten(1)[:, 0] > whole.flatten(1)[:, 1]
    assert torch.equal(DRAWS[kind](ImageNoise(3, index).fold("a").select(mask)), whole[mask])
    for i in (0, 63):
        assert torch.equal(DRAWS[kind](ImageNoise(3, index[i : i + 1]).fold("a"))[0], whole[i])


def test_a_longer_draw_continues_a_shorter_one():
    noise = ImageNoise(0, torch.arange(4))
    assert torch.equal(noise.uniform((10,))[:, :6], noise.uniform((6,)))


def test_uniform_is_uniform_in_every_direction():
    values = ImageNoise(1, torch.arange(400)).uniform((500,)).double()
    assert values.min() >= 0 and values.max() < 1 and values.dtype == torch.float64
    for name, flat in {"all": values.flatten(), "over images": values[:, 0], "over positions": values[0]}.items():
        assert stats.kstest(flat.numpy(), "uniform").pvalue > 1e-3, name
    per_draw = torch.stack([ImageNoise(1, torch.tensor([7])).uniform((), draw)[0] for draw in range(2000)])
    assert stats.kstest(per_draw.numpy(), "uniform").pvalue > 1e-3
    per_seed = torch.stack([ImageNoise(seed, torch.tensor([7])).uniform(())[0] for seed in range(2000)])
    assert stats.kstest(per_seed.numpy(), "uniform").pvalue > 1e-3


def test_every_bit_is_fair_and_neighbours_are_independent():
    words = ImageNoise(2, torch.arange(300)).bits((300,))
    assert words.min() >= 0 and words.max() <= WORD
    bits = torch.stack([(words >> k) & 1 for k in range(32)]).double()
    count = words.numel()
    assert ((bits.flatten(1).mean(1) - 0.5).abs() < 5 * 0.5 / count**0.5).all()
    uniform = words.double() / 2**32 - 0.5
    for a, b in ((uniform[1:], uniform[:-1]), (uniform[:, 1:], uniform[:, :-1])):
        pairs = ((a.flatten() + 0.5) * 16).long() * 16 + ((b.flatten() + 0.5) * 16).long()
        assert stats.chisquare(torch.bincount(pairs, minlength=256).numpy()).pvalue > 1e-3


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda n: n, lambda n: n.fold(0)),
        (lambda n: n.fold(0), lambda n: n.fold(1)),
        (lambda n: n.fold("a"), lambda n: n.fold("b")),
        (lambda n: n.fold(1).fold(2), lambda n: n.fold(2).fold(1)),
    ],
)
def test_streams_are_uncorrelated(first, second):
    noise = ImageNoise(0, torch.arange(100))
    a, b = first(noise).normal((400,)), second(noise).normal((400,))
    assert abs(float((a * b).mean())) < 5 / (100 * 400) ** 0.5
    assert not (a == b).all(1).any()


def test_draws_are_uncorrelated():
    noise = ImageNoise(0, torch.arange(100))
    draws = torch.stack([noise.normal((400,), draw).flatten() for draw in (0, 1, 2, "a", "b")])
    correlation = torch.corrcoef(draws) - torch.eye(5)
    assert correlation.abs().max() < 5 / (100 * 400) ** 0.5


def test_normal_is_normal():
    values = ImageNoise(5, torch.arange(200)).normal((500,)).double().flatten()
    assert values.isfinite().all()
    assert stats.kstest(values.numpy(), "norm").pvalue > 1e-3
    assert abs(float(values.mean())) < 5 / len(values) ** 0.5
    assert abs(float(values.var()) - 1) < 5 * (2 / len(values)) ** 0.5
    assert 3.5 < float(values.abs().max()) < 6.7


@pytest.mark.parametrize("high", [1, 2, 9, 999])
def test_integers_are_uniform_below_high(high):
    values = ImageNoise(0, torch.arange(1000)).integers(high, (20,))
    assert values.dtype == torch.int64 and values.min() >= 0 and values.max() < high
    if high > 1:
        assert stats.chisquare(torch.bincount(values.flatten(), minlength=high).numpy()).pvalue > 1e-3


def test_signs_are_fair():
    values = ImageNoise(0, torch.arange(100)).signs((400,))
    assert set(values.unique().tolist()) == {-1.0, 1.0}
    assert abs(float(values.mean())) < 5 / (100 * 400) ** 0.5


def test_no_two_images_share_a_key():
    noise = ImageNoise(0, torch.arange(200_000)).fold("restart").fold(1)
    keys = (noise._key[0] << 31) ^ noise._key[1]
    assert len(keys.unique()) == 200_000


def test_a_tag_may_be_a_tensor_for_all_or_for_each_image():
    noise = ImageNoise(0, torch.arange(3))
    assert torch.equal(noise.fold(torch.tensor(7)).bits((2,)), noise.fold(7).bits((2,)))
    each = noise.fold(torch.tensor([7, 8, 7])).bits((2,))
    assert torch.equal(each[0], noise.fold(7).bits((2,))[0]) and torch.equal(each[1], noise.fold(8).bits((2,))[1])


def test_no_global_generator_is_used():
    torch.manual_seed(0)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    for draw in DRAWS.values():
        draw(ImageNoise(0, torch.arange(5)))
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert (np.random.get_state()[1] == before[2]).all()  # noqa: NPY002


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ON_DEVICES)
def test_the_device_does_not_matter(kind):
    index = torch.cat([torch.arange(2_000), torch.tensor([2**33, 2**62, 1, -7])])
    draw = ON_DEVICES[kind]
    for seed in (0, -3, 2**40 + 1):
        assert torch.equal(draw(ImageNoise(seed, index.cuda())).cpu(), draw(ImageNoise(seed, index)))


@pytest.mark.parametrize("kind", ON_DEVICES)
def test_every_path_through_the_kernels_gives_the_bits_of_the_hash(kind):
    assert len(ON_DEVICES[kind](ImageNoise(0, torch.arange(4)))) in (0, 1, 4)


def test_without_triton_noise_is_the_same_after_a_warning(monkeypatch):
    monkeypatch.setattr(seeding, "find_spec", lambda name: object())
    monkeypatch.setattr(seeding.importlib, "import_module", no_compiler)
    seeding._with_triton.cache_clear()
    try:
        with pytest.warns(UserWarning, match="Triton does not work here, .*: Failed to find C compiler"):
            assert seeding._with_triton(torch.device("cuda")) is None
        assert seeding._with_triton(torch.device("cuda")) is None  # said once
    finally:
        seeding._with_triton.cache_clear()


def no_compiler(name):
    raise RuntimeError("Failed to find C compiler\nPlease specify one")


@pytest.mark.parametrize("index", [torch.zeros(2), torch.zeros(2, 2).long(), torch.tensor([True])])
def test_a_bad_index_is_rejected(index):
    with raises_problem("wrong_shape", "index"):
        ImageNoise(0, index)
