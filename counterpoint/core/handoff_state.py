"""Requests of which this engine has only a part (types.Part): their pages are *kept*, for others to read or write.

Owns: what outside is told of them, and what Adopt and Release do. Promises: a part becomes a plain request when it is adopted, and
a finished one when it is released. Must not: free anything (core/engine.py does, when no pass names it).
"""

from __future__ import annotations

from counterpoint.core.prefix_cache import PrefixCache
from counterpoint.core.request import Phase, Request
from counterpoint.core.state import EngineState, Pass
from counterpoint.types import Admitted, Computed, DisaggRole, Progress


class HandoffState:
    def __init__(self, state: EngineState, prefixes: PrefixCache) -> None:
        self._state = state
        self._prefix_cache = prefixes
        self._progress: list[Progress] = []

    # ------------------------------------------------------------ to outside

    def take_progress(self) -> list[Progress]:
        progress, self._progress = self._progress, []
        return progress

    def on_admitted(self, request: Request, cached: int) -> None:
        """It holds its pages; the first `cached` have their content."""
        self._progress.append(Admitted(request.id, tuple(request.pages), cached))
        if request.input.disagg_role is DisaggRole.DECODE:
            self._state.set_phase(request, Phase.HELD)

    def on_computed(self, request: Request) -> None:
        self._progress.append(
            Computed(request.id, request.computed_tokens, request.computed_tokens)
        )

    def on_layers_computed(self, whole: Pass, layers: int) -> None:
        """A pass has come through its first `layers` layers, which are not all."""
        for segment, request in zip(whole.segments, whole.requests, strict=True):
            if request.pinned and request.phase is Phase.PREFILL:
                self._progress.append(
                    Computed(
                        request.id, request.computed_tokens, segment.start + segment.tokens, layers
                    )
                )

    # ------------------------------------------------------------ from outside

    def resume_decode(self, request: Request, token: int, now: float) -> bool:
        """Nobody outside touches the pages of `request` (HELD) any more, and the KV of all its tokens is there: decode. True if
        the executor does not have its row yet."""
        request.pinned = False
        self._state.set_phase(request, Phase.DECODE)
        if request.input.disagg_role is not DisaggRole.DECODE:
            return False
        request.scheduled_tokens = request.computed_tokens = request.prefill_target
        self._prefix_cache.register(request)
        request.output.append(token)
        request.token_s.append(now)
        return True
