"""The coordinator's process: routes requests, drives handoffs, watches the nodes."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Collection, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import structlog
from ray.exceptions import RayActorError, RayTaskError

from cluster.adapter_rollout import AdapterRollout
from cluster.errors import NodeLost, NoNodeLeft
from handoff.coordinator import Order
from handoff.drive import HandoffRecord
from handoff.driver import Driver, DriverLimits
from handoff.leases import HandoffKey, LeaseKeeper
from handoff.logs import configure_logs
from handoff.node_actor import ADAPTER_TIMEOUT_S
from handoff.report import NodeReport
from scheduler.adapters import AdapterFacts, LoraCommand
from scheduler.commands import Command, CommandEffects, SubmitHandoffPrefill
from scheduler.ids import HandoffId, NodeId, RequestId
from scheduler.request import Request
from scheduler.routing import least_loaded

log = structlog.get_logger()

T = TypeVar("T")

RECENT_RECORDS = 256
ANSWER_TIMEOUT_S = 10.0
"""A node's answer to a question of an operator."""
ADAPTER_ANSWER_TIMEOUT_S = ADAPTER_TIMEOUT_S + ANSWER_TIMEOUT_S
"""A node's answer to an adapter command: its own limit comes first, and withdraws the command."""


class RayNodes:
    """NodePort, LeasePort and AdapterPort over actor handles."""

    def __init__(self, handles: dict[NodeId, Any]) -> None:
        self._handles = handles

    async def apply(self, node: NodeId, command: Command) -> CommandEffects:
        return await _unwrapped(node, self._handles[node].apply.remote(command))

    async def submit_prefill(
        self, node: NodeId, command: SubmitHandoffPrefill, send_to: NodeId | None
    ) -> CommandEffects:
        return await _unwrapped(node, self._handles[node].submit_prefill.remote(command, send_to))

    async def start_transfer(self, node: NodeId, handoff_id: HandoffId, attempt: int, destination: NodeId) -> bool:
        return await _unwrapped(node, self._handles[node].start_transfer.remote(handoff_id, attempt, destination))

    async def renew_leases(self, node: NodeId, handoffs: Sequence[HandoffKey]) -> None:
        await _unwrapped(node, self._handles[node].renew_leases.remote(handoffs))

    async def lora(self, node: NodeId, command: LoraCommand) -> tuple[AdapterFacts, ...]:
        return await _unwrapped(node, self._handles[node].lora.remote(command))


async def _unwrapped(node: NodeId, call: Awaitable[T]) -> T:
    """A node's own error instead of Ray's wrapping of it. Raises NodeLost if its process is gone."""
    try:
        return await call
    except RayTaskError as error:
        raise error.cause from None
    except RayActorError:
        raise NodeLost(f"{node} was lost") from None


async def _answer(call: Awaitable[T]) -> T:
    """A node's answer in time. Raises TimeoutError, RayActorError or RayTaskError."""

    async def wait() -> T:
        return await call

    return await asyncio.wait_for(wait(), ANSWER_TIMEOUT_S)


class CoordinatorActor:
    """Hosts the driver. Its calls are coroutines of one event loop."""

    def __init__(
        self,
        order: str,
        limits: DriverLimits,
        lease_s: float,
        health_interval_s: float,
        health_timeout_s: float,
    ) -> None:
        self._order = Order(order)
        self._limits = limits
        self._lease_s = lease_s
        self._health_interval_s = health_interval_s
        self._health_timeout_s = health_timeout_s
        self._handles: dict[NodeId, Any] = {}
        self._pools: dict[str, list[NodeId]] = {"prefill": [], "decode": []}
        self._lost: dict[NodeId, str] = {}
        self._recent: deque[HandoffRecord] = deque(maxlen=RECENT_RECORDS)
        self._completions: Counter[str] = Counter()
        self._turn = 0
        self._driver: Driver | None = None
        self._rollout: AdapterRollout | None = None
        self._api: Any = None
        self._watches: list[asyncio.Task[None]] = []

    async def start(self, api: Any, prefill: dict[NodeId, Any], decode: dict[NodeId, Any]) -> None:
        """Take over these nodes. api.fail is told of requests that can't go on."""
        configure_logs("coordinator")
        self._api = api
        self._handles = {**prefill, **decode}
        self._pools = {"prefill": list(prefill), "decode": list(decode)}
        nodes = RayNodes(self._handles)
        self._driver = Driver(nodes, self._limits, time.monotonic, self._on_record, self._on_orphan, self._another)
        self._rollout = AdapterRollout(nodes, self._alive_nodes, ADAPTER_ANSWER_TIMEOUT_S)
        keeper = LeaseKeeper(nodes, self._driver.live_handoffs, self._lease_s)
        self._watches = [asyncio.create_task(keeper.run()), asyncio.create_task(self._ping_nodes())]
        self._watches += [asyncio.create_task(self._wait_for_end(node)) for node in self._handles]

    async def serve(self, request: Request) -> HandoffRecord:
        """Route and hand over one request. Returns when it runs on its decode node, has ended, or failed."""
        driver = self._running()
        source, destination = self._pick("prefill"), self._pick("decode")
        self._turn += 1
        handoff_id = HandoffId(f"h-{request.request_id}")
        return await driver.hand_over(handoff_id, request, source, destination, self._order)

    async def cancel(self, request_id: RequestId) -> bool:
        return self._running().cancel(request_id)

    async def load_adapter(self, name: str, path: str) -> None:
        """On all nodes or none. Raises AdapterRefused, AdapterUnsettled, NoNodeLeft."""
        await self._adapters().load(name, path)

    async def unload_adapter(self, name: str) -> None:
        """Raises AdapterRefused, AdapterUnsettled, NoNodeLeft."""
        await self._adapters().unload(name)

    async def report(self, report: NodeReport) -> None:
        self._running().on_report(report)

    async def status(self) -> dict[str, Any]:
        """Plain data: see docs/api.md, /cluster/status."""
        driver = self._running()
        nodes = [n for pool in self._pools.values() for n in pool]
        statuses = await asyncio.gather(*(self._status_of(node) for node in nodes))
        return {
            "order": self._order.value,
            "missing_roles": [role for role in self._pools if not self._alive(role)],
            "nodes": statuses,
            "counters": _summed(statuses),
            "handoffs": {
                "active": driver.active,
                "phases": driver.phases(),
                **{name: self._completions[name] for name in sorted(self._completions)},
            },
            "recent": [_plain(record) for record in self._recent],
        }

    async def story(self, request_id: RequestId) -> dict[str, Any]:
        """What every node knows of a request, in order of time: see docs/api.md, /cluster/story."""
        answers = await asyncio.gather(*(self._story_of(node, request_id) for node in self._handles))
        lines = [line for answer in answers for line in answer.get("lines", ())]
        return {
            "request_id": request_id,
            "lines": sorted(lines, key=lambda line: line["at"]),
            "silent": [answer for answer in answers if "reason" in answer],
        }

    def _running(self) -> Driver:
        if self._driver is None:
            raise RuntimeError("the coordinator is not started")
        return self._driver

    def _adapters(self) -> AdapterRollout:
        if self._rollout is None:
            raise RuntimeError("the coordinator is not started")
        return self._rollout

    def _pick(self, role: str) -> NodeId:
        alive = self._alive(role)
        if not alive:
            raise NoNodeLeft(f"no {role} node is alive; restart the server")
        driver = self._running()
        return least_loaded(alive, {node: driver.load(node) for node in alive}, self._turn)

    def _another(self, request: Request, not_these: Collection[NodeId]) -> NodeId | None:
        """A decode node for KV that is still held, whose first destination has failed."""
        left = [node for node in self._alive("decode") if node not in not_these]
        driver = self._running()
        return least_loaded(left, {node: driver.load(node) for node in left}, self._turn) if left else None

    def _alive(self, role: str) -> list[NodeId]:
        return [node for node in self._pools[role] if node not in self._lost]

    def _alive_nodes(self) -> list[NodeId]:
        """Prefill nodes first. Raises NoNodeLeft if a pool has none: nothing can be served then."""
        pools = {role: self._alive(role) for role in self._pools}
        for role, alive in pools.items():
            if not alive:
                raise NoNodeLeft(f"no {role} node is alive; restart the server")
        return [node for alive in pools.values() for node in alive]

    def _on_record(self, record: HandoffRecord) -> None:
        self._recent.append(record)
        self._completions[record.completion.value] += 1

    def _on_orphan(self, request_id: RequestId, reason: str) -> None:
        self._api.fail.remote(request_id, reason)

    async def _status_of(self, node: NodeId) -> dict[str, Any]:
        if node in self._lost:
            return {"node": node, "lost": self._lost[node]}
        try:
            status: dict[str, Any] = await _answer(self._handles[node].status.remote())
        except (TimeoutError, RayActorError, RayTaskError) as error:
            return {"node": node, "unreachable": f"{type(error).__name__}: {error}"}
        return status

    async def _story_of(self, node: NodeId, request_id: RequestId) -> dict[str, Any]:
        if node in self._lost:
            return {"node": node, "reason": self._lost[node]}
        try:
            lines: list[dict[str, Any]] = await _answer(self._handles[node].story.remote(request_id))
        except (TimeoutError, RayActorError, RayTaskError) as error:
            return {"node": node, "reason": f"{type(error).__name__}: {error}".splitlines()[0]}
        return {"lines": [{"node": node, **line} for line in lines]}

    async def _wait_for_end(self, node: NodeId) -> None:
        """A node that ends, or whose process dies, is noticed at once."""
        try:
            reason = await self._handles[node].ended.remote()
        except (RayActorError, RayTaskError) as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
        self._lose(node, reason)

    async def _ping_nodes(self) -> None:
        """A node that is alive and does not answer is noticed within the health interval and timeout."""
        while True:
            await asyncio.sleep(self._health_interval_s)
            alive = [node for node in self._handles if node not in self._lost]
            await asyncio.gather(*(self._check(node) for node in alive))

    async def _check(self, node: NodeId) -> None:
        try:
            await asyncio.wait_for(self._ping(node), self._health_timeout_s)
        except Exception as error:
            self._lose(node, f"{type(error).__name__}: {error}".splitlines()[0])

    async def _ping(self, node: NodeId) -> None:
        await self._handles[node].ping.remote()

    def _lose(self, node: NodeId, reason: str) -> None:
        """A lost node gets no more requests; its peers give it up, so that their memory is quiet."""
        if node in self._lost:
            return
        log.error("node lost", node=node, reason=reason)
        self._lost[node] = reason
        for other, handle in self._handles.items():
            if other not in self._lost:
                handle.disconnect.remote(node)
        self._running().on_node_lost(node)


def _summed(statuses: list[dict[str, Any]]) -> dict[str, int]:
    """The nodes' counters added up, under names that the metrics keep."""
    total: Counter[str] = Counter()
    for status in statuses:
        total.update({f"node_{name}_total": count for name, count in status.get("counters", {}).items()})
    return dict(total)


def _plain(record: HandoffRecord) -> dict[str, Any]:
    values = asdict(record)
    values["completion"] = record.completion.value
    return values
