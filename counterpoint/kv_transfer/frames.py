"""The format of a TCP data connection (tcp.py, tcp_receiver.py).

Promises: a frame is small enough that a cancelled write ends soon.

The writer sends a preface (magic, key, the receiver's number of the link), then frames. The
receiver acknowledges each frame.

    frame    generation, op, number of spans, bytes   (u64, u64, u32, u64)
             that many (region, offset, bytes)        (3 x i64)
             the bytes
    ack      op, 0: in place or 1: not granted        (u64, u8)
"""

from __future__ import annotations

import struct
from collections import deque

from counterpoint.kv_transfer.memory import Spans, split_spans

MAGIC = b"CPKVTCP1"
PREFACE = struct.Struct("!8s16sQ")
FRAME = struct.Struct("!QQIQ")
ACK = struct.Struct("!QB")
FRAME_SPANS = 4096
FRAME_BYTES = 8 << 20
MAX_BUFFERS = 256  # in one system call


def split_frames(spans: Spans) -> list[Spans]:
    """One array of spans per frame."""
    return split_spans(spans, FRAME_BYTES, FRAME_SPANS)


def drop_bytes(buffers: deque[memoryview], count: int) -> None:
    """Drop the first `count` bytes of `buffers`."""
    while count:
        if count < len(buffers[0]):
            buffers[0] = buffers[0][count:]
            return
        count -= len(buffers.popleft())
