"""KV accounting: what admission takes, what it leaves alone, and what the prefix cache gives to whom."""

from collections.abc import Iterable
from copy import deepcopy
from itertools import product
from typing import Any

import pytest
from scheduler_drive import request

from scheduler.errors import InvariantBroken
from scheduler.kv import KvAccounting
from scheduler.sequence import Sequence

BLOCK_SIZE = 4


def accounting(blocks: int, **options: Any) -> KvAccounting:
    return KvAccounting(blocks, BLOCK_SIZE, **options)


def sequence(name: str, prompt: Iterable[int], max_tokens: int = 4, **options: Any) -> Sequence:
    return Sequence(request(name, prompt, max_tokens, **options), 0, max_tokens)


def admit(kv: KvAccounting, asking: Sequence, **options: Any) -> bool:
    """As the batcher does it: blocks for all that is known, the last token's logits are needed."""
    return kv.admit(asking, len(asking.known), **{"leave": 1, **options})


def computed(kv: KvAccounting, name: str, prompt: Iterable[int], **options: Any) -> Sequence:
    """A sequence whose prompt is in KV and published."""
    owner = sequence(name, prompt, **options)
    assert admit(kv, owner)
    kv.settle_copies(copied=True)
    owner.start = len(owner.known)
    kv.publish(owner)
    return owner


def cached(kv: KvAccounting, prompt: Iterable[int], **options: Any) -> Sequence:
    """One that was released."""
    owner = computed(kv, "cached", prompt, **options)
    kv.release(owner)
    return owner


def test_a_block_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token, not 0"):
        KvAccounting(4, 0)


def test_admission_takes_blocks_for_the_positions_asked() -> None:
    kv = accounting(8)
    one, two = sequence("one", range(8)), sequence("two", range(50, 58))
    assert kv.admit(one, 8, leave=1)
    assert kv.admit(two, 9, leave=1)
    assert (len(one.blocks), len(two.blocks)) == (2, 3)
    assert len({*one.blocks, *two.blocks}) == 5
    assert (one.start, one.published) == (0, 0)
    assert (kv.pool.used, kv.pool.free) == (5, 3)


def test_the_footprint_leaves_the_last_sampled_token_out() -> None:
    kv = accounting(8)
    sizes = {(5, 4): 2, (5, 5): 3, (4, 1): 1, (1, 1): 1}
    assert {key: kv.footprint(sequence("a", range(key[0]), key[1])) for key in sizes} == sizes


def test_admission_is_all_or_nothing() -> None:
    kv = accounting(6)
    cached(kv, [1, 2, 3, 4, 5, 6, 7, 8])
    cached(kv, [9, 9, 9, 9])
    owner = computed(kv, "owner", range(20, 31))
    before = deepcopy(vars(kv.pool))
    # One block is found, one more is needed than there are besides it; even its turn in the eviction order stays.
    asking = sequence("asking", [1, 2, 3, 4, *range(60, 73)])
    assert not admit(kv, asking)
    assert vars(kv.pool) == before
    assert (asking.blocks, asking.start, asking.published, asking.committed) == ([], 0, 0, 0)
    assert kv.copies == ()
    kv.release(owner)
    assert admit(kv, asking)


def test_a_failed_probe_of_a_tail_changes_nothing() -> None:
    kv = accounting(3)
    cached(kv, [1, 2, 3, 4, 5, 6])
    before = deepcopy(vars(kv.pool))
    asking = sequence("asking", [1, 2, 3, 4, 5, 6, *range(50, 57)])
    assert not admit(kv, asking)
    assert vars(kv.pool) == before
    assert kv.copies == ()


def test_pinned_hits_are_not_evictable() -> None:
    kv = accounting(4)
    first = cached(kv, range(8)).chain
    # 17 tokens are 5 blocks. Two are cached and hit, two are free: the hits can't be evicted to make room for the rest.
    assert not admit(kv, sequence("five", range(17)))
    assert kv.pool.cached == 2
    four = sequence("four", range(13))
    assert admit(kv, four)
    assert four.blocks[:2] == kv.pool.match(first)
    assert (four.start, four.published) == (8, 2)
    assert (kv.pool.used, kv.pool.available) == (4, 0)


def test_an_admission_evicts_the_cache_of_others_and_not_its_own() -> None:
    kv = accounting(6)
    foreign = cached(kv, range(100, 112)).chain
    own = cached(kv, range(8)).chain
    asking = sequence("asking", range(17))
    assert admit(kv, asking)
    assert asking.start == 8
    assert len(kv.pool.match(foreign)) == 1
    assert len(kv.pool.match(own)) == 2


def test_headroom_stays_available() -> None:
    kv = accounting(5)
    asking = sequence("asking", range(9))
    assert not admit(kv, asking, headroom=3)
    assert admit(kv, asking, headroom=2)
    assert kv.pool.available == 2


def test_idle_hits_do_not_count_as_headroom() -> None:
    kv = accounting(5)
    cached(kv, range(8))
    asking = sequence("asking", range(9))
    assert not admit(kv, asking, headroom=3)
    assert admit(kv, asking, headroom=2)
    assert (asking.start, kv.pool.available) == (8, 2)


def test_hits_in_use_by_others_cost_nothing() -> None:
    kv = accounting(4)
    owner = computed(kv, "owner", range(12))
    asking = sequence("asking", range(13))
    assert admit(kv, asking, headroom=0)
    assert asking.blocks[:3] == owner.blocks
    assert kv.pool.available == 0


def test_a_reservation_finds_the_whole_prompt() -> None:
    kv = accounting(4)
    chain = cached(kv, range(8)).chain
    reservation = sequence("reservation", range(8))
    assert kv.admit(reservation, 9, leave=0)
    assert (reservation.start, reservation.published) == (8, 2)
    assert reservation.blocks[:2] == kv.pool.match(chain)
    assert len(reservation.blocks) == 3
    assert kv.copies == ()


def test_a_request_computes_at_least_its_last_token() -> None:
    kv = accounting(4, prefix_caching=True)
    cached(kv, range(9))
    asking = sequence("asking", range(9))
    assert admit(kv, asking)
    assert asking.start == 8


def test_reuse_can_be_declined() -> None:
    kv = accounting(6)
    chain = cached(kv, range(8)).chain
    restored = sequence("restored", range(8))
    assert admit(kv, restored, reuse=False)
    assert not set(restored.blocks) & set(kv.pool.match(chain))
    assert (restored.start, restored.published, kv.lookups) == (0, 0, 1)


def test_without_prefix_caching_nothing_is_found_or_kept() -> None:
    kv = accounting(6, prefix_caching=False)
    owner = computed(kv, "owner", range(10))
    asking = sequence("asking", range(10))
    assert admit(kv, asking)
    assert (asking.start, set(asking.blocks) & set(owner.blocks)) == (0, set())
    kv.release(owner)
    kv.release(asking)
    kv.release(computed(kv, "short", range(3)))
    assert (kv.pool.free, kv.pool.published, kv.lookups, kv.hits) == (6, 0, 0, 0)


def test_lookups_and_hits_are_counted_in_blocks() -> None:
    kv = accounting(8)
    cached(kv, range(8))
    assert (kv.lookups, kv.hits) == (1, 0)
    admit(kv, sequence("longer", range(17)))
    assert (kv.lookups, kv.hits) == (5, 2)


def test_guaranteed_admission_promises_the_whole_footprint() -> None:
    kv = accounting(6, guaranteed=True)
    # 13 prompt and 8 new tokens: 20 positions hold KV, 5 blocks; 4 are taken now.
    first, second = sequence("first", range(13), 8), sequence("second", range(50, 57), 2)
    assert admit(kv, first)
    assert (kv.committed, first.committed, kv.pool.used) == (5, 5, 4)
    before = deepcopy(vars(kv.pool))
    assert not admit(kv, second)
    assert vars(kv.pool) == before
    assert (kv.committed, second.committed) == (5, 0)
    kv.release(first)
    assert (kv.committed, first.committed) == (0, 0)
    assert admit(kv, second)
    assert kv.committed == 2


def test_guaranteed_admission_gives_no_credit_for_hits() -> None:
    kv = accounting(5, guaranteed=True)
    assert admit(kv, sequence("owner", range(8), 5))
    assert kv.committed == 3
    kv.publish(owner := sequence("twin", range(8), 5))
    assert not admit(kv, owner)
    assert admit(kv, sequence("small", range(8), 1))
    assert kv.committed == 5


def test_what_was_promised_is_there_when_it_is_needed() -> None:
    kv = accounting(7, guaranteed=True)
    promised = [sequence("a", range(5), 8), sequence("b", range(50, 55), 12)]
    for asking in promised:
        assert admit(kv, asking)
    assert kv.committed == 7
    for _ in range(11):
        for asking in promised:
            if asking.outputs < asking.output_limit - 1:
                asking.known.append(7)
            assert kv.extend(asking)
    assert (kv.pool.used, kv.pool.available) == (7, 0)


def test_a_promise_that_ends_is_a_reason_to_try_again_although_no_block_became_available() -> None:
    kv = accounting(5, guaranteed=True)
    owner = computed(kv, "owner", range(8))
    twin = sequence("twin", range(8), 1)
    assert kv.admit(twin, 8, leave=0)
    assert twin.blocks == owner.blocks[:2]
    generation = kv.pool.generation
    kv.release(twin)
    assert kv.pool.generation == generation + 1


def test_a_resumed_sequence_is_promised_what_it_knows_even_beyond_its_footprint() -> None:
    kv = accounting(4, guaranteed=True)
    reservation = sequence("reservation", range(8), 1)
    assert kv.admit(reservation, 9, leave=0)
    assert reservation.committed == 3


def test_extend_adds_a_block_exactly_when_the_last_token_needs_one() -> None:
    kv = accounting(3)
    growing = sequence("growing", range(7))
    assert admit(kv, growing)
    sizes = []
    for token in range(5):
        growing.known.append(token)
        assert kv.extend(growing)
        sizes.append(len(growing.blocks))
    assert sizes == [2, 3, 3, 3, 3]
    growing.known.append(9)
    blocks, before = list(growing.blocks), deepcopy(vars(kv.pool))
    assert not kv.extend(growing)
    assert growing.blocks == blocks
    assert vars(kv.pool) == before


def test_only_full_blocks_are_published_and_each_once() -> None:
    kv = accounting(4)
    owner = sequence("owner", range(11))
    assert admit(kv, owner)
    published = []
    for start in (3, 4, 7, 8, 11):
        owner.start = start
        kv.publish(owner)
        published.append((owner.published, kv.pool.published))
    assert published == [(0, 0), (1, 1), (1, 1), (2, 2), (2, 2)]
    assert kv.pool.match(owner.chain) == owner.blocks[:2]


def test_hits_by_adapter_and_salt_never_cross() -> None:
    kv = accounting(64)
    keys = list(product((None, "a", "b"), (None, "a", "b")))
    prompt = range(10)
    owners = {}
    for adapter, salt in keys:
        other = sequence("other", prompt, adapter=adapter, cache_salt=salt)
        assert admit(kv, other)
        assert other.start == 0, (adapter, salt)
        kv.release(other, keep=False)
        # 9 tokens: the released tail must not cross either.
        owners[adapter, salt] = cached(kv, range(9), adapter=adapter, cache_salt=salt)
    assert kv.pool.published == 9 * 3
    for adapter, salt in keys:
        same = sequence("same", prompt, adapter=adapter, cache_salt=salt)
        assert admit(kv, same)
        assert same.start == 9
        assert same.blocks[:2] == kv.pool.match(owners[adapter, salt].chain)
        kv.release(same, keep=False)


def test_giving_back_twice_is_a_broken_invariant_of_that_request() -> None:
    kv = accounting(2)
    owner = computed(kv, "owner", range(4))
    kv.pool.release(owner.blocks)
    with pytest.raises(InvariantBroken, match="owner: block 0 is released more often than taken") as raised:
        kv.release(owner)
    assert raised.value.request_id == "owner"
