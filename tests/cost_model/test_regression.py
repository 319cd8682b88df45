"""Least squares."""

from __future__ import annotations

import pytest

from counterpoint.cost_model.regression import least_squares, solve


def test_solve():
    assert solve([[4.0, 1.0], [1.0, 3.0]], [1.0, 2.0]) == pytest.approx([1 / 11, 7 / 11])


def test_least_squares_follows_the_points_and_stays_where_there_are_none():
    found = least_squares([([1.0, 0.0], 3.0), ([2.0, 0.0], 6.0)], [(1.0, 0.4), (1.5, 0.4)])
    assert found[0] == pytest.approx(3.0, rel=0.02)
    assert found[1] == pytest.approx(1.5)
