"""Grammars: which tokens may come next in the slots whose answers must obey one.

Owns: the vocabulary as llguidance wants it, the compiled grammars, a matcher for each slot that has one. Promises: a slot without a
grammar costs nothing, an engine that never sees one nothing at all; a matcher follows its slot's tokens however they came (sampled
here, or before a preemption, or by another engine); what a grammar may cost is bounded; one that costs more allows
nothing (and its request fails, alone), any other at least one token.
Must not: sample, know a schema, import torch.

What wins: the grammar, then `min_tokens` and `ignore_eos`. These keep the end away as long as the grammar has anything else.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from counterpoint.types import Sampling

if TYPE_CHECKING:  # imported with the first grammar: who sees none need not have it
    from llguidance import LLMatcher, LLTokenizer

log = logging.getLogger(__name__)

KEPT_CHARACTERS = (
    2**20
)  # of grammars that are kept compiled, the latest used: at some 150 bytes a character


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`tokens`: the bytes that each id adds to a text, b"" for none. `special` ids are marks, not text. `encode`: the ids of a
    text, nothing put around it."""

    tokens: Sequence[bytes]
    special: Sequence[int]
    encode: Callable[[str], Sequence[int]]


@dataclass(slots=True, eq=False)
class SlotGrammar:
    """A slot's answer. `unread` tokens of it are still to be followed by `matcher`, which is made of `compiled` with the first
    mask. `stops`: the mask of its stop tokens."""

    sampling: Sampling
    unread: list[int]
    stops: np.ndarray
    compiled: LLMatcher | None
    matcher: LLMatcher | None = None


class Grammars:
    """`vocab` and `eos_token_ids` as in Settings. One of the threads that run steps has a slot at a time."""

    def __init__(self, vocab: int, eos_token_ids: Sequence[int]) -> None:
        self.vocab = vocab
        self.eos_token_ids = tuple(id for id in eos_token_ids if id < vocab)
        self._eos = self._mask_of(self.eos_token_ids)
        self._load: Callable[[], Vocabulary] | None = None
        self._tokenizer: LLTokenizer | None = None
        self._loading = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._characters = 0  # of the keys of `_compiled`
        self._keeping = threading.Lock()  # of both
        self._slots: dict[int, SlotGrammar] = {}

    def set_vocabulary_loader(self, load: Callable[[], Vocabulary]) -> None:
        """Where the vocabulary is to be had. It is asked for when the first grammar comes."""
        self._load = load

    # ------------------------------------------------------------ grammars

    def is_compiled(self, grammar: str) -> bool:
        """It can be used without delay ("": there is none)."""
        return not grammar or grammar in self._compiled

    def compile(self, grammar: str) -> LLMatcher:
        """Compile it now, if it is not yet. What is wrong with it shows when it is used."""
        known = self._known(grammar)
        if known is not None:
            return known
        matcher = compile_grammar(grammar, self._ready_tokenizer())
        with self._keeping:
            self._characters += len(grammar) * (grammar not in self._compiled)
            self._compiled[grammar] = matcher
            while self._characters > KEPT_CHARACTERS:
                self._characters -= len(self._compiled.popitem(last=False)[0])
        return matcher

    def _known(self, grammar: str) -> LLMatcher | None:
        with self._keeping:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
            return self._compiled.get(grammar)

    def _ready_tokenizer(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                if self._load is None:
                    raise RuntimeError("nobody has said where the vocabulary is to be had")
                self._tokenizer = make_tokenizer(self._load(), self.vocab, self.eos_token_ids)
            return self._tokenizer

    # ------------------------------------------------------------ slots

    def init_slot(self, slot: int, sampling: Sampling, output: Sequence[int] = ()) -> None:
        """The slot has a new answer, of which `output` is there already."""
        self._slots.pop(slot, None)
        if sampling.grammar:
            stops = self._mask_of([id for id in sampling.stop_token_ids if id < self.vocab])
            self._slots[slot] = SlotGrammar(
                sampling, list(output), stops, self._known(sampling.grammar)
            )

    def free_slot(self, slot: int) -> None:
        """The slot's answer is over."""
        self._slots.pop(slot, None)

    def accept_tokens(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """These tokens were sampled."""
        if not self._slots:
            return
        for slot, token in zip(slots, tokens, strict=True):
            bound = self._slots.get(slot)
            if bound is not None:
                bound.unread.append(token)

    def compute_bitmasks(self, slots: Sequence[int], counts: Sequence[int]) -> np.ndarray:
        """Which tokens may come next, as bits [R, ceil(vocab / 8)], the lowest first. `counts`: how many tokens each answer has."""
        masks_RK = np.zeros((len(slots), len(self._eos)), np.uint8)
        for row, slot, count in zip(masks_RK, slots, counts, strict=True):
            bound = self._slots[slot]
            try:
                row[:] = self._allowed(bound)
            except Exception:  # the vocabulary could not be read, or the library fell
                log.exception("the grammar of slot %d cannot be followed", slot)
            sampling = bound.sampling
            if count < sampling.min_tokens:
                keep_on_(row, self._eos | bound.stops)
            elif sampling.ignore_eos:
                keep_on_(row, self._eos)
        return masks_RK

    def _allowed(self, bound: SlotGrammar) -> np.ndarray | int:
        """One answer's mask, 0 if nothing is allowed."""
        if bound.matcher is None:
            bound.matcher = (bound.compiled or self.compile(bound.sampling.grammar)).deep_copy()
        matcher = bound.matcher
        followed = matcher.consume_tokens(bound.unread)
        bound.unread.clear()
        mask = matcher.compute_bitmask() if followed else b""
        if matcher.is_error():
            log.info("a grammar cannot be followed: %s", matcher.get_error())
            return 0
        return np.frombuffer(mask, np.uint8)[: len(self._eos)]

    def _mask_of(self, ids: Sequence[int]) -> np.ndarray:
        bits = np.zeros(self.vocab, bool)
        bits[list(ids)] = True
        return np.packbits(bits, bitorder="little")


def keep_on_(mask_K: np.ndarray, ends_K: np.ndarray) -> None:
    """Forbid the ends, if anything else is allowed."""
    others_K = mask_K & ~ends_K
    if others_K.any():
        mask_K[:] = others_K


def make_tokenizer(vocabulary: Vocabulary, vocab: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """The vocabulary for llguidance: `vocab` ids, whatever the tokeniser has. Takes some tenths of a second."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(
        TokenizerWrapper(TokenizerAdapter(vocabulary, vocab, eos_token_ids)),
        n_vocab=vocab,
        eos_token=list(eos_token_ids),
    )


class TokenizerAdapter:
    """What TokenizerWrapper asks of a tokeniser."""

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
    """Never raises for what is in the grammar: the matcher tells (`is_error`). Releases the interpreter lock."""
    from llguidance import LLMatcher, LLParserLimits

    # A mask takes some ten microseconds; these bound it to about 100 ms, and a request's memory to about 60 MB.
    limits = LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=100_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
