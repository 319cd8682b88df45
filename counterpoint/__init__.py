"""Counterpoint: an LLM serving engine in which prefill and decode run side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from counterpoint.serve.offline.llm import LLM, SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Imports LLM and SamplingParams at first use: they load the whole engine."""
    if name in ("LLM", "SamplingParams"):
        from counterpoint.serve.offline import llm

        return vars(llm)[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
