"""Where a node's blocks, slot records and staging area lie in the flat memory that its transport registers.

[ block 0 | block 1 | ... | padding | slot 0 | slot 1 | ... | padding | staging ]
"""

from dataclasses import dataclass

from handoff.pieces import Part
from handoff.transports.base import Piece
from handoff.wire import Layers
from scheduler.contract import DeviceFacts


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """In bytes. blocks_bytes: all blocks. slot_bytes: of one slot, 0 for a model whose whole state is KV.

    layers: how many of equal size lie one after another in a block.
    """

    block_bytes: int
    blocks_bytes: int = 0
    first_slot: int = 0
    slot_bytes: int = 0
    first_staging: int = 0
    staging_bytes: int = 0
    layers: int = 1

    @classmethod
    def of(cls, facts: DeviceFacts) -> "PoolLayout":
        return cls(
            block_bytes=facts.block_bytes,
            blocks_bytes=facts.block_bytes * facts.total_blocks,
            first_slot=facts.first_slot,
            slot_bytes=facts.slot_bytes,
            first_staging=facts.first_staging,
            staging_bytes=facts.staging_bytes,
            layers=facts.layers,
        )

    def part(self, layers: Layers | None) -> Part | None:
        """Where in a block these layers lie."""
        if layers is None:
            return None
        size = self.block_bytes // self.layers
        return layers[0] * size, (layers[1] - layers[0]) * size

    def slot_piece(self, slot: int) -> Piece:
        return Piece(self.first_slot + slot * self.slot_bytes, self.slot_bytes)
