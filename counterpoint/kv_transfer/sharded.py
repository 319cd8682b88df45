"""Workers split over several ranks (tensor parallelism): their pools as one, their transports as
one.

Owns: how whole pages become slices of heads, and which links, writes and grants of the ranks belong
to one of the worker.
Promises: a ShardedMemory is used like any pool, and a ShardedTransport like any transport, however
the other worker is split. Only the prefill ranks that the plan names (head_mapping.py) may write a
decode rank's page. A write has completed when all its parts have; Quiesced and LinkSevered come
when every rank has given them.
Must not: compute checksums, since heads are at other offsets on the other side.

One process reaches all ranks' pools: rank 0 decides, so it counts the ranks' completions and gives
Completed once (docs/decisions/handoff.md). shm needs pages of one size at both ends, so it serves
only splits that have them.
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
MAX_REVOKED = 4096  # revoked generations that still wait for Quiesced

HeadOrder = Literal["token, head", "head, token"]


class ShardedPage(NamedTuple):
    """A page of `heads` heads in one region: `tokens` tokens, `head_bytes` of each head of each
    token. `order`: which axis is outer."""

    heads: int
    tokens: int
    head_bytes: int
    order: HeadOrder

    @property
    def bytes(self) -> int:
        return self.heads * self.tokens * self.head_bytes

    def slice(self, first: int, count: int) -> tuple[np.ndarray, int]:
        """Offsets in the page of the pieces of heads [first, first + count), and bytes of each."""
        if self.order == "head, token":
            per_head = self.tokens * self.head_bytes
            return np.array([first * per_head]), count * per_head
        offsets = (np.arange(self.tokens) * self.heads + first) * self.head_bytes
        return offsets, count * self.head_bytes


@dataclass(frozen=True, eq=False)
class ShardedMemory:
    """A worker's pool. Page p of the worker is page p of every rank, which holds its heads of it
    (`layout`). `page` is one with all heads; spans of the pool are in such pages. Raises ValueError
    if `parts` don't fit."""

    layout: HeadLayout
    page: ShardedPage
    parts: tuple[KvMemory, ...]

    def __post_init__(self) -> None:
        sizes = {(part.page_bytes, part.pages, part.layers) for part in self.parts}
        own = self.rank_page().bytes
        if len(self.parts) != self.layout.tp or len(sizes) != 1 or self.parts[0].page_bytes != own:
            raise ValueError(
                f"{self.layout.tp} ranks need as many pools of one size, in pages of {own} bytes"
            )

    def rank_page(self, layout: HeadLayout | None = None) -> ShardedPage:
        """A page of one rank, of this worker or of one with `layout`."""
        return self.page._replace(heads=len((layout or self.layout).heads(0)))

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
        raise NotImplementedError("a sharded pool has no checksums")


def head_spans(
    spans: Spans, whole: ShardedPage, here: ShardedPage, there: ShardedPage, part: HeadSlice
) -> Spans:
    """What one rank writes to another of `spans` of whole pages: the heads of `part`. `here`,
    `there`: the pages of the two ranks."""
    counts = spans[:, 3] // whole.bytes
    steps = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    region = np.repeat(spans[:, 0], counts)
    source, target = (np.repeat(spans[:, side] // whole.bytes, counts) + steps for side in (1, 2))
    from_here, size = here.slice(part.source, part.heads)
    to_there, _ = there.slice(part.target, part.heads)
    made = np.empty((len(region), len(from_here), 4), np.int64)
    made[:, :, 0] = region[:, None]
    made[:, :, 1] = source[:, None] * here.bytes + from_here
    made[:, :, 2] = target[:, None] * there.bytes + to_there
    made[:, :, 3] = size
    return merge_spans(made.reshape(-1, 4))


def merge_spans(spans: Spans) -> Spans:
    """Join spans that follow each other on both sides."""
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
    """`rank_metadata`: of the ranks' transports."""

    kv_heads: int
    tp: int
    page: ShardedPage
    rank_metadata: tuple[bytes, ...]


class RankLink(NamedTuple):
    """A link of rank `rank` here to one rank there. `source`: the prefill rank of the two; `part`:
    what it writes."""

    rank: int
    number: int
    source: int
    part: HeadSlice


@dataclass(slots=True, eq=False)
class LinkBundle:
    """One link of the worker: the links of its ranks, and the page of a rank there."""

    rank_links: list[RankLink]
    there: ShardedPage
    leaving: bool = False
    unsevered: set[int] = field(default_factory=set)  # of `rank_links`, once leaving


@dataclass(slots=True, eq=False)
class ShardedWrite:
    """A write. `pending`: its parts that have not completed, with the rank that writes each."""

    op: int
    link: int
    pending: dict[int, int]
    error: str = ""


class ShardedTransport:
    """`transports`: one for each rank, of one kind; the `wake` of each wakes the user of all."""

    def __init__(self, transports: Sequence[Transport]) -> None:
        self.kind = transports[0].kind
        self._transports = tuple(transports)
        self._memory: ShardedMemory | None = None
        self._links: dict[int, LinkBundle] = {}
        self._link_of: dict[int, int] = {}  # number of a rank's link -> link
        self._writes: dict[int, ShardedWrite] = {}  # by the op of each part
        # generation -> (rank, the rank's own generation) of those that are not quiet yet
        self._grants: dict[int, set[tuple[int, int]]] = {}
        self._revoked: deque[int] = deque()  # generations
        self._last_op = 0

    # ------------------------------------------------------------ the interface (transport.py)

    def register(self, memory: PagedMemory) -> bytes:
        assert isinstance(memory, ShardedMemory), "one pool needs no ShardedTransport"
        self._memory = memory
        rank_metadata = tuple(
            transport.register(part)
            for transport, part in zip(self._transports, memory.parts, strict=True)
        )
        layout = memory.layout
        return msgspec.msgpack.encode(
            ShardedPeerInfo(layout.kv_heads, layout.tp, memory.page, rank_metadata)
        )

    def connect(self, link: int, remote: int, metadata: bytes, writes: bool) -> None:
        assert self._memory is not None
        mine = self._memory
        try:
            peer = msgspec.msgpack.decode(metadata, type=ShardedPeerInfo)
            pairs = self._rank_pairs(peer, writes)
        except (msgspec.DecodeError, ValueError) as error:
            raise TransportError(f"the peer's ranks do not fit these: {error}") from None
        if (peer.kv_heads, peer.page) != (mine.layout.kv_heads, mine.page):
            raise TransportError(
                f"the peer's pages are {peer.page} of {peer.kv_heads} heads, those here {mine.page}"
            )
        bundle = LinkBundle([], mine.rank_page(HeadLayout(peer.kv_heads, peer.tp)))
        self._links[link] = bundle
        for source, target, part in pairs:
            rank, other = (source, target) if writes else (target, source)
            rank_link = RankLink(rank, rank_number(link, source, target), source, part)
            there = rank_number(remote, source, target)
            try:
                self._transports[rank].connect(
                    rank_link.number, there, peer.rank_metadata[other], writes
                )
            except TransportError:
                self.disconnect(link)
                raise
            bundle.rank_links.append(rank_link)
            self._link_of[rank_link.number] = link

    def _rank_pairs(self, peer: ShardedPeerInfo, writes: bool) -> list[tuple[int, int, HeadSlice]]:
        """(prefill rank, decode rank, what the one writes to the other)."""
        assert self._memory is not None
        if not 0 < peer.tp < MAX_RANKS or len(peer.rank_metadata) != peer.tp:
            raise ValueError(f"{len(peer.rank_metadata)} pools of {peer.tp} ranks")
        mine = self._memory.layout
        theirs = mine._replace(tp=peer.tp)
        source, target = (mine, theirs) if writes else (theirs, mine)
        return [
            (source_rank, target_rank, part)
            for source_rank in range(source.tp)
            for target_rank in range(target.tp)
            for part in plan_slices(source, target, source_rank, target_rank)
        ]

    def grant(self, link: int, generation: int, pages: Sequence[int]) -> None:
        bundle = self._links.get(link)
        rank_links = bundle.rank_links if bundle is not None else []
        self._grants[generation] = {
            (each.rank, rank_generation(generation, each)) for each in rank_links
        }
        for each in rank_links:
            own = rank_generation(generation, each)
            self._transports[each.rank].grant(each.number, own, pages)

    def revoke(self, generation: int) -> None:
        for rank, own in tuple(self._grants.get(generation, ())):
            self._transports[rank].revoke(own)
        self._revoked.append(generation)
        if len(self._revoked) > MAX_REVOKED:  # some transports never give Quiesced
            self._grants.pop(self._revoked.popleft(), None)

    def write(self, link: int, generation: int, spans: Spans, op: int) -> None:
        assert self._memory is not None
        bundle = self._links.get(link)
        if bundle is None or bundle.leaving:
            return
        first = self._last_op + 1
        self._last_op += len(bundle.rank_links)
        numbered = tuple(enumerate(bundle.rank_links, first))
        write = ShardedWrite(op, link, {part_op: each.rank for part_op, each in numbered})
        self._writes |= dict.fromkeys(write.pending, write)
        whole, here = self._memory.page, self._memory.rank_page()
        for part_op, each in numbered:
            parts = head_spans(spans, whole, here, bundle.there, each.part)
            own = rank_generation(generation, each)
            self._transports[each.rank].write(each.number, own, parts, part_op)

    def cancel(self, op: int) -> None:
        for part_op, write in tuple(self._writes.items()):
            if write.op == op:
                self._transports[write.pending[part_op]].cancel(part_op)

    def disconnect(self, link: int) -> None:
        bundle = self._links.get(link)
        if bundle is None or bundle.leaving:
            return
        bundle.leaving = True
        bundle.unsevered = {each.number for each in bundle.rank_links}
        self._writes = {op: write for op, write in self._writes.items() if write.link != link}
        if not bundle.rank_links:
            del self._links[link]
        for each in bundle.rank_links:
            self._transports[each.rank].disconnect(each.number)

    def poll(self) -> list[Notice]:
        found = (
            self._on_notice(rank, notice)
            for rank, transport in enumerate(self._transports)
            for notice in transport.poll()
        )
        return [notice for notice in found if notice is not None]

    def close(self) -> None:
        for transport in self._transports:
            transport.close()

    # ------------------------------------------------------------ from many notices to one

    def _on_notice(self, rank: int, notice: Notice) -> Notice | None:
        """The worker's notice, if this one of a rank was the last that it needs."""
        if isinstance(notice, Completed):
            return self._on_completed(notice)
        if isinstance(notice, Quiesced):
            return self._on_quiesced(rank, notice)
        link = self._link_of.get(notice.link)
        if link is None:
            return None
        bundle = self._links[link]
        if isinstance(notice, LinkLost):
            return None if bundle.leaving else LinkLost(link, f"rank {rank}: {notice.error}")
        bundle.unsevered.discard(notice.link)
        if bundle.unsevered or not bundle.leaving:
            return None
        for each in bundle.rank_links:
            del self._link_of[each.number]
        del self._links[link]
        return LinkSevered(link)

    def _on_quiesced(self, rank: int, notice: Quiesced) -> Quiesced | None:
        generation = notice.generation // MAX_RANKS
        pending = self._grants.get(generation)
        if pending is None:
            return None
        pending.discard((rank, notice.generation))
        if pending:
            return None
        del self._grants[generation]
        return Quiesced(generation)

    def _on_completed(self, notice: Completed) -> Completed | None:
        write = self._writes.pop(notice.op, None)
        if write is None:
            return None
        del write.pending[notice.op]
        write.error = write.error or notice.error
        return None if write.pending else Completed(write.op, write.error)


def rank_generation(generation: int, rank_link: RankLink) -> int:
    """The generation under which one prefill rank writes."""
    return generation * MAX_RANKS + rank_link.source


def rank_number(link: int, source: int, target: int) -> int:
    """The number of a rank's link, of 63 bits."""
    text = repr((link, source, target)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1
