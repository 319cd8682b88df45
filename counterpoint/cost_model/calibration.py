"""A calibration: what steps really took, measured on one device with one model.

Owns: the form of the table and what it is known by. Promises: plain numbers, as JSON; points are kept as they were measured, so
that a better fit needs no new measurement; those marked `held_out` are never fitted, they are what the fit is judged by.
Must not: measure, fit, or choose where a table is kept.
"""

from __future__ import annotations

import bisect
import math

import msgspec

from counterpoint.spec.model import ModelSpec
from counterpoint.types import BatchShape

CO_RUNNING_KIND = "beside each other"  # a kind of `Table.on_and_on`


class CalibrationKey(msgspec.Struct, frozen=True, kw_only=True):
    """What a calibration holds for. `device`: its name as its driver has it; `model`: a shape (`shape_of`), not a name; `kernels`:
    the arithmetic and its version."""

    device: str
    units: int
    model: str
    dtype: str
    kv_dtype: str
    kernels: str

    def matches(self, other: CalibrationKey) -> bool:
        """The same in all but the kernels: near enough to start from, and worth saying."""
        return msgspec.structs.replace(self, kernels="") == msgspec.structs.replace(
            other, kernels=""
        )


class CalibrationPoint(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A step of `work` on `units` took `seconds`, with others of its kind before and behind it, alone or while `beside` = (work,
    units) ran again and again. For `host_s` of these the host was busy launching it (0: not known), in so many `steps`. On an idle
    device it takes `start_s` longer."""

    work: BatchShape
    units: int
    seconds: float
    co_running: tuple[BatchShape, int] | None = None
    held_out: bool = False
    host_s: float = 0.0
    steps: int = 1
    start_s: float = 0.0


class Calibration(msgspec.Struct, kw_only=True):
    """`buckets`: sizes to which a decode batch is filled up with idle rows (none: it is not); `pass_buckets`: and those of passes
    with prompt tokens, by their rows; of larger ones it is not known. `on_and_on`: how many times longer than in the short runs of
    its points steps take among others for seconds: mixed and prefill alone, and a prefill and a decode beside each other (why, was
    not found out; a card at its power limit would be slower so). `about`: date, versions, command."""

    key: CalibrationKey
    about: dict[str, str] = {}
    buckets: tuple[int, ...] = ()
    pass_buckets: tuple[int, ...] = ()
    on_and_on: dict[str, float] = {}
    points: list[CalibrationPoint] = []

    @property
    def splits(self) -> tuple[int, ...]:
        """Decode units on which a decode was measured beside a prefill, ascending."""
        return tuple(
            sorted(
                {
                    p.units
                    for p in self.points
                    if p.co_running is not None and not p.work.prefill_tokens
                }
            )
        )


def pad_rows(rows: int, buckets: tuple[int, ...]) -> int:
    """The bucket of so many rows; beyond the last one, `rows`."""
    at = bisect.bisect_left(buckets, rows)
    return buckets[at] if at < len(buckets) else rows


def shape_key(model: ModelSpec) -> str:
    """What the price of a step depends on, in one line."""
    experts = (
        f" {model.experts_per_token}/{model.experts}x{model.ffn}"
        if model.experts
        else f" ffn{model.ffn}"
    )
    return f"{model.layers}x{model.hidden} {model.heads}/{model.kv_heads}x{model.head_dim}{experts} vocab{model.vocab}"


def file_name(key: CalibrationKey) -> str:
    words = f"{key.device} {key.model} {key.dtype} {key.kv_dtype}".lower()
    return "".join(c if c.isalnum() or c in ".-" else "_" for c in words) + ".json"


def encode(table: Calibration) -> bytes:
    """JSON with a line per point."""
    head = msgspec.json.encode(msgspec.structs.replace(table, points=[]))
    lines = b",\n".join(msgspec.json.encode(point) for point in table.points)
    return head[: head.rindex(b"[")] + b"[\n" + lines + b"\n]}\n"


def decode(text: bytes) -> Calibration:
    """Raises ValueError if it is no calibration."""
    try:
        table = msgspec.json.decode(text, type=Calibration)
    except msgspec.DecodeError as error:
        raise ValueError(f"not a calibration: {error}") from None
    if any(not (point.seconds > 0 and math.isfinite(point.seconds)) for point in table.points):
        raise ValueError("not a calibration: a step takes more than 0 s")
    return table
