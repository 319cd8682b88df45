"""Admission control: how many requests and prompt tokens may wait for a first token.

Promises: a rejection costs no tokenising; each admitted request is counted out exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence

from counterpoint.serve.api.errors import Overloaded
from counterpoint.types import AddRequest

REJECT_REASONS = ("queued_requests", "queued_tokens")


class AdmissionQueue:
    """Counts engine requests (one per choice) without a first token, and their prompt tokens.

    A limit of None is no limit. A request larger than a limit is admitted when the queue is empty.
    `rejected` counts rejections by reason.
    """

    def __init__(self, max_requests: int | None = None, max_tokens: int | None = None) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.rejected = dict.fromkeys(REJECT_REASONS, 0)
        self.queued_requests = 0
        self.queued_tokens = 0

    def check(self, requests: int = 1, tokens: int = 1) -> None:
        """Raises Overloaded if that much more can't be queued now."""
        if not self.queued_requests:
            return
        if self.max_requests is not None and self.queued_requests + requests > self.max_requests:
            self.rejected["queued_requests"] += 1
            raise Overloaded(
                f"{self.queued_requests} requests wait already, of at most {self.max_requests}: "
                "try again later"
            )
        if self.max_tokens is not None and self.queued_tokens + tokens > self.max_tokens:
            self.rejected["queued_tokens"] += 1
            raise Overloaded(
                f"{self.queued_tokens} prompt tokens wait already, of at most {self.max_tokens}: "
                "try again later"
            )

    def enter(self, engine_requests: Sequence[AddRequest]) -> QueueTicket:
        """Raises Overloaded."""
        sizes = {request.id: len(request.prompt) for request in engine_requests}
        self.check(len(sizes), sum(sizes.values()))
        self.queued_requests += len(sizes)
        self.queued_tokens += sum(sizes.values())
        return QueueTicket(self, sizes)


class QueueTicket:
    """A place in the queue for requests of the given prompt sizes, by id."""

    def __init__(self, queue: AdmissionQueue, sizes: dict[str, int]) -> None:
        self._queue = queue
        self._sizes = sizes

    def on_first_token(self, id: str) -> None:
        """Request `id` has its first token, or has ended. Later calls for it do nothing."""
        size = self._sizes.pop(id, None)
        if size is not None:
            self._queue.queued_requests -= 1
            self._queue.queued_tokens -= size

    def close(self) -> None:
        for id in tuple(self._sizes):
            self.on_first_token(id)
