"""How uncertain a measured number is: other images, other seeds. Intervals, and values resampled from them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from advnorm._core.records import digest
from advnorm.evaluation.intervals import accuracy_interval
from advnorm.evaluation.outcomes import decode_rows, unpack_bits

#: Number of images of an analysis whose measure names no ``limit``.
ANALYSIS_IMAGES = 1000
#: Resampled sets of values, and sets in which only the numbers without an interval change.
RESAMPLES, PROBES = 1000, 4
#: Images whose weights are drawn together.
BLOCK = 1024
#: Settings of a data set that do not change which images it has.
SAME_IMAGES = ("image_size", "resize", "limit")
#: Standard deviation of an accuracy between seeds, in percent, and its degrees of freedom. Three seeds of A/table3's
#: ``single/eps16`` under ``fast`` give 0.43, 0.30 and 0.38 for its three accuracies. A cell's own deviation is pooled
#: with it: with two seeds alone, a t interval would be ten times wider than with the declared deviation and one seed.
SEED_DEVIATION, SEED_FREEDOM = 0.4, 6
#: Number of test images of the data sets for records that do not list them.
TEST_IMAGES = {"cifar10": 10_000, "cifar100": 10_000, "features": 10_000, "svhn": 26_032, "tiny_imagenet": 10_000}
#: A cell and the name of a value.
Key = tuple[str, str]


@dataclass(frozen=True, eq=False)
class ImageResults:
    """Results per image on a data set: the rows of the images, and whether each is classified correctly."""

    data: str
    rows: np.ndarray
    correct: np.ndarray


class Sample(NamedTuple):
    """A number over seeds. ``unit``: 100 for an accuracy in percent, 1 for a fraction, None for another number.

    ``images`` is the number of test images of an accuracy, None if it is unknown. ``results`` has the results per image
    of each seed; empty if a seed lacks them.
    """

    values: tuple[float, ...]
    unit: float | None = None
    images: int | None = None
    results: tuple[ImageResults, ...] = ()

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def spread(self) -> float | None:
        """The standard deviation over seeds, with n - 1 in the denominator; None for one seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Wilson's 95 % interval of an accuracy for other images; None for another number."""
        if self.unit is None or not self.images:
            return None
        low, high = accuracy_interval(min(max(self.mean / self.unit, 0.0), 1.0), self.images)
        return self.unit * low, self.unit * high

    @property
    def on_one_network(self) -> bool:
        """Whether nothing is known about how much the number would differ for another seed."""
        return self.unit is None and len(self.values) == 1

    def resampled_means(self, key: Key, seeds: int | None = None) -> np.ndarray:
        """Return means as other images and other seeds would give them, then those of the probes.

        An accuracy for other images follows Jeffreys' posterior. With results per image, the weights of the images are
        the same for all numbers, so that an image that becomes correct raises every resampled number. Without, the
        quantiles depend on ``key`` only, so that a larger number gives larger resampled numbers. ``seeds``: as if so
        many had been run, with the same spread.
        """
        from scipy.stats import beta, norm, t  # slow to import

        draw = np.random.default_rng(int(digest("/".join(key))[:15], 16))
        images, networks = ((draw.permutation(RESAMPLES) + 0.5) / RESAMPLES for _ in range(2))
        probes = np.full(PROBES, self.mean)
        if self.on_one_network:
            probes = (self.mean or 1e-3) * np.exp(norm.ppf(draw.uniform(0.01, 0.99, PROBES)))  # keeps its sign
            return np.concatenate([np.full(RESAMPLES, self.mean), probes])
        own, spread = len(self.values) - 1, self.spread or 0.0
        count = max(len(self.values), seeds or 0)
        if self.unit is None:
            return np.concatenate([self.mean + t.ppf(networks, count - 1) * spread / math.sqrt(count), probes])
        freedom = SEED_FREEDOM + own
        variance = (SEED_FREEDOM * (SEED_DEVIATION / 100) ** 2 + own * (spread / self.unit) ** 2) / freedom
        share = min(max(self.mean / self.unit, 0.0), 1.0)
        found = np.full(RESAMPLES, share)
        if self.results:
            found = np.mean([_reweighted(results, draw) for results in self.results], 0)
        elif self.images:
            found = beta.ppf(images, share * self.images + 0.5, (1 - share) * self.images + 0.5)
        found = found + t.ppf(networks, SEED_FREEDOM + count - 1) * math.sqrt(variance / count)
        return np.concatenate([self.unit * np.clip(found, 0.0, 1.0), probes])


def _reweighted(results: ImageResults, draw: np.random.Generator) -> np.ndarray:
    """Return the share of correct images in each resampled set (the Bayesian bootstrap, Rubin 1981).

    Each image has an exponential weight. One correct and one wrong pseudo-image have Gamma(0.5) weights. The share of
    the correct weight then follows Jeffreys' Beta posterior exactly.
    """
    right, wrong = draw.standard_gamma(0.5, (2, RESAMPLES))
    blocks = results.rows // BLOCK
    for block in np.unique(blocks):
        here = blocks == block
        rows, correct = results.rows[here] % BLOCK, results.correct[here]
        weights = _image_weights(results.data, int(block))
        right = right + weights[rows[correct]].sum(0)
        wrong = wrong + weights[rows[~correct]].sum(0)
    return right / (right + wrong)


@lru_cache(maxsize=64)
def _image_weights(data: str, block: int) -> np.ndarray:
    """Return the weights of the images of a block in each set, which do not depend on the other images."""
    seeded = np.random.default_rng(int(digest(data, block)[:15], 16))
    return seeded.standard_exponential((BLOCK, RESAMPLES))


class Estimate(float):
    """A number that shows its interval: ``f"{estimate:.1f}"`` is ``45.5 (44.6–46.5)``."""

    interval: tuple[float, float]

    def __format__(self, form: str) -> str:
        low, high = self.interval
        return f"{float(self):{form}} ({low:{form}}–{high:{form}})"


class MeasuredValues(dict[Key, Sequence[float]]):
    """Measured numbers by cell and name, each over seeds, with their uncertainties."""

    def __init__(self, samples: Mapping[Key, Sample]) -> None:
        super().__init__({key: list(sample.values) for key, sample in samples.items()})
        self.samples = dict(samples)

    @classmethod
    def wrap(cls, values: Mapping[Key, Sequence[float]]) -> MeasuredValues:
        """Return plain values as numbers of which nothing else is known."""
        return values if isinstance(values, MeasuredValues) else cls({k: Sample(tuple(v)) for k, v in values.items()})

    def estimate(self, key: Key, mean: float) -> float:
        """Return a mean that shows its interval, if it has one."""
        interval = self.samples[key].interval
        if interval is None:
            return mean
        found = Estimate(mean)
        found.interval = interval
        return found


class ResampledValues(Mapping[Key, Sequence[float]]):
    """The values of one of the resampled sets, number ``place``: all seeds of a number are shifted by one amount."""

    def __init__(self, measured: MeasuredValues, seeds: int | None = None) -> None:
        self.measured, self.seeds, self.place = measured, seeds, 0
        self._shifts: dict[Key, list[float]] = {}

    def __getitem__(self, key: Key) -> Sequence[float]:
        sample = self.measured.samples[key]
        if key not in self._shifts:
            self._shifts[key] = (sample.resampled_means(key, self.seeds) - sample.mean).tolist()
        shift = self._shifts[key][self.place]
        return [value + shift for value in sample.values]

    def __iter__(self) -> Iterator[Key]:
        return iter(self.measured)

    def __len__(self) -> int:
        return len(self.measured)


def collect_samples(records: Sequence[Mapping[str, Any]]) -> MeasuredValues:
    """Return the numbers of records over seeds, with the sources of their uncertainty."""
    found: dict[Key, list[tuple[float, float | None, int | None, ImageResults | None]]] = {}
    for record in records:
        by_name = dict(_read_results(record))
        for name, value in record["values"].items():
            unit, images = kind_of_value(record, name, float(value))
            results = by_name.get(name)
            images = images if results is None else len(results.rows)
            if results is not None and (unit is None or abs(value / unit - results.correct.mean()) > 1e-6):
                results = None
            one = float(value), unit, images, results
            found.setdefault((record["cell"], name), []).append(one)
    samples: dict[Key, Sample] = {}
    for key, several in found.items():
        values, units, images, results = zip(*several)
        known = [count for count in images if count is not None]
        fewest = min(known) if len(known) == len(images) else None
        paired = () if None in results else results
        samples[key] = Sample(tuple(values), units[0] if len(set(units)) == 1 else None, fewest, paired)
    return MeasuredValues(samples)


def _read_results(record: Mapping[str, Any]) -> Iterator[tuple[str, ImageResults]]:
    """Yield the results per image of a record by the name of the value."""
    data = record["run"]["config"].get("data")
    if not data:
        return
    images = digest({key: value for key, value in data.items() if key not in SAME_IMAGES})
    for part in record.get("outcomes") or ():
        rows = decode_rows(part["rows"])
        for name, bits in part["bits"].items():
            if len(rows):
                yield name, ImageResults(images, rows.numpy(), unpack_bits(bits, len(rows)).numpy())


def kind_of_value(record: Mapping[str, Any], name: str, value: float) -> tuple[float | None, int | None]:
    """Return the unit of an accuracy and its number of images, from the measurement that gave a value."""
    config = record["run"]["config"]
    data = config.get("data") or {}
    test_images = data.get("size", TEST_IMAGES.get(data.get("name", "")))
    parts = name.split("/")
    parts = parts[1:] if parts[0].isdecimal() else parts  # an epoch
    for measure in record["measures"]:
        options, kind = measure["options"], measure.get("name", "benchmark")
        scale = measure.get("scale", 1.0)
        limit = options.get("limit", None if kind == "benchmark" else ANALYSIS_IMAGES)
        images = test_images if limit is None else min(limit, test_images or limit)
        if kind == "benchmark":
            routes = options.get("route") or ("shared",)
            if parts[0] in routes and "/".join(parts[1:]) in ("clean", *options["attacks"]):
                return 100.0, images
        elif kind == "metrics":
            if parts[0] == "held_out" and parts[-1] != "score":
                return 1.0, config.get("validation_images") or config.get("held_out") or None
            if parts[-1].endswith("_accuracy"):
                return 1.0, None
        elif (scale == 100.0 and 0 <= value <= 100) or (parts[0] == "accuracy" and 0 <= value <= scale):
            return scale, images
    return None, None
