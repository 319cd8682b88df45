"""Forecast: how predicted times to first token compare with what came, and what is learnt from it.

Owns: a factor for each worker that prefills, and the latest errors. Promises: pure; a factor stays within [1 / BOUND, BOUND] and
moves by a share of what is missing, so that no single request and no wrong price throws the router off.
Must not: read a clock, or predict (router.py does).
"""

from __future__ import annotations

import math
from collections import deque

BOUND = 4.0  # a factor's furthest from 1, either way
SHARE = 1 / 16  # of the way to what was seen, at each first token
REMEMBERED = 256  # errors


class TtftCorrection:
    def __init__(self) -> None:
        self.num_observed = 0
        self._logs: dict[str, float] = {}  # of each worker's factor
        self._errors: deque[float] = deque(maxlen=REMEMBERED)

    def factor(self, worker: str) -> float:
        """What a prediction for `worker` by prices alone is to be multiplied with."""
        return math.exp(self._logs.get(worker, 0.0))

    def factors(self) -> dict[str, float]:
        return {worker: self.factor(worker) for worker in self._logs}

    def forget(self, worker: str) -> None:
        """It is gone; under its name may come another machine."""
        self._logs.pop(worker, None)

    def observe(self, worker: str, priced_s: float, told_s: float, actual_s: float) -> None:
        """A first token came from `worker` after `actual_s`; its prices alone gave `priced_s`, and `told_s` was predicted."""
        if priced_s <= 0 or actual_s <= 0:
            return
        self.num_observed += 1
        self._errors.append(abs(told_s - actual_s) / actual_s)
        most = math.log(BOUND)
        wanted = min(most, max(-most, math.log(actual_s / priced_s)))
        known = self._logs.get(worker, 0.0)
        self._logs[worker] = known + SHARE * (wanted - known)

    def relative_error(self, quantile: float) -> float:
        """Of |predicted - actual| / actual of the latest first tokens; 0 before there are any."""
        ordered = sorted(self._errors)
        return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))] if ordered else 0.0
