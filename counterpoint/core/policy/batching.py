"""Picking tokens under a budget: shared by the policies."""

from __future__ import annotations

from collections.abc import Iterable

from counterpoint.core.request import Request


def pack_prompts(prefills: Iterable[Request], budget_tokens: int) -> list[tuple[Request, int]]:
    """Whole remaining prompts, in order, up to the budget; of a first one that is longer, as much as that holds."""
    picks: list[tuple[Request, int]] = []
    for request in prefills:
        tokens = request.unscheduled_tokens
        if picks and tokens > budget_tokens:
            break
        picks.append((request, min(tokens, budget_tokens)))
        budget_tokens -= tokens
    return picks


def pack_chunks(prefills: Iterable[Request], budget_tokens: int) -> list[tuple[Request, int]]:
    """As much of each remaining prompt as the budget holds, in order."""
    picks: list[tuple[Request, int]] = []
    for request in prefills:
        if budget_tokens <= 0:
            break
        tokens = min(request.unscheduled_tokens, budget_tokens)
        picks.append((request, tokens))
        budget_tokens -= tokens
    return picks
