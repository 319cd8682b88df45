"""From one choice's OutputDeltas to what the client gets: text, log-probabilities, finish reason.

Promises: no part of a stop string is released, nor text that could become one; the text does not
depend on how tokens are cut into deltas; nothing follows the piece with a finish reason. Must not:
know HTTP, asyncio, or an API's fields.
"""

from __future__ import annotations

import codecs
import dataclasses
from collections import deque
from collections.abc import Callable, Sequence

from counterpoint.serve.output_parsing.output_parser import (
    CallStart,
    ContentDelta,
    OutputParser,
    OutputPart,
    PlainParser,
    join_parts,
)
from counterpoint.serve.text.tokenizer import ModelTokenizer
from counterpoint.types import FinishReason, OutputDelta, TokenLogprobs

PROMPT_TAIL_TOKENS = 4  # a character has at most four bytes
# UTF-8 bytes that continue a character.
CONTINUATION_BYTES = frozenset(bytes([byte]) for byte in range(0x80, 0xC0))


class StopStrings:
    """Cuts a growing text at the first stop string in it.

    The match whose end comes first wins (of those, the longest), however the text is cut.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self.stops = tuple(stops)
        self.include = include
        self.held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """(text to release, the stop string found or None). After a match, nothing is held."""
        if not self.stops:
            return text, None
        text = self.held + text
        found = [(at + len(stop), at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            end, start, stop = min(found)
            self.held = ""
            return text[: end if self.include else start], stop
        keep = self._partial_match_length(text)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """Releases what was held back, when no more text comes."""
        text, self.held = self.held, ""
        return text

    def _partial_match_length(self, text: str) -> int:
        """Length of the longest suffix of `text` that begins a stop string."""
        longest = max(len(stop) for stop in self.stops) - 1
        for size in range(min(longest, len(text)), 0, -1):
            suffix = text[len(text) - size :]
            if any(stop.startswith(suffix) for stop in self.stops):
                return size
        return 0


@dataclasses.dataclass(frozen=True, slots=True)
class LogprobEntry:
    """A token with its log-probabilities. [start, end): its characters in the choice's text."""

    token: int
    logprobs: TokenLogprobs | None
    start: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class OutputPiece:
    """What one delta gave, maybe nothing.

    `num_tokens`: the delta's tokens. `finish_reason`: "stop", "length", "abort" or "error".
    `stop_reason`: a stop string or token id. `needs_abort`: the engine still runs the request.
    """

    parts: tuple[OutputPart, ...] = ()
    logprob_entries: tuple[LogprobEntry, ...] = ()
    num_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    needs_abort: bool = False
    error: str = ""

    @property
    def text(self) -> str:
        """The content in `parts`."""
        return "".join(part.text for part in self.parts if isinstance(part, ContentDelta))


@dataclasses.dataclass(frozen=True, slots=True)
class OutputOptions:
    """How a choice's tokens are shown.

    `make_parser` makes what separates reasoning and calls from content; stop strings apply to
    content alone. `parser_token_ids`: special tokens that the parser must see. `discard_tokens`:
    the client wants only what concerns the prompt.
    """

    stop_strings: tuple[str, ...] = ()
    include_stop_string: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    logprobs: bool = False
    discard_tokens: bool = False
    make_parser: Callable[[], OutputParser] = PlainParser
    parser_token_ids: frozenset[int] = frozenset()


class OutputProcessor:
    """One choice. `reasoning_tokens` and `num_calls` are counts so far."""

    def __init__(
        self, tokenizer: ModelTokenizer, options: OutputOptions, prompt: Sequence[int] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self.options = options
        self.token_ids: list[int] = []
        self.cached_tokens = 0
        self.reasoning_tokens = 0
        self.num_calls = 0
        # Of the prompt's last tokens, as many as the engine sent.
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.finished = False
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._parser = options.make_parser()
        self._stops = StopStrings(options.stop_strings, options.include_stop_string)
        self._entries: deque[LogprobEntry] = deque()
        self._num_characters = 0  # decoded so far
        # The first token may complete a character that the prompt began.
        for token in prompt[-PROMPT_TAIL_TOKENS:]:
            self._decode_token(token)

    def feed(self, delta: OutputDelta) -> OutputPiece:
        """Processes the next delta. After the piece with `finish_reason`, pieces are empty."""
        if self.finished:
            return OutputPiece()
        self.cached_tokens = delta.cached_tokens or self.cached_tokens
        self.prompt_logprobs += delta.prompt_logprobs or ()
        parts: list[OutputPart] = []
        for count, token in enumerate(delta.tokens, 1):
            self.token_ids.append(token)
            ends_answer = count == len(delta.tokens) and delta.stop_reason is not None
            if self.options.discard_tokens or (
                ends_answer and not self.options.include_stop_string
            ):
                continue
            logprobs = delta.logprobs[count - 1] if delta.logprobs else None
            stop = self._process_token(token, logprobs, parts)
            if stop is not None or self._parser.done:
                needs_abort = delta.finish_reason is None
                return self._last_piece(
                    parts, OutputPiece((), (), count, "stop", stop, needs_abort)
                )
        if delta.finish_reason is None:
            entries = self._release_entries(inside=True)
            return OutputPiece(self._pack_parts(parts), entries, len(delta.tokens))
        return self._finish(parts, delta)

    def _process_token(
        self, token: int, logprobs: TokenLogprobs | None, parts: list[OutputPart]
    ) -> str | None:
        """Appends the token's text to `parts`. Returns the stop string that it completes."""
        is_first = len(self.token_ids) == 1
        if is_first and self.tokenizer.token_bytes(token)[:1] not in CONTINUATION_BYTES:
            self._utf8.reset()
        text = self._decode_token(token)
        end = self._num_characters + len(text)
        if self.options.logprobs:
            self._entries.append(LogprobEntry(token, logprobs, self._num_characters, end))
        self._num_characters = end
        was_reasoning = self._parser.in_reasoning
        parsed = self._parser.feed(text)
        self.reasoning_tokens += was_reasoning or self._parser.in_reasoning
        return self._apply_stop_strings(parsed, parts)

    def _apply_stop_strings(self, parsed: list[OutputPart], parts: list[OutputPart]) -> str | None:
        for part in parsed:
            if not isinstance(part, ContentDelta):
                add_content(self._stops.flush(), parts)
                parts.append(part)
            elif len(self.token_ids) < self.options.min_tokens:
                parts.append(part)
            else:
                size = len(self._stops.held) + len(part.text)
                released, stop = self._stops.feed(part.text)
                add_content(released, parts)
                if stop is not None:
                    # Text from the stop string on does not count as output.
                    self._num_characters -= size - len(released)
                    return stop
        return None

    def _pack_parts(self, parts: list[OutputPart]) -> tuple[OutputPart, ...]:
        self.num_calls += sum(isinstance(part, CallStart) for part in parts)
        return join_parts(parts) if len(parts) > 1 else tuple(parts)

    def _finish(self, parts: list[OutputPart], delta: OutputDelta) -> OutputPiece:
        """Releases what was held back, as the engine has ended the request."""
        assert delta.finish_reason is not None
        rest = ""
        if self.token_ids and not self.options.discard_tokens:
            rest = self._utf8.decode(b"", final=True)
        complete = delta.finish_reason is FinishReason.STOP
        parsed = [*self._parser.feed(rest), *self._parser.end(complete)]
        stop = self._apply_stop_strings(parsed, parts)
        num_tokens = len(delta.tokens)
        if stop is not None:
            return self._last_piece(parts, OutputPiece((), (), num_tokens, "stop", stop))
        add_content(self._stops.flush(), parts)
        reason = str(delta.finish_reason)
        piece = OutputPiece((), (), num_tokens, reason, delta.stop_reason, error=delta.error)
        return self._last_piece(parts, piece)

    def _last_piece(self, parts: list[OutputPart], piece: OutputPiece) -> OutputPiece:
        """`piece` with these parts and the remaining log-probabilities."""
        self.finished = True
        at_stop_string = piece.finish_reason == FinishReason.STOP and isinstance(
            piece.stop_reason, str
        )
        entries = self._release_entries(inside=not at_stop_string, final=True)
        return dataclasses.replace(piece, parts=self._pack_parts(parts), logprob_entries=entries)

    def _release_entries(self, inside: bool, final: bool = False) -> tuple[LogprobEntry, ...]:
        """Removes and returns the entries of released text: those that lie `inside` it, else those
        that begin in it. Unless `final`, entries of an unfinished character wait for its end."""
        released = self._num_characters - self._parser.num_held - len(self._stops.held)
        out: list[LogprobEntry] = []
        while self._entries:
            entry = self._entries[0]
            if entry.end > released if inside else entry.start >= released:
                break
            if not final and entry.end == self._num_characters and self._inside_character():
                break
            out.append(self._entries.popleft())
        return tuple(out)

    def _inside_character(self) -> bool:
        return bool(self._utf8.getstate()[0])

    def _decode_token(self, token: int) -> str:
        if (
            self.options.skip_special_tokens
            and self.tokenizer.is_special(token)
            and token not in self.options.parser_token_ids
        ):
            return ""
        return self._utf8.decode(self.tokenizer.token_bytes(token))


def add_content(text: str, parts: list[OutputPart]) -> None:
    if text:
        parts.append(ContentDelta(text))
