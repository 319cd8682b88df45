"""Servers for the tests: real processes, reached over real sockets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, NoBrowser
from serve_process import Running, poll
from tiny_model import TINY
from tool_cases import TEMPLATE

from counterpoint.serve.text.tokenizer_loader import make_byte_tokenizer


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The flags that name a model of random weights."""
    path = tmp_path_factory.mktemp("tiny") / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One server for every test that leaves it as it was."""
    running = Running(tmp_path_factory.mktemp("server") / "log")
    try:
        yield running.wait_ready()
        assert running.metric("counterpoint_requests_running") == 0
        assert running.stop() == 0
    finally:
        if running.process.poll() is None:
            running.process.kill()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Starts servers which the test may harm."""
    started: list[Running] = []

    def start(**settings: Any) -> Running:
        started.append(Running(tmp_path / f"log{len(started)}", **settings))
        return started[-1]

    yield start
    for running in started:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    try:
        running = Browser(tmp_path_factory.mktemp("chromium"))
    except NoBrowser as none:
        pytest.skip(str(none))
    yield running
    running.close()


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The echoing engine, with a tokeniser whose chat template knows tools and reasoning."""
    folder = tmp_path_factory.mktemp("thinker")
    make_byte_tokenizer().tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    running = Running(folder / "log", folder=str(folder))
    try:
        yield running.wait_ready()
        poll(lambda: running.metric("counterpoint_requests_running") == 0)
        assert running.stop() == 0
    finally:
        if running.process.poll() is None:
            running.process.kill()
