"""Where a node's blocks and slot records lie in the flat memory that its transport registers.

[ block 0 | block 1 | ... | padding | slot 0 | slot 1 | ... ]
"""

from dataclasses import dataclass

from handoff.transports.base import Piece
from scheduler.contract import DeviceFacts


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """In bytes. slot_bytes: what travels of one slot, 0 for a model whose whole state is KV."""

    block_bytes: int
    first_slot: int = 0
    slot_bytes: int = 0

    @classmethod
    def of(cls, facts: DeviceFacts) -> "PoolLayout":
        return cls(facts.block_bytes, facts.first_slot, facts.slot_bytes)

    def slot_piece(self, slot: int) -> Piece:
        return Piece(self.first_slot + slot * self.slot_bytes, self.slot_bytes)
