"""What one rank's pool holds, and which heads."""

from dataclasses import dataclass

from handoff.compatibility import Compatibility

ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


class BadShape(ValueError):
    """No pool has this shape; the message says which field is wrong."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """A rank's pool: [blocks, layers, 2, local heads, block_size, head_dim].

    kv_heads: of the whole model. ranks: the tensor-parallel degree. Rank r holds a contiguous range of heads:
    kv_heads / ranks of them from r * kv_heads / ranks on; with more ranks than heads, ranks / kv_heads neighbours hold
    the same head, rank r head r // (ranks / kv_heads). One of the two numbers divides the other.
    Raises BadShape.
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    ranks: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "block_size", "ranks"):
            if getattr(self, name) < 1:
                raise BadShape(f"{name} is {getattr(self, name)}; it is at least 1")
        if self.dtype not in ITEM_BYTES:
            raise BadShape(f"dtype is {self.dtype}; KV is re-laid out in {', '.join(ITEM_BYTES)}")
        if self.kv_heads % self.ranks and self.ranks % self.kv_heads:
            raise BadShape(f"ranks is {self.ranks} with {self.kv_heads} kv_heads; one must divide the other")
        if not 0 <= self.rank < self.ranks:
            raise BadShape(f"rank is {self.rank}; there are ranks 0 to {self.ranks - 1}")

    @classmethod
    def of(cls, compatibility: Compatibility, rank: int = 0) -> "KvShape":
        c = compatibility
        return cls(c.layers, c.kv_heads, c.head_dim, c.block_size, c.dtype, c.ranks, rank)

    @property
    def heads(self) -> range:
        """The model's heads that this rank holds."""
        first = self.rank * self.kv_heads // self.ranks
        return range(first, first + max(1, self.kv_heads // self.ranks))

    @property
    def replicas(self) -> int:
        """How many ranks hold each head."""
        return max(1, self.ranks // self.kv_heads)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.bytes_of(len(self.heads))

    def bytes_of(self, heads: int) -> int:
        """What `heads` heads of one block take."""
        return self.layers * 2 * heads * self.block_size * self.head_dim * self.item_bytes
