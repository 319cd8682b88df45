"""Spans of pages, and which of them a grant covers."""

from __future__ import annotations

import numpy as np
import pytest

from counterpoint.kv_transfer.memory import KvMemory, page_mask


@pytest.fixture
def memory() -> KvMemory:
    """2 layers, 8 pages of 8 bytes."""
    return KvMemory(tuple(np.zeros(64, np.uint8) for _ in range(4)), 8)


def test_spans_are_as_few_as_pages_allow(memory):
    assert memory.spans(0, 1, (0, 1, 2, 5), (3, 4, 5, 6)).tolist() == [
        [0, 0, 24, 24],
        [0, 40, 48, 8],
        [1, 0, 24, 24],
        [1, 40, 48, 8],
    ]
    assert len(memory.spans(0, 2, (), ())) == 0
    with pytest.raises(ValueError, match="pages of 7 bytes"):
        KvMemory(memory.regions, 7)


OUTSIDE = [
    (0, 0, 8, 8),
    (0, 0, 16, 9),
    (4, 0, 16, 8),
    (-1, 0, 16, 8),
    (0, 0, -8, 8),
    (0, 0, 16, 0),
    (0, 0, 60, 8),
    (0, 0, 1 << 62, 1 << 62),
]


@pytest.mark.parametrize("span", OUTSIDE)
def test_spans_outside_the_grant_are_found(memory, span):
    granted = page_mask((2, 7), 8)
    inside = [(0, 0, 16, 8), (3, 0, 56, 8), (0, 0, 18, 2)]
    assert memory.is_granted(np.array(inside), granted)
    assert not memory.is_granted(np.array([(0, 0, 16, 8), span]), granted)
