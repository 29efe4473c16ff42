"""The partial last block in the prefix cache: continued in place, copied, or computed, and never misread."""

from collections.abc import Iterable
from typing import Any

from kv_machine import expected_output
from scheduler_drive import Stepper, prefill_scheduler, request

from scheduler.batching import BatchLimits
from scheduler.commands import CancelRequest, Submit
from scheduler.effects import CopyBlocks
from scheduler.events import BoundaryEffects
from scheduler.ids import RequestId
from scheduler.kv import BlockCopy, KvAccounting
from scheduler.prefix import hash_partial
from scheduler.sequence import Sequence

BLOCK_SIZE = 4


def accounting(blocks: int) -> KvAccounting:
    return KvAccounting(blocks, BLOCK_SIZE)


def sequence(name: str, prompt: Iterable[int], **options: Any) -> Sequence:
    return Sequence(request(name, prompt, **options), 0, 4)


def admitted(kv: KvAccounting, name: str, prompt: Iterable[int], **options: Any) -> Sequence:
    asking = sequence(name, prompt)
    assert kv.admit(asking, len(asking.known), **{"leave": 1, **options})
    return asking


def computed(kv: KvAccounting, name: str, prompt: Iterable[int], upto: int | None = None) -> Sequence:
    """A sequence whose KV is there up to position `upto`, its full blocks published."""
    owner = admitted(kv, name, prompt)
    owner.start = len(owner.known) if upto is None else upto
    kv.publish(owner)
    return owner


def test_a_released_tail_is_found_again_and_taken_over_when_idle() -> None:
    kv = accounting(4)
    owner = computed(kv, "owner", range(6))
    blocks = list(owner.blocks)
    kv.release(owner)
    assert (kv.pool.cached, kv.pool.published) == (2, 2)
    longer = admitted(kv, "longer", range(10))
    assert longer.start == 6
    assert longer.blocks[:2] == blocks
    assert (longer.published, kv.copies) == (1, ())
    # Its name is withdrawn, for it will be written; the full block keeps its own.
    assert kv.pool.published == 1
    twin = admitted(kv, "twin", [*range(4), 77])
    assert (twin.start, twin.blocks[0]) == (4, blocks[0])


def test_the_tail_of_a_first_block_needs_no_parent() -> None:
    kv = accounting(2)
    owner = computed(kv, "owner", [7, 8, 9])
    blocks = list(owner.blocks)
    kv.release(owner)
    longer = admitted(kv, "longer", [7, 8, 9, 10])
    assert (longer.start, longer.blocks, kv.copies) == (3, blocks, ())


def test_a_tail_grows_from_owner_to_owner_in_one_block() -> None:
    kv = accounting(2)
    blocks = []
    for length in (2, 3, 4):
        owner = admitted(kv, "owner", range(length))
        assert owner.start == max(0, length - 1) * (length > 2)
        owner.start = length
        kv.publish(owner)
        blocks.append(list(owner.blocks))
        kv.release(owner)
    assert blocks == [blocks[0]] * 3
    assert (kv.pool.cached, kv.pool.published, kv.pool.free) == (1, 1, 1)


def test_the_longest_tail_is_found_and_never_one_with_other_tokens() -> None:
    kv = accounting(12)
    for tail in ([4, 6, 7], [4, 5], [4]):
        kv.release(computed(kv, "owner", [*range(4), *tail]))
    assert kv.pool.published == 4
    # A tail is found by all of its tokens only; of one that is the prompt's end, the last token is computed.
    starts = {(4, 5, 99): 6, (4, 6, 99): 5, (4, 6, 7, 99): 7, (9, 5): 4, (4, 6, 7): 6}
    for tokens, start in starts.items():
        asking = admitted(kv, "asking", [*range(4), *tokens])
        assert asking.start == start, tokens
        kv.release(asking)
    assert kv.pool.published == 4


def test_a_tail_that_others_read_is_copied() -> None:
    kv = accounting(5)
    owner = computed(kv, "owner", range(6))
    tail = owner.blocks[1]
    kv.release(owner)
    kv.pool.acquire([tail])
    asking = admitted(kv, "asking", range(7))
    assert asking.start == 6
    assert asking.blocks[1] != tail
    assert kv.copies == (BlockCopy(asking, tail, asking.blocks[1]),)
    kv.pool.check([asking.blocks, [tail], [tail]])
    kv.settle_copies(copied=True)
    assert asking.start == 6
    assert not kv.copies
    kv.pool.check([asking.blocks, [tail]])
    assert kv.pool.find(hash_partial(asking.chain[0], [4, 5])) == tail


def test_a_full_hit_of_an_aligned_prompt_in_use_is_copied_but_for_one_token() -> None:
    kv = accounting(4)
    owner = computed(kv, "owner", range(8))
    twin = admitted(kv, "twin", range(8))
    assert twin.start == 7
    assert twin.blocks[0] == owner.blocks[0]
    assert kv.copies == (BlockCopy(twin, owner.blocks[1], twin.blocks[1]),)
    assert (kv.pool.used, kv.pool.free) == (3, 1)
    kv.settle_copies(copied=True)
    kv.pool.check([owner.blocks, twin.blocks])


def test_a_full_hit_of_an_aligned_idle_prompt_is_copied_and_stays_findable() -> None:
    kv = accounting(3)
    owner = computed(kv, "owner", range(8))
    chain, blocks = owner.chain, list(owner.blocks)
    kv.release(owner)
    twin = admitted(kv, "twin", range(8))
    assert twin.start == 7
    assert kv.copies == (BlockCopy(twin, blocks[1], twin.blocks[1]),)
    assert kv.pool.available == 0
    kv.settle_copies(copied=True)
    assert (kv.pool.match(chain), kv.pool.available) == (blocks, 1)


def test_without_a_block_to_spare_the_last_block_is_computed() -> None:
    for headroom, blocks in ((0, 2), (1, 3)):
        kv = accounting(blocks)
        owner = computed(kv, "owner", range(8))
        kv.release(owner)
        # The copy would need the cached block and a fresh one at a time.
        twin = admitted(kv, "twin", range(8), headroom=headroom)
        assert (twin.start, twin.published, kv.copies) == (4, 1, ())
        assert kv.pool.available == headroom


def test_a_tail_is_taken_over_even_without_a_block_to_spare() -> None:
    kv = accounting(2)
    kv.release(computed(kv, "owner", range(6)))
    assert admitted(kv, "longer", range(8)).start == 6
    assert kv.pool.available == 0


def test_a_failed_copy_falls_back_to_the_block_before() -> None:
    kv = accounting(4)
    owner = computed(kv, "owner", range(8))
    twin = admitted(kv, "twin", range(8))
    kv.settle_copies(copied=False)
    assert (twin.start, twin.published, len(twin.blocks), kv.copies) == (4, 1, 2, ())
    kv.pool.check([owner.blocks, twin.blocks])


def test_a_reservation_uses_full_blocks_only() -> None:
    kv = accounting(4)
    kv.release(computed(kv, "owner", range(6)))
    reservation = admitted(kv, "reservation", range(7), leave=0)
    assert (reservation.start, kv.copies) == (4, ())


def test_a_tail_that_is_not_kept_is_free() -> None:
    kv = accounting(2)
    owner = computed(kv, "owner", range(6))
    kv.release(owner, keep=False)
    assert (kv.pool.cached, kv.pool.free) == (1, 1)
    assert admitted(kv, "asking", range(7)).start == 4


def test_what_is_computed_of_an_unfinished_prompt_is_kept() -> None:
    kv = accounting(4)
    kv.release(computed(kv, "owner", range(12), upto=6))
    assert (kv.pool.cached, kv.pool.free) == (2, 2)
    assert admitted(kv, "asking", range(12)).start == 6


def test_a_tail_behind_an_unpublished_parent_is_never_found() -> None:
    kv = accounting(4)
    restored = sequence("restored", range(7))
    assert kv.admit(restored, 7, leave=1, reuse=False)
    # Its KV came back from the spill store: nothing of it is published yet.
    restored.start = 6
    kv.release(restored)
    assert (kv.pool.published, kv.pool.free) == (0, 4)
    assert admitted(kv, "asking", range(7)).start == 0


def test_two_like_tails_are_kept_once() -> None:
    kv = accounting(4)
    first, second = admitted(kv, "first", range(6)), admitted(kv, "second", range(6))
    for owner in (first, second):
        owner.start = 6
        kv.publish(owner)
        kv.release(owner)
    assert (kv.pool.cached, kv.pool.free) == (2, 2)


def play(prompts: list[list[int]], **device: Any) -> tuple[Stepper, list[BoundaryEffects]]:
    """Serve one prompt after the other, each for 3 tokens."""
    stepper = Stepper(prefill_scheduler(12), **device)
    seen = []
    for number, prompt in enumerate(prompts):
        stepper.scheduler.apply(Submit(request(str(number), prompt, max_tokens=3)))
        seen += stepper.run()
        assert stepper.tokens[str(number)] == expected_output(prompt, 3)
    return stepper, seen


def test_a_conversation_goes_on_in_the_block_where_it_stopped() -> None:
    first = [1, 2, 3, 4, 5]
    answer = expected_output(first, 3)
    stepper, seen = play([first, [*first, *answer, 60]])
    # 5 prompt tokens and the first two of the answer have KV; the third was never computed.
    assert stepper.plans[3] == "prefill 1[7..8]"
    assert [o.cached_tokens for effects in seen for o in effects.outputs if o.index == 0] == [0, 7]
    assert stepper.effects == []


def test_the_same_aligned_prompt_again_copies_a_block_and_computes_one_token() -> None:
    stepper, _ = play([list(range(8))] * 2)
    assert stepper.plans[3] == "decode 1[7..7]"
    (copy,) = stepper.effects
    assert isinstance(copy, CopyBlocks)
    assert len(copy.pairs) == 1


def test_the_twin_of_a_running_request_writes_into_its_own_copy() -> None:
    stepper = Stepper(prefill_scheduler())
    stepper.scheduler.apply(Submit(request("one", range(8), max_tokens=6)))
    stepper.step()
    for name in ("two", "three"):
        stepper.scheduler.apply(Submit(request(name, range(8), max_tokens=6)))
    stepper.run()
    assert stepper.plans[1] == "decode one[8..8], two[7..7], three[7..7]"
    assert [len(e.pairs) for e in stepper.effects if isinstance(e, CopyBlocks)] == [2]
    assert stepper.tokens == dict.fromkeys(("one", "two", "three"), expected_output(range(8), 6))


def test_a_failed_copy_of_the_device_costs_time_and_nothing_else() -> None:
    stepper, seen = play([list(range(8))] * 2, fail_effects={0})
    assert stepper.plans[3] == "prefill 1[4..7]"
    assert [o.cached_tokens for effects in seen for o in effects.outputs if o.index == 0] == [0, 4]


def after_failed_copies() -> Stepper:
    """One decodes 12 tokens; of its three twins each needs one token after its copy, and four without it."""
    stepper = Stepper(prefill_scheduler(32, limits=BatchLimits(8, 4)), fail_effects={0})
    stepper.scheduler.apply(Submit(request("one", range(12), max_tokens=9)))
    stepper.step()
    stepper.step()
    for name in ("two", "three", "four"):
        stepper.scheduler.apply(Submit(request(name, range(12), max_tokens=2)))
    return stepper


def test_failed_copies_keep_to_the_token_budget() -> None:
    stepper = after_failed_copies()
    stepper.run()
    assert stepper.plans[2] == "prefill one[12..12], two[8..11], three[8..10] no draw"
    for name in ("two", "three", "four"):
        assert stepper.tokens[name] == expected_output(range(12), 2)


def test_one_whose_copy_failed_and_that_finds_no_place_in_the_step_can_be_cancelled() -> None:
    stepper = after_failed_copies()
    plan = stepper.launch()
    assert plan is not None
    assert stepper.scheduler.apply(CancelRequest(RequestId("four"))).retired == ("four",)
    stepper.settle(plan)
    stepper.run()
    assert stepper.scheduler.is_drained
    assert sorted(stepper.tokens) == ["one", "three", "two"]


def test_a_cancelled_prefill_leaves_its_tail_for_the_next_one() -> None:
    stepper = Stepper(prefill_scheduler(12, limits=BatchLimits(6, 2)))
    stepper.scheduler.apply(Submit(request("gone", range(12))))
    stepper.step()
    stepper.scheduler.apply(CancelRequest(RequestId("gone")))
    stepper.scheduler.apply(Submit(request("next", range(12), max_tokens=2)))
    stepper.run()
    assert stepper.plans[:2] == ["prefill gone[0..5] no draw", "prefill next[6..11]"]
    assert stepper.tokens["next"] == expected_output(range(12), 2)
