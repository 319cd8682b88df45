"""How KV should travel between two workers: by which mover, in what grain, and what of it the user sees.

Owns: these formulas. Promises: pure; each choice comes with its reason, in words, for the log.
Must not: measure.
"""

from __future__ import annotations

from typing import NamedTuple

from counterpoint.disagg.handoff_events import TransferGranularity

WORTH_HIDING = 0.05  # of the prefill's time: a shorter transfer is sent whole
LEAST_GROUP_BYTES = 4 << 20  # of a layer group that is sent by itself,
LEAST_GROUP_S = 0.001  # or its computing time
STAGED = "staged through host memory, slowly, as asked for"
PREFERENCE = ("local", "cuda-ipc", "shm", "nixl", "tcp")


class TransportEndpoint(NamedTuple):
    """Where a worker's pool is and how it can be reached. `process` and `host`: equal if two workers share them. `device`: cpu or
    cuda. `kinds`: its movers."""

    process: str
    host: str
    device: str
    transports: tuple[str, ...]


class NoTransport(ValueError):
    """The two workers have no mover in common that may be used; the message says what to change."""


def choose_transport(
    ours: TransportEndpoint, theirs: TransportEndpoint, allow_staged: bool = False
) -> tuple[str, str]:
    """(kind, why), the first of PREFERENCE that both ends have and that fits where they are. `allow_staged`: KV in GPU memory may
    go through host memory. Raises NoTransport."""
    both = [kind for kind in PREFERENCE if kind in ours.transports and kind in theirs.transports]
    on_gpu = "cuda" in (ours.device, theirs.device)
    for kind in both:
        if kind == "local" and ours.process == theirs.process:
            return kind, "the same process"
        if (
            kind == "cuda-ipc"
            and ours.host == theirs.host
            and ours.device == theirs.device == "cuda"
        ):
            return kind, "GPUs of one host"
        if kind == "shm" and ours.host == theirs.host and (allow_staged or not on_gpu):
            return kind, STAGED if on_gpu else "the same host"
        if kind == "nixl":
            return kind, "both have NIXL"
        if kind == "tcp" and (allow_staged or not on_gpu):
            return kind, STAGED if on_gpu else "another host or no shared memory"
    if both and on_gpu:
        raise NoTransport(
            "CUDA IPC joins GPUs of one host only, and these workers have none in common: --transport tcp on all of them sends KV "
            "through host memory instead, slowly"
        )
    raise NoTransport(
        f"no mover in common: {', '.join(ours.transports)} here, {', '.join(theirs.transports)} there"
    )


def choose_granularity(
    total_bytes: float, prefill_s: float, bandwidth: float, layers: int, chunks: int = 1
) -> tuple[TransferGranularity, str]:
    """(grain, why) for a prompt of `total_bytes` of KV that takes `prefill_s` to compute in `chunks` passes, over a link of
    `bandwidth` bytes/s. Splitwise (ISCA'24, section 4.3) sends layer by layer for large prompts alone; so does this."""
    alone_s = total_bytes / bandwidth
    if alone_s <= WORTH_HIDING * prefill_s:
        return (
            TransferGranularity.PROMPT,
            f"the transfer takes {alone_s / prefill_s:.1%} of the prefill",
        )
    last = 1 / chunks
    if (
        total_bytes * last / layers >= LEAST_GROUP_BYTES
        or prefill_s * last / layers >= LEAST_GROUP_S
    ):
        return (
            TransferGranularity.LAYER,
            f"the transfer takes {alone_s / prefill_s:.0%} of the prefill, and a layer is large enough to send",
        )
    return (
        TransferGranularity.CHUNK,
        f"the transfer takes {alone_s / prefill_s:.0%} of the prefill, and a layer is too small to send",
    )


def visible_transfer_s(
    total_bytes: float, prefill_s: float, bandwidth: float, groups: int, control_s: float = 0.0
) -> float:
    """Seconds of transfer that remain when the prefill is over, with KV sent in `groups` equal parts as they are computed (1: at
    the end). What was posted before the last group overlaps with computing; the last group can only be sent behind it."""
    group_s = total_bytes / groups / bandwidth
    behind = max(0.0, (groups - 1) * group_s - (1 - 1 / groups) * prefill_s)
    return behind + group_s + control_s
