"""The block pool against a plain model: lists of owners, and one list in order of last use."""

from determinism import deterministic
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from scheduler.blocks import BlockPool
from scheduler.ids import BlockId

TOTAL = 6
names = st.sampled_from([bytes([letter]) for letter in b"abcde"])


class BlockPoolMachine(RuleBasedStateMachine):
    """owned: tables of live owners. name_of: published content. cached: idle published blocks, oldest first."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.owned: dict[int, list[BlockId]] = {}
        self.name_of: dict[BlockId, bytes] = {}
        self.cached: list[BlockId] = []
        self.owners = 0

    def own(self, blocks: list[BlockId]) -> int:
        self.owners += 1
        self.owned[self.owners] = blocks
        return self.owners

    def is_used(self, block: BlockId) -> bool:
        return any(block in blocks for blocks in self.owned.values())

    @rule(target=tables, count=st.integers(0, TOTAL))
    def allocate(self, count: int) -> int:
        used = {block for blocks in self.owned.values() for block in blocks}
        free = TOTAL - len(used) - len(self.cached)
        blocks = self.pool.allocate(count)
        if count > TOTAL - len(used):
            assert blocks is None
            return self.own([])
        assert blocks is not None
        assert len(set(blocks)) == count
        assert not used & set(blocks)
        for evicted in self.cached[: max(0, count - free)]:
            assert evicted in blocks
            del self.name_of[evicted]
        self.cached = self.cached[max(0, count - free) :]
        assert not set(self.cached) & set(blocks)
        return self.own(blocks)

    @rule(table=tables, data=st.data(), name=names)
    def publish(self, table: int, data: st.DataObject, name: bytes) -> None:
        blocks = self.owned.get(table)
        if not blocks:
            return
        block = data.draw(st.sampled_from(blocks))
        self.pool.publish(block, name)
        if block not in self.name_of and name not in self.name_of.values():
            self.name_of[block] = name

    @rule(target=tables, wanted=st.lists(names, max_size=4, unique=True))
    def share(self, wanted: list[bytes]) -> int:
        block_of = {name: block for block, name in self.name_of.items()}
        expected = []
        for name in wanted:
            if name not in block_of:
                break
            expected.append(block_of[name])
        found = self.pool.match(wanted)
        assert found == expected
        self.pool.acquire(found)
        self.cached = [block for block in self.cached if block not in found]
        return self.own(found)

    @rule(table=consumes(tables))
    def release(self, table: int) -> None:
        blocks = self.owned.pop(table)
        self.pool.release(blocks)
        for block in reversed(blocks):
            if not self.is_used(block) and block in self.name_of:
                self.cached.append(block)

    @precondition(lambda self: self.cached)
    @rule()
    def cached_blocks_are_found(self) -> None:
        for block in self.cached:
            assert self.pool.match([self.name_of[block]]) == [block]
            assert self.pool.is_idle(block)

    @invariant()
    def accounts(self) -> None:
        self.pool.check(self.owned.values())
        used = {block for blocks in self.owned.values() for block in blocks}
        assert self.pool.used == len(used)
        assert self.pool.cached == len(self.cached)
        assert self.pool.available == TOTAL - len(used)


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = deterministic(max_examples=120, steps=40)
