"""Requests of which this engine runs only a part (types.DisaggRole).

Their pages are *pinned*: others read or write them until ResumeDecode or Release. The engine frees
them, once no pass names the request.
"""

from __future__ import annotations

from counterpoint.core.prefix_cache import PrefixCache
from counterpoint.core.request import Phase, Request
from counterpoint.core.state import EngineState, Pass
from counterpoint.types import Admitted, Computed, DisaggRole, Progress


class HandoffState:
    """Collects what KV transfer must know of such requests, and resumes them."""

    def __init__(self, state: EngineState, prefix_cache: PrefixCache) -> None:
        self._state = state
        self._prefix_cache = prefix_cache
        self._progress: list[Progress] = []

    def take_progress(self) -> list[Progress]:
        progress, self._progress = self._progress, []
        return progress

    def on_admitted(self, request: Request, cached_pages: int) -> None:
        """It holds its pages; the first `cached_pages` have their content."""
        self._progress.append(Admitted(request.id, tuple(request.pages), cached_pages))
        if request.input.disagg_role is DisaggRole.DECODE:
            self._state.set_phase(request, Phase.HELD)

    def on_computed(self, request: Request) -> None:
        tokens = request.computed_tokens
        self._progress.append(Computed(request.id, tokens, tokens))

    def on_layers_computed(self, batch: Pass, layers: int) -> None:
        """A pass has come through its first `layers` layers, which are not all."""
        for segment, request in zip(batch.segments, batch.requests, strict=True):
            if request.pinned and request.phase is Phase.PREFILL:
                end = segment.start + segment.tokens
                self._progress.append(Computed(request.id, request.computed_tokens, end, layers))

    def resume_decode(self, request: Request, token: int, now: float) -> bool:
        """Unpin `request`, which is HELD with the KV of all its tokens, and decode.

        True if the executor does not have its row yet.
        """
        request.pinned = False
        self._state.set_phase(request, Phase.DECODE)
        if request.input.disagg_role is not DisaggRole.DECODE:
            return False
        request.scheduled_tokens = request.computed_tokens = request.prefill_target
        self._prefix_cache.register(request)
        request.output.append(token)
        request.token_s.append(now)
        return True
