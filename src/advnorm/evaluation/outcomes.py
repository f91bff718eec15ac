"""Results per image in records: a packed bit per image, and the rows of the images in their data set."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor

from advnorm._core.errors import ConfigError
from advnorm._core.shapes import check_record

#: Name in results and records of an evaluation without a given route, and its name in records before version 2.
DEFAULT_ROUTE, OLD_DEFAULT_ROUTE = "default", "as called"
#: Rows in records: a row, or the first row of a range and the row after its last.
EncodedRows = Sequence[int | Sequence[int]]
CELL_FORMAT = "advnorm.cell/1"
#: No data set has more images; a damaged record with more would fill the memory.
MOST_ROWS = 10**8


class PackedOutcomes(TypedDict):
    """Results per image of one evaluation in a cell's record: rows of the images, and bits by the name of a value."""

    rows: list[int | list[int]]
    bits: dict[str, str]


class CellShape(TypedDict):
    """The parts of a cell's record that a comparison reads. Records of older versions have no outcomes."""

    run: dict[str, Any]
    outcomes: NotRequired[list[PackedOutcomes] | None]


class _SignedCell(CellShape):
    digest: str


def check_cell(record: Mapping[str, Any], source: object, cure: str) -> None:
    """Raise if a cell's record is damaged. One with outcomes needs a digest; older versions wrote neither."""
    check_record(record, _SignedCell if "outcomes" in record else CellShape, source, cure, CELL_FORMAT)


def pack_bits(values: Tensor) -> str:
    """Return one bit per image as base64, the first image in the highest bit of the first byte."""
    return base64.b64encode(np.packbits(values.bool().cpu().numpy()).tobytes()).decode()


def unpack_bits(text: str, count: int) -> Tensor:
    """Return the ``count`` booleans of :func:`pack_bits`."""
    packed = np.frombuffer(base64.b64decode(text, validate=True), dtype=np.uint8)
    if len(packed) != -(-count // 8):
        message = f"{{field}} must have {count} bits in {-(-count // 8)} bytes"
        raise ConfigError("damaged_file", message, field="outcomes", got=len(packed))
    return torch.from_numpy(np.unpackbits(packed, count=count).astype(bool))


def encode_rows(rows: Tensor) -> list[int | list[int]]:
    """``[[0, 1000], 1007]``: contiguous rows as a range, others alone."""
    found: list[int | list[int]] = []
    if not len(rows):
        return found
    cuts = (torch.nonzero(rows[1:] != rows[:-1] + 1).flatten() + 1).tolist()
    for start, stop in zip([0, *cuts], [*cuts, len(rows)]):
        first = int(rows[start])
        found.append(first if stop - start == 1 else [first, first + stop - start])
    return found


def decode_rows(encoded: EncodedRows) -> Tensor:
    """Return the rows of :func:`encode_rows`."""
    ranges = [(part, part + 1) if isinstance(part, int) else (part[0], part[1]) for part in encoded]
    if not all(0 <= first < last <= MOST_ROWS for first, last in ranges):
        raise ValueError(f"rows must lie in [0, {MOST_ROWS})")
    return torch.cat([torch.arange(*bounds) for bounds in ranges]) if ranges else torch.arange(0)


def letters_to_bits(letters: str) -> Tensor:
    """Return the booleans of a string of 0 and 1, as in records before version 2."""
    return torch.tensor([bool("01".index(letter)) for letter in letters], dtype=torch.bool)


def read_outcomes(record: Mapping[str, Any]) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
    """Return the rows of an evaluation's images and its results per image, by route and attack.

    Version 1 has strings of 0 and 1, and the images are the first ones.
    """
    if "outcomes" in record:
        rows = decode_rows(record["rows"])
        outcomes = {
            route: {name: unpack_bits(bits, len(rows)) for name, bits in row.items()}
            for route, row in record["outcomes"].items()
        }
    else:
        outcomes = {
            DEFAULT_ROUTE if route == OLD_DEFAULT_ROUTE else route: {
                name: letters_to_bits(letters) for name, letters in row.items()
            }
            for route, row in record["verdicts"].items()
        }
        rows = torch.arange(len(next(iter(outcomes.values()), {"clean": ()})["clean"]))
    if not outcomes or not all(
        "clean" in row and all(len(one) == len(rows) for one in row.values()) for row in outcomes.values()
    ):
        raise ValueError("each route needs a result of each image without an attack")
    return rows, outcomes


def read_cell_outcomes(record: Mapping[str, Any], source: object) -> tuple[str, Tensor, dict[str, dict[str, Tensor]]]:
    """Return the data set, the rows of the images and the results per image of a study's cell."""
    cure = "measure it again, or compare evaluations"
    check_cell(record, source, cure)
    parts: Sequence[PackedOutcomes] = record.get("outcomes") or ()
    if not parts:
        raise ConfigError("missing_outcomes", f"{source} has no results per image", "record", hint=cure)
    found: dict[str, dict[str, Tensor]] = {}
    try:
        data = record["run"]["config"]["data"]["name"]
        rows = decode_rows(parts[0]["rows"])
        for part in parts:
            if part["rows"] == parts[0]["rows"]:  # a cell whose measurements use different images shows the first
                for name, bits in part["bits"].items():
                    route, _, attack = name.partition("/")
                    found.setdefault(route, {})[attack] = unpack_bits(bits, len(rows))
    except (ConfigError, LookupError, TypeError, ValueError) as error:
        message = "{field} must have a bit for each image"
        raise ConfigError("damaged_file", message, field=f"{source}: outcomes", hint=cure) from error
    return data, rows, found
