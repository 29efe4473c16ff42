"""Batches of a decode node that prefills as well: who rides along, and that nobody waits for who can't run."""

from collections.abc import Iterable
from typing import Any

import pytest
from kv_machine import expected_output
from scheduler_drive import Stepper, copy_blocks, decode_scheduler, handoff, prefill_scheduler, request

from scheduler.batching import BatchLimits
from scheduler.commands import (
    ActivateDestination,
    Applied,
    CancelDestination,
    ReleaseSource,
    ReserveDestination,
    Submit,
    SubmitHandoffPrefill,
)
from scheduler.decode_scheduler import DecodeScheduler
from scheduler.events import DestinationReserved
from scheduler.policies import Preemption, SchedulingPolicy
from scheduler.prefill_scheduler import PrefillScheduler


class DecodeNode(Stepper):
    """A decode node; the KV of its destinations comes from a prefill node of its own."""

    scheduler: DecodeScheduler

    def __init__(self, blocks: int = 32, **options: Any) -> None:
        super().__init__(decode_scheduler(blocks, **options))
        self.asked: dict[str, list[int]] = {}

    def submit(self, name: str, prompt: Iterable[int], max_tokens: int = 4) -> None:
        asked = request(name, prompt, max_tokens)
        self.asked[name] = expected_output(asked.prompt, max_tokens)
        self.scheduler.apply(Submit(asked))

    def reserve(self, name: str, prompt: Iterable[int], max_tokens: int = 4) -> bool:
        """Whether the blocks are there at once."""
        effects = self.scheduler.apply(ReserveDestination(handoff(name), request(name, prompt, max_tokens)))
        return any(isinstance(event, DestinationReserved) for event in effects.events)

    def land(self, name: str, prompt: Iterable[int], max_tokens: int = 4) -> None:
        prompt = tuple(prompt)
        source = Stepper(prefill_scheduler(16))
        source.scheduler.apply(SubmitHandoffPrefill(handoff(name), request(name, prompt)))
        source.run()
        assert isinstance(source.scheduler, PrefillScheduler)
        held, reserved = source.scheduler.held(handoff(name), 1), self.scheduler.reserved(handoff(name), 1)
        assert held is not None
        assert reserved is not None
        first = reserved.cached_blocks
        copy_blocks(source.device, held.blocks[first:], self.device, reserved.blocks[first:])
        assert self.scheduler.landed(handoff(name), 1, held.first_token)
        # The first token was streamed by the source.
        self.asked[name] = expected_output(prompt, max_tokens)[1:]

    def activate(self, name: str, prompt: Iterable[int], max_tokens: int = 4) -> None:
        """Everything from the reservation to the activation."""
        prompt = tuple(prompt)
        assert self.reserve(name, prompt, max_tokens)
        self.land(name, prompt, max_tokens)
        assert self.scheduler.apply(ActivateDestination(handoff(name))).result == Applied()

    def finish(self) -> None:
        """Run to the end; every answer is right and nothing is left."""
        self.run()
        assert self.tokens == self.asked
        assert self.scheduler.is_drained


def test_local_chunks_ride_with_the_decodes_in_one_plan() -> None:
    node = DecodeNode()
    node.activate("d1", range(5), max_tokens=9)
    node.activate("d2", range(50, 57), max_tokens=9)
    node.submit("local", range(100, 133))
    node.run(100)
    assert node.plans[:4] == [
        "prefill d1[5..5], d2[7..7], local[0..13] no draw",
        "prefill d1[6..6], d2[8..8], local[14..27] no draw",
        "prefill d1[7..7], d2[9..9], local[28..32]",
        "decode d1[8..8], d2[10..10], local[33..33]",
    ]
    node.finish()


def test_decodes_alone_are_a_decode_before_and_after() -> None:
    node = DecodeNode()
    node.activate("d", range(5), max_tokens=6)
    node.step()
    node.submit("local", range(100, 108), max_tokens=1)
    node.step()
    node.step()
    assert node.plans == ["decode d[5..5]", "prefill d[6..6], local[0..7]", "decode d[7..7]"]
    node.finish()


def test_decodes_leave_the_rest_of_the_budget_to_chunks_and_at_least_one_token() -> None:
    node = DecodeNode(limits=BatchLimits(max_tokens=4, max_sequences=4))
    for name, first in (("d1", 0), ("d2", 50), ("d3", 100)):
        node.activate(name, range(first, first + 5), max_tokens=9)
    node.submit("local", [7, 8, 9], max_tokens=2)
    for _ in range(3):
        node.step()
    decodes = [", ".join(f"d{i}[{position}..{position}]" for i in (1, 2, 3)) for position in (5, 6, 7)]
    assert node.plans == [
        # One token of the prompt is a row of one token as any other.
        f"decode {decodes[0]}, local[0..0] no draw",
        f"decode {decodes[1]}, local[1..1] no draw",
        f"decode {decodes[2]}, local[2..2]",
    ]
    node.finish()


def test_a_full_batch_of_decodes_keeps_a_local_prompt_waiting_until_one_ends() -> None:
    node = DecodeNode(limits=BatchLimits(max_tokens=4, max_sequences=2))
    node.activate("d1", range(5), max_tokens=9)
    node.activate("d2", range(50, 55), max_tokens=3)
    node.submit("local", [7, 8, 9], max_tokens=2)
    for _ in range(3):
        node.step()
    assert node.plans == ["decode d1[5..5], d2[5..5]", "decode d1[6..6], d2[6..6]", "prefill d1[7..7], local[0..2]"]
    node.finish()


def test_an_activated_destination_waits_for_a_place_and_goes_before_new_ones() -> None:
    node = DecodeNode(limits=BatchLimits(max_tokens=16, max_sequences=2))
    node.activate("d1", range(5), max_tokens=3)
    node.activate("d2", range(20, 25), max_tokens=4)
    node.submit("local", [7, 8, 9], max_tokens=2)
    node.activate("d3", range(40, 45), max_tokens=3)
    node.run()
    assert node.plans[:4] == [
        "decode d1[5..5], d2[5..5]",
        "decode d1[6..6], d2[6..6]",
        "decode d2[7..7], d3[5..5]",
        "prefill d3[6..6], local[0..2]",
    ]
    node.finish()


def test_an_activated_destination_does_not_wait_until_a_long_local_prompt_is_done() -> None:
    node = DecodeNode(limits=BatchLimits(max_tokens=8, max_sequences=4))
    node.submit("local", range(100, 140), max_tokens=1)
    node.step()
    node.activate("d", range(5))
    node.step()
    assert node.plans == ["prefill local[0..7] no draw", "prefill d[5..5], local[8..14] no draw"]
    node.finish()


def test_reserved_and_landed_destinations_take_no_place_in_the_batch() -> None:
    node = DecodeNode(limits=BatchLimits(max_tokens=8, max_sequences=1))
    assert node.reserve("reserved", range(5))
    assert node.reserve("landed", range(20, 25))
    node.land("landed", range(20, 25))
    node.submit("local", [7, 8, 9], max_tokens=2)
    node.run()
    assert node.plans == ["prefill local[0..2]", "decode local[3..3]"]
    node.scheduler.apply(CancelDestination(handoff("reserved")))
    node.scheduler.apply(ActivateDestination(handoff("landed")))
    node.finish()


def test_a_pending_reservation_holds_new_requests_back_and_nobody_else() -> None:
    node = DecodeNode(blocks=12)
    node.activate("running", range(5), max_tokens=8)
    assert node.reserve("ready", range(20, 25))
    assert not node.reserve("pending", range(40, 80))
    node.submit("local", [7, 8, 9], max_tokens=2)
    node.step()
    node.land("ready", range(20, 25))
    node.scheduler.apply(ActivateDestination(handoff("ready")))
    node.step()
    assert node.plans == ["decode running[5..5]", "decode running[6..6], ready[5..5]"]
    # The one that nobody can serve now goes, and the new one runs at once.
    node.scheduler.apply(CancelDestination(handoff("pending")))
    node.step()
    assert node.plans[2] == "prefill running[7..7], ready[6..6], local[0..2]"
    node.finish()


def test_nothing_runs_while_all_wait_for_a_command() -> None:
    node = DecodeNode(blocks=4)
    assert node.reserve("reserved", range(11))
    assert not node.reserve("pending", range(20, 31))
    node.submit("local", [7, 8, 9], max_tokens=2)
    node.boundary()
    assert [node.step() for _ in range(3)] == [None] * 3
    assert node.plans == []
    node.scheduler.apply(CancelDestination(handoff("reserved")))
    node.scheduler.apply(CancelDestination(handoff("pending")))
    node.finish()


def test_held_sources_take_no_place_in_the_batch() -> None:
    scheduler = prefill_scheduler(32, limits=BatchLimits(max_tokens=8, max_sequences=2))
    stepper = Stepper(scheduler)
    for number in range(5):
        name, first = f"s{number}", number * 10
        scheduler.apply(SubmitHandoffPrefill(handoff(name), request(name, range(first, first + 4))))
    stepper.run()
    assert stepper.plans == ["prefill s0[0..3], s1[0..3]", "prefill s2[0..3], s3[0..3]", "prefill s4[0..3]"]
    assert scheduler.metrics().held == 5
    scheduler.apply(Submit(request("local", [7, 8], max_tokens=2)))
    stepper.run()
    assert stepper.plans[3:] == ["prefill local[0..1]", "decode local[2..2]"]
    for number in range(5):
        scheduler.apply(ReleaseSource(handoff(f"s{number}")))
    assert scheduler.is_drained


def test_held_blocks_keep_a_prompt_waiting_and_never_one_that_runs() -> None:
    scheduler = prefill_scheduler(6)
    stepper = Stepper(scheduler)
    scheduler.apply(SubmitHandoffPrefill(handoff("h"), request("held", range(9))))
    scheduler.apply(Submit(request("running", [7, 8], max_tokens=7)))
    stepper.step()
    # Four blocks; three of six are held, and the running one takes two.
    scheduler.apply(Submit(request("large", range(50, 63), max_tokens=1)))
    stepper.run()
    assert stepper.tokens["running"] == expected_output([7, 8], 7)
    assert stepper.plans[-1] == "decode running[7..7]"
    scheduler.apply(ReleaseSource(handoff("h")))
    stepper.run()
    assert stepper.plans[-1] == "prefill large[0..12]"
    assert stepper.tokens["large"] == expected_output(range(50, 63), 1)


@pytest.mark.parametrize("preemption", [Preemption.RECOMPUTE, Preemption.SPILL])
def test_a_preempted_destination_resumes_before_pending_reservations_and_new_requests(preemption: Preemption) -> None:
    node = DecodeNode(blocks=6, policy=SchedulingPolicy(preemption=preemption))
    node.activate("d1", range(8), max_tokens=12)
    node.activate("d2", range(50, 58), max_tokens=8)
    while node.scheduler.batcher.pressure.counters.preemptions == 0:
        node.step()
    assert node.plans[-1] == "decode d1[12..12]"
    assert not node.reserve("pending", range(20, 24), max_tokens=2)
    node.submit("local", [7, 8, 9], max_tokens=2)
    runs = len(node.plans)
    node.run()
    # The reservation is made as soon as d2 has its blocks, and leaves none to the new one.
    order = [[row.split("[")[0].split()[-1] for row in plan.split(", ")] for plan in node.plans[runs:]]
    assert order == [["d1"]] * 6 + [["d2"]] * 3 + [["local"]] * 2
    story = [line.what for line in node.scheduler.story(request("pending", [1]).request_id)]
    assert story[-1] == "reserved, 1 of 1 blocks missing"
    node.scheduler.apply(CancelDestination(handoff("pending")))
    node.finish()
