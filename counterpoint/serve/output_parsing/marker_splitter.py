"""Cuts a growing text into regions (reasoning, a call) at the markers of a response template.

Promises: the regions do not depend on how the text is cut; no text is lost; only a marker, or what
could become one, is held back; the work per character is bounded. Must not: interpret a region's
text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplateField

MAX_MARKER_CHARACTERS = 256  # bounds the work and what is held back
LOOKBEHIND_CHARACTERS = 16  # of released text, for patterns that look behind
MAX_KEPT_CHARACTERS = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class RegionOpened:
    """`field` begins. `mark`: the text of its marker; `names`: the marker's named groups."""

    field: ResponseTemplateField
    mark: str
    names: dict[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class RegionText:
    """Text of the open region, or between regions if none is open."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class RegionClosed:
    """The open region ends with the marker `mark`."""

    mark: str


SplitEvent = RegionOpened | RegionText | RegionClosed


@dataclasses.dataclass(frozen=True, slots=True)
class Marker:
    """How a region opens or closes. `literals`: its texts, None if only a pattern matches it.
    `cannot_extend`: no text that follows turns a match into a longer one."""

    field: ResponseTemplateField
    pattern: Any  # of the module `regex`
    literals: Sequence[str] | None
    cannot_extend: bool

    def find(self, text: str, at: int, more: bool) -> Any:
        """The first match from `at` on. With `more`, maybe a partial match at the text's end."""
        while (match := self.pattern.search(text, at, partial=more)) is not None:
            if match.end() - match.start() <= MAX_MARKER_CHARACTERS:
                return match
            at = match.start() + 1
        return None

    def is_final_match(self, match: Any, text: str) -> bool:
        """More text would not change this match."""
        if match.partial:
            return False
        if self.literals is not None:
            return self.cannot_extend or match.end() < len(text)
        if match.end() == len(text):
            return False
        again = self.pattern.match(text + "\0", match.start())
        return (
            again is not None
            and again.span() == match.span()
            and again.groupdict() == match.groupdict()
        )


def make_open_marker(field: ResponseTemplateField) -> Marker:
    return Marker(field, field.open_re, field.open_literals, not field.open_literal_can_extend)


def make_close_markers(field: ResponseTemplateField) -> list[Marker]:
    """Empty for a region that lasts to the end."""
    if field.close_re is None:
        return []
    return [Marker(field, field.close_re, field.close_literals, not field.close_literal_can_extend)]


class MarkerSplitter:
    """`fields`: those with an opening marker. `inside`: the region in which the text begins."""

    def __init__(
        self, fields: Sequence[ResponseTemplateField], inside: ResponseTemplateField | None = None
    ) -> None:
        self._open_markers = [
            make_open_marker(field) for field in fields if field.open_re is not None
        ]
        self._enter_region(inside)
        self._text = ""  # held back from `_at` on
        self._at = 0
        self._empty_at = -1  # of the last empty match, which must not match again

    def _enter_region(self, region: ResponseTemplateField | None) -> None:
        self.region = region
        self._markers = make_close_markers(region) if region is not None else self._open_markers
        literals = [marker.literals for marker in self._markers]
        # Of all markers; None if some marker is a pattern.
        self._first_characters = None
        if None not in literals:
            self._first_characters = frozenset(
                text[0] for texts in literals for text in texts or ()
            )

    @property
    def num_held(self) -> int:
        return len(self._text) - self._at

    def feed(self, text: str) -> Iterator[SplitEvent]:
        return self._split(text, more=True)

    def end(self) -> Iterator[SplitEvent]:
        """Releases what was held back, when no more text comes. An open region stays open."""
        return self._split("", more=False)

    def _split(self, text: str, more: bool) -> Iterator[SplitEvent]:
        if self._at > MAX_KEPT_CHARACTERS:
            dropped = self._at - LOOKBEHIND_CHARACTERS
            self._text = self._text[dropped:]
            self._at, self._empty_at = LOOKBEHIND_CHARACTERS, self._empty_at - dropped
        has_no_marker = (
            bool(text)
            and not self.num_held
            and self._first_characters is not None
            and self._first_characters.isdisjoint(text)
        )
        self._text += text
        if has_no_marker:  # the common case
            self._at = len(self._text)
            yield RegionText(text)
            return
        while True:
            marker, match, safe = self._next_marker(more)
            until = safe if match is None else match.start()
            if until > self._at:
                body, self._at = self._text[self._at : until], until
                yield RegionText(body)
            if match is None or marker is None:
                return
            self._at = match.end()
            yield self._cross_marker(marker, match)

    def _cross_marker(self, marker: Marker, match: Any) -> SplitEvent:
        self._empty_at = match.end() if match.start() == match.end() else -1
        if self.region is None:
            self._enter_region(marker.field)
            return RegionOpened(
                marker.field,
                match[0],
                {name: text for name, text in match.groupdict().items() if text is not None},
            )
        self._enter_region(None)
        return RegionClosed(match[0])

    def _next_marker(self, more: bool) -> tuple[Marker | None, Any, int]:
        """The next final marker with its match, and the position up to which there is none. The
        first match wins; of matches at one position the longest, then the field that was listed
        first."""
        safe = len(self._text)
        found: list[tuple[int, int, int]] = []
        matches: list[tuple[Marker, Any]] = []
        for marker in self._markers:
            match = marker.find(self._text, self._at, more)
            if match is None or (match.start() == match.end() == self._empty_at):
                continue
            if more and not marker.is_final_match(match, self._text):
                safe = min(safe, match.start())
                continue
            found.append((match.start(), -match.end(), len(matches)))
            matches.append((marker, match))
        if not found or min(found)[0] >= safe:
            return None, None, safe
        return *matches[min(found)[2]], safe
