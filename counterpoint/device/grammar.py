"""Grammars: which tokens may come next in the slots whose answers must obey one.

Owns: the vocabulary in llguidance's form, the compiled grammars, a matcher for each slot that has
one, and the gate where requests wait until their grammars are compiled.
Promises: slots without a grammar cost nothing. A matcher follows its slot's tokens wherever they
came from: sampled here, before a preemption, or by another engine. A grammar's cost is bounded; one
that costs more allows nothing, and its request fails alone. Any other allows at least one token.
Must not: sample, know a JSON schema, import torch.

Precedence: the grammar, then `min_tokens` and `ignore_eos`. These forbid the end as long as the
grammar allows anything else.
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from counterpoint.device.event_queue import WallClockEventQueue
from counterpoint.types import Abort, AddRequest, Release, ResumeDecode, Sampling

if TYPE_CHECKING:  # imported with the first grammar: without grammars it need not be installed
    from llguidance import LLMatcher, LLTokenizer

log = logging.getLogger(__name__)

CACHE_CHARACTERS = 2**20  # of compiled grammars, at some 150 bytes a character
COMPILE_STACK_BYTES = 64 << 20  # a grammar may nest deeply
COMPILE_NICENESS = 10

ClientEvent = AddRequest | Abort | ResumeDecode | Release


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`tokens`: the bytes that each id adds to a text, b"" for none. `special` ids are control
    tokens, not text. `encode`: the ids of a text, without any around it."""

    tokens: Sequence[bytes]
    special: Sequence[int]
    encode: Callable[[str], Sequence[int]]


@dataclass(slots=True, eq=False)
class SlotGrammar:
    """A slot's answer. `matcher` has not consumed `pending` tokens of it yet; it is made from
    `compiled` with the first bitmask. `stop_mask`: the request's own stop tokens."""

    sampling: Sampling
    pending: list[int]
    stop_mask: np.ndarray
    compiled: LLMatcher | None
    matcher: LLMatcher | None = None


class Grammars:
    """`vocab` and `eos_token_ids` as in SamplingTables. Only one of the threads that run steps uses
    a slot at a time."""

    def __init__(self, vocab: int, eos_token_ids: Sequence[int]) -> None:
        self.vocab = vocab
        self.eos_token_ids = tuple(id for id in eos_token_ids if id < vocab)
        self._eos_mask = self._mask_of(self.eos_token_ids)
        self._load: Callable[[], Vocabulary] | None = None
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # least recently used first
        self._characters = 0  # of the keys of `_compiled`
        self._compiled_lock = threading.Lock()  # of both
        self._slots: dict[int, SlotGrammar] = {}

    def set_vocabulary_loader(self, load: Callable[[], Vocabulary]) -> None:
        """`load` is called when the first grammar comes."""
        self._load = load

    # ------------------------------------------------------------ compiled grammars

    def is_compiled(self, grammar: str) -> bool:
        """Whether it can be used without delay ("": there is none)."""
        return not grammar or grammar in self._compiled

    def compile(self, grammar: str) -> LLMatcher:
        """Compile it now, unless it is compiled. An error in the grammar shows when it is used."""
        cached = self._cached(grammar)
        if cached is not None:
            return cached
        matcher = compile_grammar(grammar, self._get_tokenizer())
        with self._compiled_lock:
            self._characters += len(grammar) * (grammar not in self._compiled)
            self._compiled[grammar] = matcher
            while self._characters > CACHE_CHARACTERS:
                self._characters -= len(self._compiled.popitem(last=False)[0])
        return matcher

    def _cached(self, grammar: str) -> LLMatcher | None:
        with self._compiled_lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
            return self._compiled.get(grammar)

    def _get_tokenizer(self) -> LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                if self._load is None:
                    raise RuntimeError("no vocabulary: call set_vocabulary_loader first")
                self._tokenizer = make_tokenizer(self._load(), self.vocab, self.eos_token_ids)
            return self._tokenizer

    # ------------------------------------------------------------ slots

    def init_slot(self, slot: int, sampling: Sampling, output: Sequence[int] = ()) -> None:
        """Start the slot's answer, of which `output` exists already."""
        self._slots.pop(slot, None)
        if sampling.grammar:
            stop_mask = self._mask_of([id for id in sampling.stop_token_ids if id < self.vocab])
            compiled = self._cached(sampling.grammar)
            self._slots[slot] = SlotGrammar(sampling, list(output), stop_mask, compiled)

    def free_slot(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def accept_tokens(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """These tokens were sampled, one per slot."""
        if not self._slots:
            return
        for slot, token in zip(slots, tokens, strict=True):
            if slot in self._slots:
                self._slots[slot].pending.append(token)

    def compute_bitmasks(self, slots: Sequence[int], counts: Sequence[int]) -> np.ndarray:
        """Which tokens may come next, as bits [R, ceil(vocab / 8)], the lowest first. `counts`:
        tokens in each answer so far."""
        masks_RK = np.zeros((len(slots), len(self._eos_mask)), np.uint8)
        for row, slot, count in zip(masks_RK, slots, counts, strict=True):
            state = self._slots[slot]
            try:
                row[:] = self._allowed(state)
            except Exception:  # the vocabulary could not be read, or the library failed
                log.exception("the grammar of slot %d cannot be followed", slot)
            if count < state.sampling.min_tokens:
                forbid_ends_(row, self._eos_mask | state.stop_mask)
            elif state.sampling.ignore_eos:
                forbid_ends_(row, self._eos_mask)
        return masks_RK

    def _allowed(self, state: SlotGrammar) -> np.ndarray | int:
        """One answer's mask, 0 if nothing is allowed."""
        if state.matcher is None:
            state.matcher = (state.compiled or self.compile(state.sampling.grammar)).deep_copy()
        matcher = state.matcher
        accepted = matcher.consume_tokens(state.pending)
        state.pending.clear()
        mask = matcher.compute_bitmask() if accepted else b""
        if matcher.is_error():
            log.info("a grammar cannot be followed: %s", matcher.get_error())
            return 0
        return np.frombuffer(mask, np.uint8)[: len(self._eos_mask)]

    def _mask_of(self, ids: Sequence[int]) -> np.ndarray:
        bits = np.zeros(self.vocab, bool)
        bits[list(ids)] = True
        return np.packbits(bits, bitorder="little")


def forbid_ends_(mask_K: np.ndarray, ends_K: np.ndarray) -> None:
    """Clear the ends from `mask_K`, if anything else is allowed."""
    others_K = mask_K & ~ends_K
    if others_K.any():
        mask_K[:] = others_K


# ---------------------------------------------------------------- llguidance


def make_tokenizer(vocabulary: Vocabulary, vocab: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """The vocabulary for llguidance: `vocab` ids, however many the tokeniser has. Takes some tenths
    of a second."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(
        TokenizerWrapper(TokenizerAdapter(vocabulary, vocab, eos_token_ids)),
        n_vocab=vocab,
        eos_token=list(eos_token_ids),
    )


class TokenizerAdapter:
    """The interface that TokenizerWrapper wants."""

    def __init__(self, vocabulary: Vocabulary, vocab: int, eos_token_ids: Sequence[int]) -> None:
        known = list(vocabulary.tokens[:vocab])
        self.tokens = known + [b""] * (vocab - len(known))
        self.special_token_ids = sorted(
            {id for id in (*vocabulary.special, *eos_token_ids) if id < vocab}
        )
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = None
        self._encode = vocabulary.encode

    def __call__(self, text: str) -> list[int]:
        return list(self._encode(text))


def compile_grammar(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Never raises for an error in the grammar: the matcher's `is_error` says so. Releases the
    GIL."""
    from llguidance import LLMatcher, LLParserLimits

    # A mask takes some ten microseconds; these bound it to about 100 ms, and a request's memory to
    # about 60 MB.
    limits = LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=100_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


# ---------------------------------------------------------------- the gate


class GrammarGate:
    """In front of `inbox`: holds a request until its grammar is compiled, by a thread of its own.

    Events of one request keep their order. A request without a grammar, or with a compiled one,
    passes at once. One whose grammar can't be compiled is delayed and fails where the grammar is
    used. Without `grammars`, everything passes. `put` from any thread; `close` waits for the
    thread's end."""

    def __init__(self, grammars: Grammars | None, inbox: WallClockEventQueue) -> None:
        self._grammars = grammars
        self._inbox = inbox
        self._lock = threading.Lock()  # of `_held`
        # By request id: its AddRequest, and the events that came after it.
        self._held: dict[str, list[ClientEvent]] = {}
        self._to_compile: queue.SimpleQueue[AddRequest | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, event: ClientEvent) -> None:
        with self._lock:
            held = self._held.get(event.id)
            if held is not None:
                held.append(event)
                return
            grammars = self._grammars
            if (
                grammars is None
                or not isinstance(event, AddRequest)
                or grammars.is_compiled(event.sampling.grammar)
            ):
                self._inbox.put(event)
                return
            self._held[event.id] = [event]
            if self._thread is None:
                self._thread = start_compile_thread(functools.partial(self._run, grammars))
        self._to_compile.put(event)

    def close(self) -> None:
        self._to_compile.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self, grammars: Grammars) -> None:
        if sys.platform == "linux":  # threads have a niceness of their own: give way to the lanes
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COMPILE_NICENESS)
        while (request := self._to_compile.get()) is not None:
            try:
                grammars.compile(request.sampling.grammar)
            except Exception:  # the vocabulary can't be read, say
                log.exception("the grammar of request %s cannot be compiled", request.id)
            with self._lock:
                for event in self._held.pop(request.id):
                    self._inbox.put(event)


def start_compile_thread(run: Callable[[], None]) -> threading.Thread:
    """A running thread with a stack of COMPILE_STACK_BYTES."""
    before = threading.stack_size(COMPILE_STACK_BYTES)
    try:
        thread = threading.Thread(target=run, name="grammars", daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    return thread
