"""Answer: from the Deltas of one choice to what a client may see.

Owns: detokenising across tokens, stop strings, the log-probability entries, the finish reason. Promises: nothing of a stop string
is ever let out, nor anything that might become one; the text is the same however the tokens are cut into Deltas, so a stream and a
whole answer are equal; nothing follows the piece that has `finish`.
Must not: know HTTP, asyncio, or which API is spoken.
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

PROMPT_TAIL_TOKENS = 4  # of the prompt: a character has at most four bytes
CONTINUATION_BYTES = frozenset(
    bytes([byte]) for byte in range(0x80, 0xC0)
)  # UTF-8 bytes that continue a character


class StopStrings:
    """Cuts a growing text at the first stop string in it.

    The match is the one whose end comes first (of those, the longest), so it does not depend on how the text was cut up.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self.stops = tuple(stops)
        self.include = include
        self.held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """(what may go out, the stop string that was met or None). After a match, nothing is held."""
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
        """What was held back, when no more text comes."""
        text, self.held = self.held, ""
        return text

    def _partial_match_length(self, text: str) -> int:
        """Length of the longest suffix of `text` with which a stop string begins."""
        longest = max(len(stop) for stop in self.stops) - 1
        for size in range(min(longest, len(text)), 0, -1):
            suffix = text[len(text) - size :]
            if any(stop.startswith(suffix) for stop in self.stops):
                return size
        return 0


@dataclasses.dataclass(frozen=True, slots=True)
class LogprobEntry:
    """A token with its log-probabilities, for the client. `start`: where its text begins in the answer, in characters."""

    token: int
    logprobs: TokenLogprobs | None
    start: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class OutputPiece:
    """What one Delta gave: maybe nothing. `tokens`: how many it had. `finish` is "stop", "length", "abort" or "error";
    `stopped_by` a stop string or token id. `cancel`: the engine must be told that no more is wanted."""

    parts: tuple[OutputPart, ...] = ()
    logprob_entries: tuple[LogprobEntry, ...] = ()
    num_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    needs_abort: bool = False
    error: str = ""

    @property
    def text(self) -> str:
        """What of it is the answer's content."""
        return "".join(part.text for part in self.parts if isinstance(part, ContentDelta))


@dataclasses.dataclass(frozen=True, slots=True)
class OutputOptions:
    """How a choice's tokens are shown. `voice` makes what tells reasoning and calls from content; stop strings count in content
    alone. `marks`: special tokens that it must see. `discard`: the tokens are not wanted (only what is known of the prompt is)."""

    stop_strings: tuple[str, ...] = ()
    include_stop_string: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    logprobs: bool = False
    discard_tokens: bool = False
    make_parser: Callable[[], OutputParser] = PlainParser
    parser_token_ids: frozenset[int] = frozenset()


class OutputProcessor:
    """One choice. `reasoning_tokens` of its tokens were thought; it has called `calls` tools."""

    def __init__(
        self, tokenizer: ModelTokenizer, options: OutputOptions, prompt: Sequence[int] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self.options = options
        self.token_ids: list[int] = []
        self.cached_tokens = 0
        self.reasoning_tokens = 0
        self.num_calls = 0
        self.prompt_logprobs: list[
            TokenLogprobs
        ] = []  # of the prompt's last tokens, as many as are known
        self.finished = False
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._parser = options.make_parser()
        self._stops = StopStrings(options.stop_strings, options.include_stop_string)
        self._entries: deque[LogprobEntry] = deque()
        self._num_characters = 0  # characters made of tokens so far
        for token in prompt[
            -PROMPT_TAIL_TOKENS:
        ]:  # so that the first token may finish a character which the prompt began
            self._decode_token(token)

    def feed(self, delta: OutputDelta) -> OutputPiece:
        """Take the next Delta. After a piece with `finish`, every further one is empty."""
        if self.finished:
            return OutputPiece()
        self.cached_tokens = delta.cached_tokens or self.cached_tokens
        self.prompt_logprobs += delta.prompt_logprobs or ()
        said: list[OutputPart] = []
        for at, token in enumerate(delta.tokens):
            self.token_ids.append(token)
            last = at == len(delta.tokens) - 1
            if self.options.discard_tokens or (
                last and delta.stop_reason is not None and not self.options.include_stop_string
            ):
                continue
            stop = self._process_token(token, delta.logprobs[at] if delta.logprobs else None, said)
            if stop is not None or self._parser.done:
                return self._last_piece(
                    said, at + 1, "stop", stop, cancel=delta.finish_reason is None
                )
        if delta.finish_reason is None:
            return OutputPiece(
                self._pack_parts(said),
                self._release_entries(self._released_characters(), whole=True),
                len(delta.tokens),
            )
        return self._finish_with(said, delta)

    def _process_token(
        self, token: int, logprobs: TokenLogprobs | None, said: list[OutputPart]
    ) -> str | None:
        """What `token` says is put behind `said`; the stop string that was met, or None."""
        if (
            len(self.token_ids) == 1
            and self.tokenizer.token_bytes(token)[:1] not in CONTINUATION_BYTES
        ):
            self._utf8.reset()
        made = self._decode_token(token)
        if self.options.logprobs:
            self._entries.append(
                LogprobEntry(
                    token, logprobs, self._num_characters, self._num_characters + len(made)
                )
            )
        self._num_characters += len(made)
        before = self._parser.in_reasoning
        heard = self._parser.feed(made)
        self.reasoning_tokens += before or self._parser.in_reasoning
        return self._apply_stop_strings(heard, said)

    def _apply_stop_strings(self, heard: list[OutputPart], said: list[OutputPart]) -> str | None:
        for part in heard:
            if not isinstance(part, ContentDelta):
                self._say(self._stops.flush(), said)
                said.append(part)
            elif len(self.token_ids) < self.options.min_tokens:
                said.append(part)
            else:
                size = len(self._stops.held) + len(part.text)
                out, stop = self._stops.feed(part.text)
                self._say(out, said)
                if stop is not None:
                    self._num_characters -= size - len(out)  # what is not let out has not been said
                    return stop
        return None

    def _say(self, text: str, said: list[OutputPart]) -> None:
        if text:
            said.append(ContentDelta(text))

    def _pack_parts(self, said: list[OutputPart]) -> tuple[OutputPart, ...]:
        self.num_calls += sum(isinstance(part, CallStart) for part in said)
        return join_parts(said) if len(said) > 1 else tuple(said)

    def _finish_with(self, said: list[OutputPart], delta: OutputDelta) -> OutputPiece:
        assert delta.finish_reason is not None
        left = (
            ""
            if self.options.discard_tokens or not self.token_ids
            else self._utf8.decode(b"", final=True)
        )
        heard = [
            *self._parser.feed(left),
            *self._parser.end(delta.finish_reason is FinishReason.STOP),
        ]
        stop = self._apply_stop_strings(heard, said)
        if stop is None:
            self._say(self._stops.flush(), said)
            return self._last_piece(
                said,
                len(delta.tokens),
                str(delta.finish_reason),
                delta.stop_reason,
                error=delta.error,
            )
        return self._last_piece(said, len(delta.tokens), "stop", stop)

    def _last_piece(
        self,
        said: list[OutputPart],
        tokens: int,
        finish: str,
        by: str | int | None,
        cancel: bool = False,
        error: str = "",
    ) -> OutputPiece:
        self.finished = True
        entries = self._release_entries(
            self._released_characters(),
            whole=finish != FinishReason.STOP or not isinstance(by, str),
            final=True,
        )
        return OutputPiece(self._pack_parts(said), entries, tokens, finish, by, cancel, error)

    def _released_characters(self) -> int:
        """Characters let out so far, or told by what was let out."""
        return self._num_characters - self._parser.num_held - len(self._stops.held)

    def _release_entries(
        self, sent: int, whole: bool, final: bool = False
    ) -> tuple[LogprobEntry, ...]:
        """The entries of the text that has been let out: those that end in it, and at the end those that begin in it.
        Entries of an unfinished character wait for the token that finishes it."""
        out: list[LogprobEntry] = []
        while self._entries:
            entry = self._entries[0]
            inside = entry.end <= sent if whole else entry.start < sent
            if not inside or (
                not final and entry.end == self._num_characters and self._inside_character()
            ):
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
