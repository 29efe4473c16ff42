import pytest
from kv_machine import expected_output
from scheduler_drive import Stepper, handoff, prefill_scheduler, request

from scheduler.commands import (
    Applied,
    CancelRequest,
    CancelSource,
    Noop,
    ReleaseSource,
    SourceFinished,
    SourceHeld,
    Submit,
    SubmitHandoffPrefill,
    Submitted,
)
from scheduler.errors import CommandRejected
from scheduler.ids import RequestId
from scheduler.prefill_scheduler import HeldKv
from scheduler.request import FinishReason

H = handoff("h")
PROMPT = range(10)


def prefilled(blocks: int = 16) -> Stepper:
    """A source that is held."""
    stepper = Stepper(prefill_scheduler(blocks))
    stepper.scheduler.apply(SubmitHandoffPrefill(H, request("a", PROMPT)))
    stepper.run()
    return stepper


def test_a_source_is_held_with_its_prompt_blocks_and_its_first_token() -> None:
    stepper = Stepper(scheduler := prefill_scheduler())
    effects = scheduler.apply(SubmitHandoffPrefill(H, request("a", PROMPT)))
    assert effects.result == Submitted(RequestId("a"))
    assert scheduler.held(H, 1) is None
    (boundary,) = stepper.run()
    assert boundary.events == (SourceHeld(H, 1, RequestId("a"), prompt_tokens=10, cached_tokens=0),)
    assert boundary.outputs[0].finish is None
    assert boundary.retired == ()
    held = scheduler.held(H, 1)
    assert isinstance(held, HeldKv)
    assert held.first_token == expected_output(PROMPT, 1)[0]
    assert len(held.blocks) == 3
    occupancy = scheduler.occupancy()
    assert (occupancy.held, occupancy.active, occupancy.running_requests) == (3, 0, 0)


def test_a_chunked_prompt_is_held_after_its_last_chunk() -> None:
    stepper = Stepper(prefill_scheduler())
    stepper.scheduler.apply(SubmitHandoffPrefill(H, request("a", range(40))))
    assert [bool(boundary.events) for boundary in stepper.run()] == [False, False, True]


def test_a_source_needs_room_for_its_prompt_only() -> None:
    stepper = Stepper(prefill_scheduler(blocks=3))
    stepper.scheduler.apply(SubmitHandoffPrefill(H, request("a", range(12), max_tokens=200)))
    stepper.run()
    assert stepper.scheduler.occupancy().held == 3


@pytest.mark.parametrize("command", [ReleaseSource, CancelSource])
def test_a_held_source_ends_once_and_stays_cached(command: type[ReleaseSource] | type[CancelSource]) -> None:
    scheduler = prefilled().scheduler
    effects = scheduler.apply(command(H))
    assert (effects.result, effects.retired) == (Applied(), ("a",))
    scheduler.check()
    assert scheduler.is_drained
    assert scheduler.occupancy().cached == 2
    again = scheduler.apply(command(H))
    assert (again.result, again.retired) == (Noop(), ())


def test_prefill_work_is_found_again_while_held_and_after() -> None:
    stepper = prefilled()
    for name in ("while", "after"):
        stepper.scheduler.apply(SubmitHandoffPrefill(handoff(name), request(name, PROMPT)))
        (boundary,) = stepper.run()
        (event,) = boundary.events
        assert isinstance(event, SourceHeld)
        assert event.cached_tokens == 8
        stepper.scheduler.apply(ReleaseSource(H))
    assert stepper.tokens["while"] == stepper.tokens["after"] == stepper.tokens["a"]


def test_held_blocks_are_not_evicted() -> None:
    stepper = prefilled(blocks=4)
    stepper.scheduler.apply(Submit(request("b", range(50, 55), max_tokens=1)))
    assert stepper.run() == []
    stepper.scheduler.apply(ReleaseSource(H))
    stepper.run()
    assert stepper.tokens["b"] == expected_output(range(50, 55), 1)


def test_cancel_before_the_prefill_starts() -> None:
    scheduler = prefill_scheduler()
    scheduler.apply(SubmitHandoffPrefill(H, request("a", PROMPT)))
    effects = scheduler.apply(CancelSource(H))
    assert (effects.result, effects.retired) == (Applied(), ("a",))
    assert scheduler.plan() is None
    assert scheduler.is_drained
    assert scheduler.apply(CancelSource(H)).result == Noop()


def test_cancel_between_chunks_keeps_what_is_computed_as_cache() -> None:
    stepper = Stepper(prefill_scheduler())
    stepper.scheduler.apply(SubmitHandoffPrefill(H, request("a", range(40))))
    stepper.step()
    assert stepper.scheduler.apply(CancelSource(H)).retired == ("a",)
    stepper.scheduler.check()
    assert (stepper.scheduler.occupancy().cached, stepper.scheduler.occupancy().free) == (4, 12)
    assert stepper.run() == []


def test_early_release_lets_the_prefill_end_without_a_hold() -> None:
    stepper = Stepper(prefill_scheduler())
    stepper.scheduler.apply(SubmitHandoffPrefill(H, request("a", range(40))))
    stepper.step()
    effects = stepper.scheduler.apply(ReleaseSource(H))
    assert (effects.result, effects.retired) == (Applied(), ())
    last = stepper.run()[-1]
    assert last.events == ()
    assert last.retired == ("a",)
    assert stepper.scheduler.is_drained
    assert stepper.scheduler.apply(ReleaseSource(H)).result == Noop()


def test_cancel_request_reaches_a_pending_source_but_not_a_held_one() -> None:
    stepper = Stepper(scheduler := prefill_scheduler())
    scheduler.apply(SubmitHandoffPrefill(H, request("a", PROMPT)))
    assert scheduler.apply(CancelRequest(RequestId("a"))).retired == ("a",)
    assert scheduler.apply(CancelSource(H)).result == Noop()
    scheduler.apply(SubmitHandoffPrefill(H, request("a", PROMPT)))
    stepper.run()
    assert scheduler.apply(CancelRequest(RequestId("a"))).result == Noop()
    assert scheduler.held(H, 1) is not None
    assert scheduler.apply(CancelRequest(RequestId("unknown"))).result == Noop()


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP])
def test_a_first_token_that_ends_the_request_leaves_nothing_held(reason: FinishReason) -> None:
    first = expected_output(PROMPT, 1)[0]
    if reason is FinishReason.STOP:
        asked = request("a", PROMPT, stop_token_ids=frozenset({first}))
    else:
        asked = request("a", PROMPT, max_tokens=1)
    stepper = Stepper(prefill_scheduler())
    stepper.scheduler.apply(SubmitHandoffPrefill(H, asked))
    (boundary,) = stepper.run()
    assert boundary.events == (SourceFinished(H, 1, RequestId("a"), reason),)
    assert boundary.outputs[0].finish is reason
    assert boundary.retired == ("a",)
    assert stepper.scheduler.is_drained


def test_a_failed_step_finishes_its_source_with_an_error() -> None:
    stepper = Stepper(prefill_scheduler(), fail_at={0})
    stepper.scheduler.apply(SubmitHandoffPrefill(H, request("a", PROMPT)))
    (boundary,) = stepper.run()
    assert boundary.events == (SourceFinished(H, 1, RequestId("a"), FinishReason.ERROR),)
    assert stepper.scheduler.is_drained


def test_live_ids_are_rejected_before_anything_is_registered() -> None:
    scheduler = prefilled().scheduler
    before = scheduler.occupancy()
    for command, message in (
        (SubmitHandoffPrefill(H, request("b", [1])), "already a source"),
        (SubmitHandoffPrefill(handoff("other"), request("a", [1])), "already active"),
        (Submit(request("a", [1])), "already active"),
    ):
        with pytest.raises(CommandRejected, match=message):
            scheduler.apply(command)
    assert scheduler.occupancy() == before
    assert scheduler.apply(CancelSource(handoff("other"))).result == Noop()


def test_ids_are_reusable_once_ownership_has_ended() -> None:
    stepper = prefilled()
    stepper.scheduler.apply(ReleaseSource(H))
    stepper.scheduler.apply(SubmitHandoffPrefill(H, request("a", PROMPT)))
    stepper.run()
    assert stepper.scheduler.apply(CancelSource(H)).retired == ("a",)


def test_another_attempt_addresses_nothing() -> None:
    stepper = Stepper(scheduler := prefill_scheduler())
    scheduler.apply(SubmitHandoffPrefill(H, request("a", PROMPT), attempt=2))
    stepper.run()
    assert scheduler.apply(CancelSource(H, attempt=1)).result == Noop()
    assert scheduler.held(H, 1) is None
    scheduler.transfer_started(H, 1)
    scheduler.transfer_quiet(H, 1)
    assert scheduler.apply(ReleaseSource(H, attempt=2)).retired == ("a",)


@pytest.mark.parametrize("command", [ReleaseSource, CancelSource])
def test_blocks_that_are_being_sent_drain_until_quiet(command: type[ReleaseSource] | type[CancelSource]) -> None:
    stepper = Stepper(scheduler := prefill_scheduler(blocks=3))
    scheduler.apply(SubmitHandoffPrefill(H, request("a", PROMPT)))
    stepper.run()
    scheduler.transfer_started(H, 1)
    effects = scheduler.apply(command(H))
    assert (effects.result, effects.retired) == (Applied(), ())
    assert scheduler.apply(command(H)).result == Noop()
    assert (scheduler.occupancy().held, scheduler.occupancy().draining) == (0, 3)
    scheduler.apply(Submit(request("b", [1], max_tokens=1)))
    assert scheduler.plan() is None
    scheduler.transfer_quiet(H, 1)
    assert scheduler.take_effects().retired == ("a",)
    scheduler.check()
    stepper.run()
    assert stepper.tokens["b"] == expected_output([1], 1)
    assert scheduler.is_drained


def test_a_transfer_that_ended_leaves_the_source_held() -> None:
    stepper = Stepper(scheduler := prefill_scheduler())
    scheduler.apply(SubmitHandoffPrefill(H, request("a", PROMPT)))
    stepper.run()
    scheduler.transfer_started(H, 1)
    scheduler.transfer_quiet(H, 1)
    assert scheduler.held(H, 1) is not None
    assert scheduler.apply(ReleaseSource(H)).retired == ("a",)
