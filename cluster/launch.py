"""Start and stop an embedded cluster: Ray on this machine, the coordinator, the API and the nodes as its actors."""

import logging
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

import ray
import ray._private.node
import ray._private.services
import structlog
from ray.exceptions import RayError, RayTaskError

from cluster.api_actor import ApiActor
from cluster.api_keys import ApiKeys
from cluster.coordinator_actor import CoordinatorActor
from cluster.environment import ENVIRONMENT
from cluster.errors import LaunchFailed
from cluster.secret_files import cluster_secret
from cluster.settings import PoolSettings, Settings
from decode_node.actor import DecodeActor
from device.models import ModelFolder
from handoff.driver import DriverLimits
from handoff.node_config import NodeConfig
from handoff.wiring import PeerInfo
from prefill_node.actor import PrefillActor
from scheduler.batching import BatchLimits
from scheduler.device_config import DeviceConfig
from scheduler.ids import NodeId

log = structlog.get_logger()

OBJECT_STORE_BYTES = 80 << 20
"""Tokens and commands are small and travel inline; KV never goes through Ray."""
STOP_TIMEOUT_S = 3.0
RESERVED_CALLS = 1000
"""Calls to the coordinator beside those that serve requests: reports, cancels, status."""
LOOPBACK = "127.0.0.1"

_RAY_CONFIG: dict[str, Any] = {
    # Ray lets its workers give way to every other process (nice 15), which then starves the nodes.
    "worker_niceness": 0,
    # An idle cluster should cost next to nothing: these periodic jobs of Ray's serve its dashboard and its schedulers
    # of many tasks, neither of which is used here.
    "event_stats": False,
    "gcs_pull_resource_loads_period_milliseconds": 10_000,
    "io_context_monitor_probe_interval_ms": 60_000,
    "kill_idle_workers_interval_ms": 5000,
    "memory_monitor_refresh_ms": 5000,
    "metrics_report_interval_ms": 60_000,
    "object_manager_timer_freq_ms": 1000,
    "raylet_check_gc_period_milliseconds": 5000,
    "raylet_report_resources_period_milliseconds": 1000,
    "task_events_report_interval_ms": 0,
}

Progress = Callable[[str], None]


class Cluster:
    """A running cluster. url: the API's address; model: the name that requests give."""

    def __init__(self, url: str, model: str, api: Any, nodes: dict[NodeId, Any]) -> None:
        self.url = url
        self.model = model
        self._api = api
        self._nodes = nodes

    def stop(self) -> None:
        """End everything that `launch` started: first the API, then the nodes, then Ray. Bounded."""
        _settle([self._api.stop.remote()])
        _settle([node.stop.remote() for node in self._nodes.values()])
        ray.shutdown()


def launch(settings: Settings, model: ModelFolder, progress: Progress, keys: ApiKeys | None = None) -> Cluster:
    """Start an embedded cluster. Raises LaunchFailed or SettingsError; whatever happens, nothing stays behind.

    keys: what the API asks for; None, or no keys at all, lets everybody in.
    """
    progress("Starting Ray.")
    try:
        start_ray(settings)
        return _launch_actors(settings, model, progress, keys)
    except BaseException as error:
        ray.shutdown()
        if isinstance(error, RayTaskError):
            raise LaunchFailed(str(error.cause)) from None
        if isinstance(error, RayError):
            raise LaunchFailed(str(error).splitlines()[0]) from error
        raise


def start_ray(settings: Settings) -> None:
    """An embedded Ray that listens on loopback only and sends no usage report."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with _signal_handlers_kept(), _embedded_ray():
        ray.init(
            address="local",
            include_dashboard=False,
            _node_ip_address=LOOPBACK,
            num_cpus=1,
            object_store_memory=OBJECT_STORE_BYTES,
            resources={"prefill": settings.prefill.nodes, "decode": settings.decode.nodes},
            log_to_driver=False,
            _system_config=_RAY_CONFIG,
            logging_level=logging.ERROR,
        )


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Ray's native handler of SIGTERM would abort this process, with a stack trace, while the nodes load."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def _embedded_ray() -> Iterator[None]:
    """Two things that Ray has no public setting for, while it starts.

    It replaces 127.0.0.1 by the machine's outward address, and then listens on all of them: keep it. It starts a log
    monitor, the busiest of its idle processes, to forward what we tell it not to forward: don't. Tests list the
    sockets and the processes, so a Ray that changes here is noticed.
    """
    with (
        patch.object(ray._private.services, "resolve_ip_for_localhost", lambda host: host),
        patch.object(ray._private.node.Node, "start_log_monitor", lambda node: None),
    ):
        yield


def _launch_actors(settings: Settings, model: ModelFolder, progress: Progress, keys: ApiKeys | None) -> Cluster:
    limits = settings.limits
    api = _actor(ApiActor).remote(limits)
    coordinator = launch_coordinator(settings)
    progress(f"Loading {model.name} on {settings.prefill.nodes} prefill and {settings.decode.nodes} decode node(s).")
    nodes = launch_nodes(settings, model, api, coordinator)
    url: str = ray.get(
        api.start.remote(
            coordinator,
            str(model.path),
            model.name,
            _max_model_len(nodes, limits.start_s),
            settings.host,
            settings.port,
            keys,
        ),
        timeout=limits.start_s,
    )
    return Cluster(url, model.name, api, nodes)


def launch_coordinator(settings: Settings) -> Any:
    """The coordinator's actor, idle until `launch_nodes`."""
    limits = settings.limits
    return _actor(CoordinatorActor, max_concurrency=coordinator_calls(limits.max_requests)).remote(
        settings.order,
        DriverLimits(action_s=limits.action_s, handoff_s=limits.handoff_s),
        limits.lease_s,
        limits.health_interval_s,
        limits.health_timeout_s,
    )


def launch_nodes(settings: Settings, model: ModelFolder, api: Any, coordinator: Any) -> dict[NodeId, Any]:
    """Start and connect the nodes of both pools under a coordinator; prefill nodes first. api: see NodeActor.start."""
    secret = cluster_secret(settings)
    prefill = _node_actors(PrefillActor, "prefill", settings, settings.prefill, model, secret)
    decode = _node_actors(DecodeActor, "decode", settings, settings.decode, model, secret)
    nodes, timeout_s = {**prefill, **decode}, settings.limits.start_s
    infos: list[PeerInfo] = ray.get([node.start.remote(api, coordinator) for node in nodes.values()], timeout=timeout_s)
    _connect_pairs(prefill, decode, {info.node: info for info in infos}, timeout_s)
    ray.get(coordinator.start.remote(api, prefill, decode), timeout=timeout_s)
    return nodes


def coordinator_calls(max_requests: int) -> int:
    """How many calls the coordinator may have open at once.

    Each request that is not handed over yet keeps one open, and so does one whose client has left until it is cleaned
    up. Beyond the limit Ray queues calls, and the reports that would let the open ones end must never be among those.
    """
    return 2 * max_requests + RESERVED_CALLS


def _actor(actor: type, **options: Any) -> Any:
    """Ray's decorator is typed for methods that it decorates itself; handles are untyped here."""
    remote: Any = ray.remote(actor)
    return remote.options(num_cpus=0, **options)


def _node_actors(
    actor: type, role: str, settings: Settings, pool: PoolSettings, model: ModelFolder, secret: bytes
) -> dict[NodeId, Any]:
    handles: dict[NodeId, Any] = {}
    for index in range(pool.nodes):
        config = _node_config(role, index, settings, pool, model, secret)
        gpus = 1 if settings.device.startswith("cuda") else 0
        handles[config.node] = _actor(actor, num_gpus=gpus, resources={role: 1}).remote(config)
    return handles


def _node_config(
    role: str, index: int, settings: Settings, pool: PoolSettings, model: ModelFolder, secret: bytes
) -> NodeConfig:
    return NodeConfig(
        node=NodeId(f"{role}-{index}"),
        incarnation=1,
        device=DeviceConfig(
            model_path=str(model.path),
            model_name=model.name,
            device=settings.device,
            dtype=pool.dtype or settings.dtype,
            attention=settings.attention,
            block_size=pool.block_size or settings.block_size,
            kv_bytes=pool.kv_mib << 20,
            max_model_len=settings.max_model_len,
            threads=settings.threads_of(pool),
            spill_bytes=pool.spill_bytes,
            spill_path=pool.spill_path,
            slots=pool.max_batch_sequences + max(settings.limits.max_holds, settings.limits.max_reservations),
            snapshots=pool.snapshots,
            staging_bytes=settings.limits.staging_mib << 20 if role == "decode" else 0,
            router=settings.router,
        ),
        batch=BatchLimits(
            max_tokens=max(pool.max_batch_tokens, pool.max_batch_sequences),
            max_sequences=pool.max_batch_sequences,
        ),
        policy=pool.scheduling,
        max_holds=settings.limits.max_holds,
        max_reservations=settings.limits.max_reservations,
        lease_s=settings.limits.lease_s,
        prefix_caching=settings.prefix_caching,
        transport=settings.transport,
        layerwise_tokens=settings.limits.layerwise_tokens,
        secret=secret,
    )


def _connect_pairs(
    prefill: dict[NodeId, Any], decode: dict[NodeId, Any], infos: dict[NodeId, PeerInfo], timeout_s: float
) -> None:
    calls = []
    for source, source_handle in prefill.items():
        for destination, destination_handle in decode.items():
            calls.append(source_handle.connect.remote(infos[destination]))
            calls.append(destination_handle.connect.remote(infos[source]))
    ray.get(calls, timeout=timeout_s)


def _max_model_len(nodes: dict[NodeId, Any], timeout_s: float) -> int:
    """The longest request that every node can hold."""
    statuses = ray.get([node.status.remote() for node in nodes.values()], timeout=timeout_s)
    devices = [status["device"] for status in statuses]
    return min(int(min(d["max_model_len"], d["total_blocks"] * d["block_size"])) for d in devices)


def _settle(calls: Iterable[Any]) -> None:
    """Wait for calls that stop things; one that fails or hangs must not keep the others from ending."""
    calls = list(calls)
    with suppress(Exception):
        _, late = ray.wait(calls, num_returns=len(calls), timeout=STOP_TIMEOUT_S)
        if late:
            log.warning("not everything stopped in time", late=len(late))
