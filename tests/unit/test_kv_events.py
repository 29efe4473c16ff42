"""KV events: who replays them knows exactly which full blocks can be found here."""

from collections.abc import Iterable
from random import Random
from typing import Any

import pytest
from kv_machine import expected_output
from scheduler_drive import LIMITS, Stepper, decode_scheduler, handoff, prefill_scheduler, request

from scheduler.base import SchedulerBase
from scheduler.commands import ActivateDestination, CancelRequest, ReserveDestination, Submit, SubmitHandoffPrefill
from scheduler.events import BlocksRemoved, BlocksStored, BoundaryEffects, KvEvent
from scheduler.ids import BlockHash, RequestId
from scheduler.kv import KvAccounting
from scheduler.policies import Preemption, SchedulingPolicy
from scheduler.prefix import extend_chain, root
from scheduler.sequence import Sequence

BLOCK_SIZE = 4


def names(tokens: Iterable[int], adapter: str | None = None, salt: str | None = None) -> list[BlockHash]:
    chain: list[BlockHash] = []
    extend_chain(chain, list(tokens), BLOCK_SIZE, root(adapter, salt))
    return chain


def prefill(blocks: int = 16, **options: Any) -> Stepper:
    return Stepper(prefill_scheduler(blocks, kv_events=True, **options))


def events_of(effects: Iterable[BoundaryEffects]) -> list[KvEvent]:
    return [event for one in effects for event in one.kv_events]


def serve(stepper: Stepper, name: str, prompt: Iterable[int], max_tokens: int = 1, **options: Any) -> list[KvEvent]:
    """Run one request to its end; the KV events that it caused."""
    stepper.scheduler.apply(Submit(request(name, prompt, max_tokens, **options)))
    return events_of(stepper.run())


def owner(kv: KvAccounting, prompt: Iterable[int]) -> Sequence:
    sequence = Sequence(request("owner", prompt), 0, 4)
    assert kv.admit(sequence, len(sequence.known), leave=1)
    return sequence


def compute(kv: KvAccounting, sequence: Sequence, upto: int) -> None:
    sequence.start = upto
    kv.publish(sequence)


def test_full_blocks_are_stored_behind_their_parent() -> None:
    stepper = prefill()
    chain = names(range(20))
    assert serve(stepper, "short", range(8)) == [BlocksStored(1, None, (chain[0], chain[1]))]
    assert serve(stepper, "long", range(20)) == [BlocksStored(2, chain[1], (chain[2], chain[3], chain[4]))]


def test_each_chunk_stores_what_it_filled() -> None:
    stepper = prefill()
    chain = names(range(33))
    assert serve(stepper, "a", range(33)) == [
        BlocksStored(1, None, tuple(chain[:4])),
        BlocksStored(2, chain[3], tuple(chain[4:8])),
    ]


def test_a_decode_stores_a_block_when_it_is_full() -> None:
    stepper = prefill()
    known = [1, 2, 3, *expected_output([1, 2, 3], 7)]
    chain = names(known)
    assert serve(stepper, "a", [1, 2, 3], max_tokens=7) == [
        BlocksStored(1, None, (chain[0],)),
        BlocksStored(2, chain[0], (chain[1],)),
    ]


def test_nothing_is_told_of_partial_blocks() -> None:
    stepper = prefill(3)
    assert serve(stepper, "three tokens", range(3)) == []
    assert stepper.scheduler.kv.pool.published == 1
    # Its tail is taken over, and after that another one is evicted.
    assert serve(stepper, "longer", range(4), max_tokens=1) == [BlocksStored(1, None, tuple(names(range(4))))]
    assert serve(stepper, "other", [7, 8]) == []
    assert stepper.scheduler.kv.pool.published == 2
    assert serve(stepper, "full", range(50, 62)) == [
        BlocksRemoved(2, tuple(names(range(4)))),
        BlocksStored(3, None, tuple(names(range(50, 62)))),
    ]


def test_an_eviction_is_told_once_and_before_what_took_its_place() -> None:
    stepper = prefill(4)
    old, new = names(range(16)), names(range(50, 58))
    assert serve(stepper, "old", range(16)) == [BlocksStored(1, None, tuple(old))]
    # A chain goes from its end.
    assert serve(stepper, "new", range(50, 58)) == [
        BlocksRemoved(2, (old[3], old[2])),
        BlocksStored(3, None, tuple(new)),
    ]
    assert serve(stepper, "old again", range(16))[-1] == BlocksStored(5, old[1], (old[2], old[3]))


def test_an_eviction_is_told_at_the_boundary_although_nothing_is_stored() -> None:
    stepper = prefill(2)
    serve(stepper, "old", range(8))
    stepper.scheduler.apply(Submit(request("new", range(50, 57), max_tokens=1)))
    stepper.launch()
    assert stepper.scheduler.kv.take_events() == (BlocksRemoved(2, tuple(reversed(names(range(8))))),)


def test_content_that_is_known_is_not_told_again() -> None:
    stepper = prefill()
    for name in ("one", "two"):
        stepper.scheduler.apply(Submit(request(name, range(8), max_tokens=1)))
    # Both compute the same blocks in one step.
    assert events_of(stepper.run()) == [BlocksStored(1, None, tuple(names(range(8))))]
    assert stepper.plans == ["prefill one[0..7], two[0..7]"]
    assert serve(stepper, "three", range(8)) == []


def test_blocks_with_a_known_one_between_them_are_two_runs() -> None:
    kv = KvAccounting(12, BLOCK_SIZE, kv_events=True)
    chain = names(range(16))
    first, second = owner(kv, range(13)), owner(kv, range(13))
    compute(kv, first, 8)
    compute(kv, second, 12)
    assert kv.take_events() == (
        BlocksStored(1, None, (chain[0], chain[1])),
        BlocksStored(2, chain[1], (chain[2],)),
    )
    # The first blocks are evicted, the third is in use; who computes all four again tells of the others only.
    kv.release(first, keep=False)
    filler = owner(kv, range(100, 132))
    kv.release(filler, keep=False)
    assert kv.take_events() == (BlocksRemoved(3, (chain[1], chain[0])),)
    again = owner(kv, range(16))
    compute(kv, again, 16)
    assert kv.take_events() == (
        BlocksStored(4, None, (chain[0], chain[1])),
        BlocksStored(5, chain[2], (chain[3],)),
    )


def test_the_first_block_of_an_adapter_or_tenant_has_no_parent_either() -> None:
    stepper = prefill()
    stepper.scheduler.set_adapters({"a": "a"})
    for number, key in enumerate(((None, None), ("a", None), (None, "a")), 1):
        stored = serve(stepper, str(key), range(4), adapter=key[0], cache_salt=key[1])
        assert stored == [BlocksStored(number, None, tuple(names(range(4), *key)))]


def test_what_a_failed_step_wrote_is_not_told() -> None:
    stepper = Stepper(prefill_scheduler(kv_events=True), fail_at={1})
    assert serve(stepper, "a", range(30)) == [BlocksStored(1, None, tuple(names(range(16))))]


@pytest.mark.parametrize("kind", [prefill_scheduler, decode_scheduler])
def test_nothing_is_told_unless_asked(kind: Any) -> None:
    stepper = Stepper(kind(2))
    assert serve(stepper, "a", range(8)) == serve(stepper, "b", range(50, 58)) == []


def test_events_are_visible_at_the_boundary_after_their_step() -> None:
    stepper = prefill()
    stepper.scheduler.apply(Submit(request("a", range(4), max_tokens=1)))
    assert stepper.boundary().kv_events == ()
    plan = stepper.launch()
    assert plan is not None
    stepper.settle(plan)
    effects = stepper.boundary()
    assert effects.kv_events == (BlocksStored(1, None, tuple(names(range(4)))),)
    assert len(effects.outputs) == 1
    assert stepper.boundary().is_empty


def test_a_source_stores_while_it_is_held_and_nothing_more_when_released() -> None:
    stepper = prefill()
    stepper.scheduler.apply(SubmitHandoffPrefill(handoff("h"), request("a", range(9))))
    assert events_of(stepper.run()) == [BlocksStored(1, None, tuple(names(range(9))))]


def test_a_destination_stores_when_it_is_activated_and_not_before() -> None:
    scheduler = decode_scheduler(6, kv_events=True)
    stepper = Stepper(scheduler)
    old, chain = names(range(50, 66)), names(range(11))
    assert serve(stepper, "old", range(50, 66)) == [BlocksStored(1, None, tuple(old))]
    scheduler.apply(ReserveDestination(handoff("h"), request("a", range(11), max_tokens=2)))
    assert stepper.boundary().kv_events == (BlocksRemoved(2, (old[3],)),)
    scheduler.transfer_started(handoff("h"), 1)
    assert scheduler.landed(handoff("h"), 1, 7)
    assert stepper.boundary().kv_events == ()
    scheduler.apply(ActivateDestination(handoff("h")))
    assert stepper.boundary().kv_events == (BlocksStored(3, None, (chain[0], chain[1])),)
    # Position 11, the first token's, fills the third block.
    assert events_of(stepper.run()) == [BlocksStored(4, chain[1], tuple(names([*range(11), 7])[2:]))]


class Listener:
    """What a router makes of the events."""

    def __init__(self) -> None:
        self.number = self.removed = 0
        self.findable: set[BlockHash] = set()

    def replay(self, events: Iterable[KvEvent]) -> None:
        for event in events:
            self.number += 1
            assert event.number == self.number
            assert event.hashes
            if isinstance(event, BlocksStored):
                assert not self.findable & set(event.hashes)
                self.findable |= set(event.hashes)
            else:
                assert self.findable >= set(event.hashes)
                self.removed += len(event.hashes)
                self.findable -= set(event.hashes)


@pytest.mark.parametrize("preemption", list(Preemption))
@pytest.mark.parametrize("seed", range(3))
def test_replaying_the_events_gives_exactly_the_findable_full_blocks(preemption: Preemption, seed: int) -> None:
    random = Random(seed)
    stepper = prefill(14, limits=LIMITS, policy=SchedulingPolicy(preemption=preemption))
    listener, everything = Listener(), set[BlockHash]()
    for number in range(60):
        base, salt = random.randrange(3), random.choice([None, "tenant"])
        prompt = [*range(base, base + random.randrange(1, 24)), *([99] * random.randrange(4))]
        count = random.randrange(1, 16)
        everything |= set(names([*prompt, *expected_output(prompt, count)], salt=salt))
        stepper.scheduler.apply(Submit(request(str(number), prompt, count, cache_salt=salt)))
        if random.random() < 0.2:
            stepper.scheduler.apply(CancelRequest(RequestId(str(random.randrange(number + 1)))))
        for _ in range(random.randrange(8)):
            effects = stepper.step()
            if effects is None:
                break
            listener.replay(effects.kv_events)
            assert listener.findable == {name for name in everything if is_findable(stepper.scheduler, name)}
    listener.replay(events_of(stepper.run()))
    assert listener.findable == {name for name in everything if is_findable(stepper.scheduler, name)}
    assert stepper.scheduler.is_drained
    assert listener.removed > 40, "too little was evicted to show anything"


def is_findable(scheduler: SchedulerBase, name: BlockHash) -> bool:
    return scheduler.kv.pool.find(name) is not None
