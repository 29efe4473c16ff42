"""What a prefill and a decode replica have in common: a step loop, a scheduler and an exchange, joined, without Ray.

Commands and the ends of transfers run on the step loop's thread, so the scheduler has one user. What they cause is
published at the boundary that follows, in one report with what the last step brought.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, ClassVar, Generic, TypeVar

import structlog

from handoff.adapter_desk import AdapterDesk
from handoff.exchange import Exchange
from handoff.leases import HandoffKey
from handoff.node_status import node_status
from handoff.report import NodeReport
from handoff.step_loop import LoopStopped, StepLoop
from handoff.timeline import Timeline
from handoff.transfer_ends import Broken, Landed, TransferEnd
from handoff.wiring import PeerInfo
from scheduler.adapters import AdapterFacts, LoraCommand
from scheduler.base import SchedulerBase
from scheduler.commands import Command, CommandEffects
from scheduler.contract import DeviceIo, LayerWatch, Prefill
from scheduler.errors import InvariantBroken
from scheduler.events import BoundaryEffects, LeaseExpired, LifecycleEvent
from scheduler.ids import NodeId, RequestId
from scheduler.story import StoryLine

log = structlog.get_logger()

S = TypeVar("S", bound=SchedulerBase)

Publish = Callable[[NodeReport], None]
MakeExchange = Callable[[Callable[[TransferEnd], None], Callable[[str], str]], Exchange]
"""Takes where ends of transfers are reported, and the digest of an adapter by its name."""


class Node(ABC, Generic[S]):
    """publish: called on the step loop's thread, must return at once. clock: seconds, monotonic."""

    role: ClassVar[str]

    def __init__(
        self,
        node: NodeId,
        incarnation: int,
        scheduler: S,
        device: DeviceIo,
        make_exchange: MakeExchange,
        publish: Publish,
        clock: Callable[[], float],
    ) -> None:
        self._node = node
        self._incarnation = incarnation
        self._scheduler = scheduler
        self._facts = device.facts()
        self._publish = publish
        self._exchange = make_exchange(
            lambda end: self._on_transfer_end(end), lambda name: self._adapters.digests.get(name, "")
        )
        self._adapters = AdapterDesk(scheduler, device)
        self._loop = StepLoop(
            scheduler, device, self._on_boundary, clock, node, self._on_launch, self._tell, self._watch
        )
        self._clock = clock
        self._timeline = Timeline()
        self._loop.ended.add_done_callback(lambda _: self._adapters.close(LoopStopped("the step loop has ended")))
        self._events: list[LifecycleEvent] = []
        self._transfers: list[Landed | Broken] = []
        self._untold: list[NodeReport] = []

    def start(self, pool: object) -> PeerInfo:
        """pool: the KV pool's bytes, see Transport.start. Returns what peers connect to."""
        self._exchange.start(pool)
        self._loop.start()
        return self._exchange.info

    def connect(self, peer: PeerInfo) -> None:
        """Both nodes of a pair connect to each other. Raises IncompatiblePeer."""
        self._exchange.connect(peer)

    def disconnect(self, peer: NodeId) -> None:
        """Give a peer up; its transfers end as broken."""
        self._exchange.disconnect(peer)

    def apply(self, command: Command) -> "Future[CommandEffects]":
        """Perform a command at the next boundary. The future raises CommandRejected or LoopStopped."""
        return self._loop.call(lambda: self._apply(command), command)

    def renew_leases(self, handoffs: Sequence[HandoffKey]) -> "Future[int]":
        """Somebody follows these handoffs. How many leases run anew; those that run nowhere here are left out."""
        return self._loop.call(lambda: sum(self._scheduler.renew(*key) for key in handoffs))

    async def lora(self, command: LoraCommand) -> tuple[AdapterFacts, ...]:
        """Change or read the adapter table when nothing is on the device. Raises AdapterRefused, LoopStopped.

        Cancelling it before that withdraws the command.
        """
        table: Future[tuple[AdapterFacts, ...]] = Future()
        asked = self._loop.call(lambda: self._adapters.ask(command, table))
        asked.add_done_callback(lambda done: _pass_on_failure(done, table))
        return await asyncio.wrap_future(table)

    def status(self) -> "Future[dict[str, Any]]":
        """This node's line in `prelay status`, as plain data; proves the block accounting on the way."""
        return self._loop.call(self._status)

    def story(self, request_id: RequestId) -> "Future[tuple[StoryLine, ...]]":
        """What happened to a request here, oldest first; empty if it is not known. Times are of this node's clock."""
        return self._loop.call(lambda: self._scheduler.story(request_id))

    def timelines(self) -> list[dict[str, Any]]:
        """When each step of the last handoffs happened here, see Timeline."""
        return self._timeline.all()

    @property
    def ended(self) -> "Future[None]":
        """Done when the step loop is over."""
        return self._loop.ended

    @property
    def failure(self) -> BaseException | None:
        """Why the step loop ended by itself; None while it runs, and after a stop that was asked for."""
        return self._loop.failure

    def stop(self, timeout_s: float) -> None:
        """The transport ends first: nothing may touch the pool once the device is torn down."""
        self._exchange.close()
        self._loop.stop(timeout_s)

    @abstractmethod
    def _on_event(self, event: LifecycleEvent) -> None:
        """Something happened that transfers depend on; runs before anybody outside knows of it."""

    @abstractmethod
    def _settle(self, end: TransferEnd) -> tuple[Landed | Broken, ...]:
        """A transfer has ended and its memory is quiet. Returns what the coordinator must know of it."""

    def _on_retired(self, request_id: RequestId) -> None:
        """Nothing of this request is owned here any more."""

    def _on_launch(self, request_ids: Sequence[RequestId]) -> None:
        """A step with these requests was launched."""

    def _watch(self, plan: Prefill) -> LayerWatch | None:
        """Whoever wants to know how far this step is, which is about to be launched."""
        return None

    def _apply(self, command: Command) -> CommandEffects:
        """On the loop's thread."""
        effects = self._scheduler.apply(command)
        for event in effects.events:
            self._on_event(event)
        # A command can let other handoffs' reservations through. Their drivers don't see this command's reply, and
        # the caller's copy may be lost with it; facts may come twice.
        self._events += effects.events
        for request_id in effects.retired:
            self._on_retired(request_id)
        return effects

    def _on_boundary(self, effects: BoundaryEffects) -> None:
        """Events are acted upon at once. What is told waits for the launch, in order: outputs, events, retirements."""
        for event in effects.events:
            if isinstance(event, LeaseExpired):
                log.warning(
                    "lease expired",
                    handoff_id=event.handoff_id,
                    attempt=event.attempt,
                    request_id=event.request_id,
                    side=event.side.value,
                )
            self._on_event(event)
        if effects.outputs:
            self._untold.append(NodeReport(self._node, self._incarnation, outputs=effects.outputs))
        events, self._events = (*self._events, *effects.events), []
        transfers, self._transfers = tuple(self._transfers), []
        if events or transfers:
            self._untold.append(NodeReport(self._node, self._incarnation, events=events, transfers=transfers))
        for request_id in effects.retired:
            self._on_retired(request_id)
        self._adapters.serve()

    def _tell(self) -> None:
        untold, self._untold = self._untold, []
        for report in untold:
            self._publish(report)

    def _on_transfer_end(self, end: TransferEnd) -> None:
        """On the transport's thread."""
        self._timeline.mark((end.handoff_id, end.attempt), "ended", self._clock())
        self._loop.call(lambda: self._end_transfer(end))

    def _end_transfer(self, end: TransferEnd) -> None:
        try:
            self._transfers += self._settle(end)
        except Exception as error:
            # Nobody waits for this call, and blocks whose transfer is not booked would stay owned for ever.
            raise InvariantBroken(f"the end of a transfer could not be booked: {end}: {error}") from error

    def _status(self) -> dict[str, Any]:
        self._scheduler.check()
        return {
            "node": self._node,
            "role": self.role,
            "incarnation": self._incarnation,
            "compatibility": asdict(self._exchange.info.compatibility),
            **node_status(self._scheduler, self._loop.counters, self._facts, self._exchange.links()),
        }


def _pass_on_failure(asked: "Future[Any]", waiting: "Future[Any]") -> None:
    failure = asked.exception()
    if failure is not None and waiting.set_running_or_notify_cancel():
        waiting.set_exception(failure)
