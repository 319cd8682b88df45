"""Packing prompts into a pass under a token budget, for all policies."""

from __future__ import annotations

from collections.abc import Iterable

from counterpoint.core.request import Request


def pack_prompts(prefills: Iterable[Request], budget_tokens: int) -> list[tuple[Request, int]]:
    """Whole remaining prompts, in order, up to the budget. A longer first one is cut to it."""
    items: list[tuple[Request, int]] = []
    for request in prefills:
        tokens = request.unscheduled_tokens
        if items and tokens > budget_tokens:
            break
        items.append((request, min(tokens, budget_tokens)))
        budget_tokens -= tokens
    return items


def pack_chunks(prefills: Iterable[Request], budget_tokens: int) -> list[tuple[Request, int]]:
    """As much of each remaining prompt as the budget holds, in order."""
    items: list[tuple[Request, int]] = []
    for request in prefills:
        if budget_tokens <= 0:
            break
        tokens = min(request.unscheduled_tokens, budget_tokens)
        items.append((request, tokens))
        budget_tokens -= tokens
    return items
