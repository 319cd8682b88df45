"""A calibration: what steps really took, measured on one device with one model.

A table is plain numbers, as JSON. It keeps points as they were measured, so a better fit needs no
new measurement. Points marked `held_out` are never fitted; they judge the fit. Measuring, fitting
and storing are elsewhere.
"""

from __future__ import annotations

import bisect
import math

import msgspec

from counterpoint.interfaces import CoRunning
from counterpoint.spec.model import ModelSpec
from counterpoint.types import BatchShape

CO_RUNNING_KIND = "beside each other"  # a key of `Calibration.on_and_on`


class CalibrationKey(msgspec.Struct, frozen=True, kw_only=True):
    """What a calibration holds for.

    `device`: its name as its driver has it. `model`: a shape (`shape_key`), not a name. `kernels`:
    the kernels and their version.
    """

    device: str
    units: int
    model: str
    dtype: str
    kv_dtype: str
    kernels: str

    def matches(self, other: CalibrationKey) -> bool:
        """Equal in all but the kernels: near enough to use, but users are told."""
        return msgspec.structs.replace(self, kernels="") == msgspec.structs.replace(
            other, kernels=""
        )


class CalibrationPoint(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A step of `work` on `units` took `seconds`, alone or while `co_running` ran repeatedly.

    Steps of its kind ran before and behind it. For `host_s` of the seconds the host was busy
    launching it (0: not known), in `steps` steps. On an idle device the step takes `start_s`
    longer.
    """

    work: BatchShape
    units: int
    seconds: float
    co_running: CoRunning | None = None
    held_out: bool = False
    host_s: float = 0.0
    steps: int = 1
    start_s: float = 0.0


class Calibration(msgspec.Struct, kw_only=True):
    """`about`: date, versions, command.

    `buckets`: sizes to which decode batches are padded with idle rows (none: they are not).
    `pass_buckets`: the same for passes with prompt tokens, by their rows; larger passes are not
    padded. `on_and_on`: how many times longer steps take in runs of seconds than in the short runs
    of the points. Its keys are mixed, prefill, and CO_RUNNING_KIND for a prefill and a decode side
    by side. The cause is not known; a card at its power limit would slow down like this.
    """

    key: CalibrationKey
    about: dict[str, str] = {}
    buckets: tuple[int, ...] = ()
    pass_buckets: tuple[int, ...] = ()
    on_and_on: dict[str, float] = {}
    points: list[CalibrationPoint] = []

    @property
    def splits(self) -> tuple[int, ...]:
        """Decode units on which a decode was measured with a co-running prefill, ascending."""
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
    """The bucket that holds `rows` rows; beyond the last bucket, `rows`."""
    at = bisect.bisect_left(buckets, rows)
    return buckets[at] if at < len(buckets) else rows


def shape_key(model: ModelSpec) -> str:
    """What the cost of a step depends on, in one line."""
    experts = (
        f" {model.experts_per_token}/{model.experts}x{model.ffn}"
        if model.experts
        else f" ffn{model.ffn}"
    )
    heads = f"{model.heads}/{model.kv_heads}x{model.head_dim}"
    return f"{model.layers}x{model.hidden} {heads}{experts} vocab{model.vocab}"


def file_name(key: CalibrationKey) -> str:
    words = f"{key.device} {key.model} {key.dtype} {key.kv_dtype}".lower()
    return "".join(c if c.isalnum() or c in ".-" else "_" for c in words) + ".json"


def encode(table: Calibration) -> bytes:
    """JSON with one line per point."""
    head = msgspec.json.encode(msgspec.structs.replace(table, points=[]))
    lines = b",\n".join(msgspec.json.encode(point) for point in table.points)
    return head[: head.rindex(b"[")] + b"[\n" + lines + b"\n]}\n"


def decode(text: bytes) -> Calibration:
    """Raises ValueError if `text` is no calibration."""
    try:
        table = msgspec.json.decode(text, type=Calibration)
    except msgspec.DecodeError as error:
        raise ValueError(f"not a calibration: {error}") from None
    if any(not (point.seconds > 0 and math.isfinite(point.seconds)) for point in table.points):
        raise ValueError("not a calibration: a step takes more than 0 s")
    return table
