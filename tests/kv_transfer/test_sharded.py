"""Workers cut over different numbers of ranks: whole links between them, against moving heads one by one."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from counterpoint.kv_transfer.head_mapping import HeadLayout, HeadSlice
from counterpoint.kv_transfer.local import LocalTransport
from counterpoint.kv_transfer.memory import KvMemory, page_spans
from counterpoint.kv_transfer.sharded import (
    Order,
    ShardedMemory,
    ShardedPage,
    ShardedTransport,
    head_spans,
)
from counterpoint.kv_transfer.transport import (
    Completed,
    LinkLost,
    LinkSevered,
    Quiesced,
    TransportError,
)

LAYERS, PAGES, TOKENS, HEAD_BYTES = 2, 7, 3, 6
ORDERS: tuple[Order, ...] = ("token, head", "head, token")
CUTS = [
    (p, d, h) for p, d, h in itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4)) if p * d > 1
]


@dataclass
class Worker:
    """`heads[region, page, token, head]`: what its pool shall hold, and the link over its ranks."""

    heads: NDArray[np.uint8]
    shards: ShardedMemory
    link: ShardedTransport
    blob: bytes

    def holds(self) -> NDArray[np.uint8]:
        """As `heads`, read from the ranks one by one. Ranks with the same head must agree."""
        kv_heads = self.shards.layout.kv_heads
        found = np.zeros_like(self.heads)
        seen: set[int] = set()
        for rank, part in enumerate(self.shards.parts):
            mine = self.shards.layout.heads(rank)
            for region, data in enumerate(part.regions):
                if self.shards.page.order == "token, head":
                    pages = data.reshape(PAGES, TOKENS, len(mine), HEAD_BYTES)
                else:
                    pages = data.reshape(PAGES, len(mine), TOKENS, HEAD_BYTES).transpose(0, 2, 1, 3)
                for index, head in enumerate(mine):
                    assert (
                        head not in seen or (found[region, :, :, head] == pages[:, :, index]).all()
                    ), "copies of a head differ"
                    found[region, :, :, head] = pages[:, :, index]
            seen |= set(mine)
        assert seen == set(range(kv_heads))
        return found


def worker(
    name: str, tp: int, kv_heads: int, order: Order, others: dict[str, LocalTransport], seed: int
) -> Worker:
    heads = np.random.default_rng(seed).integers(
        0, 255, (2 * LAYERS, PAGES, TOKENS, kv_heads, HEAD_BYTES), np.uint8
    )
    layout, page = HeadLayout(kv_heads, tp), ShardedPage(kv_heads, TOKENS, HEAD_BYTES, order)
    parts = []
    for rank in range(tp):
        mine = heads[:, :, :, layout.heads(rank).start : layout.heads(rank).stop]
        placed = mine if order == "token, head" else mine.transpose(0, 1, 3, 2, 4)
        parts.append(
            KvMemory(
                tuple(np.ascontiguousarray(region).reshape(-1) for region in placed),
                mine[0, 0].size,
            )
        )
    shards = ShardedMemory(layout, page, tuple(parts))
    link = ShardedTransport(
        [LocalTransport(lambda: None, f"{name}{rank}", others) for rank in range(tp)]
    )
    return Worker(heads, shards, link, link.register(shards))


def two(p_tp: int, d_tp: int, kv_heads: int, order: Order = "token, head") -> tuple[Worker, Worker]:
    """A prefill and a decode worker, linked as 1 and 2."""
    others: dict[str, LocalTransport] = {}
    p, d = (
        worker("p", p_tp, kv_heads, order, others, 1),
        worker("d", d_tp, kv_heads, order, others, 2),
    )
    d.link.connect(2, 1, p.blob, False)
    p.link.connect(1, 2, d.blob, True)
    return p, d


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("p_tp", "d_tp", "kv_heads"), CUTS)
def test_each_head_of_each_token_comes_to_its_place_and_nothing_else_changes(
    p_tp, d_tp, kv_heads, order
):
    p, d = two(p_tp, d_tp, kv_heads, order)
    want, sources, destinations = d.heads.copy(), (4, 5, 0), (2, 3, 6)
    d.link.grant(2, 9, destinations)
    p.link.write(1, 9, p.shards.spans(1, 2, sources, destinations), 77)
    assert p.link.poll() == [Completed(77)]
    for region in (2, 3):
        for source, target in zip(sources, destinations, strict=True):
            want[region, target] = p.heads[region, source]
    assert (d.holds() == want).all()
    assert (p.holds() == p.heads).all()


@pytest.mark.parametrize(
    ("order", "part", "count"),
    [
        (
            "token, head",
            HeadSlice(0, 4, 0),
            1,
        ),  # all there is: pages that follow each other are one span
        ("token, head", HeadSlice(1, 2, 0), 3 * TOKENS),  # a slice is in one piece within a token
        ("head, token", HeadSlice(1, 2, 0), 3),  # or within a page
    ],
)
def test_spans_are_as_few_as_places_allow(order: Order, part: HeadSlice, count: int):
    here = ShardedPage(4, TOKENS, HEAD_BYTES, order)
    there = here._replace(heads=part.heads)
    spans = page_spans(here.bytes, 0, 1, (4, 5, 6), (1, 2, 3))
    made = head_spans(spans, here, here, there, part)
    assert len(made) == 2 * count and made[:, 3].sum() == 2 * 3 * there.bytes


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 4), (4, 1), (4, 2), (2, 4)])
def test_a_worker_writes_only_what_is_granted(p_tp, d_tp):
    p, d = two(p_tp, d_tp, 4)
    d.link.grant(2, 9, (2, 3))
    for op, generation, target in ((1, 9, 4), (2, 8, 2)):
        p.link.write(1, generation, p.shards.spans(0, 2, (0,), (target,)), op)
        (done,) = p.link.poll()
        assert isinstance(done, Completed) and done.op == op and "not granted" in done.error
    assert (d.holds() == d.heads).all()
    d.link.revoke(9)
    assert d.link.poll() == [Quiesced(9)], "once, when every rank is quiet"
    p.link.write(1, 9, p.shards.spans(0, 2, (0,), (2,)), 3)
    (done,) = p.link.poll()
    assert isinstance(done, Completed) and "not granted" in done.error


class Slow(LocalTransport):
    """Its notices come when they are let out."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.shut = True

    def poll(self):
        return [] if self.shut else super().poll()


def test_nothing_is_told_before_the_last_rank_has_said_it():
    others: dict[str, LocalTransport] = {}
    p, d = (worker(name, 2, 4, "token, head", others, n) for n, name in enumerate("pd"))
    for one in (p, d):
        one.link = ShardedTransport(
            [
                LocalTransport(lambda: None, f"{id(one)}0", others),
                Slow(lambda: None, f"{id(one)}1", others),
            ]
        )
        one.blob = one.link.register(one.shards)
    d.link.connect(2, 1, p.blob, False)
    p.link.connect(1, 2, d.blob, True)
    slow = [mover for one in (p, d) for mover in one.link._movers if isinstance(mover, Slow)]

    def let_out() -> None:
        for mover in slow:
            mover.shut = not mover.shut

    d.link.grant(2, 9, (1,))
    p.link.write(1, 9, p.shards.spans(0, 2, (0,), (1,)), 5)
    assert p.link.poll() == []
    let_out()
    assert p.link.poll() == [Completed(5)]
    let_out()
    d.link.revoke(9)
    assert d.link.poll() == []
    let_out()
    assert d.link.poll() == [Quiesced(9)]
    let_out()
    for one, link in ((p, 1), (d, 2)):
        one.link.disconnect(link)
        one.link.disconnect(link)
        assert one.link.poll() == []
    let_out()
    assert p.link.poll() == [LinkSevered(1)] and d.link.poll() == [LinkSevered(2)]
    for one in (p, d):
        assert not (one.link._links or one.link._link_of or one.link._writes or one.link._grants), (
            "something is remembered"
        )


def test_a_rank_that_is_lost_loses_the_link():
    p, d = two(2, 4, 4)
    d.link._movers[3].disconnect(
        next(strand.number for strand in d.link._links[2].strands if strand.rank == 3)
    )
    d.link.grant(2, 9, (1,))
    p.link.write(1, 9, p.shards.spans(0, 2, (0,), (1,)), 5)
    lost = [notice for notice in p.link.poll() if isinstance(notice, LinkLost)]
    assert [notice.link for notice in lost] == [1] and "rank 1" in lost[0].error


def test_cuts_that_do_not_fit_are_refused():
    others: dict[str, LocalTransport] = {}
    six, four = (
        worker("six", 3, 6, "token, head", others, 1),
        worker("four", 2, 6, "token, head", others, 2),
    )
    with pytest.raises(TransportError, match="must be a multiple"):
        six.link.connect(1, 2, four.blob, True)
    less = worker("less", 3, 3, "token, head", others, 1)
    with pytest.raises(TransportError, match="heads"):
        six.link.connect(1, 2, less.blob, True)
    with pytest.raises(TransportError, match="cut"):
        six.link.connect(1, 2, b"nonsense", True)
    assert not six.link._links
