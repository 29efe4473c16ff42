"""The block pool against its definition in lists (pool_model.py): places, eviction order, names, generation."""

import sys

import pytest
from determinism import deterministic, steps_taken
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pool_model import PoolModel

from scheduler.blocks import BlockPool
from scheduler.errors import InvariantBroken
from scheduler.ids import BlockId

NAMES = [bytes([letter]) for letter in b"abcdefg"]
names = st.sampled_from(NAMES)
picks = st.integers(0, 30)
"""Chooses one of whatever there is, modulo its number."""


class BlockPoolMachine(RuleBasedStateMachine):
    @initialize(total=st.integers(1, 8))
    def start(self, total: int) -> None:
        self.pool = BlockPool(total, report_removed=True)
        self.model = PoolModel(total)
        self.generation = self.freed = 0

    def owner(self, pick: int) -> int:
        owners = list(self.model.tables)
        return owners[pick % len(owners)]

    @rule(count=st.integers(0, 9))
    def allocate(self, count: int) -> None:
        blocks = self.pool.allocate(count)
        if count > self.model.available:
            assert blocks is None
            return
        assert blocks is not None
        assert len(blocks) == count
        self.model.allocated(self.model.new_owner(), blocks)

    @precondition(lambda self: self.model.tables)
    @rule(pick=picks)
    def allocate_for_an_owner(self, pick: int) -> None:
        blocks = self.pool.allocate(1)
        assert (blocks is None) == (self.model.available == 0)
        if blocks is not None:
            self.model.allocated(self.owner(pick), blocks)

    @rule(wanted=st.lists(names, min_size=1, max_size=4, unique=True))
    def acquire(self, wanted: list[bytes]) -> None:
        found = self.pool.match(wanted)
        assert found == self.model.run(wanted)
        self.pool.acquire(found)
        self.model.acquire(self.model.new_owner(), found)

    @precondition(lambda self: self.model.idle)
    @rule(pick=picks)
    def take_over(self, pick: int) -> None:
        block = self.model.idle[pick % len(self.model.idle)]
        self.pool.take_over(BlockId(block))
        self.model.take_over(self.model.new_owner(), block)

    @precondition(lambda self: any(self.model.tables.values()))
    @rule(pick=picks, name=names)
    def publish(self, pick: int, name: bytes) -> None:
        blocks = [block for table in self.model.tables.values() for block in table]
        block = blocks[pick % len(blocks)]
        assert self.pool.publish(BlockId(block), name) == self.model.publish(block, name)

    @precondition(lambda self: self.model.tables)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        owner = self.owner(pick)
        self.pool.release([BlockId(block) for block in self.model.tables[owner]])
        self.model.release(owner)

    @rule(block=st.integers(0, 7), name=names)
    def misuse(self, block: int, name: bytes) -> None:
        """What only a bug asks for is refused, and nothing has changed then."""
        block = BlockId(block % self.model.total)
        if block not in self.model.idle:
            with pytest.raises(InvariantBroken):
                self.pool.take_over(block)
        if block in self.model.free:
            with pytest.raises(InvariantBroken):
                self.pool.acquire([block])
        if not self.model.owners(block):
            with pytest.raises(InvariantBroken):
                self.pool.publish(block, name)
            with pytest.raises(InvariantBroken):
                self.pool.release([block])

    @rule()
    def what_was_removed_is_told_once(self) -> None:
        assert self.pool.take_removed() == self.model.removed
        assert self.pool.take_removed() == []
        self.model.removed = []

    @invariant()
    def the_generation_grows_when_blocks_come_back_and_only_then(self) -> None:
        came_back = self.model.freed > self.freed
        assert self.pool.generation > self.generation if came_back else self.pool.generation == self.generation
        self.generation, self.freed = self.pool.generation, self.model.freed

    @invariant()
    def the_pool_is_as_the_model_says(self) -> None:
        pool, model = self.pool, self.model
        steps_taken["block pool"] += 1
        pool.check([[BlockId(block) for block in table] for table in model.tables.values()])
        assert (pool.free, pool.cached) == (len(model.free), len(model.idle))
        assert pool.used == model.total - model.available
        assert pool.available == model.available
        assert pool.published == len(model.name_of)
        for name in NAMES:
            assert pool.find(name) == model.find(name)
        for block in range(model.total):
            assert pool.is_idle(BlockId(block)) == (not model.owners(block))
        for block, its_name in model.name_of.items():
            assert pool.name_of(BlockId(block)) == its_name

    def teardown(self) -> None:
        if not hasattr(self, "pool") or sys.exc_info()[0] is not None:
            return  # a rule has failed: that is what must be reported
        for owner in list(self.model.tables):
            self.pool.release([BlockId(block) for block in self.model.tables[owner]])
            self.model.release(owner)
        self.the_pool_is_as_the_model_says()
        everything = self.pool.allocate(self.model.total)
        assert everything is not None, "with all owners gone every block can be had"
        self.model.allocated(self.model.new_owner(), everything)
        assert self.pool.published == 0


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = deterministic(max_examples=120, steps=50)
