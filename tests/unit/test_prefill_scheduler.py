"""The source side: what is held, for how long, and what is left of it."""

import pytest
from handoff_drive import SourceNode, holding, phase_of, refuse, wind_down
from kv_machine import expected_output
from scheduler_drive import handoff, request

from scheduler.commands import (
    Applied,
    CancelRequest,
    CancelSource,
    Noop,
    ReleaseSource,
    Submit,
    SubmitHandoffPrefill,
    Submitted,
)
from scheduler.events import Output, SourceFinished, SourceHeld
from scheduler.ids import RequestId
from scheduler.policies import SchedulingPolicy
from scheduler.prefill_scheduler import HeldKv
from scheduler.request import FinishReason

A = handoff("a")
PROMPT = range(10)


def prefilled(blocks: int = 16) -> SourceNode:
    """A source that is held."""
    node = SourceNode(blocks)
    node.hold("a", PROMPT)
    return node


def test_a_source_is_held_with_its_prompt_blocks_and_its_first_token() -> None:
    node = SourceNode()
    assert node.submit("a", PROMPT).result == Submitted(RequestId("a"))
    assert node.scheduler.held(A, 1) is None
    (boundary,) = node.run()
    first = expected_output(PROMPT, 1)[0]
    assert boundary.outputs == [Output(RequestId("a"), 0, first, cached_tokens=0)]
    assert boundary.events == (SourceHeld(A, 1, RequestId("a"), prompt_tokens=10, cached_tokens=0),)
    assert boundary.retired == ()
    held = node.scheduler.held(A, 1)
    assert isinstance(held, HeldKv)
    assert (held.request_id, held.prompt_tokens, held.first_token, len(held.blocks)) == ("a", 10, first, 3)
    metrics = node.scheduler.metrics()
    assert (metrics.held, metrics.active, metrics.running, metrics.waiting) == (3, 0, 0, 0)


def test_a_chunked_prompt_is_held_after_its_last_chunk() -> None:
    node = SourceNode()
    node.submit("a", range(40))
    assert [len(boundary.events) for boundary in node.run()] == [0, 0, 1]


def test_a_source_needs_room_for_its_prompt_only() -> None:
    node = SourceNode(blocks=3)
    node.hold("a", range(12), max_tokens=200)
    assert node.scheduler.metrics().held == 3


def test_a_source_samples_one_token_whatever_the_request_asks_for() -> None:
    node = prefilled()
    assert node.run() == []
    assert node.tokens["a"] == expected_output(PROMPT, 1)


@pytest.mark.parametrize("command", [ReleaseSource, CancelSource])
def test_a_held_source_ends_once_and_stays_cached(command: type[ReleaseSource] | type[CancelSource]) -> None:
    scheduler = prefilled().scheduler
    effects = scheduler.apply(command(A))
    assert (effects.result, effects.retired) == (Applied(), ("a",))
    scheduler.check()
    assert scheduler.is_drained
    # Two full blocks and the partial tail.
    assert scheduler.metrics().cached == 3
    again = scheduler.apply(command(A))
    assert (again.result, again.retired) == (Noop(), ())


def test_prefill_work_is_found_again_while_held_and_after() -> None:
    node = prefilled()
    cached = []
    for name in ("while", "after"):
        node.submit(name, PROMPT)
        (boundary,) = node.run()
        (event,) = boundary.events
        assert isinstance(event, SourceHeld)
        cached.append(event.cached_tokens)
        node.scheduler.apply(ReleaseSource(A))
    # The partial tail is found once its owner has left it.
    assert cached == [8, 9]
    assert node.tokens["while"] == node.tokens["after"] == node.tokens["a"] == expected_output(PROMPT, 1)


def test_held_blocks_are_not_evicted() -> None:
    node = prefilled(blocks=4)
    node.scheduler.apply(Submit(request("b", range(50, 55), max_tokens=1)))
    assert node.run() == []
    node.scheduler.apply(ReleaseSource(A))
    node.run()
    assert node.tokens["b"] == expected_output(range(50, 55), 1)


def test_cancel_before_the_prefill_starts() -> None:
    node = SourceNode()
    node.submit("a", PROMPT)
    effects = node.scheduler.apply(CancelSource(A))
    assert (effects.result, effects.retired) == (Applied(), ("a",))
    assert node.run() == []
    assert node.scheduler.is_drained
    assert node.scheduler.apply(CancelSource(A)).result == Noop()


def test_cancel_between_chunks_keeps_what_is_computed_as_cache() -> None:
    node = SourceNode()
    node.submit("a", range(40))
    node.step()
    assert node.scheduler.apply(CancelSource(A)).retired == ("a",)
    node.scheduler.check()
    assert (node.scheduler.metrics().cached, node.scheduler.metrics().free) == (4, 12)
    assert node.run() == []


def test_early_release_lets_the_prefill_end_without_a_hold() -> None:
    node = SourceNode()
    node.submit("a", range(40))
    node.step()
    effects = node.scheduler.apply(ReleaseSource(A))
    assert (effects.result, effects.retired) == (Applied(), ())
    last = node.run()[-1]
    assert last.events == ()
    assert last.retired == ("a",)
    assert node.scheduler.is_drained
    assert node.scheduler.apply(ReleaseSource(A)).result == Noop()


def test_cancel_request_reaches_a_pending_source_but_not_a_held_one() -> None:
    node = SourceNode()
    node.submit("a", PROMPT)
    assert node.scheduler.apply(CancelRequest(RequestId("a"))).retired == ("a",)
    assert node.scheduler.apply(CancelSource(A)).result == Noop()
    node.hold("a", PROMPT)
    assert node.scheduler.apply(CancelRequest(RequestId("a"))).result == Noop()
    assert node.scheduler.held(A, 1) is not None
    assert node.scheduler.apply(CancelRequest(RequestId("unknown"))).result == Noop()


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP])
def test_a_first_token_that_ends_the_request_leaves_nothing_held(reason: FinishReason) -> None:
    first = expected_output(PROMPT, 1)[0]
    node = SourceNode()
    if reason is FinishReason.STOP:
        node.submit("a", PROMPT, stop_token_ids=frozenset({first}))
    else:
        node.submit("a", PROMPT, max_tokens=1)
    (boundary,) = node.run()
    assert boundary.events == (SourceFinished(A, 1, RequestId("a"), reason),)
    assert boundary.outputs == [Output(RequestId("a"), 0, first, reason, cached_tokens=0)]
    assert boundary.retired == ("a",)
    assert node.scheduler.is_drained


def test_a_failed_step_finishes_its_source_with_an_error() -> None:
    node = SourceNode(fail_at={0})
    node.submit("a", PROMPT)
    (boundary,) = node.run()
    assert boundary.outputs == [Output(RequestId("a"), 0, None, FinishReason.ERROR)]
    assert boundary.events == (SourceFinished(A, 1, RequestId("a"), FinishReason.ERROR),)
    assert boundary.retired == ("a",)
    assert node.scheduler.is_drained
    # What a failed step wrote is no prefix cache.
    assert node.scheduler.metrics().free == 16


def test_live_ids_are_rejected_before_anything_is_registered() -> None:
    scheduler = prefilled().scheduler
    refuse(scheduler, SubmitHandoffPrefill(A, request("b", [1])), match="already a source")
    refuse(scheduler, SubmitHandoffPrefill(handoff("other"), request("a", [1])), match="already active")
    refuse(scheduler, Submit(request("a", [1])), match="already active")
    assert scheduler.apply(CancelSource(handoff("other"))).result == Noop()


def test_ids_are_reusable_once_ownership_has_ended() -> None:
    node = prefilled()
    node.scheduler.apply(ReleaseSource(A))
    node.hold("a", PROMPT)
    assert node.scheduler.apply(CancelSource(A)).retired == ("a",)


def test_another_attempt_addresses_nothing() -> None:
    node = SourceNode()
    scheduler = node.scheduler
    scheduler.apply(SubmitHandoffPrefill(A, request("a", PROMPT), attempt=2))
    node.run()
    assert scheduler.apply(CancelSource(A, attempt=1)).result == Noop()
    assert scheduler.held(A, 1) is None
    scheduler.transfer_started(A, 1)
    scheduler.transfer_quiet(A, 1)
    assert not scheduler.renew(A, 1)
    assert scheduler.apply(ReleaseSource(A, attempt=2)).retired == ("a",)


@pytest.mark.parametrize("command", [ReleaseSource, CancelSource])
def test_blocks_that_are_being_sent_drain_until_quiet(command: type[ReleaseSource] | type[CancelSource]) -> None:
    node = SourceNode(blocks=3)
    scheduler = node.scheduler
    node.hold("a", PROMPT)
    scheduler.transfer_started(A, 1)
    effects = scheduler.apply(command(A))
    assert (effects.result, effects.retired) == (Applied(), ())
    assert scheduler.held(A, 1) is None
    assert scheduler.apply(command(A)).result == Noop()
    assert (scheduler.metrics().held, scheduler.metrics().draining) == (0, 3)
    scheduler.apply(Submit(request("b", [1], max_tokens=1)))
    assert node.step() is None
    scheduler.transfer_quiet(A, 1)
    assert node.boundary().retired == ("a",)
    node.run()
    assert node.tokens["b"] == expected_output([1], 1)
    assert scheduler.is_drained


def test_a_transfer_that_ended_leaves_the_source_held() -> None:
    scheduler = prefilled().scheduler
    scheduler.transfer_started(A, 1)
    scheduler.transfer_quiet(A, 1)
    assert scheduler.held(A, 1) is not None
    assert scheduler.apply(ReleaseSource(A)).retired == ("a",)


def test_transfer_notes_for_what_is_not_held_change_nothing() -> None:
    node = SourceNode()
    node.submit("a", PROMPT)
    for name in ("a", "unknown"):
        node.scheduler.transfer_started(handoff(name), 1)
        node.scheduler.transfer_quiet(handoff(name), 1)
    # A pending source was not marked as being sent: its cancel does not drain.
    assert node.scheduler.apply(CancelSource(A)).retired == ("a",)


def test_handoffs_have_their_own_limit_apart_from_the_batch() -> None:
    node = SourceNode(max_handoffs=2)
    for index, name in enumerate("abc"):
        node.submit(name, [index] * 5)
    node.scheduler.apply(Submit(request("local", [9] * 5, max_tokens=1)))
    node.run()
    assert node.plans == ["prefill a[0..4], b[0..4], local[0..4]"]
    assert node.scheduler.metrics().waiting == 1
    assert phase_of(node.scheduler, "c") == "pending"
    node.scheduler.apply(ReleaseSource(A))
    node.run()
    assert node.plans[1:] == ["prefill c[0..4]"]
    assert node.tokens["c"] == expected_output([2] * 5, 1)


def test_a_draining_source_counts_for_the_limit() -> None:
    node = SourceNode(max_handoffs=1)
    node.hold("a", PROMPT)
    node.submit("b", [7] * 5)
    node.scheduler.transfer_started(A, 1)
    node.scheduler.apply(ReleaseSource(A))
    assert node.run() == []
    node.scheduler.transfer_quiet(A, 1)
    node.run()
    assert phase_of(node.scheduler, "b") == "held"


def test_the_queue_policy_orders_sources_that_wait_for_the_limit() -> None:
    node = SourceNode(max_handoffs=1, policy=SchedulingPolicy(queue="priority"))
    node.hold("a", PROMPT)
    for name, priority in (("b", 2), ("c", 1), ("d", 0)):
        node.submit(name, [ord(name)] * 5, priority=priority)
    node.scheduler.apply(ReleaseSource(A))
    node.run()
    assert [phase_of(node.scheduler, name) for name in ("b", "c", "d")] == ["pending", "pending", "held"]


def test_limits_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="max_handoffs is 0, must be at least 1"):
        SourceNode(max_handoffs=0)


def test_many_handoffs_in_a_row_leave_no_trace() -> None:
    node = SourceNode(blocks=4)
    for index in range(16):
        node.hold(f"r{index}", [index] * 9)
        assert node.tokens[f"r{index}"] == expected_output([index] * 9, 1)
        held = holding(node.scheduler, f"r{index}")
        assert held is not None
        assert held.blocks == 3
        assert node.scheduler.apply(ReleaseSource(handoff(f"r{index}"))).retired == (f"r{index}",)
    wind_down(node)
