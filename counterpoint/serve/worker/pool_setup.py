"""What a Config says of a pool: its workers, where they join, and how requests are routed.

Owns: the checks of these settings. Promises: pure, but for files that settings name.
Must not: start anything.
"""

from __future__ import annotations

import secrets
from collections.abc import Container, Iterable

import msgspec

from counterpoint.builder import worker_setup
from counterpoint.config import Config, ConfigError, parse_host_port
from counterpoint.device.cores import usable_cores
from counterpoint.disagg import peer_connection
from counterpoint.disagg.load_tracker import LoadTracker, WorkerShape
from counterpoint.disagg.peer_connection import Address, ControlError
from counterpoint.disagg.role_rebalancer import RebalanceTargets, RoleRebalancer, WorkerQuarantine
from counterpoint.disagg.router import Router, RoutingRule
from counterpoint.disagg.routing_feedback import LinkBandwidth
from counterpoint.serve.worker.registry import HeartbeatLimits, ListenAddress, RegisteredWorker
from counterpoint.serve.worker.supervisor import (
    Launcher,
    ProcessLauncher,
    WorkerPlan,
    pool_slots,
)
from counterpoint.serve.worker.wire import (
    HEARTBEAT_S,
    EngineInfo,
    KvEndpoint,
    WorkerReady,
    read_cluster_token,
)
from counterpoint.spec.source import ModelSource

CHUNK_TOKENS = 128  # of a CPU's mixed batch, unless it is set
GPU_CHUNK_TOKENS = 512
FROZEN_SHARE = 0.4  # of `worker_lost_s`


def make_plan(config: Config, system: str) -> WorkerPlan:
    """Raises ConfigError if Ray is asked for and not installed."""
    worker_config = config.replace(api_key=None, cluster_token=None, cores=None)
    return WorkerPlan(worker_config, system, pool_slots(config.cluster), make_launcher(config))


def make_launcher(config: Config) -> Launcher:
    if config.cluster.ray_address is None:
        return ProcessLauncher(usable_cores(config.device.cores))
    from counterpoint.serve.worker.ray_launcher import RayLauncher

    return RayLauncher(config)


def make_heartbeat_limits(config: Config) -> HeartbeatLimits:
    lost_s = config.cluster.worker_lost_s
    return HeartbeatLimits(max(2 * HEARTBEAT_S, FROZEN_SHARE * lost_s), lost_s)


def make_listen_address(config: Config) -> ListenAddress:
    """Raises ConfigError if workers could be reached from elsewhere without a token, or could not
    know an address that others reach."""
    listen = Address(
        *parse_host_port("cluster_listen", config.cluster.cluster_listen or "127.0.0.1:0")
    )
    token = shared_token(config, listen.host)
    return ListenAddress(listen, frontend_host(config, listen.host), token)


def frontend_host(config: Config, listen: str) -> str:
    """Where the workers that this server starts dial it."""
    cluster, anywhere = config.cluster, listen in ("0.0.0.0", "::")
    unknown = anywhere if cluster.ray_address is not None else not peer_connection.is_local(listen)
    if unknown and cluster.workers and cluster.cluster_host is None:
        raise ConfigError(
            "cluster_listen lets other machines in: set cluster_host, this machine's address for"
            " their workers"
        )
    if not anywhere:
        return listen
    return cluster.cluster_host or "127.0.0.1" if cluster.ray_address is not None else "127.0.0.1"


def shared_token(config: Config, listen: str) -> str:
    """The secret that workers must know: the configured one, or a new one."""
    token = read_cluster_token(config)
    for host in (listen, config.cluster.cluster_host or "127.0.0.1"):
        try:
            peer_connection.check_exposure(host, token)
        except ControlError as error:
            raise ConfigError(str(error)) from None
    return token or secrets.token_hex(16)


def make_rebalancer(config: Config) -> RoleRebalancer | None:
    """Raises ConfigError if roles may change and there is no target to judge by."""
    ttft_s, tpot_s = config.scheduler.ttft_s, config.scheduler.tpot_s
    if not config.cluster.elastic:
        return None
    if ttft_s is None or tpot_s is None:
        raise ConfigError(
            "elastic is on, and there are no targets to judge by: set ttft_s and tpot_s"
        )
    return RoleRebalancer(RebalanceTargets(ttft_s, tpot_s))


# ---------------------------------------------------------------- from what workers say


def endpoint_of(ready: WorkerReady) -> KvEndpoint:
    assert ready.kv is not None  # every worker of a pool has one
    return ready.kv


def merge_engine_info(workers: Iterable[RegisteredWorker]) -> EngineInfo:
    """What all workers can do."""
    infos = {each.name: each.ready.engine_info for each in workers if each.ready is not None}
    return msgspec.structs.replace(
        next(iter(infos.values())),
        lanes="; ".join(f"{name}: {info.lanes}" for name, info in sorted(infos.items())),
        max_context_tokens=min(info.max_context_tokens for info in infos.values()),
        kv_tokens=min(info.kv_tokens for info in infos.values()),
        notes=tuple(dict.fromkeys(note for info in infos.values() for note in info.notes)),
    )


def make_load_tracker(config: Config, source: ModelSource, ready: WorkerReady) -> LoadTracker:
    """`ready`: of the first worker."""
    estimator = worker_setup.make_estimator(config, source, ready.units, ready.gpu)
    links = LinkBandwidth(
        worker_setup.link_bytes_per_s(config, ready.gpu), endpoint_of(ready).bytes_per_token
    )
    return LoadTracker(
        Router(estimator, links, RoutingRule.from_config(config.cluster)),
        config.scheduler.prefix_cache,
    )


def worker_shape(config: Config, ready: WorkerReady) -> WorkerShape:
    page_tokens = ready.engine_info.page_tokens
    return WorkerShape(
        ready.units,
        endpoint_of(ready).digest.layers,
        page_tokens,
        ready.engine_info.kv_tokens // page_tokens,
        config.scheduler.chunk_tokens or (GPU_CHUNK_TOKENS if ready.gpu else CHUNK_TOKENS),
        config.scheduler.max_running,
    )


def quarantines(tracker: LoadTracker, names: Container[str]) -> list[WorkerQuarantine]:
    """Shares of quarantined pages, of the workers that are in `names`."""
    return [
        WorkerQuarantine(name, worker.quarantined_pages / worker.shape.pages_total, worker.is_empty)
        for name, worker in tracker.workers.items()
        if name in names
    ]
