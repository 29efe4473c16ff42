"""KV accounting as its definition says it: for every block what each of its positions holds, in words, not hashes.

What a position holds is named by its namespace (adapter and salt) and all tokens up to it. The model of the property
tests: it computes, copies and evicts by these names and shares no code with the scheduler.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, cast

from pool_model import PoolModel

Namespace: TypeAlias = tuple[str | None, str | None]
Content: TypeAlias = tuple[Namespace, tuple[int, ...]]
"""A namespace, and the tokens from position 0 to the one that is held."""
Name: TypeAlias = tuple[str, Namespace, tuple[int, ...]]
"""Of a block: full or partial, and the content of its last position."""


@dataclass(slots=True, eq=False)
class Owner:
    """A sequence with blocks. start: positions whose KV is there. published: its full blocks that went by `publish`.

    promised: blocks that guaranteed admission has promised it.
    """

    number: int
    namespace: Namespace
    known: list[int]
    start: int
    published: int
    promised: int
    blocks: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Tail:
    """A cached block of which `tokens` positions are wanted; taken over as it is, or copied."""

    block: int
    tokens: int
    copied: bool


@dataclass(frozen=True, slots=True)
class Found:
    """What admission finds. hits: full blocks to share. fits: whether there is room for the rest."""

    hits: list[int]
    tail: Tail | None
    fits: bool


class CacheModel:
    def __init__(self, total: int, block_size: int, caching: bool, guaranteed: bool) -> None:
        self.pool = PoolModel(total)
        self.size = block_size
        self.caching = caching
        self.guaranteed = guaranteed
        self.owners: list[Owner] = []
        self.copies: list[tuple[Owner, int, int]] = []
        self.lookups = self.hits = 0
        self._content: dict[tuple[int, int], Content] = {}
        self._pins = self.pool.new_owner()

    def blocks_for(self, tokens: int) -> int:
        return (tokens + self.size - 1) // self.size

    @property
    def promised(self) -> int:
        return sum(owner.promised for owner in self.owners)

    def find(
        self, namespace: Namespace, known: Sequence[int], positions: int, leave: int, headroom: int, reuse: bool
    ) -> Found:
        """What an admission for `positions` finds, `leave` of the known tokens staying to be computed."""
        reuse = reuse and self.caching
        wanted = [self._full(namespace, known, i) for i in range((len(known) - leave) // self.size)] if reuse else []
        hits = self.pool.run(wanted)
        self.lookups += len(wanted)
        self.hits += len(hits)
        room = self.pool.available - sum(block in self.pool.idle for block in hits)
        fresh = self.blocks_for(positions) - len(hits)
        if fresh + headroom > room:
            return Found(hits, None, fits=False)
        tail = self._find_tail(namespace, known, len(hits), leave) if reuse and leave else None
        if tail is not None and tail.copied and tail.block in self.pool.idle and fresh + headroom == room:
            tail = None  # a copy needs both blocks at a time
        return Found(hits, tail, fits=True)

    def _find_tail(self, namespace: Namespace, known: Sequence[int], full: int, leave: int) -> Tail | None:
        """The most that is cached of the next block: part of a full one, or a partial one."""
        most = min(len(known) - leave - full * self.size, self.size - 1)
        if most < 1:
            return None
        if len(known) >= (full + 1) * self.size:
            whole = self.pool.find(self._full(namespace, known, full))
            if whole is not None:
                return Tail(whole, most, copied=True)
        for count in range(min(len(known) - full * self.size, self.size - 1), 0, -1):
            block = self.pool.find(self._partial(namespace, known, full * self.size + count))
            if block is not None:
                return Tail(block, min(count, most), copied=block not in self.pool.idle)
        return None

    def _full(self, namespace: Namespace, known: Sequence[int], index: int) -> Name:
        return "full", namespace, tuple(known[: (index + 1) * self.size])

    def _partial(self, namespace: Namespace, known: Sequence[int], end: int) -> Name:
        return "partial", namespace, tuple(known[:end])

    def admitted(
        self, namespace: Namespace, known: list[int], found: Found, blocks: Sequence[int], promised: int
    ) -> Owner:
        """`blocks` is the table that the sequence got for what was found."""
        number = self.pool.new_owner()
        shared = len(found.hits)
        assert list(blocks[:shared]) == found.hits, f"table {blocks}, but {found.hits} hold its first tokens"
        self.pool.acquire(number, found.hits)
        start, tail = shared * self.size, found.tail
        owner = Owner(number, namespace, known, start, shared, promised)
        if tail is not None:
            owner.start += tail.tokens
            if tail.copied:
                self.pool.acquire(self._pins, [tail.block])
                self.copies.append((owner, tail.block, blocks[shared]))
            else:
                assert blocks[shared] == tail.block, "a partial block that nobody owns is continued in place"
                self.pool.take_over(number, tail.block)
                shared += 1
        self.pool.allocated(number, blocks[shared:])
        owner.blocks = list(blocks)
        self.owners.append(owner)
        return owner

    def settle_copies(self, copied: bool) -> None:
        for owner, source, target in self.copies:
            if copied:
                for offset in range(self.size):
                    if (source, offset) in self._content:
                        self._content[target, offset] = self._content[source, offset]
            else:
                owner.start = owner.start // self.size * self.size
        pins = [source for _, source, _ in self.copies]
        self.copies = []
        self.pool.release(self._pins, pins)
        self.pool.tables.setdefault(self._pins, [])

    def grown(self, owner: Owner, blocks: Sequence[int]) -> None:
        """The table has become `blocks`."""
        assert list(blocks[: len(owner.blocks)]) == owner.blocks
        self.pool.allocated(owner.number, blocks[len(owner.blocks) :])
        owner.blocks = list(blocks)

    def compute(self, owner: Owner, count: int) -> None:
        """The KV of the next `count` tokens is written: only ever into blocks that nobody else can see."""
        for position in range(owner.start, owner.start + count):
            block = owner.blocks[position // self.size]
            assert self.pool.owners(block) == 1, f"block {block} is written and shared"
            assert block not in self.pool.name_of, f"block {block} is written and published"
            self._content[block, position % self.size] = owner.namespace, tuple(owner.known[: position + 1])
        owner.start += count

    def publish(self, owner: Owner) -> list[Hashable]:
        """Full blocks become findable. Returns the names that were not before."""
        if not self.caching:
            return []
        full = owner.start // self.size
        names = [(i, self._full(owner.namespace, owner.known, i)) for i in range(owner.published, full)]
        owner.published = max(owner.published, full)
        return [name for i, name in names if self.pool.publish(owner.blocks[i], name)]

    def release(self, owner: Owner, keep: bool) -> None:
        full, rest = divmod(owner.start, self.size)
        if keep and self.caching and rest and full == owner.published and full < len(owner.blocks):
            self.pool.publish(owner.blocks[full], self._partial(owner.namespace, owner.known, owner.start))
        self.pool.release(owner.number)
        self.owners.remove(owner)

    def require_right_content(self) -> None:
        """Every position that an owner counts as computed, and every position under a name, holds what it should."""
        uncopied = {target for _, _, target in self.copies}
        for owner in self.owners:
            for position in range(owner.start):
                block = owner.blocks[position // self.size]
                right = owner.namespace, tuple(owner.known[: position + 1])
                assert block in uncopied or self._content.get((block, position % self.size)) == right, (
                    f"position {position} of {owner} is wrong: {self._content.get((block, position % self.size))}"
                )
        for block, name in self.pool.name_of.items():
            _, namespace, tokens = cast(Name, name)
            first = (len(tokens) - 1) // self.size * self.size
            for position in range(first, len(tokens)):
                assert self._content[block, position % self.size] == (namespace, tokens[: position + 1])
