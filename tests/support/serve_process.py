"""A server as a process, and a client of it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
import psutil

if TYPE_CHECKING:
    import openai

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
START_S = 120
Found = TypeVar("Found")


def poll(look: Callable[[], Found], seconds: float = 15, what: str = "") -> Found:
    """What `look` gives as soon as it is true; fails the test after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what or look}"
        time.sleep(0.02)
    return found


class Running:
    """A server process with flat `settings`. `command` starts it (default: the fake engine)."""

    def __init__(self, log: Path, command: list[str] | None = None, **settings: Any) -> None:
        self.log = log
        command = command or [
            sys.executable,
            str(HERE / "fake_server.py"),
            json.dumps({"port": 0} | settings),
        ]
        path = os.pathsep.join(
            [str(ROOT), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | {"PYTHONPATH": path}
            )
        self.url = ""
        self.http = httpx.Client(timeout=30, trust_env=False)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_ready(self) -> Running:
        def address() -> str:
            assert self.process.poll() is None, self.said()
            found = re.search(r"^ready: .* at (http://\S+)/v1", self.said(), re.MULTILINE)
            return found[1] if found else ""

        self.url = poll(address, START_S, "the ready line")
        return self

    # ------------------------------------------------------------ asking

    @functools.cached_property
    def client(self) -> openai.OpenAI:
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=30)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """`body`: bytes as they are, anything else as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"} | options.pop("headers", {})
        return self.http.post(f"{self.url}{path}", content=data, headers=headers, **options)

    def get(self, path: str) -> httpx.Response:
        """Over a new connection: the server may close a kept one as it is used again."""
        return httpx.get(f"{self.url}{path}", timeout=10, trust_env=False)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of this name that have these labels."""
        total, found = 0.0, False
        for line in self.get("/metrics").text.splitlines():
            sample = re.fullmatch(re.escape(name) + r"(?:\{(.*)\})? (\S+)", line)
            if sample and all(
                f'{key}="{value}"' in (sample[1] or "") for key, value in labels.items()
            ):
                total, found = total + float(sample[2]), True
        assert found, f"no metric {name} {labels}"
        return total

    def events(
        self, body: dict[str, Any], path: str = "/v1/completions"
    ) -> list[dict[str, Any] | str]:
        """The data of each event of a stream, parsed, "[DONE]" as it is."""
        with self.http.stream(
            "POST", f"{self.url}{path}", json=body | {"stream": True}
        ) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            return [data_of(line) for line in response.iter_lines() if line]

    def named_events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The data of each event of a stream with named events; the name is the data's type."""
        with self.http.stream(
            "POST", f"{self.url}{path}", json=body | {"stream": True}
        ) as response:
            assert response.status_code == 200 and response.headers["content-type"].startswith(
                "text/event-stream"
            )
            lines = [line for line in response.iter_lines() if line]
        names, data = lines[::2], [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
        assert [name.removeprefix("event: ") for name in names] == [event["type"] for event in data]
        return data

    # ------------------------------------------------------------ life

    @property
    def engine(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(
            child
            for child in children
            if "counterpoint.serve.worker.worker_process" in child.cmdline()
        )

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


def data_of(line: str) -> dict[str, Any] | str:
    assert line.startswith("data: "), line
    return line[6:] if line == "data: [DONE]" else json.loads(line[6:])


class Reading:
    """A stream, read in a thread; `begun`: wait for its first event."""

    def __init__(self, server: Running, body: dict[str, Any], begun: bool = True) -> None:
        self.events: list[Any] = []
        self.begun = threading.Event()
        self._server, self._body = server, body
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        assert not begun or self.begun.wait(20)

    def _read(self) -> None:
        with httpx.stream(
            "POST", f"{self._server.url}/v1/completions", json=self._body, timeout=60
        ) as response:
            for line in response.iter_lines():
                if line:
                    self.events.append(data_of(line))
                    self.begun.set()

    def end(self) -> list[Any]:
        """All events, once the server has closed the stream."""
        self._thread.join(30)
        assert not self._thread.is_alive(), "the stream hangs"
        return self.events

    def fails(self) -> dict[str, Any]:
        """The error with which it ends: no finish, no [DONE]."""
        *events, last = self.end()
        assert "[DONE]" not in events and "error" in last, last
        assert not any(choice["finish_reason"] for event in events for choice in event["choices"])
        return last["error"]


def alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
