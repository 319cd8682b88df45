"""A worker's KV pool as plain bytes.

Owns: where page p of layer l is. Promises: as few spans as contiguous pages allow; no tensor
library.

A pool is a list of regions, two per layer: region 2l holds the keys of layer l, 2l + 1 its values.
Each region has `pages` pages of `page_bytes` bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Spans = NDArray[np.int64]  # [n, 4]: region, offset here, offset there, bytes


class PagedMemory(Protocol):
    """What a handoff asks of a pool, which may be in several shards (sharded.py)."""

    @property
    def pages(self) -> int: ...

    @property
    def layers(self) -> int: ...

    @property
    def page_bytes(self) -> int: ...

    def spans(
        self, first_layer: int, last_layer: int, sources: Sequence[int], destinations: Sequence[int]
    ) -> Spans: ...

    def checksum(self, spans: Spans) -> int: ...


@dataclass(frozen=True, eq=False)
class KvMemory:
    """`regions`: writable 1-D uint8 arrays of one size, in order of layers. Raises ValueError if
    they do not fit `page_bytes`."""

    regions: tuple[NDArray[np.uint8], ...]
    page_bytes: int

    def __post_init__(self) -> None:
        sizes = {region.nbytes for region in self.regions}
        if len(sizes) != 1 or len(self.regions) % 2 or sizes.pop() % self.page_bytes:
            raise ValueError(
                f"a pool needs K and V regions of one size, in pages of {self.page_bytes} bytes"
            )

    @property
    def pages(self) -> int:
        return self.regions[0].nbytes // self.page_bytes

    @property
    def layers(self) -> int:
        return len(self.regions) // 2

    def spans(
        self, first_layer: int, last_layer: int, sources: Sequence[int], destinations: Sequence[int]
    ) -> Spans:
        """Layers [first_layer, last_layer) of pages `sources` here to `destinations` there."""
        return page_spans(self.page_bytes, first_layer, last_layer, sources, destinations)

    def is_granted(self, spans: Spans, granted: NDArray[np.bool_]) -> bool:
        """Whether every destination byte of `spans` lies in this pool, in a page that `granted`
        (by page) marks."""
        region, start, size = spans[:, 0], spans[:, 2], spans[:, 3]
        end, limit = start + size, self.regions[0].nbytes
        if not len(spans) or (region < 0).any() or (region >= len(self.regions)).any():
            return False
        outside = (size <= 0) | (start < 0) | (start > limit) | (end > limit) | (end < start)
        if outside.any():
            return False
        before = np.concatenate(([0], np.cumsum(granted)))
        first, last = start // self.page_bytes, (end - 1) // self.page_bytes + 1
        return bool((before[last] - before[first] == last - first).all())

    def checksum(self, spans: Spans) -> int:
        """Of the bytes of `spans` here: the sum of the CRC-32 of each page of each region, modulo
        2^63. So sums of parts add up, however the spans were split."""
        total = 0
        for region, start, _, size in spans.tolist():
            view = self.regions[region][start : start + size]
            for at in range(0, size, self.page_bytes):
                total += zlib.crc32(view[at : at + self.page_bytes])
        return total & (1 << 63) - 1


Allocate = Callable[[int, int, int], KvMemory]  # pages, bytes of a page in one region, regions


def page_spans(
    page_bytes: int,
    first_layer: int,
    last_layer: int,
    sources: Sequence[int],
    destinations: Sequence[int],
) -> Spans:
    """Layers [first_layer, last_layer) of pages `sources` here to `destinations` there. Pages that
    follow each other on both sides are one span."""
    if not sources:
        return np.empty((0, 4), np.int64)
    here, there = np.asarray(sources, np.int64), np.asarray(destinations, np.int64)
    breaks = np.flatnonzero((np.diff(here) != 1) | (np.diff(there) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    lengths = np.diff(np.concatenate((starts, [len(here)])))
    one = np.empty((len(starts), 4), np.int64)
    one[:, 1] = here[starts] * page_bytes
    one[:, 2] = there[starts] * page_bytes
    one[:, 3] = lengths * page_bytes
    regions = np.arange(2 * first_layer, 2 * last_layer)
    spans = np.tile(one, (len(regions), 1))
    spans[:, 0] = np.repeat(regions, len(starts))
    return spans


def split_spans(spans: Spans, max_bytes: int, max_spans: int | None = None) -> list[Spans]:
    """Consecutive groups of `spans`, each of at most so many bytes and spans. A span over
    `max_bytes` is cut."""
    if (spans[:, 3] > max_bytes).any():
        spans = np.concatenate([_cut_span(span, max_bytes) for span in spans])
    groups, start = [], 0
    ends = np.cumsum(spans[:, 3])
    while start < len(spans):
        before = ends[start - 1] if start else 0
        end = max(start + 1, int(np.searchsorted(ends, before + max_bytes, side="right")))
        if max_spans is not None:
            end = min(end, start + max_spans)
        groups.append(spans[start:end])
        start = end
    return groups


def _cut_span(span: NDArray[np.int64], max_bytes: int) -> Spans:
    at = np.arange(0, span[3], max_bytes)
    parts = np.tile(span, (len(at), 1))
    parts[:, 1] += at
    parts[:, 2] += at
    parts[:, 3] = np.minimum(max_bytes, span[3] - at)
    return parts


def page_mask(pages: Sequence[int], total: int) -> NDArray[np.bool_]:
    """[total], true at each of `pages`."""
    mask = np.zeros(total, np.bool_)
    mask[list(pages)] = True
    return mask
