"""Between the ranks of a source and those of a destination: who sends which heads to whom."""

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TypeAlias

from handoff.relayout.shape import BadShape, KvShape

RankPair: TypeAlias = tuple[int, int]
"""(source rank, destination rank). With a handoff's id and attempt it names one transfer: two source ranks may feed
one destination rank, so neither rank alone is enough."""


@dataclass(frozen=True, slots=True)
class Route:
    """What one source rank sends to one destination rank: `heads`, a contiguous range that both hold."""

    source: KvShape
    destination: KvShape
    heads: range

    @property
    def key(self) -> RankPair:
        return self.source.rank, self.destination.rank

    @property
    def whole(self) -> bool:
        """All of the source's heads go: its blocks are sent straight from the pool. Otherwise they are packed."""
        return self.heads == self.source.heads

    @property
    def direct(self) -> bool:
        """Blocks of both sides have the same bytes: they go from pool to pool, nothing is staged."""
        return (
            self.whole
            and self.heads == self.destination.heads
            and self.source.block_size == self.destination.block_size
            and self.source.dtype == self.destination.dtype
        )

    @property
    def staged_block_bytes(self) -> int:
        """What one source block takes on the wire and in the staging area."""
        return self.source.bytes_of(len(self.heads))

    @property
    def source_heads(self) -> slice:
        """`heads` as an index into the source's pool."""
        return _within(self.heads, self.source.heads)

    @property
    def destination_heads(self) -> slice:
        """`heads` as an index into the destination's pool."""
        return _within(self.heads, self.destination.heads)


def routes(source: KvShape, destination: KvShape, turn: int = 0) -> dict[RankPair, Route]:
    """All routes between the ranks of two replicas; `rank` of the two shapes is ignored.

    Every destination rank gets each of its heads exactly once. Of the ranks that hold a replicated head, the
    destination ranks that need it take each as often as any other, give or take one; `turn` (the same number on all
    ranks of both sides, another one for each handoff) rotates who begins. Raises BadShape for two different models.
    """
    for name in ("layers", "kv_heads", "head_dim"):
        ours, theirs = getattr(source, name), getattr(destination, name)
        if ours != theirs:
            raise BadShape(f"{name} is {ours} at the source and {theirs} at the destination")
    heads: defaultdict[RankPair, list[int]] = defaultdict(list)
    for rank in range(destination.ranks):
        for head in replace(destination, rank=rank).heads:
            heads[_sender(source, destination, head, rank, turn), rank].append(head)
    return {
        (s, d): Route(replace(source, rank=s), replace(destination, rank=d), range(own[0], own[-1] + 1))
        for (s, d), own in heads.items()
    }


def _sender(source: KvShape, destination: KvShape, head: int, rank: int, turn: int) -> int:
    """The source rank that sends `head` to destination rank `rank`."""
    first = head * source.ranks // source.kv_heads
    asking = rank % destination.replicas
    return first + (asking * source.replicas // destination.replicas + turn) % source.replicas


def _within(heads: range, own: range) -> slice:
    return slice(heads.start - own.start, heads.stop - own.start)
