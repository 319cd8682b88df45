"""A fake engine for handoffs: it admits, prefills in pieces and decodes, and its KV is checkable.

The KV of a page encodes its tokens and layer. It treats parts of requests (DisaggRole) as
core/engine.py does, and checks the KV of what it adopts.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from counterpoint.core.page_pool import PagePool
from counterpoint.kv_transfer.memory import KvMemory
from counterpoint.kv_transfer.sharded import ShardedMemory
from counterpoint.types import (
    Abort,
    AddRequest,
    Admitted,
    Computed,
    DisaggRole,
    FinishReason,
    OutputDelta,
    Release,
    ResumeDecode,
)

LAYERS, PAGE_TOKENS, WORD_BYTES = 3, 4, 8
MASK = (1 << 64) - 1


def token_at(arrive: AddRequest, position: int) -> int:
    """The answer's token at `position`, whoever computes it."""
    return hash((arrive.prompt, position)) % 997


def kv_hashes(tokens: tuple[int, ...]) -> list[int]:
    """What the KV of each page of `tokens` must be (before the layer is mixed in)."""
    return [
        hash(tokens[: start + PAGE_TOKENS]) & MASK for start in range(0, len(tokens), PAGE_TOKENS)
    ]


@dataclass(slots=True, eq=False)
class RequestPart:
    """A request's part in a FakeEngine."""

    arrive: AddRequest
    page_hashes: list[int]
    pages: list[int] = field(default_factory=list)
    tokens: int = 0
    ahead: int = 0
    layers: int = 0
    output: int = 0  # tokens it has given
    admitted: bool = False
    decoding: bool = False
    over: bool = False  # gives nothing more; pages stay until Release

    @property
    def total(self) -> int:
        return len(self.arrive.prompt) + len(self.arrive.generated_prefix)


def plain_memory(pages: int, page_bytes: int = WORD_BYTES) -> KvMemory:
    return KvMemory(
        tuple(np.zeros(pages * page_bytes, np.uint8) for _ in range(2 * LAYERS)), page_bytes
    )


class ShardedWords:
    """A region of a pool that is cut over ranks, as the words of whole pages. A head's are told
    apart by its number on top."""

    def __init__(self, shards: ShardedMemory, region: int) -> None:
        layout, page = shards.layout, shards.page
        self.parts = []  # the words of a rank, and what is on top of them
        for rank, part in enumerate(shards.parts):
            words = (
                part.regions[region]
                .view(np.uint64)
                .reshape(part.pages, page.tokens, len(layout.heads(rank)), -1)
            )
            self.parts.append((words, np.array(layout.heads(rank), np.uint64)[:, None]))

    def __setitem__(self, page: int, word: int) -> None:
        for words, tops in self.parts:
            words[page] = np.uint64(word) + tops

    def __getitem__(self, pages: list[int]) -> NDArray[np.uint64]:
        return np.concatenate(
            [(words[pages] - tops).reshape(len(pages), -1) for words, tops in self.parts], axis=1
        )


class FakeEngine:
    """The part of an engine that the handoff sees. A page of a region is `page_bytes` bytes: one
    8-byte word, repeated."""

    def __init__(self, memory: KvMemory | ShardedMemory, rng: random.Random) -> None:
        self.rng = rng
        self.memory = memory
        self.pool = PagePool(memory.pages)
        self.kv: list[Any]
        if isinstance(memory, ShardedMemory):
            self.kv = [ShardedWords(memory, region) for region in range(2 * memory.layers)]
        else:
            self.kv = [
                region.view(np.uint64).reshape(memory.pages, -1) for region in memory.regions
            ]
        self.parts: dict[str, RequestPart] = {}
        self.waiting: list[RequestPart] = []
        self.active: list[RequestPart] = []
        self.out: list = []
        self.closed: set[DisaggRole] = set()  # parts that are not admitted now

    def handle(self, event: AddRequest | Abort | ResumeDecode | Release) -> None:
        if isinstance(event, AddRequest):
            assert event.id not in self.parts
            piece = RequestPart(event, kv_hashes((*event.prompt, *event.generated_prefix)))
            if len(piece.page_hashes) > self.pool.total:
                self.out.append(
                    OutputDelta(event.id, finish_reason=FinishReason.ERROR, error="too long")
                )
                return
            self.parts[event.id] = piece
            self.waiting.append(piece)
            self.admit()
            return
        piece = self.parts.get(event.id)
        if piece is None:
            return
        if isinstance(event, Release):
            assert not piece.decoding, "released after it was adopted"
            self.drop(piece)
        elif isinstance(event, ResumeDecode):
            assert piece.admitted and not piece.decoding
            piece.decoding, piece.output, piece.tokens = True, 1, piece.total
            assert event.token == token_at(piece.arrive, len(piece.arrive.generated_prefix))
            self.check_kv(piece)
            self.active.append(piece)
            self.publish(piece)
        else:
            self.stop(piece, FinishReason.ABORT)

    def admit(self) -> None:
        while self.waiting:
            piece = self.waiting[0]
            if piece.arrive.disagg_role in self.closed:
                return
            full = piece.page_hashes[: piece.total // PAGE_TOKENS]
            if piece.arrive.disagg_role is not DisaggRole.DECODE:
                full = full[: (piece.total - 1) // PAGE_TOKENS]
            hits = self.pool.match([str(name).encode() for name in full])
            fresh = len(piece.page_hashes) - len(hits)
            if fresh > self.pool.available - self.pool.count_evictable(hits):
                return
            self.pool.ref(hits)
            taken = self.pool.allocate(fresh)
            assert taken is not None
            for page in taken:  # what was there before is gone
                for words in self.kv:
                    words[page] = 0
            piece.pages = hits + taken
            piece.tokens = piece.ahead = len(hits) * PAGE_TOKENS
            piece.admitted = True
            self.waiting.pop(0)
            if piece.arrive.disagg_role is not DisaggRole.DECODE:
                self.active.append(piece)
            if piece.arrive.disagg_role is not DisaggRole.WHOLE:
                self.out.append(Admitted(piece.arrive.id, tuple(piece.pages), len(hits)))

    def work(self) -> bool:
        """One layer group of a prompt, or one token."""
        if not self.active:
            return False
        piece = self.rng.choice(self.active)
        if piece.decoding:
            self.token(piece)
        else:
            self.prefill(piece)
        return True

    def prefill(self, piece: RequestPart) -> None:
        if piece.layers in (0, LAYERS):
            piece.layers = 0
            piece.ahead = min(piece.total, piece.tokens + self.rng.randint(1, 9))
        first, piece.layers = piece.layers, min(LAYERS, piece.layers + self.rng.randint(1, LAYERS))
        for index in range(piece.tokens // PAGE_TOKENS, -(-piece.ahead // PAGE_TOKENS)):
            whole = (index + 1) * PAGE_TOKENS <= piece.ahead or piece.ahead == piece.total
            for region in range(2 * first, 2 * piece.layers):
                self.kv[region][piece.pages[index]] = (
                    ((piece.page_hashes[index] + region) & MASK) if whole else 1
                )
        part = piece.arrive.disagg_role is DisaggRole.PREFILL
        if piece.layers < LAYERS:
            self.out += [Computed(piece.arrive.id, piece.tokens, piece.ahead, piece.layers)] * part
            return
        piece.tokens = piece.ahead
        self.publish(piece)
        self.out += [Computed(piece.arrive.id, piece.tokens, piece.tokens, 0)] * part
        if piece.tokens == piece.total:
            piece.decoding = not part
            self.token(piece)
            if part and piece in self.active:
                self.active.remove(piece)

    def token(self, piece: RequestPart) -> None:
        position = len(piece.arrive.generated_prefix) + piece.output
        piece.output += 1
        finish = FinishReason.LENGTH if position + 1 >= piece.arrive.sampling.max_tokens else None
        self.out.append(
            OutputDelta(piece.arrive.id, (token_at(piece.arrive, position),), finish_reason=finish)
        )
        if finish is not None:
            self.stop(piece, None)

    def stop(self, piece: RequestPart, finish: FinishReason | None) -> None:
        if piece.over:
            return
        piece.over = True
        if piece in self.active:
            self.active.remove(piece)
        if piece in self.waiting:
            self.waiting.remove(piece)
        if finish is not None:
            self.out.append(OutputDelta(piece.arrive.id, finish_reason=finish))
        if piece.decoding:
            self.check_kv(piece)
        if piece.decoding or piece.arrive.disagg_role is DisaggRole.WHOLE:
            self.drop(piece)

    def drop(self, piece: RequestPart) -> None:
        del self.parts[piece.arrive.id]
        if piece in self.active:
            self.active.remove(piece)
        if piece in self.waiting:
            self.waiting.remove(piece)
        self.pool.release(piece.pages)
        self.admit()

    def publish(self, piece: RequestPart) -> None:
        for index in range(piece.tokens // PAGE_TOKENS):
            self.pool.register(piece.pages[index], str(piece.page_hashes[index]).encode())

    def check_kv(self, piece: RequestPart) -> None:
        for region, words in enumerate(self.kv):
            want = [(name + region) & MASK for name in piece.page_hashes]
            got = words[piece.pages]
            assert got[:, 0].tolist() == want and (got == got[:, :1]).all(), (
                f"the KV of {piece.arrive.id!r} differs"
            )

    def check(self, ledger) -> None:
        held = Counter(page for piece in self.parts.values() for page in piece.pages)
        self.pool.check(held)
        ledger.check(held, self.pool._free)
