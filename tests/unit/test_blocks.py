import pytest

from scheduler.blocks import BlockPool
from scheduler.errors import InvariantBroken
from scheduler.ids import BlockId


def names(*numbers: int) -> list[bytes]:
    return [bytes([number]) for number in numbers]


def take(pool: BlockPool, count: int) -> list[BlockId]:
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks


def cached_chain(pool: BlockPool, *numbers: int) -> list[BlockId]:
    """Blocks that were published under these names and released."""
    blocks = take(pool, len(numbers))
    for block, name in zip(blocks, names(*numbers), strict=True):
        pool.publish(block, name)
    pool.release(blocks)
    return blocks


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(3)
    assert pool.allocate(4) is None
    assert pool.free == 3
    assert sorted(take(pool, 3)) == [0, 1, 2]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_released_blocks_are_free_unless_published() -> None:
    pool = BlockPool(3)
    blocks = take(pool, 2)
    pool.publish(blocks[0], b"a")
    pool.release(blocks)
    assert (pool.free, pool.cached, pool.used, pool.available) == (2, 1, 0, 3)
    assert pool.match([b"a"]) == [blocks[0]]


def test_a_match_ends_at_the_first_unknown_block() -> None:
    pool = BlockPool(4)
    first, _, third = cached_chain(pool, 1, 2, 3)
    assert pool.match(names(1, 9, 3)) == [first]
    assert pool.match(names(9, 1)) == []
    assert pool.match(names(3)) == [third]


def test_a_shared_block_is_used_until_its_last_owner_releases_it() -> None:
    pool = BlockPool(2)
    (block,) = cached_chain(pool, 1)
    pool.acquire([block])
    pool.acquire([block])
    pool.release([block])
    assert pool.used == 1
    pool.release([block])
    assert (pool.used, pool.cached) == (0, 1)


def test_the_least_recently_used_block_is_evicted_first() -> None:
    pool = BlockPool(2)
    cached_chain(pool, 1)
    cached_chain(pool, 2)
    (one,) = pool.match(names(1))
    pool.acquire([one])
    pool.release([one])
    take(pool, 1)
    assert pool.match(names(2)) == []
    assert pool.match(names(1)) == [one]


def test_a_chain_is_evicted_from_its_end() -> None:
    pool = BlockPool(3)
    chain = cached_chain(pool, 1, 2, 3)
    take(pool, 1)
    assert pool.match(names(1, 2, 3)) == chain[:2]


def test_free_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(3)
    chain = cached_chain(pool, 1, 2)
    take(pool, 1)
    assert pool.match(names(1, 2)) == chain


def test_a_used_block_is_never_evicted() -> None:
    pool = BlockPool(2)
    (block,) = cached_chain(pool, 1)
    pool.acquire([block])
    assert pool.allocate(2) is None
    assert take(pool, 1) != [block]


def test_content_that_is_known_keeps_its_first_block() -> None:
    pool = BlockPool(2)
    first, second = take(pool, 2)
    assert pool.publish(first, b"same")
    assert not pool.publish(second, b"same")
    assert not pool.publish(first, b"other")
    pool.release([first, second])
    assert pool.match([b"same"]) == [first]
    assert pool.match([b"other"]) == []
    assert (pool.cached, pool.free) == (1, 1)


def test_find_and_match_take_no_reference() -> None:
    pool = BlockPool(1)
    (block,) = cached_chain(pool, 1)
    assert pool.find(b"\x01") == block
    assert pool.find(b"\x02") is None
    assert pool.match(names(1)) == [block]
    assert pool.is_idle(block)
    assert take(pool, 1) == [block]


def test_published_counts_what_can_be_found_used_or_not() -> None:
    pool = BlockPool(4)
    cached_chain(pool, 1, 2)
    (used,) = take(pool, 1)
    pool.publish(used, b"used")
    assert (pool.published, pool.cached, pool.used, pool.free, pool.available) == (3, 2, 1, 1, 3)
    assert pool.name_of(used) == b"used"


def test_a_block_that_is_taken_over_loses_its_name_and_can_be_published_anew() -> None:
    pool = BlockPool(2)
    (block,) = cached_chain(pool, 1)
    pool.take_over(block)
    assert (pool.find(b"\x01"), pool.published, pool.used, pool.cached) == (None, 0, 1, 0)
    pool.check([[block]])
    assert pool.publish(block, b"longer")
    pool.release([block])
    assert pool.find(b"longer") == block


def test_the_generation_grows_with_each_block_that_becomes_available_and_else_never() -> None:
    pool = BlockPool(4)
    blocks = take(pool, 3)
    pool.publish(blocks[0], b"a")
    pool.acquire(blocks[:1])
    assert pool.allocate(2) is None
    assert pool.generation == 0
    pool.release(blocks[:1])
    assert pool.generation == 0
    pool.release(blocks[:1])
    assert pool.generation == 1
    pool.release(blocks[1:])
    assert pool.generation == 3
    pool.take_over(blocks[0])
    take(pool, 3)
    assert pool.generation == 3


def test_withdrawn_names_are_reported_once_and_in_order() -> None:
    pool = BlockPool(3, report_removed=True)
    chain = cached_chain(pool, 1, 2, 3)
    take(pool, 1)
    pool.take_over(chain[0])
    assert pool.take_removed() == names(3, 1)
    assert pool.take_removed() == []
    take(pool, 1)
    assert pool.take_removed() == names(2)


def test_nobody_listens_unless_asked() -> None:
    pool = BlockPool(1)
    cached_chain(pool, 1)
    take(pool, 1)
    assert pool.take_removed() == []


def test_misuse_is_a_broken_invariant() -> None:
    pool = BlockPool(2)
    with pytest.raises(InvariantBroken, match="block 0 is free"):
        pool.acquire([BlockId(0)])
    with pytest.raises(InvariantBroken, match="published by no owner"):
        pool.publish(BlockId(0), b"a")
    with pytest.raises(InvariantBroken, match="released more often than taken"):
        pool.release([BlockId(0)])
    with pytest.raises(InvariantBroken, match="block 0 is not cached"):
        pool.take_over(BlockId(0))
    take(pool, 1)
    with pytest.raises(InvariantBroken, match="somebody else may read it"):
        pool.take_over(BlockId(0))


def test_check_sees_a_leak_and_a_foreign_owner() -> None:
    pool = BlockPool(4)
    blocks = take(pool, 2)
    pool.check([blocks])
    with pytest.raises(InvariantBroken, match=r"ownership at blocks \[0, 1\]"):
        pool.check([])
    with pytest.raises(InvariantBroken, match=r"ownership at blocks \[0\]"):
        pool.check([blocks, blocks[:1]])


def test_check_wants_each_block_of_a_shared_one_owner_each() -> None:
    pool = BlockPool(2)
    (block,) = cached_chain(pool, 1)
    pool.acquire([block])
    pool.acquire([block])
    pool.check([[block], [block]])
    with pytest.raises(InvariantBroken, match=r"ownership at blocks \[0\]"):
        pool.check([[block]])
