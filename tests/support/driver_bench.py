"""A driver on nodes that answer as told, with one handoff under way."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from scheduler_drive import request

from handoff.coordinator import Order
from handoff.drive import HandoffRecord
from handoff.driver import Driver, DriverLimits
from handoff.leases import HandoffKey
from handoff.report import NodeReport
from handoff.transfer_ends import Broken, Landed
from scheduler.commands import (
    Applied,
    Command,
    CommandEffects,
    DestinationAccepted,
    ReserveDestination,
    SubmitHandoffPrefill,
    Submitted,
)
from scheduler.events import DestinationFinished, DestinationReserved, LifecycleEvent, SourceHeld
from scheduler.ids import HandoffId, NodeId, RequestId
from scheduler.request import FinishReason

P, D = NodeId("prefill-0"), NodeId("decode-0")
H, R = HandoffId("h"), RequestId("r")
HELD = SourceHeld(H, 1, R, prompt_tokens=10, cached_tokens=4)
RESERVED = DestinationReserved(H, 1, R, prompt_blocks=3, missing_blocks=3)
FINISHED = DestinationFinished(H, 1, R, FinishReason.LENGTH)
LANDED = Landed(H, 1, 42, P, "manual", 3, 96, 0.5)


class FakeNodes:
    """Answers commands as an able node would. replies: what a kind of command does instead.

    renewed: the calls that renew leases. silent: nodes that don't answer those.
    """

    def __init__(self) -> None:
        self.done: list[str] = []
        self.replies: dict[type, Callable[[], CommandEffects]] = {}
        self.stuck: set[type] = set()
        self.holds = True
        self.renewed: list[tuple[NodeId, list[HandoffKey]]] = []
        self.silent: set[NodeId] = set()

    async def apply(self, node: NodeId, command: Command) -> CommandEffects:
        self.done.append(f"{node} {type(command).__name__}")
        if type(command) in self.stuck:
            await asyncio.Event().wait()
        if type(command) in self.replies:
            return self.replies[type(command)]()
        match command:
            case SubmitHandoffPrefill():
                return CommandEffects(Submitted(R))
            case ReserveDestination():
                return CommandEffects(DestinationAccepted(R))
            case _:
                return CommandEffects(Applied())

    async def submit_prefill(
        self, node: NodeId, command: SubmitHandoffPrefill, send_to: NodeId | None
    ) -> CommandEffects:
        effects = await self.apply(node, command)
        if send_to is not None:
            self.done.append(f"{node} sends to {send_to}")
        return effects

    async def start_transfer(self, node: NodeId, handoff_id: HandoffId, attempt: int, destination: NodeId) -> bool:
        self.done.append(f"{node} transfer to {destination}")
        return self.holds

    async def renew_leases(self, node: NodeId, handoffs: Sequence[HandoffKey]) -> None:
        self.renewed.append((node, list(handoffs)))
        if node in self.silent:
            await asyncio.Event().wait()


class Bench:
    """A driver on fake nodes, with one handoff under way."""

    def __init__(
        self,
        order: Order = Order.DESTINATION_FIRST,
        limits: DriverLimits | None = None,
        destinations: Sequence[NodeId] = (D,),
    ) -> None:
        """destinations: those there are, for a handoff that is redirected."""
        self.nodes = FakeNodes()
        self.now = 0.0
        self.records: list[HandoffRecord] = []
        self.orphans: list[tuple[RequestId, str]] = []
        self.order = order
        self.driver = Driver(
            self.nodes,
            limits or DriverLimits(action_s=5.0, handoff_s=100.0),
            lambda: self.now,
            self.records.append,
            lambda request_id, reason: self.orphans.append((request_id, reason)),
            lambda request, not_these: next((d for d in destinations if d not in not_these), None),
        )

    async def begin(self) -> "asyncio.Task[HandoffRecord]":
        task = asyncio.create_task(self.driver.hand_over(H, request("r", range(10)), P, D, self.order))
        await settle()
        return task

    async def report(self, *facts: LifecycleEvent | Landed | Broken, node: NodeId = D) -> None:
        events = tuple(f for f in facts if not isinstance(f, Landed | Broken))
        transfers = tuple(f for f in facts if isinstance(f, Landed | Broken))
        self.driver.on_report(NodeReport(node, 1, (), events, transfers))
        await settle()

    async def hand_over(self) -> "asyncio.Task[HandoffRecord]":
        """To where the destination decodes."""
        task = await self.begin()
        for fact in self.facts():
            await self.report(fact)
        return task

    def facts(self) -> list[Any]:
        return [RESERVED, HELD, LANDED] if self.order is Order.DESTINATION_FIRST else [HELD, RESERVED, LANDED]


async def settle() -> None:
    """Let the driver do all that it can."""
    for _ in range(50):
        await asyncio.sleep(0)
