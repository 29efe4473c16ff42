"""How transfers end. Each side reports exactly one end of each, and its memory is quiet when it does."""

from dataclasses import dataclass
from typing import TypeAlias

from scheduler.ids import HandoffId, NodeId

Key: TypeAlias = tuple[str, int]
"""(handoff_id, attempt)"""


@dataclass(frozen=True, slots=True)
class Landed:
    """Destination: every byte is in place and verified.

    seconds: during which bytes were on their way. exposed_s, exposed_bytes: from the last segment's announcement to the
    last byte, and of it: what a client waits for.
    """

    handoff_id: HandoffId
    attempt: int
    first_token: int
    source: NodeId
    lane: str
    blocks: int
    bytes_moved: int
    seconds: float
    exposed_s: float = 0.0
    exposed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Sent:
    """Source: every byte has left."""

    handoff_id: HandoffId
    attempt: int


@dataclass(frozen=True, slots=True)
class Broken:
    """Either side: the transfer ended without success."""

    handoff_id: HandoffId
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class Ceased:
    """Either side: the transfer was called off by one of the two, which has its own reason and tells it itself."""

    handoff_id: HandoffId
    attempt: int


class StillSending(RuntimeError):
    """Bytes of this handoff are under way to another destination: ask again when they have ended."""


TransferEnd: TypeAlias = Landed | Sent | Broken | Ceased
