"""RayLauncher: workers of a pool as actors of a Ray cluster (extra `cluster`).

Owns: a placement group with room for all workers, and an actor for each, whose process is the
worker. Promises: an actor that ends, alone or with its machine, can be started again where there is
room; all end with this process, however it ends; no setting of the cluster is changed.
Must not: send anything but StartWorker through Ray. The worker dials the server as any other does;
requests, tokens and KV go over connections of our own.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import math
import queue
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec

from counterpoint.config import Config, ConfigError, parse_host_port
from counterpoint.device.cores import usable_cores
from counterpoint.disagg.peer_connection import is_local
from counterpoint.serve.worker.supervisor import EngineFailed, describe_exit, divide_cores
from counterpoint.serve.worker.wire import StartWorker
from counterpoint.serve.worker.worker_process import run_worker

CONNECT_S = 60.0
REACH_S = 5.0
CLOSE_S = 5.0
BEGIN_S = 60.0  # for Ray to take an actor
LOOK_S, ANSWER_S = 5.0, 5.0  # between two checks of the cluster, and for its answer
ROOM_S = 60.0  # for Ray to find room for all workers
STORE_BYTES = 80 << 20  # object store of a cluster that is started for us, which we do not use

T = TypeVar("T")
log = logging.getLogger("counterpoint")


class RayWorker:
    """Its process is a worker."""

    def run(self, start: bytes, rank: int, of: int, most_cores: int) -> int:
        """The exit status. This is worker number `rank` of `of` on this machine."""
        cores = divide_cores(usable_cores(), of)[rank][:most_cores]
        return run_worker(
            msgspec.structs.replace(
                msgspec.json.decode(start, type=StartWorker), cores=cores, engines=of
            )
        )


class RayLauncher:
    """Raises ConfigError if Ray is not installed."""

    def __init__(self, config: Config) -> None:
        try:
            ray: Any = importlib.import_module("ray")
            importlib.import_module("ray.util.scheduling_strategies")
        except ImportError:
            raise ConfigError(
                "ray_address needs Ray, which is not installed: pip install 'counterpoint[cluster]'"
            ) from None
        self.ray = ray
        self._caller = RayCaller()
        self.address = config.cluster.ray_address or "auto"
        self.device, self.most_cores = config.device.device, config.device.cores
        listen = config.cluster.cluster_listen
        self.local = listen is None or is_local(parse_host_port("cluster_listen", listen)[0])
        self._numbers: dict[str, int] = {}  # name -> bundle of the placement group
        self._bundle: dict[str, float] = {}
        self._group: Any = None
        self._actors: dict[str, Any] = {}
        self._watching: asyncio.Task[None] | None = None

    async def open(self, names: Sequence[str]) -> None:
        self._numbers = {name: number for number, name in enumerate(names)}
        try:
            if self.address not in ("auto", "local"):  # Ray itself would wait for ever
                await reach(parse_host_port("ray_address", self.address))
            await asyncio.wait_for(self._caller.call(self._open), CONNECT_S + ROOM_S)
        except OSError as error:  # TimeoutError is one
            raise EngineFailed(
                f"ray_address {self.address}: {str(error) or 'Ray does not respond'}", "user"
            ) from None
        self._watching = asyncio.create_task(self._watch())
        with contextlib.suppress(ValueError):  # not the main thread: there is no handler of ours
            # Ray has put a handler before ours that prints a stack.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.getsignal(number))

    def _open(self) -> None:
        started = {"include_dashboard": False, "object_store_memory": STORE_BYTES}
        try:
            self.ray.init(
                self.address, logging_level="error", **started if self.address == "local" else {}
            )
        except (self.ray.exceptions.RayError, ValueError, RuntimeError, OSError) as error:
            raise EngineFailed(f"ray_address {self.address}: {error}", "user") from None
        machines = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        workers = len(self._numbers)
        self._bundle = bundle(machines, workers, self.device, self.most_cores)
        # GPUs near each other, for KV transfers; CPU workers where each has its own bandwidth.
        strategy = "PACK" if "GPU" in self._bundle else "SPREAD"
        log.info("asking Ray for room for %d workers, each %s", workers, self._bundle)
        self._group = self.ray.util.placement_group([self._bundle] * workers, strategy=strategy)
        if not self._group.wait(ROOM_S):
            raise EngineFailed(
                f"Ray has no room for {workers} workers with {self._bundle} each:"
                " set fewer workers, or --cores of each",
                "user",
            )
        here = self._addresses()[self.ray.get_runtime_context().get_node_id()]
        if self.local and set(self._machines()) != {here}:
            raise EngineFailed(
                "Ray places workers on other machines: set cluster_listen to this machine's address"
                " for them, and a token",
                "user",
            )

    def _machines(self) -> list[str]:
        """The address of each bundle, "" for none: Ray moves it when its machine is lost."""
        nodes = self.ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        addresses = self._addresses()
        return [addresses.get(nodes.get(number, ""), "") for number in range(len(self._numbers))]

    def _addresses(self) -> dict[str, str]:
        return {node["NodeID"]: node["NodeManagerAddress"] for node in self.ray.nodes()}

    async def run(self, start: StartWorker) -> str:
        try:
            began = await asyncio.wait_for(self._caller.call(self._begin, start), BEGIN_S)
            return describe_exit(await asyncio.wrap_future(began))
        except TimeoutError:
            return "Ray does not respond"
        except Exception as error:  # any of Ray's: the worker has ended, and is started again
            return str(error).strip().partition("\n")[0]
        finally:
            self.kill(start.name)

    async def _watch(self) -> None:
        """Log when the cluster is lost: Ray does not, and no end of an actor is reported then."""
        responds = True
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await asyncio.wait_for(self._caller.call(self.ray.nodes), ANSWER_S)
            except Exception:  # TimeoutError, or one of Ray's
                if responds:
                    log.error(
                        "Ray does not respond: if the cluster's head is lost,"
                        " start this server again for a new one"
                    )
                responds = False
            else:
                if not responds:
                    log.info("Ray responds again")
                responds = True

    def _begin(self, start: StartWorker) -> Any:
        """Start an actor: the future of its exit status."""
        number, machines = self._numbers[start.name], self._machines()
        if not machines[number]:
            raise RuntimeError("Ray has no machine for it now")
        rank, of = machines[:number].count(machines[number]), machines.count(machines[number])
        place = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, number
        )
        needs = {"num_cpus": self._bundle["CPU"], "num_gpus": self._bundle.get("GPU", 0)}
        # supervisor.py starts it again, not Ray.
        remote = self.ray.remote(max_restarts=0, scheduling_strategy=place, **needs)
        self._actors[start.name] = actor = remote(RayWorker).remote()
        data = msgspec.json.encode(
            msgspec.structs.replace(start, config=start.config.replace(cluster_host=None))
        )
        return actor.run.remote(data, rank, of, math.ceil(self._bundle["CPU"])).future()

    def kill(self, name: str) -> None:
        actor = self._actors.pop(name, None)
        if actor is not None:
            self._caller.call(self._kill, actor)

    def _kill(self, actor: Any) -> None:
        with contextlib.suppress(self.ray.exceptions.RayError):
            self.ray.kill(actor)

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        with contextlib.suppress(TimeoutError):  # the cluster is lost
            await asyncio.wait_for(self._caller.call(self._close), CLOSE_S)

    def _close(self) -> None:
        if self.ray.is_initialized():
            if self._group is not None:
                self.ray.util.remove_placement_group(self._group)
            self.ray.shutdown()


async def reach(address: tuple[str, int]) -> None:
    """Raises OSError if nobody listens there."""
    _, writer = await asyncio.wait_for(asyncio.open_connection(*address), REACH_S)
    writer.close()


class RayCaller:
    """One daemon thread for all calls to Ray, which may never return: an executor's thread would
    keep the process alive. It stays, since a cluster that Ray starts ends with the thread that
    started it (PR_SET_PDEATHSIG)."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="ray", daemon=True).start()

    def call(self, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        future: Future[T] = Future()

        def call() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*arguments))
                except BaseException as error:
                    future.set_exception(error)

        self._calls.put(call)
        return asyncio.wrap_future(future)

    def _run(self) -> None:
        while True:
            self._calls.get()()


def bundle(
    machines: Sequence[Mapping[str, float]], workers: int, device: str, cores: int | None
) -> dict[str, float]:
    """What Ray reserves for each of `workers`: a GPU, if the device is one or there are enough, and
    `cores`, else the most CPUs that all can have (less than one, if there are too few)."""
    gpus = sum(int(machine.get("GPU", 0)) for machine in machines)
    have = [machine.get("CPU", 0.0) for machine in machines]
    share = sum(have) / workers
    even = (n for n in range(int(share), 0, -1) if sum(count // n for count in have) >= workers)
    most = cores or next(even, math.floor(100 * share) / 100)
    return {"CPU": most} | (
        {"GPU": 1} if device == "cuda" or (device == "auto" and gpus >= workers) else {}
    )
