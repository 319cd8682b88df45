"""Workers that are cut over several ranks (tensor parallelism), as one: a pool and a link made of those of the ranks.

Owns: how whole pages become slices of heads, and one number of a link, a write or a reservation the many that its ranks have.
Promises: to a courier, a Shards is a pool like any other and a ShardedTransport a mover like any other (kv_transfer/transport.py), whatever
the other worker's cut is; a decode rank's page may be written only by the prefill ranks that the plan names (mapping.py); a write
has completed when all its parts have, and Quiet and Severed come when every rank has said so.
Must not: decide who holds which head, or sum bytes: heads lie in other places on the other side, so nothing is verified.

All ranks' pools are reached from the process that has the courier: rank 0 decides, so it counts its ranks' completions and says
Done once (docs/decisions/handoff.md). Shared memory wants pages of one size at both ends, so it takes only cuts that have them.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from counterpoint.kv_transfer.head_mapping import HeadLayout, HeadSlice, plan_slices
from counterpoint.kv_transfer.memory import KvMemory, PagedMemory, Spans, page_spans
from counterpoint.kv_transfer.transport import (
    Completed,
    LinkLost,
    LinkSevered,
    Notice,
    Quiesced,
    Transport,
    TransportError,
)

MAX_RANKS = 1 << 10
REMEMBERED = 4096  # revoked generations that may still be told to be quiet

Order = Literal["token, head", "head, token"]


class ShardedPage(NamedTuple):
    """A page of `heads` heads in one region: `tokens` tokens, `head_bytes` of each head of each; `order`: which axis is outer."""

    heads: int
    tokens: int
    head_bytes: int
    order: Order

    @property
    def bytes(self) -> int:
        return self.heads * self.tokens * self.head_bytes

    def slice(self, first: int, count: int) -> tuple[np.ndarray, int]:
        """Offsets of the pieces of heads [first, first + count) in the page, and the bytes of each."""
        if self.order == "head, token":
            return np.array(
                [first * self.tokens * self.head_bytes]
            ), count * self.tokens * self.head_bytes
        return (
            np.arange(self.tokens) * self.heads + first
        ) * self.head_bytes, count * self.head_bytes


@dataclass(frozen=True, eq=False)
class ShardedMemory:
    """A worker's pool: page p of the worker is page p of every rank, which holds its heads of it (`layout`). `page`: with all
    heads, as if there were one rank; spans of the pool are in such pages. Raises ValueError if `parts` don't fit."""

    layout: HeadLayout
    page: ShardedPage
    parts: tuple[KvMemory, ...]

    def __post_init__(self) -> None:
        sizes = {(part.page_bytes, part.pages, part.layers) for part in self.parts}
        mine = self.page._replace(heads=len(self.layout.heads(0))).bytes
        if len(self.parts) != self.layout.tp or len(sizes) != 1 or self.parts[0].page_bytes != mine:
            raise ValueError(
                f"a cut over {self.layout.tp} needs as many pools, alike, in pages of {mine} bytes"
            )

    @property
    def pages(self) -> int:
        return self.parts[0].pages

    @property
    def layers(self) -> int:
        return self.parts[0].layers

    @property
    def page_bytes(self) -> int:
        return self.page.bytes

    def spans(
        self, first_layer: int, last_layer: int, sources: Sequence[int], destinations: Sequence[int]
    ) -> Spans:
        return page_spans(self.page.bytes, first_layer, last_layer, sources, destinations)

    def checksum(self, spans: Spans) -> int:
        raise NotImplementedError("a pool that is cut is not summed")


def head_spans(
    spans: Spans, whole: ShardedPage, here: ShardedPage, there: ShardedPage, part: HeadSlice
) -> Spans:
    """What one rank writes to another of `spans` of whole pages: the heads of `part`, as few spans as their places allow."""
    counts = spans[:, 3] // whole.bytes
    steps = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    region = np.repeat(spans[:, 0], counts)
    source, target = (np.repeat(spans[:, side] // whole.bytes, counts) + steps for side in (1, 2))
    (from_here, size), (to_there, _) = (
        here.slice(part.source, part.heads),
        there.slice(part.target, part.heads),
    )
    made = np.empty((len(region), len(from_here), 4), np.int64)
    made[:, :, 0] = region[:, None]
    made[:, :, 1] = source[:, None] * here.bytes + from_here
    made[:, :, 2] = target[:, None] * there.bytes + to_there
    made[:, :, 3] = size
    return merged(made.reshape(-1, 4))


def merged(spans: Spans) -> Spans:
    """Spans that follow each other on both sides become one."""
    if len(spans) < 2:
        return spans
    before, after = spans[:-1], spans[1:]
    follows = (before[:, [1, 2]] + before[:, [3]] == after[:, [1, 2]]).all(axis=1) & (
        before[:, 0] == after[:, 0]
    )
    starts = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    joined = spans[starts].copy()
    joined[:, 3] = np.add.reduceat(spans[:, 3], starts)
    return joined


class ShardedPeerInfo(msgspec.Struct, frozen=True):
    """`blobs`: those of the ranks' movers."""

    kv_heads: int
    tp: int
    page: ShardedPage
    blobs: tuple[bytes, ...]


class RankLink(NamedTuple):
    """A link of rank `rank` here to one rank there. `source`: the prefill rank of the two; `part`: what it writes."""

    rank: int
    number: int
    source: int
    part: HeadSlice


@dataclass(slots=True, eq=False)
class LinkBundle:
    """The strands of one link, and the page of a rank there."""

    strands: list[RankLink]
    there: ShardedPage
    cut: bool = False  # being torn down
    left: set[int] = field(default_factory=set)  # strands that are not severed yet


@dataclass(slots=True, eq=False)
class ShardedWrite:
    """A write: its parts that have not completed, by the rank that writes them."""

    op: int
    link: int
    left: dict[int, int]
    error: str = ""


class ShardedTransport:
    """`movers`: one for each rank, of one kind; their `wake` is that of the whole."""

    def __init__(self, movers: Sequence[Transport]) -> None:
        self.kind = movers[0].kind
        self._movers = tuple(movers)
        self._shards: ShardedMemory | None = None
        self._links: dict[int, LinkBundle] = {}
        self._link_of: dict[int, int] = {}  # strand -> link
        self._writes: dict[int, ShardedWrite] = {}  # by each part's op
        self._grants: dict[
            int, set[tuple[int, int]]
        ] = {}  # generation -> (rank, its own generation) of those not yet quiet
        self._revoked: deque[int] = deque()  # generations
        self._last_op = 0

    # ------------------------------------------------------------ the interface (port.py)

    def register(self, memory: PagedMemory) -> bytes:
        assert isinstance(memory, ShardedMemory), "what is not cut needs no ShardedTransport"
        self._shards = memory
        blobs = tuple(
            mover.register(part) for mover, part in zip(self._movers, memory.parts, strict=True)
        )
        return msgspec.msgpack.encode(
            ShardedPeerInfo(memory.layout.kv_heads, memory.layout.tp, memory.page, blobs)
        )

    def connect(self, link: int, remote: int, blob: bytes, writes: bool) -> None:
        assert self._shards is not None
        here = self._shards
        try:
            peer = msgspec.msgpack.decode(blob, type=ShardedPeerInfo)
            pairs = self._pairs(peer, writes)
        except (msgspec.DecodeError, ValueError) as error:
            raise TransportError(f"the peer's pool can't be cut to fit this one: {error}") from None
        if (peer.kv_heads, peer.page) != (here.layout.kv_heads, here.page):
            raise TransportError(
                f"the peer's pages are {peer.page} of {peer.kv_heads} heads, those here {here.page}"
            )
        there = here.page._replace(heads=len(HeadLayout(peer.kv_heads, peer.tp).heads(0)))
        bundle = self._links[link] = LinkBundle([], there)
        for source, target, part in pairs:
            rank, other = (source, target) if writes else (target, source)
            strand = RankLink(rank, numbered(link, source, target), source, part)
            try:
                self._movers[rank].connect(
                    strand.number, numbered(remote, source, target), peer.blobs[other], writes
                )
            except TransportError:
                self.disconnect(link)
                raise
            bundle.strands.append(strand)
            self._link_of[strand.number] = link

    def _pairs(self, peer: ShardedPeerInfo, writes: bool) -> list[tuple[int, int, HeadSlice]]:
        assert self._shards is not None
        cuts = (self._shards.layout.tp, peer.tp)
        source_tp, target_tp = cuts if writes else cuts[::-1]
        if not 0 < peer.tp < MAX_RANKS or len(peer.blobs) != peer.tp:
            raise ValueError(f"{len(peer.blobs)} pools of {peer.tp} ranks")
        return [
            (source, target, part)
            for source in range(source_tp)
            for target in range(target_tp)
            for part in plan_slices(
                source_tp, target_tp, source, target, self._shards.layout.kv_heads
            )
        ]

    def grant(self, link: int, generation: int, pages: Sequence[int]) -> None:
        bundle = self._links.get(link)
        own = (
            [(strand, generation * MAX_RANKS + strand.source) for strand in bundle.strands]
            if bundle is not None
            else []
        )
        self._grants[generation] = {(strand.rank, number) for strand, number in own}
        for strand, number in own:
            self._movers[strand.rank].grant(strand.number, number, pages)

    def revoke(self, generation: int) -> None:
        for rank, own in tuple(self._grants.get(generation, ())):
            self._movers[rank].revoke(own)
        self._revoked.append(generation)
        if len(self._revoked) > REMEMBERED:  # some movers never say Quiet
            self._grants.pop(self._revoked.popleft(), None)

    def write(self, link: int, generation: int, spans: Spans, op: int) -> None:
        assert self._shards is not None
        whole, bundle = self._shards.page, self._links.get(link)
        if bundle is None or bundle.cut:
            return
        here = whole._replace(heads=len(self._shards.layout.heads(0)))
        writing = ShardedWrite(op, link, {})
        for strand in bundle.strands:
            self._last_op += 1
            writing.left[self._last_op] = strand.rank
            self._writes[self._last_op] = writing
        for (part_op, rank), strand in zip(
            tuple(writing.left.items()), bundle.strands, strict=True
        ):
            parts = head_spans(spans, whole, here, bundle.there, strand.part)
            self._movers[rank].write(
                strand.number, generation * MAX_RANKS + strand.source, parts, part_op
            )

    def cancel(self, op: int) -> None:
        for part_op, writing in tuple(self._writes.items()):
            if writing.op == op:
                self._movers[writing.left[part_op]].cancel(part_op)

    def disconnect(self, link: int) -> None:
        bundle = self._links.get(link)
        if bundle is None or bundle.cut:
            return
        bundle.cut = True
        bundle.left = {strand.number for strand in bundle.strands}
        self._writes = {op: writing for op, writing in self._writes.items() if writing.link != link}
        if not bundle.strands:
            del self._links[link]
        for strand in bundle.strands:
            self._movers[strand.rank].disconnect(strand.number)

    def poll(self) -> list[Notice]:
        found: list[Notice] = []
        for rank, mover in enumerate(self._movers):
            for notice in mover.poll():
                told = self._heard(rank, notice)
                found += [told] if told is not None else []
        return found

    def close(self) -> None:
        for mover in self._movers:
            mover.close()

    # ------------------------------------------------------------ from many to one

    def _heard(self, rank: int, notice: Notice) -> Notice | None:
        if isinstance(notice, Completed):
            return self._completed(notice)
        if isinstance(notice, Quiesced):
            generation = notice.generation // MAX_RANKS
            left = self._grants.get(generation, set())
            left.discard((rank, notice.generation))
            return self._quiet(generation) if generation in self._grants and not left else None
        link = self._link_of.get(notice.link)
        if link is None:
            return None
        if isinstance(notice, LinkLost):
            return None if self._links[link].cut else LinkLost(link, f"rank {rank}: {notice.error}")
        bundle = self._links[link]
        bundle.left.discard(notice.link)
        if bundle.left or not bundle.cut:
            return None
        for strand in bundle.strands:
            del self._link_of[strand.number]
        del self._links[link]
        return LinkSevered(link)

    def _quiet(self, generation: int) -> Quiesced:
        del self._grants[generation]
        return Quiesced(generation)

    def _completed(self, notice: Completed) -> Completed | None:
        writing = self._writes.pop(notice.op, None)
        if writing is None:
            return None
        del writing.left[notice.op]
        writing.error = writing.error or notice.error
        return None if writing.left else Completed(writing.op, writing.error)


def numbered(*parts: int) -> int:
    """A number of 63 bits for these, the same at both ends."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1
