"""The asynchronous face of a node, for an actor system to host. Knows handles only by their `.method.remote(...)`.

The node's own threads never wait here: reports are passed to this event loop, which sends them on.
"""

import asyncio
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import Any, Generic, TypeVar

from handoff.compatibility import Compatibility
from handoff.exchange import Exchange
from handoff.leases import HandoffKey
from handoff.logs import configure_logs
from handoff.node import MakeExchange, Node
from handoff.node_config import NodeConfig
from handoff.packaging import check_packages
from handoff.pool_layout import PoolLayout
from handoff.report import NodeReport
from handoff.step_loop import first_line
from handoff.transfer_ends import TransferEnd
from handoff.transports.registry import make_transport
from handoff.wire import PROTOCOL_VERSION
from handoff.wiring import PeerInfo
from scheduler.adapters import AdapterFacts, LoraCommand
from scheduler.commands import Command, CommandEffects
from scheduler.contract import DeviceFacts
from scheduler.ids import NodeId, RequestId
from scheduler.options import SchedulerOptions
from scheduler.slots import SlotLimits

N = TypeVar("N", bound=Node[Any])
T = TypeVar("T")

BOUNDARY_TIMEOUT_S = 60.0
"""Longest wait for a boundary: one step of the largest chunk on a slow machine."""
STOP_TIMEOUT_S = 2.0
SWITCH_INTERVAL_S = 0.0005
"""How long a thread that runs Python keeps another one waiting. With Python's own 5 ms the step loop, the transport and
the event loop wait for each other longer than a handoff takes."""
ADAPTER_TIMEOUT_S = 600.0
"""Longest wait for a quiet device: all requests that run when an adapter is to be loaded must end first."""


class NodeActor(ABC, Generic[N]):
    """Calls come from the coordinator and the wiring. Every wait is bounded."""

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._node: N | None = None
        self._api: Any = None
        self._coordinator: Any = None
        self._event_loop: asyncio.AbstractEventLoop | None = None

    @abstractmethod
    def _build(self) -> tuple[N, object]:
        """Load the model. Returns the node and the bytes of its KV pool."""

    async def start(self, api: Any, coordinator: Any) -> PeerInfo:
        """Load the model and start serving. api.deliver gets outputs, coordinator.report the rest."""
        check_packages()
        self._api, self._coordinator = api, coordinator
        self._event_loop = asyncio.get_running_loop()
        configure_logs(self._config.node)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        node, pool = await asyncio.to_thread(self._build)
        info = await asyncio.to_thread(node.start, pool)
        self._node = node
        return info

    async def connect(self, peer: PeerInfo) -> None:
        """Raises IncompatiblePeer."""
        self._running().connect(peer)

    async def disconnect(self, peer: NodeId) -> None:
        self._running().disconnect(peer)

    async def apply(self, command: Command) -> CommandEffects:
        """Raises CommandRejected, LoopStopped or TimeoutError."""
        return await self._at_boundary(self._running().apply(command))

    async def renew_leases(self, handoffs: Sequence[HandoffKey]) -> None:
        """Somebody follows these handoffs. Raises LoopStopped or TimeoutError."""
        await self._at_boundary(self._running().renew_leases(handoffs))

    async def ping(self) -> None:
        """Answers as long as this process can."""

    async def ended(self) -> str:
        """Why this node's step loop is over; waits as long as it runs. A process that dies ends the call as well."""
        node = self._running()
        await asyncio.wrap_future(node.ended)
        return f"its step loop failed: {first_line(node.failure)}" if node.failure else "it was stopped"

    async def status(self) -> dict[str, Any]:
        status: dict[str, Any] = await self._at_boundary(self._running().status())
        return status

    async def story(self, request_id: RequestId) -> list[dict[str, Any]]:
        """What happened to a request here, oldest first: at (seconds since the epoch), step, tokens, what."""
        lines = await self._at_boundary(self._running().story(request_id))
        epoch = time.time() - time.monotonic()
        return [{**asdict(line), "at": epoch + line.at} for line in lines]

    async def timelines(self) -> list[dict[str, Any]]:
        """See Node.timelines."""
        return self._running().timelines()

    async def lora(self, command: LoraCommand) -> tuple[AdapterFacts, ...]:
        """See Node.lora. Raises TimeoutError when what was admitted before is not done in ADAPTER_TIMEOUT_S."""
        return await asyncio.wait_for(self._running().lora(command), ADAPTER_TIMEOUT_S)

    async def stop(self) -> None:
        if self._node is not None:
            await asyncio.to_thread(self._node.stop, STOP_TIMEOUT_S)

    def _scheduler_options(self, facts: DeviceFacts) -> SchedulerOptions:
        config = self._config
        return {
            "prefix_caching": config.prefix_caching,
            "policy": config.policy,
            "lease_s": config.lease_s,
            "incarnation": config.incarnation,
            "state": SlotLimits(facts.slots, facts.snapshots, recurrent=facts.slot_bytes > 0),
        }

    def _make_exchange(self, facts: DeviceFacts) -> MakeExchange:
        config = self._config

        def make(report: Callable[[TransferEnd], None], adapter_digest: Callable[[str], str]) -> Exchange:
            return Exchange(
                node=config.node,
                incarnation=config.incarnation,
                transport=make_transport(config.transport, config.secret),
                compatibility=Compatibility.of(facts, PROTOCOL_VERSION),
                layout=PoolLayout.of(facts),
                report=report,
                clock=time.monotonic,
                adapter_digest=adapter_digest,
            )

        return make

    def _running(self) -> N:
        if self._node is None:
            raise RuntimeError(f"{self._config.node} is not started")
        return self._node

    async def _at_boundary(self, future: "Future[T]") -> T:
        return await asyncio.wait_for(asyncio.wrap_future(future), BOUNDARY_TIMEOUT_S)

    def _publish(self, report: NodeReport) -> None:
        assert self._event_loop is not None
        self._event_loop.call_soon_threadsafe(self._send, report)

    def _send(self, report: NodeReport) -> None:
        if report.outputs:
            self._api.deliver.remote(report.outputs)
        if report.events or report.transfers:
            self._coordinator.report.remote(replace(report, outputs=()))
