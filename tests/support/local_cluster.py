"""A whole cluster in one process: real nodes with their threads, the real driver, the memory transport."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kv_machine import KvMachine

from cluster.gateway import GatewayError, ServiceFailed
from cluster.token_streams import TokenStreams
from decode_node.node import DecodeNode
from handoff.compatibility import Compatibility
from handoff.coordinator import Completion, Order
from handoff.drive import HandoffRecord
from handoff.driver import Driver, DriverLimits
from handoff.exchange import Exchange
from handoff.leases import HandoffKey, LeaseKeeper
from handoff.node import MakeExchange, Node
from handoff.pool_layout import PoolLayout
from handoff.report import NodeReport
from handoff.transfer_ends import TransferEnd
from handoff.transports.base import Transport
from handoff.transports.memory import MemoryFabric, MemoryTransport
from handoff.wire import PROTOCOL_VERSION
from prefill_node.node import PrefillNode
from scheduler.batching import BatchLimits
from scheduler.commands import Command, CommandEffects, SubmitHandoffPrefill
from scheduler.contract import DeviceFacts, DeviceIo
from scheduler.decode_scheduler import DecodeScheduler
from scheduler.ids import HandoffId, NodeId, RequestId
from scheduler.policies import SchedulingPolicy
from scheduler.prefill_scheduler import PrefillScheduler
from scheduler.request import Request
from scheduler.routing import least_loaded
from scheduler.slots import SlotLimits

T = TypeVar("T")

BLOCK_SIZE = 4
STAGING_BYTES = 512
"""Of a decode node: half of it takes 8 blocks of a prefill node."""
TOKEN_TIMEOUT_S = 20.0
RECLAIM_S = 1.0
"""How long blocks may take to come back after a cancel."""


@dataclass(slots=True)
class Answer:
    """What a client saw. record: of its handoff."""

    tokens: list[int] = field(default_factory=list)
    error: str = ""
    cached_tokens: int | None = None
    record: HandoffRecord | None = None


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """policy: of both pools. spill_blocks: room for spilled KV on each node. depth: steps in flight on each node.

    decode_block_size: where it is not that of the prefill nodes.
    make_device: a node's device for its number of blocks, and its pool's bytes, instead of a KvMachine; spill_blocks
    and depth are its own business then. make_transport: instead of the memory transport.
    jitter_seed: delays answers and reports at random, and delivers some reports twice; each node's stay in order.
    """

    prefills: int = 1
    decodes: int = 1
    prefill_blocks: int = 256
    decode_blocks: int = 256
    order: Order = Order.DESTINATION_FIRST
    limits: BatchLimits = field(default_factory=lambda: BatchLimits(max_tokens=32, max_sequences=8))
    policy: SchedulingPolicy = field(default_factory=SchedulingPolicy)
    spill_blocks: int = 0
    max_holds: int = 64
    max_reservations: int = 32
    lease_s: float = 60.0
    max_model_len: int = 1024
    decode_block_size: int = BLOCK_SIZE
    depth: int = 2
    layerwise_tokens: int = 0
    make_device: Callable[[int], tuple[DeviceIo, object]] | None = None
    make_transport: Callable[[], Transport] | None = None
    jitter_seed: int | None = None


class Ports:
    """NodePort and LeasePort over nodes of this process. sent: commands that have reached a node's inbox.

    delay: seconds that an answer takes. cut: no call reaches any node, as if the caller was dead.
    """

    def __init__(self, delay: Callable[[], float]) -> None:
        self._delay = delay
        self.cut = False
        self.nodes: dict[NodeId, PrefillNode | DecodeNode] = {}
        self.lost: set[NodeId] = set()
        self.sent: list[Command] = []
        self._losses: dict[NodeId, asyncio.Event] = {}

    async def apply(self, node: NodeId, command: Command) -> CommandEffects:
        self._require(node)
        future = self.nodes[node].apply(command)
        self.sent.append(command)
        return await self._answer(node, future)

    async def submit_prefill(
        self, node: NodeId, command: SubmitHandoffPrefill, send_to: NodeId | None
    ) -> CommandEffects:
        self._require(node)
        prefill = self.nodes[node]
        assert isinstance(prefill, PrefillNode)
        future = prefill.submit_prefill(command, send_to)
        self.sent.append(command)
        return await self._answer(node, future)

    async def start_transfer(self, node: NodeId, handoff_id: HandoffId, attempt: int, destination: NodeId) -> bool:
        self._require(node)
        prefill = self.nodes[node]
        assert isinstance(prefill, PrefillNode)
        return await self._answer(node, prefill.start_transfer(handoff_id, attempt, destination))

    async def renew_leases(self, node: NodeId, handoffs: Sequence[HandoffKey]) -> None:
        self._require(node)
        await self._answer(node, self.nodes[node].renew_leases(handoffs))

    def lose(self, node: NodeId) -> None:
        """Like a dead process: calls under way and later ones fail."""
        self.lost.add(node)
        self._loss_of(node).set()

    async def _answer(self, node: NodeId, future: "Future[T]") -> T:
        answer = asyncio.wrap_future(future)
        loss = asyncio.create_task(self._loss_of(node).wait())
        try:
            await asyncio.wait((answer, loss), return_when=asyncio.FIRST_COMPLETED)
            self._require(node)
            if (delay := self._delay()) > 0:
                await asyncio.sleep(delay)
            return await answer
        finally:
            loss.cancel()

    def _loss_of(self, node: NodeId) -> asyncio.Event:
        return self._losses.setdefault(node, asyncio.Event())

    def _require(self, node: NodeId) -> None:
        if self.cut or node in self.lost:
            raise ConnectionError(f"{node} is gone")


class LocalCluster:
    """Use as an async context manager; every node is stopped at its end. devices: the KvMachines, by node."""

    def __init__(self, shape: ClusterShape) -> None:
        self.shape = shape
        self.fabric = MemoryFabric()
        self.devices: dict[NodeId, KvMachine] = {}
        self._pools: dict[NodeId, object] = {}
        self._jitter = None if shape.jitter_seed is None else random.Random(shape.jitter_seed)
        self._deliver_at: dict[NodeId, float] = {}
        self.ports = Ports(self._delay)
        self.records: list[HandoffRecord] = []
        self._streams = TokenStreams()
        self._turn = 0
        self._prefills = [NodeId(f"prefill-{i}") for i in range(shape.prefills)]
        self._decodes = [NodeId(f"decode-{i}") for i in range(shape.decodes)]

    async def __aenter__(self) -> "LocalCluster":
        self._event_loop = asyncio.get_running_loop()
        self.driver = Driver(
            self.ports,
            DriverLimits(action_s=15.0, handoff_s=30.0),
            time.monotonic,
            self.records.append,
            lambda request_id, reason: self._streams.fail(request_id, ServiceFailed(reason)),
        )
        for name in self._prefills:
            self._add(name, self.shape.prefill_blocks, self._prefill_node)
        for name in self._decodes:
            self._add(name, self.shape.decode_blocks, self._decode_node)
        keeper = LeaseKeeper(self.ports, self.driver.live_handoffs, self.shape.lease_s)
        self._keeping = asyncio.create_task(keeper.run())
        infos = {name: node.start(self._pools[name]) for name, node in self.ports.nodes.items()}
        for prefill in self._prefills:
            for decode in self._decodes:
                self.ports.nodes[prefill].connect(infos[decode])
                self.ports.nodes[decode].connect(infos[prefill])
        return self

    async def __aexit__(self, *_: object) -> None:
        self._keeping.cancel()
        self.fabric.release()
        for name, node in self.ports.nodes.items():
            if name in self.devices:
                self.devices[name].gate.release()
            await asyncio.to_thread(node.stop, 10.0)

    def _add(self, name: NodeId, blocks: int, make: Callable[[NodeId, DeviceIo], PrefillNode | DecodeNode]) -> None:
        if self.shape.make_device is not None:
            device, self._pools[name] = self.shape.make_device(blocks)
        else:
            device = self.devices[name] = self._oracle(name, blocks)
            self._pools[name] = device.pool
        self.ports.nodes[name] = make(name, device)

    def _oracle(self, name: NodeId, blocks: int) -> KvMachine:
        decodes = name.startswith("decode")
        return KvMachine(
            blocks,
            self.shape.decode_block_size if decodes else BLOCK_SIZE,
            staging_bytes=STAGING_BYTES if decodes else 0,
            max_model_len=self.shape.max_model_len,
            spill_blocks=self.shape.spill_blocks,
            depth=self.shape.depth,
        )

    def _prefill_node(self, name: NodeId, device: DeviceIo) -> PrefillNode:
        facts = device.facts()
        scheduler = PrefillScheduler(
            facts.total_blocks,
            facts.block_size,
            self.shape.limits,
            max_model_len=facts.max_model_len,
            max_handoffs=self.shape.max_holds,
            policy=self.shape.policy,
            lease_s=self.shape.lease_s,
            state=_state(facts),
        )
        make, tokens = self._make_exchange(name, device), self.shape.layerwise_tokens
        return PrefillNode(name, 1, scheduler, device, make, self._publish, time.monotonic, tokens)

    def _decode_node(self, name: NodeId, device: DeviceIo) -> DecodeNode:
        facts = device.facts()
        scheduler = DecodeScheduler(
            facts.total_blocks,
            facts.block_size,
            self.shape.limits,
            max_model_len=facts.max_model_len,
            max_reservations=self.shape.max_reservations,
            policy=self.shape.policy,
            lease_s=self.shape.lease_s,
            state=_state(facts),
        )
        exchange = self._make_exchange(name, device)
        return DecodeNode(name, 1, scheduler, device, exchange, self._publish, time.monotonic)

    def _make_exchange(self, name: NodeId, device: DeviceIo) -> MakeExchange:
        facts = device.facts()

        def make(report: Callable[[TransferEnd], None], adapter_digest: Callable[[str], str]) -> Exchange:
            return Exchange(
                node=name,
                incarnation=1,
                transport=self._make_transport(),
                compatibility=Compatibility.of(facts, PROTOCOL_VERSION),
                layout=PoolLayout.of(facts),
                report=report,
                clock=time.monotonic,
                adapter_digest=adapter_digest,
            )

        return make

    def _make_transport(self) -> Transport:
        make = self.shape.make_transport
        return MemoryTransport(self.fabric) if make is None else make()

    def _publish(self, report: NodeReport) -> None:
        self._event_loop.call_soon_threadsafe(self._send, report)

    def _delay(self) -> float:
        return 0.0 if self._jitter is None else self._jitter.choice([0.0, 0.001, 0.003])

    def _send(self, report: NodeReport) -> None:
        """To the API and the coordinator, after all earlier ones of this node."""
        if self._jitter is None:
            self._deliver(report)
            return
        at = max(self._deliver_at.get(report.node, 0.0) + 1e-5, self._event_loop.time() + self._delay())
        self._deliver_at[report.node] = at
        for _ in range(self._jitter.choice([1, 1, 2])):
            self._event_loop.call_at(at, self._deliver, report)

    def _deliver(self, report: NodeReport) -> None:
        if report.node in self.ports.lost:
            return
        self._streams.deliver(report.outputs)
        if not self.ports.cut:
            self.driver.on_report(report)

    def node(self, name: str) -> Node[Any]:
        return self.ports.nodes[NodeId(name)]

    def gate(self, name: str) -> Any:
        return self.devices[NodeId(name)].gate

    async def serve(self, request: Request) -> Answer:
        """Route, hand over and collect one request, like the API does."""
        load = {name: self.driver.load(name) for name in (*self._prefills, *self._decodes)}
        source = least_loaded([n for n in self._prefills if n not in self.ports.lost], load, self._turn)
        destination = least_loaded([n for n in self._decodes if n not in self.ports.lost], load, self._turn)
        self._turn += 1
        handoff_id = HandoffId(f"h-{request.request_id}")
        answer = Answer()
        stream = self._streams.open(request.request_id)

        async def hand_over() -> None:
            answer.record = await self.driver.hand_over(handoff_id, request, source, destination, self.shape.order)
            if answer.record.completion in (Completion.FAILED, Completion.CANCELLED):
                reason = answer.record.reason or answer.record.completion.value
                self._streams.fail(request.request_id, ServiceFailed(reason))

        handing_over = asyncio.create_task(hand_over())
        try:
            while True:
                token = await stream.next(TOKEN_TIMEOUT_S)
                answer.tokens.append(token.token)
                if token.index == 0:
                    answer.cached_tokens = token.cached_tokens
                if token.finish is not None:
                    break
        except GatewayError as error:
            answer.error = str(error)
        finally:
            self._streams.close(request.request_id)
        await asyncio.wait_for(handing_over, TOKEN_TIMEOUT_S)
        return answer

    async def until_sent(self, kind: type[Any], request_id: str) -> None:
        """Wait until a command of a request's handoff waits at its node's next boundary."""
        await self.until(
            lambda: any(isinstance(c, kind) and c.handoff_id == f"h-{request_id}" for c in self.ports.sent)
        )

    def cancel(self, request_id: str) -> bool:
        """The client leaves: nothing more reaches it."""
        self._streams.fail(RequestId(request_id), ServiceFailed("cancelled by the client"))
        return self.driver.cancel(RequestId(request_id))

    def lose(self, name: str) -> None:
        """A node's process is gone: no answers, no reports, and its peers give it up."""
        lost = NodeId(name)
        self.ports.lose(lost)
        for other, node in self.ports.nodes.items():
            if other not in self.ports.lost:
                node.disconnect(lost)
        self.driver.on_node_lost(lost)

    def stop_renewals(self) -> None:
        self._keeping.cancel()

    def kill_coordinator(self) -> None:
        """No command, no renewal and no cleanup comes from it any more; nodes and clients live on."""
        self.stop_renewals()
        self.ports.cut = True

    async def status(self, name: str) -> dict[str, Any]:
        return await asyncio.wrap_future(self.node(name).status())

    async def until(self, condition: Callable[[], Any], timeout_s: float = 10.0) -> None:
        """Wait for a condition (plain or awaitable) to hold; AssertionError after the timeout."""
        deadline = time.monotonic() + timeout_s
        while True:
            holds = condition()
            if asyncio.iscoroutine(holds):
                holds = await holds
            if holds:
                return
            assert time.monotonic() < deadline, f"did not happen within {timeout_s} s"
            await asyncio.sleep(0.002)

    async def blocks_are(self, name: str, **wanted: int) -> bool:
        blocks = (await self.status(name))["blocks"]
        return all(blocks[key] == value for key, value in wanted.items())

    async def require_drained(self, timeout_s: float = RECLAIM_S) -> None:
        """All blocks of all living nodes are free or cached; nothing is driven any more."""
        await self.require_nodes_drained(timeout_s)
        await self.until(lambda: self.driver.active == 0, timeout_s)

    async def require_nodes_drained(self, timeout_s: float = RECLAIM_S) -> None:
        alive = [name for name in self.ports.nodes if name not in self.ports.lost]

        async def drained() -> bool:
            return all([(await self.status(name))["drained"] for name in alive])

        await self.until(drained, timeout_s)
        for name in alive:
            blocks = (await self.status(name))["blocks"]
            assert blocks["free"] + blocks["cached"] == blocks["total"]


def _state(facts: DeviceFacts) -> SlotLimits:
    return SlotLimits(facts.slots, facts.snapshots, recurrent=facts.slot_bytes > 0)
