"""The block pool: every block is free, cached or used, and in exactly one of these places.

    free    no content worth keeping
    cached  reference count 0, content published under a hash, evictable, least recently used first
    used    reference count >= 1; may be published as well, and then shared

Published content never changes: a published block is written again only after `take_over` withdrew its name.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from scheduler.errors import InvariantBroken
from scheduler.ids import BlockHash, BlockId


class BlockPool:
    """Counts references to `total` blocks and finds blocks by content.

    generation: grows whenever a block became available, so a caller that found too few need not ask again before.
    removed: names that were evicted since `take_removed`; None if nobody listens.
    """

    def __init__(self, total: int, *, report_removed: bool = False) -> None:
        if total < 1:
            raise ValueError(f"a block pool needs at least one block, not {total}")
        self.total = total
        self.generation = 0
        self._references = [0] * total
        self._free: deque[BlockId] = deque(BlockId(i) for i in range(total))
        self._cached: OrderedDict[BlockId, None] = OrderedDict()
        self._block_of: dict[BlockHash, BlockId] = {}
        self._hash_of: dict[BlockId, BlockHash] = {}
        self._removed: list[BlockHash] | None = [] if report_removed else None

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def used(self) -> int:
        return self.total - self.free - self.cached

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def published(self) -> int:
        """Blocks that can be found by content, used ones included."""
        return len(self._block_of)

    def find(self, block_hash: BlockHash) -> BlockId | None:
        """The block with this content. Takes no reference."""
        return self._block_of.get(block_hash)

    def name_of(self, block: BlockId) -> BlockHash:
        """What a findable block is published as."""
        return self._hash_of[block]

    def match(self, hashes: Iterable[BlockHash]) -> list[BlockId]:
        """The blocks that hold the longest known run from the start of `hashes`. Takes no reference."""
        found: list[BlockId] = []
        find = self._block_of.get
        for block_hash in hashes:
            block = find(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def is_idle(self, block: BlockId) -> bool:
        return self._references[block] == 0

    def acquire(self, blocks: Sequence[BlockId]) -> None:
        """Take a reference to each block, which must be used or cached. A referenced block can't be evicted."""
        for block in blocks:
            if self._references[block] == 0:
                if block not in self._cached:
                    raise InvariantBroken(f"block {block} is free: its content may be gone")
                del self._cached[block]
            self._references[block] += 1

    def take_over(self, block: BlockId) -> None:
        """Make a cached block the private property of one owner, who will write it: its name is withdrawn."""
        if block not in self._cached:
            raise InvariantBroken(f"block {block} is not cached: somebody else may read it")
        del self._cached[block]
        self._withdraw(block)
        self._references[block] = 1

    def allocate(self, count: int) -> list[BlockId] | None:
        """`count` blocks with one reference each, all or none. Evicts the least recently used cached blocks."""
        if count > self.available:
            return None
        return [self._take_one() for _ in range(count)]

    def _take_one(self) -> BlockId:
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._cached.popitem(last=False)
            self._withdraw(block)
        self._references[block] = 1
        return block

    def _withdraw(self, block: BlockId) -> None:
        block_hash = self._hash_of.pop(block)
        del self._block_of[block_hash]
        if self._removed is not None:
            self._removed.append(block_hash)

    def publish(self, block: BlockId, block_hash: BlockHash) -> bool:
        """Make a block findable; True if it was not. Where another block already holds this content, that one stays."""
        if self._references[block] < 1:
            raise InvariantBroken(f"block {block} is published by no owner")
        if block_hash in self._block_of or block in self._hash_of:
            return False
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        return True

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Drop a reference to each block of one sequence, in table order.

        Works from the tail, so that a chain is evicted from its end.
        """
        for block in reversed(blocks):
            count = self._references[block] - 1
            if count < 0:
                raise InvariantBroken(f"block {block} is released more often than taken")
            self._references[block] = count
            if count == 0:
                self.generation += 1
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def take_removed(self) -> list[BlockHash]:
        """The names withdrawn since the last call."""
        if not self._removed:
            return []
        removed, self._removed = self._removed, []
        return removed

    def check(self, owned: Iterable[Sequence[BlockId]]) -> None:
        """Prove that references equal what the owners hold, and that each block is in one place."""
        expected = [0] * self.total
        for blocks in owned:
            for block in blocks:
                expected[block] += 1
        if expected != self._references:
            wrong = [i for i in range(self.total) if expected[i] != self._references[i]]
            raise InvariantBroken(f"references differ from ownership at blocks {wrong[:8]}")
        free = set(self._free)
        if len(free) != len(self._free) or free & self._cached.keys():
            raise InvariantBroken("a block is in two places")
        idle = {BlockId(i) for i in range(self.total) if self._references[i] == 0}
        if free | self._cached.keys() != idle:
            raise InvariantBroken("an idle block is neither free nor cached")
        if free & self._hash_of.keys():
            raise InvariantBroken("a free block is still published")
        if {b: h for h, b in self._block_of.items()} != self._hash_of:
            raise InvariantBroken("the two directions of the prefix index differ")
