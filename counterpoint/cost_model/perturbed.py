"""An estimator with deliberate errors, to test how policies cope.

The same (seed, step size, units) always gets the same factor. So the error is a bias that a policy
must live with, not noise that averages out.
"""

from __future__ import annotations

import zlib
from functools import lru_cache

from counterpoint.interfaces import CoRunning, Estimator
from counterpoint.types import BatchShape


class Perturbed:
    """`inner` times a factor in [1 - error, 1 + error], uniform per cell.

    A cell is (prefill tokens, decode batch, decode context, each to a power of two; units). Raises
    ValueError unless 0 <= error < 1.
    """

    def __init__(self, inner: Estimator, error: float, seed: int = 0) -> None:
        if not 0 <= error < 1:
            raise ValueError(f"error is {error}: it must be at least 0 and less than 1")
        self.inner = inner
        self.error = error
        self.seed = seed
        self._factor = lru_cache(1 << 12)(self._draw)

    def seconds(self, work: BatchShape, units: int, co_running: CoRunning | None = None) -> float:
        cell = (
            work.prefill_tokens.bit_length(),
            work.decode_batch.bit_length(),
            work.decode_context.bit_length(),
            units,
        )
        return self._factor(cell) * self.inner.seconds(work, units, co_running)

    def _draw(self, cell: tuple[int, int, int, int]) -> float:
        word = zlib.crc32(repr((self.seed, cell)).encode())
        return 1 + self.error * (2 * word / 0xFFFFFFFF - 1)
