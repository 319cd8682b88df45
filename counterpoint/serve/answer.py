"""Answer: from the Deltas of one choice to the text a client may see.

Owns: detokenising across tokens, stop strings, the log-probability entries, the finish reason. Promises: nothing of a stop string
is ever let out, nor anything that might become one; the text is the same however the tokens are cut into Deltas, so a stream and a
whole answer are equal; nothing follows the piece that has `finish`.
Must not: know HTTP, asyncio, or which API is spoken.
"""

from __future__ import annotations

import codecs
import dataclasses
from collections import deque
from collections.abc import Sequence

from counterpoint.serve.text import Text
from counterpoint.types import Delta, Finish, TokenLogprobs

TAIL_TOKENS = 4  # of the prompt: a character has at most four bytes
CONTINUATION = frozenset(bytes([byte]) for byte in range(0x80, 0xC0))  # UTF-8 bytes that continue a character


class Stops:
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
        keep = self._may_become_one(text)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        text, self.held = self.held, ""
        return text

    def _may_become_one(self, text: str) -> int:
        """Length of the longest suffix of `text` with which a stop string begins."""
        longest = max(len(stop) for stop in self.stops) - 1
        for size in range(min(longest, len(text)), 0, -1):
            suffix = text[len(text) - size :]
            if any(stop.startswith(suffix) for stop in self.stops):
                return size
        return 0


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A token with its log-probabilities, for the client. `start`: where its text begins in the answer, in characters."""

    token: int
    logprobs: TokenLogprobs | None
    start: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """What one Delta gave: maybe no text. `tokens`: how many it had. `finish` is "stop", "length", "abort" or "error";
    `stopped_by` a stop string or token id. `cancel`: the engine must be told that no more is wanted."""

    text: str = ""
    entries: tuple[Entry, ...] = ()
    tokens: int = 0
    finish: str | None = None
    stopped_by: str | int | None = None
    cancel: bool = False
    error: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How a choice's tokens are shown. `discard`: the tokens are not wanted (only what is known of the prompt is)."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    min_tokens: int = 0
    logprobs: bool = False
    discard: bool = False


class Answer:
    def __init__(self, text: Text, options: AnswerOptions, prompt: Sequence[int] = ()) -> None:
        self.text = text
        self.options = options
        self.tokens: list[int] = []
        self.cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprobs] = []  # of the prompt's last tokens, as many as are known
        self.finished = False
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = Stops(options.stops, options.include_stop)
        self._entries: deque[Entry] = deque()
        self._made = 0  # characters made of tokens so far
        self._sent = 0  # characters let out so far
        for token in prompt[-TAIL_TOKENS:]:  # so that the first token may finish a character which the prompt began
            self._characters(token)

    def feed(self, delta: Delta) -> Piece:
        """Take the next Delta. After a piece with `finish`, every further one is empty."""
        if self.finished:
            return Piece()
        self.cached_tokens = delta.cached_tokens or self.cached_tokens
        self.prompt_logprobs += delta.prompt_logprobs or ()
        shown: list[str] = []
        for at, token in enumerate(delta.tokens):
            self.tokens.append(token)
            last = at == len(delta.tokens) - 1
            if self.options.discard or (last and delta.stopped_by is not None and not self.options.include_stop):
                continue
            out, stop = self._take(token, delta.logprobs[at] if delta.logprobs else None)
            shown.append(out)
            if stop is not None:
                return self._end("".join(shown), at + 1, "stop", stop, cancel=delta.finish is None)
        if delta.finish is None:
            text = "".join(shown)
            self._sent += len(text)
            return Piece(text, self._entries_before(self._sent, whole=True), len(delta.tokens))
        return self._finish("".join(shown), delta)

    def _take(self, token: int, logprobs: TokenLogprobs | None) -> tuple[str, str | None]:
        if len(self.tokens) == 1 and self.text.bytes_of(token)[:1] not in CONTINUATION:
            self._utf8.reset()
        made = self._characters(token)
        if self.options.logprobs:
            self._entries.append(Entry(token, logprobs, self._made, self._made + len(made)))
        self._made += len(made)
        if len(self.tokens) < self.options.min_tokens:
            return made, None
        return self._stops.feed(made)

    def _finish(self, text: str, delta: Delta) -> Piece:
        assert delta.finish is not None
        left = "" if self.options.discard or not self.tokens else self._utf8.decode(b"", final=True)
        rest, stop = self._stops.feed(left)
        text += rest
        if stop is None:
            text += self._stops.flush()
            return self._end(text, len(delta.tokens), str(delta.finish), delta.stopped_by, error=delta.error)
        return self._end(text, len(delta.tokens), "stop", stop)

    def _end(self, text: str, tokens: int, finish: str, by: str | int | None, cancel: bool = False, error: str = "") -> Piece:
        self.finished = True
        self._sent += len(text)
        entries = self._entries_before(self._sent, whole=finish != Finish.STOP or not isinstance(by, str), final=True)
        return Piece(text, entries, tokens, finish, by, cancel, error)

    def _entries_before(self, sent: int, whole: bool, final: bool = False) -> tuple[Entry, ...]:
        """The entries of the text that has been let out: those that end in it, and at the end those that begin in it.
        Entries of an unfinished character wait for the token that finishes it."""
        out: list[Entry] = []
        while self._entries:
            entry = self._entries[0]
            inside = entry.end <= sent if whole else entry.start < sent
            if not inside or (not final and entry.end == self._made and self._unfinished()):
                break
            out.append(self._entries.popleft())
        return tuple(out)

    def _unfinished(self) -> bool:
        return bool(self._utf8.getstate()[0])

    def _characters(self, token: int) -> str:
        if self.options.skip_special and self.text.is_special(token):
            return ""
        return self._utf8.decode(self.text.bytes_of(token))
