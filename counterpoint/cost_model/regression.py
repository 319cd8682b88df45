"""Linear regression of a few numbers, in plain Python.

It takes some milliseconds for hundreds of rows of tens of factors.
"""

from __future__ import annotations

from collections.abc import Sequence

NOISE = 0.02  # relative error of a measurement
MIN_FACTOR = 0.02  # of a factor


def least_squares(
    table: Sequence[tuple[list[float], float]], guesses: Sequence[tuple[float, float]]
) -> list[float]:
    """Factors x, none under MIN_FACTOR, with row·x near each row's seconds and near their guesses.

    `guesses`: (guess, spread) of each factor. x minimises Σ ((row·x - s) / (NOISE s))² + Σ ((x -
    guess) / spread)²: linear regression with a normal prior (Bishop, Pattern Recognition and
    Machine Learning, section 3.3).
    """
    size = len(guesses)
    matrix = [[0.0] * size for _ in range(size)]
    right = [0.0] * size
    for line, seconds in table:
        scaled = [value / (NOISE * seconds) for value in line]
        for i, a in enumerate(scaled):
            if a:
                right[i] += a / NOISE
                for j, b in enumerate(scaled):
                    matrix[i][j] += a * b
    for i, (guess, spread) in enumerate(guesses):
        matrix[i][i] += 1 / spread**2
        right[i] += guess / spread**2
    return [max(MIN_FACTOR, value) for value in solve(matrix, right)]


def solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """x with matrix·x = right.

    The matrix is symmetric and positive definite, so elimination needs no pivots.
    """
    size = len(right)
    rows = [[*line, value] for line, value in zip(matrix, right, strict=True)]
    for i in range(size):
        for j in range(i + 1, size):
            times = rows[j][i] / rows[i][i]
            if times:
                rows[j] = [b - times * a for a, b in zip(rows[i], rows[j], strict=True)]
    x = [0.0] * size
    for i in reversed(range(size)):
        x[i] = (rows[i][size] - sum(rows[i][j] * x[j] for j in range(i + 1, size))) / rows[i][i]
    return x
