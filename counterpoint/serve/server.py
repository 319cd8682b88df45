"""The server's life: port, engine, signals, drain.

Owns: the order of starting and stopping. Promises: the port is taken before the model is loaded;
SIGTERM and SIGINT let running requests finish for `drain_s` and then exit 0; a second signal stops
at once; no process is left behind. Must not: know routes or requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import time
from collections.abc import Iterator

import uvicorn

from counterpoint.config import Config, ConfigError
from counterpoint.serve.api.app import Service, create_app
from counterpoint.serve.observability.logs import has_activity, load_between, start_logging
from counterpoint.serve.observability.metrics import Metrics
from counterpoint.serve.observability.otel import Tracing
from counterpoint.serve.observability.rolling_stats import RollingStats
from counterpoint.serve.structured_output.checker import GrammarChecker
from counterpoint.serve.text.preprocess import Preprocessor
from counterpoint.serve.text.tokenizer import ModelTokenizer, TokenizerError
from counterpoint.serve.text.tokenizer_loader import load_tokenizer
from counterpoint.serve.worker.engine_client import EngineClient
from counterpoint.serve.worker.engine_runner import BUILDER
from counterpoint.serve.worker.pool import Pool
from counterpoint.serve.worker.single_engine import SingleEngine
from counterpoint.serve.worker.supervisor import EngineFailed
from counterpoint.serve.worker.wire import EngineInfo
from counterpoint.spec.source import ModelSource
from counterpoint.types import RequestTiming

LOG_EVERY_S = 10.0
ERROR_DELIVERY_S = 2.0  # after the drain, for error events to reach their clients
BACKLOG = 2048
log = logging.getLogger("counterpoint")


def run(config: Config, source: ModelSource, system: str = BUILDER) -> int:
    """Serve until a signal. Exit status 1: the engine could not start, or running requests were cut
    off. Raises ConfigError if the port is taken or the engine refuses a setting."""
    with listening(config.server.host, config.server.port) as listener:
        start_logging(config.server.log_level, config.server.log_format)
        loops = uvicorn.Config("", log_config=None).get_loop_factory()
        with asyncio.Runner(loop_factory=loops) as runner:
            return runner.run(serve(config, source, system, listener))


async def serve(config: Config, source: ModelSource, system: str, listener: socket.socket) -> int:
    return await Server(config, source, system, listener).run()


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        other = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        raise ConfigError(
            f"port {port} of {host} cannot be used: {error.strerror}; choose another with {other}"
        ) from None
    with listener:
        yield listener


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, which end the process by the signal, not with 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    def __init__(
        self, config: Config, source: ModelSource, system: str, listener: socket.socket
    ) -> None:
        self.config = config
        self.source = source
        self.listener = listener
        self.name = config.model.served_name or source.name
        self.metrics = Metrics(self.name)
        self.rolling_stats = RollingStats()
        self.tracing = (
            Tracing(config.server.otlp_endpoint)
            if config.server.otlp_endpoint is not None
            else None
        )
        self.engine = self.make_engine(system)
        self.service = Service(
            self.engine, self.metrics, self.rolling_stats, config.server, self.tracing
        )
        self.http = HttpServer(
            uvicorn.Config(
                create_app(self.service),
                log_config=None,
                access_log=False,  # RequestIds logs more
                lifespan="off",
                timeout_graceful_shutdown=round(config.server.drain_s + ERROR_DELIVERY_S),
            )
        )
        self.checker: GrammarChecker | None = None
        self.signals = 0

    def make_engine(self, system: str) -> EngineClient:
        if not self.config.cluster.has_pool:
            return SingleEngine(self.config, self.on_timing, system, self.rolling_stats)
        pool = Pool(self.config, self.source, self.on_timing, system, self.rolling_stats)
        self.metrics.pool = pool.metrics
        return pool

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.on_signal)
        begun_s = time.monotonic()
        starting = asyncio.create_task(self.start(begun_s))
        reporting = asyncio.create_task(self.log_load())
        starting.add_done_callback(self.on_started)
        try:
            await self.http.serve(sockets=[self.listener])
            if starting.done():
                await starting  # raises why it could not start
            return 1 if self.http.force_exit else 0
        except EngineFailed as failed:
            if self.signals:  # it reached the engine before that ignored signals
                return 0
            if failed.blame == "user":
                raise ConfigError(str(failed)) from None
            log.error("the engine could not start: %s", failed)
            return 1
        finally:
            starting.cancel()
            reporting.cancel()
            await self.engine.close()
            if self.checker is not None:
                self.checker.close()
            await asyncio.gather(starting, reporting, return_exceptions=True)
            if self.tracing is not None:
                self.tracing.close()

    def on_timing(self, timing: RequestTiming) -> None:
        self.metrics.observe(timing)
        if self.tracing is not None:
            self.tracing.observe(timing)

    # ------------------------------------------------------------ start

    async def start(self, begun_s: float) -> None:
        log.info("starting an engine for %s", self.name)
        text, info = await asyncio.gather(asyncio.to_thread(self.load_text), self.engine.start())
        self.service.started_s = int(time.time())
        self.checker = GrammarChecker(self.source, info.vocab, info.eos_token_ids)
        self.service.preprocessor = Preprocessor(
            text, info, self.name, self.checker, self.config.scheduler
        )
        for note in info.notes:
            log.warning("%s", note)
        print(self.ready_line(info, time.monotonic() - begun_s), flush=True)

    def load_text(self) -> ModelTokenizer:
        text = load_tokenizer(self.source)
        with contextlib.suppress(TokenizerError):  # imports the template's libraries now
            text.apply_chat_template([{"role": "user", "content": ""}])
        return text

    def ready_line(self, info: EngineInfo, seconds: float) -> str:
        host, port = self.listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        return (
            f"ready: {self.name} at {url}/v1 after {seconds:.1f} s; {info.policy}: {info.lanes}; "
            f"KV cache {info.kv_tokens:,} tokens, context {info.max_context_tokens:,}"
        )

    def on_started(self, starting: asyncio.Task[None]) -> None:
        if not starting.cancelled() and starting.exception() is not None:
            self.http.should_exit = True

    # ------------------------------------------------------------ stop

    def on_signal(self) -> None:
        self.signals += 1
        self.service.lane_feed.close()
        self.http.should_exit = True
        if self.signals == 1:
            log.info(
                "stopping: what runs may finish for %g s; a second signal stops at once",
                self.config.server.drain_s,
            )
            asyncio.get_running_loop().call_later(
                self.config.server.drain_s, self.fail_open_streams
            )
        else:
            self.fail_open_streams()
            self.http.force_exit = True

    def fail_open_streams(self) -> None:
        self.engine.fail_streams("the server is shutting down")

    # ------------------------------------------------------------ the line each 10 s

    async def log_load(self) -> None:
        last, last_s = self.engine.stats, time.monotonic()
        while True:
            await asyncio.sleep(LOG_EVERY_S)
            stats, now_s = self.engine.stats, time.monotonic()
            if has_activity(last, stats):
                load = load_between(last, stats, now_s - last_s, self.rolling_stats, now_s)
                log.info("%s", load.words(), extra={"fields": load.fields()})
            last, last_s = stats, now_s
