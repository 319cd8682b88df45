"""Pool: many workers behind one EngineClient's interface; the front of cluster/, with its connections.

Owns: the workers' connections and the streams that are open in them. Promises: every stream ends, with a Delta that has `finish` or
with EngineLost; a stream that is left early is aborted wherever it stands; a worker that dies is noticed at once, one that
freezes within `worker_lost_s`, and what ran there goes on elsewhere or ends with an error; the pool serves while any worker does.
Must not: know HTTP or text, decide where a request goes (cluster/routing.py), or start processes (crew.py).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from counterpoint import build
from counterpoint.cluster import control, nouns
from counterpoint.cluster.control import Address, ControlError, Wire
from counterpoint.cluster.digest import refusal
from counterpoint.cluster.dispatch import About, Deliver, Finished, OnLoss
from counterpoint.cluster.front import Front, Route, ToClient, ToWorker
from counterpoint.cluster.messages import Sampled, WireError
from counterpoint.cluster.router import Router, Rule, Wires
from counterpoint.cluster.routing import Routing, Shape
from counterpoint.config import Config, ConfigError, host_and_port
from counterpoint.serve import joining
from counterpoint.serve.client import EngineFailed, EngineLost, Listener, Mail, State, Stream
from counterpoint.serve.crew import Crew
from counterpoint.serve.joining import Census, Farewell, Join, Orders, Ready, Said, Told
from counterpoint.serve.pool_metrics import PoolMetrics, WorkerState
from counterpoint.serve.totals import counters, total
from counterpoint.serve.wire import BEAT_S, Beat, Failed, Hello, Outputs, Progress
from counterpoint.spec.source import Source
from counterpoint.types import Arrive, Delta, Finish, Record, Role, Stats

FROZEN_SHARE = 0.4  # of `worker_lost_s`: silent for so long, a worker gets nothing new
CHUNK_TOKENS = 128  # of a CPU's mixed batch, unless it is set
LINK_BYTES_PER_S = 1e9  # between two workers, until it has been seen
log = logging.getLogger("counterpoint")


@dataclass(slots=True, eq=False)
class Member:
    """A worker that has joined. `ready` is None while it loads."""

    name: str
    role: Role
    wire: Wire
    ready: Ready | None = None
    stats: Stats = field(default_factory=Stats)
    census: Census = field(default_factory=Census)
    silent_s: float = 0.0
    frozen: bool = False

    def say(self, word: msgspec.Struct) -> None:
        self.wire.write(joining.encode(word))


@dataclass(slots=True, eq=False)
class Life:
    """What will be told of a request when it is over, on this process's clock."""

    mail: Mail
    arrive: Arrive
    arrival_s: float
    admitted_s: float | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    token_s: list[float] = field(default_factory=list)

    def record(self, now: float, finish: Finish) -> Record:
        return Record(
            id=self.arrive.id,
            arrival_s=self.arrival_s,
            admitted_s=self.admitted_s,
            finished_s=now,
            prompt_tokens=len(self.arrive.prompt),
            cached_tokens=self.cached_tokens,
            token_s=tuple(self.token_s),
            finish=finish,
            preemptions=self.preemptions,
        )


class Pool:
    """`on_record` is called with the Record of each finished request. `system` names the function that builds a worker's engine.
    Raises ConfigError if workers could be reached from elsewhere without a token."""

    def __init__(
        self,
        config: Config,
        source: Source,
        on_record: Callable[[Record], None] | None = None,
        system: str = "counterpoint.build:system",
        listener: Listener | None = None,
    ) -> None:
        cluster = config.cluster
        self.config = config
        self.source = source
        self.on_record = on_record
        self.listener = listener
        self.hello: Hello | None = None
        self.error = ""
        self.members: dict[str, Member] = {}
        self.gone = Stats()  # what workers that are no longer there had counted
        self.listen = Address(*host_and_port("cluster_listen", cluster.cluster_listen or "127.0.0.1:0"))
        self.token = shared_token(config)
        self.crew = Crew(config.replace(api_key=None, cluster_token=None, cores=None), system, self._ended)
        self.routing: Routing | None = None
        on_loss = OnLoss(cluster.on_loss)
        self.front = Front(self._pick, cluster.handoff_deadline_s, on_loss=on_loss)
        self.metrics = PoolMetrics(self.look, lambda: self.routing.chosen if self.routing is not None else {})
        self._lives: dict[str, Life] = {}
        self._stopped = self._loading = False
        self._digest: Any = None
        self._server: asyncio.Server | None = None
        self._watch: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()

    # ------------------------------------------------------------ life

    async def start(self) -> Hello:
        """Start the workers and wait until each is ready (if there are none, until one has joined). Raises EngineFailed."""
        self._loading = True
        try:
            self._server = await asyncio.start_server(self._called, *self.listen)
        except OSError as error:
            raise EngineFailed(f"cluster_listen {self.listen.host}:{self.listen.port}: {error.strerror}", "user") from None
        self.listen = Address(*self._server.sockets[0].getsockname()[:2])
        if not self.config.cluster.workers:
            log.info("waiting for workers at %s:%d", *self.listen)
        self._watch = asyncio.create_task(self._watch_beats())
        self.crew.start(self.listen, self.token)
        hello = await asyncio.shield(self._ready)
        self._loading = False
        return hello

    async def close(self) -> None:
        """End every stream and the workers of this machine. May be called at any time, and again."""
        self._stopped = True
        self.fail_streams("the server is shutting down")
        for member in self.members.values():
            if member.name in self.crew.posts:
                member.say(Farewell())
        if self._server is not None:
            self._server.close()
        await self.crew.close()
        for member in self.members.values():
            member.wire.close()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)

    # ------------------------------------------------------------ what is here

    @property
    def serving(self) -> list[Member]:
        """Workers that can take requests."""
        return [member for member in self.members.values() if member.ready is not None and not member.frozen]

    @property
    def state(self) -> State:
        if self._stopped:
            return "stopped"
        if self.serving:
            return "loading" if self._loading else "ready"
        if any(member.frozen for member in self.members.values()):
            return "frozen"
        return "loading" if self._loading or self.members else "dead"

    @property
    def stats(self) -> Stats:
        return total([self.gone, *(member.stats for member in self.members.values())])

    def health(self) -> dict[str, Any]:
        """Of a pool that serves: ok, or degraded with what is missing."""
        missing = sorted({*self.crew.posts} - {member.name for member in self.serving})
        missing += sorted(member.name for member in self.members.values() if member.frozen and member.name not in self.crew.posts)
        return {"status": "degraded", "missing": missing} if missing else {"status": "ok"}

    def look(self) -> list[WorkerState]:
        """Each worker, those of this machine also while they are missing."""
        found = []
        for name in dict.fromkeys((*self.crew.posts, *self.members)):
            member, post = self.members.get(name), self.crew.posts.get(name)
            role = member.role if member is not None else post.role if post is not None else Role.BOTH
            pid = member.ready.hello.pid if member is not None and member.ready is not None else 0
            stats, census = (member.stats, member.census) if member is not None else (Stats(), Census())
            starts = post.starts if post is not None else 0
            found.append(WorkerState(name, role.value, member is not None and member in self.serving, pid, starts, stats, census))
        return found

    def check(self) -> None:
        """Raises EngineLost unless some worker can take requests."""
        if self.state != "ready":
            reasons = {"loading": "the workers are still loading", "frozen": "no worker responds"}
            raise EngineLost(reasons.get(self.state, "no worker is there"))

    # ------------------------------------------------------------ streams (client.Backend)

    def open(self, arrives: Iterable[Arrive], timeout_s: float | None = None) -> Stream:
        return Stream(self, arrives, timeout_s)

    def enter(self, arrives: Sequence[Arrive], mail: Mail) -> None:
        self.check()
        if self.listener is not None:
            self.listener.entered(arrives)
        now = time.monotonic()
        for arrive in arrives:
            self._lives[arrive.id] = Life(mail, arrive, now)
            self.front.submit(arrive)
        self._flow()

    def leave(self, id: str, reason: str) -> bool:
        life = self._lives.get(id)
        if life is None:
            return False
        self.front.withdraw(id)
        self._close(life, Finish.ABORT)
        self._flow()
        return True

    def fail_streams(self, reason: str) -> None:
        """End every open stream with EngineLost, and abort its requests."""
        for life in tuple(self._lives.values()):
            life.mail.put_nowait(EngineLost(reason))
            self.leave(life.arrive.id, reason)

    # ------------------------------------------------------------ what the front says

    def _pick(self, arrive: Arrive, avoid: str, prefill: str) -> Route | None:
        assert self.routing is not None
        return self.routing.pick(arrive, avoid, prefill)

    def _flow(self) -> None:
        """Tell workers and clients what is to be told."""
        orders: dict[str, list[Told]] = {}
        for item, end in with_ends(self.front.take()):
            if isinstance(item, ToWorker):
                to = self.members.get(item.decode)
                address = to.ready.address if to is not None and to.ready is not None else None
                orders.setdefault(item.worker, []).append(Told(item.order, address))
            elif item.id in self._lives:
                self._deliver(self._lives[item.id], item.news, end)
        for name, items in orders.items():
            member = self.members.get(name)
            if member is not None:
                member.say(Orders(items))

    def _deliver(self, life: Life, news: Deliver | About | Finished, end: Finished | None) -> None:
        """`end`: follows at once; a stop token and its finish are one Delta."""
        id, now = life.arrive.id, time.monotonic()
        if isinstance(news, About):
            delta = Delta(id, prompt_logprobs=news.prompt_logprobs)
        elif isinstance(news, Finished):
            delta, end = delta_of(id, (), news), news
        else:
            assert self.routing is not None
            self.routing.grew(id, tuple(sampled.token for sampled in news.tokens))
            life.token_s += [now] * len(news.tokens)
            if news.start == 0:
                life.cached_tokens = news.tokens[0].cached_tokens
            delta = delta_of(id, news.tokens, end, life.cached_tokens if news.start == 0 else 0)
        if self.listener is not None:
            self.listener.heard(Outputs([delta], now_s=now))
        life.mail.put_nowait(EngineLost(end.error) if end is not None and end.lost else delta)
        if end is not None:
            self._close(life, end.finish)

    def _close(self, life: Life, finish: Finish) -> None:
        del self._lives[life.arrive.id]
        if self.routing is not None:
            self.routing.ended(life.arrive.id)
        if self.on_record is not None:
            self.on_record(life.record(time.monotonic(), finish))

    # ------------------------------------------------------------ what workers say

    async def _called(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Somebody joins."""
        wire = Wire(reader, writer)
        try:
            joined = await joining.admit(wire, self.token, self._objection)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, WireError) as error:
            log.warning("a worker was not let in: %s", error or type(error).__name__)
            wire.close()
            return
        member = self.members[joined.worker] = Member(joined.worker, joined.role, wire)
        how = "the connection has ended"
        try:
            while True:
                self._hear(member, await joining.hear_worker(wire))
        except asyncio.CancelledError:
            raise
        except (OSError, asyncio.IncompleteReadError) as error:
            how = how if isinstance(error, asyncio.IncompleteReadError) else str(error)
        except Exception as error:  # a worker that speaks nonsense is no worker
            log.exception("worker %s", member.name)
            how = f"{type(error).__name__}: {error}"
        finally:
            self._lose(member, f"worker {member.name} is gone: {how}")

    def _objection(self, joined: Join) -> str:
        if self._stopped:
            return "the server is shutting down"
        return "a worker of this name is here already" if joined.worker in self.members else ""

    def _hear(self, member: Member, word: joining.FromWorker) -> None:
        member.silent_s = 0.0
        if member.frozen:
            log.warning("worker %s responds again", member.name)
            self._freeze(member, False)
        if isinstance(word, Said):
            self._take(member, word)
        elif isinstance(word, Progress):
            log.info("%s: %s", member.name, word.stage)
        elif isinstance(word, Ready):
            self._greet(member, word)
        elif isinstance(word, Failed):
            log.error("worker %s: %s", member.name, word.error)
            self._fail_start(f"worker {member.name}: {word.error}", word.blame)
        else:
            assert isinstance(word, Beat)

    def _greet(self, member: Member, ready: Ready) -> None:
        problem = "" if self._digest is None else refusal(self._digest, ready.digest)
        if problem:
            log.error("worker %s does not fit: %s", member.name, problem)
            member.say(Farewell(problem))
            self._fail_start(f"worker {member.name} does not fit the others: {problem}", "user")
            return
        self._digest, member.ready = ready.digest, ready
        post = self.crew.posts.get(member.name)
        if post is not None:
            post.port = ready.address.port
        if self.routing is None:
            self.routing = self._make_routing(ready)
        self.routing.seat(member.name, member.role, self._shape(ready))
        where = f"{ready.address.host}:{ready.address.port}"
        log.info(
            "worker %s (%s) is ready at %s: %s; KV over %s",
            member.name,
            member.role,
            where,
            ready.hello.lanes,
            "/".join(ready.kinds),
        )
        if not self._ready.done() and set(self.crew.posts) <= {one.name for one in self.serving}:
            self.hello = self._joint_hello()
            self._ready.set_result(self.hello)

    def _joint_hello(self) -> Hello:
        """What all workers can do."""
        hellos = [member.ready.hello for member in self.members.values() if member.ready is not None]
        first = hellos[0]
        return msgspec.structs.replace(
            first,
            lanes="; ".join(f"{member.name}: {member.ready.hello.lanes}" for member in self.serving if member.ready is not None),
            max_context_tokens=min(hello.max_context_tokens for hello in hellos),
            kv_tokens=min(hello.kv_tokens for hello in hellos),
            notes=tuple(dict.fromkeys(note for hello in hellos for note in hello.notes)),
        )

    def _make_routing(self, ready: Ready) -> Routing:
        cluster = self.config.cluster
        prices = build.estimator(self.config, self.source, ready.units)
        rule = Rule(local_tokens=cluster.local_tokens, spill_s=cluster.spill_s)
        router = Router(prices, Wires(LINK_BYTES_PER_S, ready.kv_bytes_per_token), rule)
        return Routing(router, self.config.scheduler.prefix_cache)

    def _shape(self, ready: Ready) -> Shape:
        size, chunk = ready.hello.page_tokens, self.config.scheduler.chunk_tokens or CHUNK_TOKENS
        return Shape(ready.units, ready.digest.layers, size, ready.hello.kv_tokens // size, chunk)

    def _take(self, member: Member, said: Said) -> None:
        member.stats = said.stats or member.stats
        if said.stats is not None and self.listener is not None:
            self.listener.heard(Outputs([], time.monotonic(), self.stats))
        if said.census is not None:
            member.census = said.census
            seat = self.routing.seats.get(member.name) if self.routing is not None else None
            if seat is not None:
                seat.lost_pages = said.census.pages.get("quarantine", 0)
        for item in said.items:
            if isinstance(item, Record):  # of an engine's part of a request
                self._note_record(item)
        for item in said.items:
            if isinstance(item, nouns.Ended):
                self._note_ended(item)
            if not isinstance(item, Record):
                self.front.report(member.name, item)
        self._flow()

    def _note_record(self, record: Record) -> None:
        known = nouns.handoff_of(record.id)
        life = self._lives.get(known[0].request) if known is not None else None
        if life is not None:
            life.preemptions += record.preemptions
            if life.admitted_s is None and record.admitted_s is not None:  # another clock's, but durations hold
                life.admitted_s = life.arrival_s + record.admitted_s - record.arrival_s

    def _note_ended(self, ended: nouns.Ended) -> None:
        assert self.routing is not None
        self.metrics.observe(ended)
        id = ended.handoff.request
        if ended.outcome is nouns.Outcome.ADOPTED:
            self.routing.adopted(id)
        elif ended.outcome is nouns.Outcome.STAYED:
            self.routing.stayed(id)
        life = self._lives.get(id)
        if ended.times is not None and life is not None:
            life.admitted_s = life.arrival_s + ended.times.admitted_s

    # ------------------------------------------------------------ workers that are lost

    def _lose(self, member: Member, reason: str) -> None:
        if self.members.get(member.name) is not member:
            return
        del self.members[member.name]
        member.wire.close()
        if self.routing is not None:
            self.routing.unseat(member.name)
        if not self._stopped:
            log.error("%s", reason)
            self.front.lost(member.name)
            self._flow()
        self.gone = total([self.gone, counters(member.stats)])

    def _ended(self, name: str, reason: str) -> None:
        """A process of this machine is over (crew.py starts it again)."""
        member = self.members.get(name)
        if member is not None:
            self._lose(member, reason)
        self._fail_start(self.error or reason, "engine")

    def _fail_start(self, error: str, blame: str) -> None:
        """Workers must start soundly once; after that they are started again."""
        if not self._ready.done():
            self.error = error
            self._ready.set_exception(EngineFailed(error, blame))
            self._ready.exception()  # whoever waits has it; nobody may wait any more

    def _freeze(self, member: Member, frozen: bool) -> None:
        member.frozen = frozen
        seat = self.routing.seats.get(member.name) if self.routing is not None else None
        if seat is not None:
            seat.willing = not frozen

    async def _watch_beats(self) -> None:
        """Counts turns of this loop, not seconds: time in which we were stopped ourselves is not the workers' silence."""
        lost_s = self.config.cluster.worker_lost_s
        while True:
            await asyncio.sleep(min(BEAT_S, lost_s / 8))
            for member in [member for member in self.members.values() if member.ready is not None]:  # loading may take all its time
                member.silent_s += min(BEAT_S, lost_s / 8)
                if member.silent_s >= lost_s:
                    self._lose(member, f"worker {member.name} has not been heard of for {member.silent_s:.1f} s: given up")
                    self.crew.kill(member.name)
                elif member.silent_s >= max(2 * BEAT_S, FROZEN_SHARE * lost_s) and not member.frozen:
                    log.error("worker %s has not been heard of for %.1f s", member.name, member.silent_s)
                    self._freeze(member, True)


# ---------------------------------------------------------------- small things


def with_ends(items: list[ToWorker | ToClient]) -> Iterator[tuple[ToWorker | ToClient, Finished | None]]:
    """Each item; the sound end of a request that follows its last tokens comes together with them."""
    skip = False
    for item, following in itertools.zip_longest(items, items[1:]):
        if skip:
            skip = False
            continue
        end = None
        if isinstance(item, ToClient) and isinstance(item.news, Deliver) and isinstance(following, ToClient):
            last = following.news if following.id == item.id else None
            end = last if isinstance(last, Finished) and not last.lost else None
            skip = end is not None
        yield item, end


def delta_of(id: str, tokens: Sequence[Sampled], end: Finished | None, cached_tokens: int = 0) -> Delta:
    logprobs = tuple(sampled.logprobs for sampled in tokens)
    return Delta(
        id,
        tuple(sampled.token for sampled in tokens),
        logprobs=logprobs if any(one is not None for one in logprobs) else (),
        finish=end.finish if end is not None else None,
        stopped_by=end.stopped_by if end is not None else None,
        cached_tokens=cached_tokens,
        error=end.error if end is not None else "",
    )


def shared_token(config: Config) -> str:
    """What workers must know. Raises ConfigError if they can be reached from elsewhere and there is none."""
    cluster = config.cluster
    token = cluster.cluster_token or ""
    if cluster.cluster_token_file is not None:
        try:
            token = Path(cluster.cluster_token_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cluster_token_file {cluster.cluster_token_file!r} can't be read: {error}") from None
    listen = host_and_port("cluster_listen", cluster.cluster_listen)[0] if cluster.cluster_listen is not None else "127.0.0.1"
    for host in (listen, cluster.cluster_host):
        try:
            control.check_exposure(host, token)
        except ControlError as error:
            raise ConfigError(str(error)) from None
    return token or secrets.token_hex(16)  # nobody from elsewhere can know it
