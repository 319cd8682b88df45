"""Shared by the bench tests: trace files, and short ways to make records and queries."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterpoint.types import FinishReason, RequestTiming

DATA = Path(__file__).parent / "data"
PUBLIC_TRACES = Path(__file__).parents[3] / "shared" / "traces"


@pytest.fixture
def data() -> Path:
    return DATA


@pytest.fixture
def public_trace():
    """The path of a public trace by name; skips if the file is missing."""

    def find(name: str) -> str:
        path = PUBLIC_TRACES / name
        if not path.exists():
            pytest.skip(f"the public trace {name} is not in {PUBLIC_TRACES}")
        return str(path)

    return find


@pytest.fixture
def record():
    """Makes a RequestTiming from its arrival and token times."""

    def make(
        id: str,
        arrival_s: float,
        token_s: tuple[float, ...],
        finish: FinishReason = FinishReason.LENGTH,
        **fields,
    ) -> RequestTiming:
        known = {
            "admitted_s": arrival_s,
            "finished_s": token_s[-1] if token_s else arrival_s,
            "prompt_tokens": 10,
            "cached_tokens": 0,
            "preemptions": 0,
        }
        return RequestTiming(
            id=id, arrival_s=arrival_s, token_s=token_s, finish_reason=finish, **(known | fields)
        )

    return make
