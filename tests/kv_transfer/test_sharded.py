"""Links between workers with different numbers of ranks, against moving heads one by one."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from local_transport import LocalTransport
from numpy.typing import NDArray

from counterpoint.kv_transfer.head_mapping import HeadLayout, HeadSlice
from counterpoint.kv_transfer.memory import KvMemory, page_spans
from counterpoint.kv_transfer.sharded import (
    HeadOrder,
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
ORDERS: tuple[HeadOrder, ...] = ("token, head", "head, token")
SIZES = [
    (p, d, h) for p, d, h in itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4)) if p * d > 1
]


@dataclass
class Worker:
    """`heads[region, page, token, head]`: what its pool must hold."""

    heads: NDArray[np.uint8]
    memory: ShardedMemory
    transport: ShardedTransport
    metadata: bytes

    def held(self) -> NDArray[np.uint8]:
        """As `heads`, read from the ranks one by one. Ranks with the same head must agree."""
        layout = self.memory.layout
        found = np.zeros_like(self.heads)
        seen: set[int] = set()
        for rank, part in enumerate(self.memory.parts):
            mine = layout.heads(rank)
            for region, data in enumerate(part.regions):
                if self.memory.page.order == "token, head":
                    pages = data.reshape(PAGES, TOKENS, len(mine), HEAD_BYTES)
                else:
                    pages = data.reshape(PAGES, len(mine), TOKENS, HEAD_BYTES).transpose(0, 2, 1, 3)
                for index, head in enumerate(mine):
                    same = (found[region, :, :, head] == pages[:, :, index]).all()
                    assert head not in seen or same, "copies of a head differ"
                    found[region, :, :, head] = pages[:, :, index]
            seen |= set(mine)
        assert seen == set(range(layout.kv_heads))
        return found


def make_worker(
    name: str, layout: HeadLayout, order: HeadOrder, peers: dict[str, LocalTransport], seed: int
) -> Worker:
    heads = np.random.default_rng(seed).integers(
        0, 255, (2 * LAYERS, PAGES, TOKENS, layout.kv_heads, HEAD_BYTES), np.uint8
    )
    parts = []
    for rank in range(layout.tp):
        mine = heads[:, :, :, layout.heads(rank).start : layout.heads(rank).stop]
        placed = mine if order == "token, head" else mine.transpose(0, 1, 3, 2, 4)
        regions = tuple(np.ascontiguousarray(region).reshape(-1) for region in placed)
        parts.append(KvMemory(regions, mine[0, 0].size))
    page = ShardedPage(layout.kv_heads, TOKENS, HEAD_BYTES, order)
    memory = ShardedMemory(layout, page, tuple(parts))
    transport = ShardedTransport(
        [LocalTransport(lambda: None, f"{name}{rank}", peers) for rank in range(layout.tp)]
    )
    return Worker(heads, memory, transport, transport.register(memory))


def linked(
    p_tp: int, d_tp: int, kv_heads: int, order: HeadOrder = "token, head"
) -> tuple[Worker, Worker]:
    """A prefill and a decode worker, linked as 1 and 2."""
    peers: dict[str, LocalTransport] = {}
    p = make_worker("p", HeadLayout(kv_heads, p_tp), order, peers, 1)
    d = make_worker("d", HeadLayout(kv_heads, d_tp), order, peers, 2)
    d.transport.connect(2, 1, p.metadata, False)
    p.transport.connect(1, 2, d.metadata, True)
    return p, d


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("p_tp", "d_tp", "kv_heads"), SIZES)
def test_each_head_of_each_token_comes_to_its_place_and_nothing_else_changes(
    p_tp, d_tp, kv_heads, order
):
    p, d = linked(p_tp, d_tp, kv_heads, order)
    want, sources, destinations = d.heads.copy(), (4, 5, 0), (2, 3, 6)
    d.transport.grant(2, 9, destinations)
    p.transport.write(1, 9, p.memory.spans(1, 2, sources, destinations), 77)
    assert p.transport.poll() == [Completed(77)]
    for region in (2, 3):
        for source, target in zip(sources, destinations, strict=True):
            want[region, target] = p.heads[region, source]
    assert (d.held() == want).all()
    assert (p.held() == p.heads).all()


@pytest.mark.parametrize(
    ("order", "part", "count"),
    [
        # All heads: pages that follow each other are one span.
        ("token, head", HeadSlice(0, 4, 0), 1),
        # Some heads are contiguous within a token, or within a page.
        ("token, head", HeadSlice(1, 2, 0), 3 * TOKENS),
        ("head, token", HeadSlice(1, 2, 0), 3),
    ],
)
def test_spans_are_as_few_as_places_allow(order: HeadOrder, part: HeadSlice, count: int):
    here = ShardedPage(4, TOKENS, HEAD_BYTES, order)
    there = here._replace(heads=part.heads)
    spans = page_spans(here.bytes, 0, 1, (4, 5, 6), (1, 2, 3))
    made = head_spans(spans, here, here, there, part)
    assert len(made) == 2 * count and made[:, 3].sum() == 2 * 3 * there.bytes


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 4), (4, 1), (4, 2), (2, 4)])
def test_a_worker_writes_only_what_is_granted(p_tp, d_tp):
    p, d = linked(p_tp, d_tp, 4)
    d.transport.grant(2, 9, (2, 3))
    for op, generation, target in ((1, 9, 4), (2, 8, 2)):
        p.transport.write(1, generation, p.memory.spans(0, 2, (0,), (target,)), op)
        (done,) = p.transport.poll()
        assert isinstance(done, Completed) and done.op == op and "not granted" in done.error
    assert (d.held() == d.heads).all()
    d.transport.revoke(9)
    assert d.transport.poll() == [Quiesced(9)], "once, when every rank is quiet"
    p.transport.write(1, 9, p.memory.spans(0, 2, (0,), (2,)), 3)
    (done,) = p.transport.poll()
    assert isinstance(done, Completed) and "not granted" in done.error


class SlowTransport(LocalTransport):
    """Its notices are held back while `shut`."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.shut = True

    def poll(self):
        return [] if self.shut else super().poll()


def test_notices_wait_for_the_last_rank():
    peers: dict[str, LocalTransport] = {}
    p, d = (
        make_worker(name, HeadLayout(4, 2), "token, head", peers, n) for n, name in enumerate("pd")
    )
    for one in (p, d):
        one.transport = ShardedTransport(
            [
                LocalTransport(lambda: None, f"{id(one)}0", peers),
                SlowTransport(lambda: None, f"{id(one)}1", peers),
            ]
        )
        one.metadata = one.transport.register(one.memory)
    d.transport.connect(2, 1, p.metadata, False)
    p.transport.connect(1, 2, d.metadata, True)
    slow = [
        each
        for one in (p, d)
        for each in one.transport._transports
        if isinstance(each, SlowTransport)
    ]

    def toggle() -> None:
        for each in slow:
            each.shut = not each.shut

    d.transport.grant(2, 9, (1,))
    p.transport.write(1, 9, p.memory.spans(0, 2, (0,), (1,)), 5)
    assert p.transport.poll() == []
    toggle()
    assert p.transport.poll() == [Completed(5)]
    toggle()
    d.transport.revoke(9)
    assert d.transport.poll() == []
    toggle()
    assert d.transport.poll() == [Quiesced(9)]
    toggle()
    for one, link in ((p, 1), (d, 2)):
        one.transport.disconnect(link)
        one.transport.disconnect(link)
        assert one.transport.poll() == []
    toggle()
    assert p.transport.poll() == [LinkSevered(1)] and d.transport.poll() == [LinkSevered(2)]
    for one in (p, d):
        t = one.transport
        assert not (t._links or t._link_of or t._writes or t._grants), "something is remembered"


def test_a_rank_that_is_lost_loses_the_link():
    p, d = linked(2, 4, 4)
    bundle = d.transport._links[2]
    number = next(each.number for each in bundle.rank_links if each.rank == 3)
    d.transport._transports[3].disconnect(number)
    d.transport.grant(2, 9, (1,))
    p.transport.write(1, 9, p.memory.spans(0, 2, (0,), (1,)), 5)
    lost = [notice for notice in p.transport.poll() if isinstance(notice, LinkLost)]
    assert [notice.link for notice in lost] == [1] and "rank 1" in lost[0].error


def test_ranks_that_do_not_fit_are_refused():
    peers: dict[str, LocalTransport] = {}
    six = make_worker("six", HeadLayout(6, 3), "token, head", peers, 1)
    four = make_worker("four", HeadLayout(6, 2), "token, head", peers, 2)
    with pytest.raises(TransportError, match="must be a multiple"):
        six.transport.connect(1, 2, four.metadata, True)
    less = make_worker("less", HeadLayout(3, 3), "token, head", peers, 1)
    with pytest.raises(TransportError, match="heads"):
        six.transport.connect(1, 2, less.metadata, True)
    with pytest.raises(TransportError, match="do not fit"):
        six.transport.connect(1, 2, b"nonsense", True)
    assert not six.transport._links
