"""What a node owns for handoffs, as it answers to a coordinator that has lost its memory or doubts it."""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from scheduler.events import Side
from scheduler.ids import HandoffId, RequestId
from scheduler.leases import Leases
from scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Holding:
    """One handoff's share of a node.

    phase: the side's own word for where it is (a source: pending, held, draining; a destination: pending, reserved,
    landed, active, draining). blocks: owned now. outputs: tokens sampled or received so far.
    age_s: since its command; phase_age_s: since it entered its phase. lease_left_s: None where no lease runs.
    """

    handoff_id: HandoffId
    attempt: int
    request_id: RequestId
    side: Side
    phase: str
    blocks: int
    outputs: int
    age_s: float
    phase_age_s: float
    lease_left_s: float | None


class Owned(Protocol):
    """A side's own record of a handoff. since: seconds when it entered its phase."""

    handoff_id: HandoffId
    attempt: int
    sequence: Sequence
    since: float

    @property
    def phase(self) -> Enum: ...


def holding(side: Side, owned: Owned, now: float, leases: Leases) -> Holding:
    sequence = owned.sequence
    return Holding(
        handoff_id=owned.handoff_id,
        attempt=owned.attempt,
        request_id=sequence.request_id,
        side=side,
        phase=owned.phase.value,
        blocks=len(sequence.blocks),
        outputs=sequence.outputs,
        age_s=now - sequence.since,
        phase_age_s=now - owned.since,
        lease_left_s=leases.left(owned.handoff_id, now),
    )


@dataclass(frozen=True, slots=True)
class Inventory:
    """Everything that handoffs own on a node, oldest first. local: requests that came by Submit."""

    incarnation: int
    holdings: tuple[Holding, ...]
    local: tuple[RequestId, ...]
