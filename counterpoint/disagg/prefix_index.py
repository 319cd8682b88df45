"""Prefixes: which workers are likely to have the KV of a prompt's beginning.

Owns: page name -> workers. Promises: bounded; a wrong guess costs time, never a wrong answer (the worker looks for itself).
Must not: hash tokens by itself (core/page_pool.py names pages, the same everywhere).
"""

from __future__ import annotations

from collections.abc import Sequence


class PrefixIndex:
    """`most` page names are remembered; those that were not used for longest go first."""

    def __init__(self, max_pages: int = 1 << 20) -> None:
        self.max_pages = max_pages
        self._workers: dict[bytes, set[str]] = {}  # in order of last use

    def add(self, worker: str, names: Sequence[bytes]) -> None:
        """`worker` has computed, or was sent, the pages `names` (a run from a prompt's start)."""
        for name in reversed(names):  # the beginning is used last, so it is kept longest
            workers = self._workers.pop(name, None) or set()
            workers.add(worker)
            self._workers[name] = workers
        while len(self._workers) > self.max_pages:
            del self._workers[next(iter(self._workers))]

    def forget(self, worker: str) -> None:
        """Its cache is gone (a restart, a change of weights)."""
        for name in [name for name, workers in self._workers.items() if worker in workers]:
            self._workers[name].discard(worker)
            if not self._workers[name]:
                del self._workers[name]

    def match(self, names: Sequence[bytes]) -> dict[str, int]:
        """By worker, how many of `names` it has from the start. Workers that have none are left out."""
        found: dict[str, int] = {}
        holding: set[str] | None = None
        for depth, name in enumerate(names, 1):
            workers = self._workers.get(name)
            holding = (set(workers) if holding is None else holding & workers) if workers else set()
            if not holding:
                break
            for worker in holding:
                found[worker] = depth
        return found

    def __len__(self) -> int:
        return len(self._workers)
