"""The format of a TCP data connection (tcp.py).

Owns: the structs and their bounds, and cutting writes into frames. Promises: a frame is small enough that a cancelled write ends
soon. Must not: touch a socket.

On a data connection the writer sends a preface (magic, key, the receiver's link number), then frames; the receiver answers each.

    frame    generation, op, number of spans, bytes   (u64, u64, u32, u64)
             that many (region, offset, bytes)        (3 x i64)
             the bytes
    answer   op, 0: in place or 1: not granted        (u64, u8)
"""

from __future__ import annotations

import struct
from collections import deque

import numpy as np
from numpy.typing import NDArray

from counterpoint.kv_transfer.memory import Spans

MAGIC = b"CPKVTCP1"
PREFACE = struct.Struct("!8s16sQ")
FRAME = struct.Struct("!QQIQ")
ANSWER = struct.Struct("!QB")
FRAME_SPANS = 4096
FRAME_BYTES = 8 << 20
BUFFERS = 256  # in one system call


def advance(buffers: deque[memoryview], count: int) -> None:
    """Drop the first `count` bytes of `buffers`."""
    while count:
        if count < len(buffers[0]):
            buffers[0] = buffers[0][count:]
            return
        count -= len(buffers.popleft())


def cut(spans: Spans) -> list[Spans]:
    """Frames of at most FRAME_SPANS spans and FRAME_BYTES bytes."""
    if (spans[:, 3] > FRAME_BYTES).any():
        spans = np.concatenate([_pieces(span) for span in spans])
    frames, start = [], 0
    ends = np.cumsum(spans[:, 3])
    while start < len(spans):
        before = ends[start - 1] if start else 0
        end = int(np.searchsorted(ends, before + FRAME_BYTES, side="right"))
        end = min(max(end, start + 1), start + FRAME_SPANS)
        frames.append(spans[start:end])
        start = end
    return frames


def _pieces(span: NDArray[np.int64]) -> Spans:
    """One span as several of at most FRAME_BYTES."""
    at = np.arange(0, span[3], FRAME_BYTES)
    parts = np.tile(span, (len(at), 1))
    parts[:, 1] += at
    parts[:, 2] += at
    parts[:, 3] = np.minimum(FRAME_BYTES, span[3] - at)
    return parts
