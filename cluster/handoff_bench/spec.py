"""What a run of handoffs moves, and how."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from cluster.handoff_bench.device import BLOCK_SIZE
from handoff.checksum import Checksums
from scheduler.batching import BatchLimits

Layout: TypeAlias = Literal["contiguous", "scattered"]
TransportName: TypeAlias = Literal["ucx", "memory"]


@dataclass(frozen=True, slots=True)
class Spec:
    """One run: `handoffs` times `blocks` blocks of `block_bytes`, `parallel` at a time, after some that don't count.

    layout: contiguous blocks are neighbours on both sides; scattered ones lie where chance has put them.
    transport: between two processes (ucx) or inside this one (memory). checked: handoffs after those that count, whose
    bytes are compared.
    """

    blocks: int = 256
    block_bytes: int = 360 << 10
    handoffs: int = 16
    layout: Layout = "contiguous"
    parallel: int = 1
    transport: TransportName = "ucx"
    checksums: Checksums = "sampled"
    checked: int = 3

    def __post_init__(self) -> None:
        """Raises ValueError, naming the field."""
        for name in ("blocks", "block_bytes", "handoffs", "parallel"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")

    @property
    def warmups(self) -> int:
        """Handoffs before those that count: every block has been sent once then, and the lanes are open."""
        return self.parallel + 1

    @property
    def prompt_tokens(self) -> int:
        """As many as fit into the blocks together with the first sampled token."""
        return self.blocks * BLOCK_SIZE - 1

    @property
    def total_blocks(self) -> int:
        """Of each node: the next handoff's destination need not wait for the last one's end."""
        return self.blocks * (self.parallel + 1)

    @property
    def limits(self) -> BatchLimits:
        """A prompt is read in one step."""
        sequences = max(self.parallel, 1024)
        return BatchLimits(max_tokens=max(self.parallel * self.prompt_tokens, sequences), max_sequences=sequences)
