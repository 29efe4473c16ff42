"""One handoff under way, as the driver keeps it: what it waits for, what it has heard, what it will report."""

import asyncio
from dataclasses import dataclass, field

from handoff.coordinator import (
    Completion,
    DestinationFailed,
    DestinationIsReserved,
    Event,
    Failed,
    Handoff,
    SourceHasFinished,
    SourceIsHeld,
)
from handoff.transfer_ends import Landed
from scheduler.events import (
    DestinationFinished,
    DestinationReserved,
    LeaseExpired,
    LifecycleEvent,
    Side,
    SourceFinished,
    SourceHeld,
)
from scheduler.ids import HandoffId, NodeId, RequestId
from scheduler.request import FinishReason, Request


@dataclass(frozen=True, slots=True)
class HandoffRecord:
    """A finished handoff, for logs, status and the demo's table. Times in seconds of the driver's clock.

    rejected: the request itself can't be served, here or elsewhere. redirects: destinations that were given up.
    """

    handoff_id: HandoffId
    request_id: RequestId
    source: NodeId
    destination: NodeId
    completion: Completion
    rejected: bool
    reason: str
    prompt_tokens: int
    cached_tokens: int
    total_s: float
    transfer: Landed | None
    redirects: int = 0


@dataclass(frozen=True, slots=True)
class LostNode:
    node: NodeId


@dataclass(frozen=True, slots=True)
class Fact:
    """node: who says so, which a handoff that was redirected no longer believes."""

    node: NodeId
    event: "Event | DestinationFinished"


@dataclass(slots=True)
class Drive:
    """One handoff under way. finished: set with the record once the handoff is over (the decode may go on)."""

    request: Request
    source: NodeId
    destination: NodeId
    handoff: Handoff
    started: float
    finished: "asyncio.Future[HandoffRecord]"
    inbox: "asyncio.Queue[Event | Fact | LostNode]" = field(default_factory=asyncio.Queue)
    transfer: Landed | None = None
    cached_tokens: int = 0
    rejected: bool = False
    given_up: list[NodeId] = field(default_factory=list)


def fact_of(node: NodeId, event: LifecycleEvent) -> "Event | DestinationFinished":
    match event:
        case SourceHeld():
            return SourceIsHeld()
        case SourceFinished(finish=FinishReason.ERROR):
            return Failed("the prefill step failed")
        case SourceFinished():
            return SourceHasFinished()
        case DestinationReserved():
            return DestinationIsReserved()
        case DestinationFinished():
            return event
        case LeaseExpired(side=side):
            reason = f"{node}: the {side.value}'s lease expired, nobody had renewed it"
            return Failed(reason) if side is Side.SOURCE else DestinationFailed(reason)
