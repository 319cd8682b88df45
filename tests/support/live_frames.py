"""Frames of /live as they arrive."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from serve_process import Running, data_of

Frame = dict[str, Any]


@contextlib.contextmanager
def watching(server: Running) -> Iterator[Iterator[Frame]]:
    with server.http.stream("GET", f"{server.url}/live") as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith(
            "text/event-stream"
        )
        yield (dict(data_of(line)) for line in response.iter_lines() if line)


def first(frames: Iterator[Frame], fits: Callable[[Frame], Any]) -> Frame:
    return next(frame for frame in frames if fits(frame))
