"""`counterpoint chat --url`: what a server may do in the middle of an answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from counterpoint.serve.offline.chat import remote_speaker
from counterpoint.serve.output_parsing.output_parser import ContentDelta

SAID = b'data: {"choices": [{"delta": {"content": "so"}}]}\n\n'


class Server(ThreadingHTTPServer):
    """Streams `answer`, and hangs up."""

    answer = b""
    daemon_threads = True


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "m"}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "100000")
        self.end_headers()
        self.wfile.write(self.server.answer)
        self.close_connection = True

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_an_answer_may_hold_ends_of_lines_that_are_none_of_a_stream(server):
    said = "one\u2028two\x85three"
    server.answer = f'data: {{"choices": [{{"delta": {{"content": "{said}"}}}}]}}\r\n\r\n'.encode()
    speak = remote_speaker(f"http://127.0.0.1:{server.server_port}", None, {})
    assert next(speak([{"role": "user", "content": "say"}])) == ContentDelta(said)


@pytest.mark.parametrize(
    "rest", [b"", b"data: {broken\n\n", b'data: {"what": 1}\n\n', b'data: {"choices": [7]}\n\n']
)
def test_a_stream_that_breaks_off_or_is_none_is_said_so(server, rest):
    server.answer = SAID + rest
    speak = remote_speaker(f"http://127.0.0.1:{server.server_port}", None, {})
    parts = speak([{"role": "user", "content": "say"}])
    assert next(parts) == ContentDelta("so")
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1"):
        list(parts)
