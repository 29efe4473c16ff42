from collections.abc import Iterable

import pytest
from kv_machine import expected_output
from scheduler_drive import Stepper, copy_blocks, decode_scheduler, handoff, prefill_scheduler, request

from scheduler.batching import BatchLimits
from scheduler.commands import (
    ActivateDestination,
    Applied,
    CancelDestination,
    CancelRequest,
    DestinationAccepted,
    DestinationFinished,
    DestinationReserved,
    LifecycleEvent,
    Noop,
    ReserveDestination,
    Submit,
    SubmitHandoffPrefill,
)
from scheduler.decode_scheduler import DecodeScheduler
from scheduler.errors import CommandRejected
from scheduler.ids import HandoffId, RequestId
from scheduler.request import FinishReason, Request

H = handoff("h")
PROMPT = range(10)


def land(stepper: Stepper, handoff_id: HandoffId, prompt: Iterable[int]) -> bool:
    """What a transfer does: the KV of the prompt, computed elsewhere, comes into the reserved blocks."""
    scheduler = stepper.scheduler
    assert isinstance(scheduler, DecodeScheduler)
    reserved = scheduler.reserved(handoff_id, 1)
    assert reserved is not None
    source, first_token = computed_elsewhere(tuple(prompt))
    blocks = source.scheduler.kv.blocks_for(reserved.prompt_tokens)
    missing = range(reserved.cached_blocks, blocks)
    copy_blocks(source.device, missing, stepper.device, reserved.blocks[reserved.cached_blocks :])
    return scheduler.landed(handoff_id, 1, first_token)


def computed_elsewhere(prompt: tuple[int, ...]) -> tuple[Stepper, int]:
    """A prefill node that holds `prompt` in its blocks 0, 1, ..., and the first token."""
    source = Stepper(prefill_scheduler(64))
    source.scheduler.apply(SubmitHandoffPrefill(H, request("source", prompt)))
    source.run()
    return source, source.tokens["source"][0]


def serve(stepper: Stepper, name: str, prompt: Iterable[int], max_tokens: int = 4) -> None:
    """Reserve, land and activate one request."""
    prompt = tuple(prompt)
    stepper.scheduler.apply(ReserveDestination(handoff(name), request(name, prompt, max_tokens)))
    assert land(stepper, handoff(name), prompt)
    assert stepper.scheduler.apply(ActivateDestination(handoff(name))).result == Applied()


def test_a_reservation_takes_the_prompt_and_one_token() -> None:
    scheduler = decode_scheduler()
    effects = scheduler.apply(ReserveDestination(H, request("a", range(12), max_tokens=2)))
    assert effects.result == DestinationAccepted(RequestId("a"))
    assert effects.events == (DestinationReserved(H, 1, RequestId("a"), prompt_blocks=3, missing_blocks=3),)
    assert scheduler.occupancy().reserved == 4
    reserved = scheduler.reserved(H, 1)
    assert reserved is not None
    assert (len(reserved.blocks), reserved.cached_blocks) == (3, 0)


@pytest.mark.parametrize("max_tokens", [2, 40])
def test_a_reservation_takes_no_headroom_for_the_output(max_tokens: int) -> None:
    scheduler = decode_scheduler()
    scheduler.apply(ReserveDestination(H, request("a", range(10), max_tokens)))
    assert scheduler.occupancy().reserved == 3


def test_one_token_needs_no_room_after_the_prompt() -> None:
    scheduler = decode_scheduler(blocks=3)
    assert scheduler.apply(ReserveDestination(H, request("a", range(12), max_tokens=1))).events


def test_an_activated_destination_goes_on_from_the_second_token() -> None:
    stepper = Stepper(decode_scheduler())
    serve(stepper, "h", PROMPT)
    boundaries = stepper.run()
    assert stepper.tokens["h"] == expected_output(PROMPT, 4)[1:]
    assert [b.outputs[0].index for b in boundaries] == [1, 2, 3]
    assert all(b.outputs[0].cached_tokens is None for b in boundaries)
    assert boundaries[-1].events == (DestinationFinished(H, 1, RequestId("h"), FinishReason.LENGTH),)
    assert boundaries[-1].retired == ("h",)
    assert stepper.scheduler.is_drained


def test_no_prompt_token_is_computed_by_the_destination() -> None:
    stepper = Stepper(decode_scheduler())
    serve(stepper, "h", PROMPT)
    stepper.run()
    assert stepper.device.computed["h"] == 3


def test_activation_changes_no_occupancy_but_the_name_of_it() -> None:
    stepper = Stepper(decode_scheduler())
    stepper.scheduler.apply(ReserveDestination(H, request("a", PROMPT)))
    land(stepper, H, PROMPT)
    before = stepper.scheduler.occupancy()
    stepper.scheduler.apply(ActivateDestination(H))
    after = stepper.scheduler.occupancy()
    assert (before.reserved, before.active) == (after.active, after.reserved) == (3, 0)
    assert before.free == after.free


def test_blocks_are_findable_from_activation_on_and_not_before() -> None:
    stepper = Stepper(scheduler := decode_scheduler())
    scheduler.apply(ReserveDestination(H, request("a", PROMPT)))
    land(stepper, H, PROMPT)
    scheduler.apply(ReserveDestination(handoff("before"), request("before", PROMPT)))
    scheduler.apply(ActivateDestination(H))
    scheduler.apply(ReserveDestination(handoff("after"), request("after", PROMPT)))
    cached = [scheduler.reserved(handoff(name), 1) for name in ("before", "after")]
    assert [c.cached_blocks for c in cached if c is not None] == [0, 2]


def test_a_cached_prompt_needs_no_bytes() -> None:
    stepper = Stepper(scheduler := decode_scheduler())
    serve(stepper, "first", range(12))
    stepper.run()
    effects = scheduler.apply(ReserveDestination(H, request("h", range(12))))
    assert effects.events == (DestinationReserved(H, 1, RequestId("h"), prompt_blocks=3, missing_blocks=0),)
    assert land(stepper, H, range(12))
    scheduler.apply(ActivateDestination(H))
    stepper.run()
    assert stepper.tokens["h"] == expected_output(range(12), 4)[1:]
    assert scheduler.cached_tokens_total == 12


def test_pinned_hits_are_not_evicted_by_the_rest_of_the_reservation() -> None:
    stepper = Stepper(scheduler := decode_scheduler(blocks=5))
    serve(stepper, "first", range(12), max_tokens=2)
    stepper.run()
    prompt = [*range(12), 50, 51, 52, 53]
    scheduler.apply(ReserveDestination(H, request("h", prompt, max_tokens=4)))
    assert land(stepper, H, prompt)
    scheduler.apply(ActivateDestination(H))
    stepper.run()
    assert stepper.tokens["h"] == expected_output(prompt, 4)[1:]


def test_activate_is_a_noop_until_the_bytes_have_landed_and_after() -> None:
    stepper = Stepper(scheduler := decode_scheduler())
    assert scheduler.apply(ActivateDestination(H)).result == Noop()
    scheduler.apply(ReserveDestination(H, request("a", PROMPT)))
    assert scheduler.apply(ActivateDestination(H)).result == Noop()
    land(stepper, H, PROMPT)
    assert scheduler.apply(ActivateDestination(H, attempt=2)).result == Noop()
    assert scheduler.apply(ActivateDestination(H)).result == Applied()
    assert scheduler.apply(ActivateDestination(H)).result == Noop()


def armed(prompt: Iterable[int], max_tokens: int) -> Stepper:
    stepper = Stepper(decode_scheduler())
    reserve = ReserveDestination(H, request("a", prompt, max_tokens), activate_when_landed=True)
    stepper.scheduler.apply(reserve)
    assert land(stepper, H, prompt)
    return stepper


def test_an_armed_destination_runs_as_soon_as_it_has_landed() -> None:
    stepper = armed(PROMPT, 4)
    assert stepper.scheduler.occupancy().waiting_requests == 1
    stepper.run()
    assert stepper.tokens["a"] == expected_output(tuple(PROMPT), 4)[1:]


def test_the_activation_that_follows_an_armed_one_is_acknowledged_once() -> None:
    scheduler = armed(PROMPT, 4).scheduler
    assert scheduler.apply(ActivateDestination(H)).result == Applied()
    assert scheduler.apply(ActivateDestination(H)).result == Noop()


def test_an_armed_request_that_has_ended_is_still_acknowledged() -> None:
    stepper = armed(PROMPT, 2)
    stepper.run()
    assert stepper.scheduler.is_drained
    assert stepper.scheduler.apply(ActivateDestination(H)).result == Applied()
    assert stepper.scheduler.apply(ActivateDestination(H)).result == Noop()


def test_an_armed_destination_can_be_cancelled_before_its_activation_is_acknowledged() -> None:
    scheduler = armed(PROMPT, 4).scheduler
    assert scheduler.apply(CancelDestination(H)).result == Applied()
    assert scheduler.apply(ActivateDestination(H)).result == Noop()
    assert scheduler.is_drained


def test_an_old_acknowledgement_is_not_for_a_new_reservation() -> None:
    stepper = armed(PROMPT, 2)
    stepper.run()
    stepper.scheduler.apply(ReserveDestination(H, request("b", PROMPT, 2)))
    assert stepper.scheduler.apply(ActivateDestination(H)).result == Noop()


def test_activate_after_cancel_is_a_noop() -> None:
    stepper = Stepper(scheduler := decode_scheduler())
    scheduler.apply(ReserveDestination(H, request("a", PROMPT)))
    land(stepper, H, PROMPT)
    scheduler.apply(CancelDestination(H))
    assert scheduler.apply(ActivateDestination(H)).result == Noop()


def full(max_tokens: int = 30, **options: int) -> Stepper:
    """A pool of 10 blocks whose one running request has 10 of them committed."""
    stepper = Stepper(decode_scheduler(blocks=10, **options))
    serve(stepper, "first", PROMPT, max_tokens)
    return stepper


def reserve(stepper: Stepper, *names: str) -> list[HandoffId]:
    """The handoffs that became reserved."""
    events: list[LifecycleEvent] = []
    for name in names:
        events += stepper.scheduler.apply(ReserveDestination(handoff(name), request(name, PROMPT))).events
    return [event.handoff_id for event in events]


def test_an_accepted_destination_waits_for_blocks_in_fifo_order() -> None:
    stepper = full()
    assert reserve(stepper, "x", "y") == []
    assert stepper.scheduler.occupancy().waiting_requests == 3
    events = [event for boundary in stepper.run() for event in boundary.events]
    assert [event.handoff_id for event in events] == ["first", "x", "y"]


def test_a_small_one_does_not_overtake_the_blocked_head() -> None:
    stepper = full(max_tokens=20)
    assert reserve(stepper, "large") == []
    assert stepper.scheduler.apply(ReserveDestination(handoff("small"), request("small", [1], 2))).events == ()


def test_cancelling_the_blocked_head_retries_the_next() -> None:
    stepper = full(max_tokens=20)
    reserve(stepper, "large")
    stepper.scheduler.apply(ReserveDestination(handoff("small"), request("small", [1], 2)))
    effects = stepper.scheduler.apply(CancelDestination(handoff("large")))
    assert effects.retired == ("large",)
    assert [event.handoff_id for event in effects.events] == ["small"]


def test_cancelling_what_runs_retries_the_head_at_once() -> None:
    stepper = full()
    reserve(stepper, "x")
    effects = stepper.scheduler.apply(CancelDestination(handoff("first")))
    assert effects.retired == ("first",)
    assert [event.handoff_id for event in effects.events] == ["x"]


def test_while_a_destination_waits_no_fresh_request_is_admitted() -> None:
    stepper = full(max_tokens=20)
    reserve(stepper, "large")
    stepper.scheduler.apply(Submit(request("local", [1], 1)))
    stepper.step()
    assert [row.request_id for row in stepper.plans[-1].rows] == ["first"]
    stepper.scheduler.apply(CancelDestination(handoff("large")))
    stepper.step()
    assert [row.request_id for row in stepper.plans[-1].rows] == ["first", "local"]


def test_an_activated_request_runs_past_blocked_ones() -> None:
    stepper = Stepper(scheduler := decode_scheduler(blocks=8))
    serve(stepper, "first", PROMPT)
    reserve(stepper, "second", "blocked")
    scheduler.apply(Submit(request("local", [1], 1)))
    land(stepper, handoff("second"), PROMPT)
    scheduler.apply(ActivateDestination(handoff("second")))
    stepper.step()
    assert [row.request_id for row in stepper.plans[-1].rows] == ["first", "second"]


def test_a_blocked_node_does_not_spin() -> None:
    stepper = Stepper(decode_scheduler(blocks=4))
    reserve(stepper, "x", "blocked")
    assert stepper.run() == []


def test_handoffs_under_way_have_their_own_limit() -> None:
    stepper = Stepper(scheduler := decode_scheduler(blocks=40, max_reservations=2))
    assert reserve(stepper, "x", "y", "z") == ["x", "y"]
    land(stepper, handoff("x"), PROMPT)
    assert scheduler.take_effects().events == ()
    effects = scheduler.apply(ActivateDestination(handoff("x")))
    assert [event.handoff_id for event in effects.events] == ["z"]


def test_the_limit_counts_what_drains() -> None:
    stepper = Stepper(scheduler := decode_scheduler(blocks=40, max_reservations=1))
    reserve(stepper, "x", "y")
    scheduler.transfer_started(handoff("x"), 1)
    assert scheduler.apply(CancelDestination(handoff("x"))).events == ()
    scheduler.transfer_quiet(handoff("x"), 1)
    assert [event.handoff_id for event in scheduler.take_effects().events] == ["y"]


def test_queue_position_is_that_of_the_reservation() -> None:
    stepper = Stepper(scheduler := decode_scheduler(blocks=40, limits=BatchLimits(16, 1)))
    reserve(stepper, "x", "y")
    for name in ("y", "x"):
        land(stepper, handoff(name), PROMPT)
        scheduler.apply(ActivateDestination(handoff(name)))
    stepper.step()
    assert [row.request_id for row in stepper.plans[-1].rows] == ["x"]


@pytest.mark.parametrize("phase", ["pending", "reserved", "landed", "activated", "running"])
def test_cancel_returns_every_block_once(phase: str) -> None:
    stepper = full(max_tokens=4) if phase != "pending" else full()
    scheduler = stepper.scheduler
    reserve(stepper, "h")
    if phase in ("landed", "activated", "running"):
        land(stepper, H, PROMPT)
    if phase in ("activated", "running"):
        scheduler.apply(ActivateDestination(H))
    if phase == "running":
        stepper.step()
    effects = scheduler.apply(CancelDestination(H))
    assert (effects.result, effects.retired) == (Applied(), ("h",))
    assert scheduler.apply(CancelDestination(H)).result == Noop()
    scheduler.check()
    stepper.run()
    assert stepper.tokens["first"] == expected_output(PROMPT, 30 if phase == "pending" else 4)[1:]
    assert scheduler.is_drained


def test_bytes_that_may_come_keep_the_blocks_until_quiet() -> None:
    scheduler = decode_scheduler(blocks=4)
    scheduler.apply(ReserveDestination(H, request("a", PROMPT)))
    scheduler.transfer_started(H, 1)
    effects = scheduler.apply(CancelDestination(H))
    assert (effects.result, effects.retired) == (Applied(), ())
    assert (scheduler.occupancy().draining, scheduler.occupancy().reserved) == (3, 0)
    assert scheduler.reserved(H, 1) is None
    assert scheduler.apply(CancelDestination(H)).result == Noop()
    assert scheduler.apply(ReserveDestination(handoff("x"), request("x", PROMPT))).events == ()
    scheduler.transfer_quiet(H, 2)
    assert scheduler.occupancy().draining == 3
    scheduler.transfer_quiet(H, 1)
    effects_of_quiet = scheduler.take_effects()
    assert effects_of_quiet.retired == ("a",)
    assert [event.handoff_id for event in effects_of_quiet.events] == ["x"]
    scheduler.check()


def test_bytes_that_land_after_the_cancel_are_not_wanted() -> None:
    scheduler = decode_scheduler()
    scheduler.apply(ReserveDestination(H, request("a", PROMPT)))
    scheduler.transfer_started(H, 1)
    scheduler.apply(CancelDestination(H))
    assert not scheduler.landed(H, 1, first_token=5)
    assert scheduler.take_effects().retired == ("a",)
    assert scheduler.is_drained
    assert scheduler.occupancy().cached == 0
    assert not scheduler.landed(H, 1, first_token=5)


def test_a_broken_transfer_leaves_the_reservation() -> None:
    scheduler = decode_scheduler()
    scheduler.apply(ReserveDestination(H, request("a", PROMPT)))
    scheduler.transfer_started(H, 1)
    scheduler.transfer_quiet(H, 1)
    assert scheduler.reserved(H, 1) is not None
    assert scheduler.apply(CancelDestination(H)).retired == ("a",)


def test_cancel_request_reaches_an_active_destination_only() -> None:
    stepper = Stepper(scheduler := decode_scheduler())
    reserve(stepper, "h")
    assert scheduler.apply(CancelRequest(RequestId("h"))).result == Noop()
    land(stepper, H, PROMPT)
    assert scheduler.apply(CancelRequest(RequestId("h"))).result == Noop()
    scheduler.apply(ActivateDestination(H))
    assert scheduler.apply(CancelRequest(RequestId("h"))).retired == ("h",)
    assert scheduler.apply(CancelDestination(H)).result == Noop()
    assert scheduler.is_drained


def test_cancel_after_the_natural_end_is_a_noop() -> None:
    stepper = Stepper(decode_scheduler())
    serve(stepper, "h", PROMPT)
    stepper.run()
    assert stepper.scheduler.apply(CancelDestination(H)).result == Noop()


def test_a_failed_step_finishes_its_destinations_with_an_error() -> None:
    stepper = Stepper(decode_scheduler(), fail_at={1})
    serve(stepper, "h", PROMPT)
    stepper.step()
    failed = stepper.step()
    assert failed is not None
    assert failed.events == (DestinationFinished(H, 1, RequestId("h"), FinishReason.ERROR),)
    assert (failed.outputs[0].index, failed.outputs[0].token) == (2, None)
    assert stepper.scheduler.is_drained


def too_long() -> list[tuple[Request, str]]:
    return [(request("a", range(14), 4), "KV blocks"), (request("a", range(30), 10), "positions")]


def test_what_can_never_fit_is_rejected_and_leaves_ids_and_room() -> None:
    scheduler = decode_scheduler(blocks=4, max_model_len=32)
    for asked, reason in too_long():
        with pytest.raises(CommandRejected, match=reason):
            scheduler.apply(ReserveDestination(H, asked))
    assert scheduler.is_drained
    assert scheduler.apply(ReserveDestination(H, request("a", range(13), 4))).events


def test_live_ids_are_rejected_in_every_phase_and_reusable_after() -> None:
    stepper = Stepper(scheduler := decode_scheduler())
    reserve(stepper, "h")
    for _ in range(2):
        with pytest.raises(CommandRejected, match="already a destination"):
            scheduler.apply(ReserveDestination(H, request("b", [1])))
        with pytest.raises(CommandRejected, match="already active"):
            scheduler.apply(ReserveDestination(handoff("other"), request("h", [1])))
        scheduler.transfer_started(H, 1)
        scheduler.apply(CancelDestination(H))
    scheduler.transfer_quiet(H, 1)
    assert reserve(stepper, "h") == ["h"]


def test_many_handoffs_in_a_row_leave_no_trace() -> None:
    stepper = Stepper(decode_scheduler(blocks=6))
    for i in range(16):
        serve(stepper, f"r{i}", [i] * 9)
        stepper.run()
        assert stepper.tokens[f"r{i}"] == expected_output([i] * 9, 4)[1:]
    assert stepper.scheduler.is_drained
