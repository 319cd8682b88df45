"""Splitter: cuts a growing text at the marks of a response template.

Owns: where regions of an answer (reasoning, a call) begin and end. Promises: the same regions however the text arrives; nothing of
the text is lost; a mark, and what might become one, is kept back, and nothing else; the work for a character is bounded.
Must not: know what a region says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplateField

MARK_CHARACTERS = 256  # what is longer is no mark: bounds the work, and what is kept back
CONTEXT_CHARACTERS = 16  # kept of what has gone out, for patterns that look back
KEPT_CHARACTERS = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class Opened:
    """`field` begins; `mark` is what says so, `names` its named groups."""

    field: ResponseTemplateField
    mark: str
    names: dict[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Body:
    """Text of the region that was opened last, or if none is open, of what is between them."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Closed:
    """The open region ends; `mark` says so."""

    mark: str


Event = Opened | Body | Closed


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """How a region opens, or closes. `literals`: the texts that do it, None if a pattern says which. `final`: no text that follows
    makes another mark of one."""

    field: ResponseTemplateField
    pattern: Any  # of the module `regex`
    literals: Sequence[str] | None
    final: bool

    def find(self, text: str, at: int, more: bool) -> Any:
        """The first match behind `at`; if `more` may come, maybe the beginning of one."""
        while (match := self.pattern.search(text, at, partial=more)) is not None:
            if match.end() - match.start() <= MARK_CHARACTERS:
                return match
            at = match.start() + 1
        return None

    def settled(self, match: Any, text: str) -> bool:
        """More text would not change this match."""
        if match.partial:
            return False
        if self.literals is not None:
            return self.final or match.end() < len(text)
        if match.end() == len(text):
            return False
        again = self.pattern.match(text + "\0", match.start())
        return (
            again is not None
            and again.span() == match.span()
            and again.groupdict() == match.groupdict()
        )


def opening(field: ResponseTemplateField) -> Mark:
    return Mark(field, field.open_re, field.open_literals, not field.open_literal_can_extend)


def closing(field: ResponseTemplateField) -> list[Mark]:
    """Empty for a region that goes on to the end."""
    if field.close_re is None:
        return []
    return [Mark(field, field.close_re, field.close_literals, not field.close_literal_can_extend)]


class Splitter:
    """`fields` are those that have an opening mark. `inside`: the region in which the text begins."""

    def __init__(
        self, fields: Sequence[ResponseTemplateField], inside: ResponseTemplateField | None = None
    ) -> None:
        self._openings = [opening(field) for field in fields if field.open_re is not None]
        self._enter(inside)
        self._text = ""  # what is kept back begins at `_at`
        self._at = 0
        self._empty_at = -1  # where a mark without characters was: the next one is elsewhere

    def _enter(self, region: ResponseTemplateField | None) -> None:
        self.inside = region
        self._marks = closing(region) if region is not None else self._openings
        literals = [mark.literals for mark in self._marks]
        known = None not in literals
        self._firsts = (
            frozenset(one[0] for some in literals for one in some or ()) if known else None
        )  # of marks, their characters

    @property
    def held(self) -> int:
        return len(self._text) - self._at

    def feed(self, text: str) -> Iterator[Event]:
        return self._split(text, more=True)

    def end(self) -> Iterator[Event]:
        """What was kept back, when no more comes. A region that is open stays so."""
        return self._split("", more=False)

    def _split(self, text: str, more: bool) -> Iterator[Event]:
        if self._at > KEPT_CHARACTERS:
            gone = self._at - CONTEXT_CHARACTERS
            self._text, self._at, self._empty_at = (
                self._text[gone:],
                CONTEXT_CHARACTERS,
                self._empty_at - gone,
            )
        plain = (
            bool(text)
            and not self.held
            and self._firsts is not None
            and self._firsts.isdisjoint(text)
        )
        self._text += text
        if plain:  # as most of it is: nothing to look for
            self._at = len(self._text)
            yield Body(text)
            return
        while True:
            mark, match, safe = self._next(more)
            until = safe if match is None else match.start()
            if until > self._at:
                body, self._at = self._text[self._at : until], until
                yield Body(body)
            if match is None or mark is None:
                return
            self._at = match.end()
            yield self._pass(mark, match)

    def _pass(self, mark: Mark, match: Any) -> Event:
        self._empty_at = match.end() if match.start() == match.end() else -1
        if self.inside is None:
            self._enter(mark.field)
            return Opened(
                mark.field,
                match[0],
                {name: said for name, said in match.groupdict().items() if said is not None},
            )
        self._enter(None)
        return Closed(match[0])

    def _next(self, more: bool) -> tuple[Mark | None, Any, int]:
        """The next mark that is certain and its match, and up to where the text is certain to hold none. Of marks at one place
        the longest counts, and of those the one that was named first."""
        safe = len(self._text)
        found: list[tuple[int, int, int]] = []
        matches: list[tuple[Mark, Any]] = []
        for mark in self._marks:
            match = mark.find(self._text, self._at, more)
            if match is None or (match.start() == match.end() == self._empty_at):
                continue
            if more and not mark.settled(match, self._text):
                safe = min(safe, match.start())
                continue
            found.append((match.start(), -match.end(), len(matches)))
            matches.append((mark, match))
        if not found or min(found)[0] >= safe:
            return None, None, safe
        return *matches[min(found)[2]], safe
