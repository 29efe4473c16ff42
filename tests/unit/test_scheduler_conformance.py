"""The reference's own scheduler tests (its section 7) under similar names; where we differ the docstring says so.

Depth is elsewhere: test_command_races, test_suppression, test_pending_destinations. test_kv_conformance has section 5.
"""

import pytest
from handoff_drive import (
    DestinationNode,
    SourceNode,
    launch_step,
    phase_of,
    refuse,
    reserved_in,
    settle_step,
    snapshot,
    wind_down,
)
from kv_machine import expected_output
from scheduler_drive import handoff, request

from scheduler.batching import BatchLimits
from scheduler.commands import (
    ActivateDestination,
    Applied,
    CancelDestination,
    CancelRequest,
    CancelSource,
    Noop,
    ReleaseSource,
    ReserveDestination,
    Submit,
    SubmitHandoffPrefill,
)
from scheduler.ids import RequestId
from scheduler.queues import WaitingQueue
from scheduler.sequence import Sequence

H = handoff("h")
PROMPT = tuple(range(10))
OTHER = tuple(range(50, 60))


# Scheduler, both backends


def test_unavailable_destination_keeps_source_held_until_both_owners_are_cancelled() -> None:
    source, destination = SourceNode(), DestinationNode(4)
    destination.reserve("first", OTHER)
    source.hold("h", PROMPT)
    assert destination.reserve("h", PROMPT) == []
    for _ in range(20):
        assert source.step() is None
        assert destination.step() is None
    assert (phase_of(source.scheduler, "h"), phase_of(destination.scheduler, "h")) == ("held", "pending")
    assert source.scheduler.apply(CancelSource(H)).retired == ("h",)
    assert destination.scheduler.apply(CancelDestination(H)).retired == ("h",)
    assert source.scheduler.is_drained
    assert destination.scheduler.apply(CancelDestination(handoff("first"))).retired == ("first",)
    assert destination.scheduler.is_drained


def test_destination_cancellation_retries_the_blocked_fifo_head() -> None:
    node = DestinationNode(4)
    for name, prompt in (("first", OTHER), ("head", PROMPT), ("next", PROMPT)):
        node.reserve(name, prompt)
    effects = node.scheduler.apply(CancelDestination(handoff("first")))
    assert (effects.retired, reserved_in(effects.events)) == (("first",), ["head"])


def test_blocked_destination_head_prevents_fresh_kv_admission_without_spinning() -> None:
    node = DestinationNode(4)
    node.reserve("first", OTHER)
    node.reserve("blocked", PROMPT)
    node.scheduler.apply(Submit(request("fresh", [1], 1)))
    assert node.run() == []
    assert (node.plans, node.scheduler.metrics().waiting) == ([], 3)


def test_unchanged_capacity_generation_does_not_reprobe_pending_destination() -> None:
    node = DestinationNode(4)
    node.reserve("first", OTHER)
    node.reserve("blocked", PROMPT)
    before = snapshot(node.scheduler)
    for _ in range(5):
        assert node.boundary().is_empty
        assert node.scheduler.prepare() == ()
    # Its prompt was not looked up in the prefix cache again: a probe would count two blocks each time.
    assert snapshot(node.scheduler) == before


def test_prebuilt_request_runs_before_a_blocked_pending_destination() -> None:
    node = DestinationNode(4)
    node.reserve("h", OTHER, 3)
    node.land("h", OTHER)
    node.reserve("blocked", PROMPT)
    node.scheduler.apply(ActivateDestination(H))
    node.step()
    assert node.plans == ["decode h[10..10]"]
    assert phase_of(node.scheduler, "blocked") == "pending"


def test_activation_does_not_change_occupancy() -> None:
    node = DestinationNode()
    node.reserve("h", PROMPT)
    node.land("h", PROMPT)
    before = node.scheduler.metrics()
    node.scheduler.apply(ActivateDestination(H))
    after = node.scheduler.metrics()
    assert (before.reserved, before.active) == (after.active, after.reserved) == (3, 0)
    assert (before.free, before.cached, before.usage) == (after.free, after.cached, after.usage)
    assert (before.waiting, before.queued_decodes.count) == (after.waiting, after.queued_decodes.count) == (1, 1)


def test_activated_waiting_destination_cancels_without_consuming_the_running_slot() -> None:
    node = DestinationNode(limits=BatchLimits(16, 1))
    for name, prompt in (("first", OTHER), ("h", PROMPT), ("next", [7] * 6)):
        node.serve(name, prompt, 3)
    node.step()
    assert node.scheduler.apply(CancelDestination(H)).retired == ("h",)
    node.run()
    assert node.plans == ["decode first[10..10]", "decode first[11..11]", "decode next[6..6]", "decode next[7..7]"]


def test_preterminal_source_cancel_removes_scheduled_request_once() -> None:
    node = SourceNode()
    node.submit("h", range(40))
    node.step()
    effects = node.scheduler.apply(CancelSource(H))
    assert (effects.result, effects.retired, effects.events) == (Applied(), ("h",), ())
    again = node.scheduler.apply(CancelSource(H))
    assert (again.result, again.retired) == (Noop(), ())
    assert node.run() == []


@pytest.mark.parametrize("running", [False, True])
def test_waiting_and_running_cancel_frees_kv_and_a_second_is_a_noop(running: bool) -> None:
    node = DestinationNode()
    node.scheduler.apply(Submit(request("a", PROMPT)))
    if running:
        node.step()
    assert node.scheduler.metrics().active == (3 if running else 0)
    assert node.scheduler.apply(CancelRequest(RequestId("a"))).retired == ("a",)
    assert node.scheduler.kv.pool.available == 16
    again = node.scheduler.apply(CancelRequest(RequestId("a")))
    assert (again.result, again.retired) == (Noop(), ())


# Registries


def test_completion_atomically_moves_pending_to_held() -> None:
    node = SourceNode()
    node.submit("h", PROMPT)
    plan = launch_step(node)
    assert (phase_of(node.scheduler, "h"), node.scheduler.metrics().running) == ("pending", 1)
    assert node.scheduler.held(H, 1) is None
    node.settle(plan)
    assert (phase_of(node.scheduler, "h"), node.scheduler.metrics().running) == ("held", 0)
    assert node.scheduler.held(H, 1) is not None


def test_active_ids_are_rejected_but_released_ids_can_be_reused() -> None:
    node = SourceNode()
    node.hold("h", PROMPT)
    refuse(node.scheduler, SubmitHandoffPrefill(H, request("h", PROMPT)), match="already a source")
    node.scheduler.apply(ReleaseSource(H))
    node.hold("h", PROMPT)
    node.scheduler.apply(CancelSource(H))
    node.hold("h", PROMPT)
    assert node.tokens["h"] == expected_output(PROMPT, 1) * 3


def test_unregistered_completion_releases() -> None:
    """A request that no handoff owns any more frees its KV when it ends."""
    node = SourceNode()
    node.submit("h", PROMPT)
    node.scheduler.apply(ReleaseSource(H))
    (boundary,) = node.run()
    assert (boundary.events, boundary.retired) == ((), ("h",))
    assert node.scheduler.kv.pool.available == 16


def test_fifo_survives_the_cancel_of_its_head() -> None:
    node = DestinationNode(40, max_reservations=1)
    for name in "abcd":
        node.reserve(name, [ord(name)] * 5)
    node.scheduler.apply(CancelDestination(handoff("b")))
    order = []
    for name in "acd":
        order += reserved_in(node.scheduler.apply(CancelDestination(handoff(name))).events)
    assert order == ["c", "d"]


def test_queues_are_compacted() -> None:
    """The reference compacts an index of positions; a queue here is a heap whose corpses must not pile up."""
    queue = WaitingQueue(lambda sequence: sequence.arrival)
    sequences = [Sequence(request(f"r{index}", [1]), index, 1) for index in range(1000)]
    for sequence in sequences:
        queue.push(sequence)
    for sequence in sequences[1:-1]:
        queue.remove(sequence)
    assert len(queue._heap) <= 2 * len(queue) + 64
    assert queue.head() is sequences[0]
    queue.remove(sequences[0])
    assert queue.head() is sequences[-1]


def test_a_cancel_in_the_middle_keeps_the_order_of_the_others() -> None:
    node = DestinationNode(40, max_reservations=1)
    names = [f"r{index:02}" for index in range(40)]
    for name in names:
        node.reserve(name, [1, 2, 3])
    for name in names[1::2]:
        assert node.scheduler.apply(CancelDestination(handoff(name))).events == ()
    order = ["r00"]
    while len(order) < 20:
        order += reserved_in(node.scheduler.apply(CancelDestination(handoff(order[-1]))).events)
    assert order == names[::2]


# vLLM and TRT-LLM


def test_terminal_completion_holds_source_without_freeing_kv() -> None:
    """The reference holds whatever its driver's output limit is; a source here samples exactly one token."""
    node = SourceNode()
    node.hold("h", PROMPT, max_tokens=2)
    held = node.scheduler.held(H, 1)
    assert held is not None
    assert len(held.blocks) == node.scheduler.metrics().held == 3
    assert node.scheduler.kv.pool.available == 13


def test_cancel_and_early_release_cleanup_exactly_once() -> None:
    node = SourceNode()
    node.submit("cancelled", PROMPT)
    node.submit("released", OTHER)
    assert node.scheduler.apply(CancelSource(handoff("cancelled"))).retired == ("cancelled",)
    assert node.scheduler.apply(ReleaseSource(handoff("released"))).retired == ()
    retired = [name for boundary in node.run() for name in boundary.retired]
    assert retired == ["released"]
    for name in ("cancelled", "released"):
        assert node.scheduler.apply(ReleaseSource(handoff(name))).result == Noop()
        assert node.scheduler.apply(CancelSource(handoff(name))).result == Noop()
    assert node.scheduler.is_drained


def test_active_request_id_is_rejected_before_source_hold_registration() -> None:
    node = SourceNode()
    node.scheduler.apply(Submit(request("a", OTHER)))
    refuse(node.scheduler, SubmitHandoffPrefill(H, request("a", PROMPT)), match="already active")
    assert node.scheduler.apply(ReleaseSource(H)).result == Noop()
    node.submit("h", PROMPT)


def test_destination_rejects_over_limit_prompt_before_reserving_kv() -> None:
    node = DestinationNode(80, max_model_len=64)
    refuse(node.scheduler, ReserveDestination(H, request("h", range(64), 2)), match="64 positions")
    assert node.scheduler.kv.pool.available == 80
    assert node.reserve("h", range(63), 2) == [H]


def test_reserved_kv_stays_owned_until_admission() -> None:
    node = DestinationNode(4, limits=BatchLimits(16, 1))
    node.reserve("h", PROMPT)
    node.reserve("blocked", OTHER)
    assert node.boundary().is_empty
    node.land("h", PROMPT)
    assert node.boundary().is_empty
    node.scheduler.apply(ActivateDestination(H))
    assert node.scheduler.metrics().active == 3
    node.step()
    assert node.plans == ["decode h[10..10]"]
    assert phase_of(node.scheduler, "blocked") == "pending"


def test_a_destination_before_its_activation_is_one_queued_decode() -> None:
    node = DestinationNode(max_reservations=1)
    node.reserve("other", OTHER)
    node.reserve("h", PROMPT)

    def counts() -> tuple[int, int, int, int]:
        metrics = node.scheduler.metrics()
        return (metrics.waiting, metrics.queued_decodes.count, metrics.queued_prefills.count, metrics.decodes.count)

    assert counts() == (2, 2, 0, 0)
    node.scheduler.apply(CancelDestination(handoff("other")))
    assert counts() == (1, 1, 0, 0)
    node.land("h", PROMPT)
    assert counts() == (1, 1, 0, 0)
    node.scheduler.apply(ActivateDestination(H))
    assert counts() == (1, 1, 0, 0)
    node.step()
    assert counts() == (0, 0, 0, 1)


def test_cancel_reaches_an_activated_request_once() -> None:
    node = DestinationNode()
    node.serve("h", PROMPT)
    node.step()
    assert node.scheduler.apply(CancelDestination(H)).retired == ("h",)
    assert node.scheduler.apply(CancelDestination(H)).result == Noop()
    assert node.scheduler.apply(CancelRequest(RequestId("h"))).result == Noop()
    wind_down(node)


def test_cancelling_a_running_destination_retries_the_head_immediately() -> None:
    node = DestinationNode(4)
    node.serve("h", PROMPT)
    node.step()
    node.reserve("head", OTHER)
    assert reserved_in(node.scheduler.apply(CancelDestination(H)).events) == ["head"]


def test_sixteen_sequential_activations_keep_the_queue_bounded() -> None:
    node = DestinationNode(12)
    for index in range(16):
        node.serve(f"r{index}", [index] * 6, 2)
        assert node.scheduler.metrics().waiting == 1
        node.step()
        assert (node.scheduler.metrics().waiting, node.scheduler.metrics().running) == (0, 0)
    assert node.scheduler.is_drained


# Rank


@pytest.mark.parametrize(
    ("max_tokens", "discard", "result", "suppressed"),
    [(4, False, Applied(), True), (2, False, Noop(), False), (2, True, Applied(), True)],
    ids=["applied cancel suppresses", "noop keeps", "noop with discard suppresses and retires"],
)
def test_cancel_and_pending_output(max_tokens: int, discard: bool, result: object, suppressed: bool) -> None:
    node = DestinationNode()
    node.serve("h", PROMPT, max_tokens)
    settle_step(node)
    effects = node.scheduler.apply(CancelRequest(RequestId("h"), discard_pending_output=discard))
    assert (effects.result, effects.suppressed_pending_output) == (result, suppressed)
    boundary = node.boundary()
    assert (effects.retired, boundary.retired) == ((("h",), ()) if suppressed else ((), ("h",)))
    assert len(boundary.outputs) == (0 if suppressed else 1)


def test_tracking_is_inserted_on_success_and_cleared_by_cancel_and_terminal_output() -> None:
    """Whose output a handoff's cancel suppresses: that of the request that owns it now, if any does."""
    node = DestinationNode()
    node.serve("h", PROMPT, 2)
    refuse(node.scheduler, ReserveDestination(H, request("intruder", OTHER)))
    settle_step(node)
    # The terminal output cleared it.
    assert not node.scheduler.apply(CancelDestination(H)).suppressed_pending_output
    node.scheduler.apply(ReserveDestination(H, request("second", OTHER, 4)))
    assert not node.scheduler.apply(CancelDestination(H)).suppressed_pending_output
    assert [output.request_id for output in node.boundary().outputs] == ["h"]


def test_mid_step_command_does_not_leak_due_transfers() -> None:
    node = DestinationNode()
    node.serve("other", OTHER)
    node.reserve("h", PROMPT)
    node.scheduler.transfer_started(H, 1)
    node.scheduler.apply(CancelDestination(H))
    plan = launch_step(node)
    node.scheduler.transfer_quiet(H, 1)
    assert node.scheduler.apply(Submit(request("late", [1]))).retired == ()
    node.settle(plan)
    assert node.boundary().retired == ("h",)


def test_an_id_whose_end_is_not_told_is_taken() -> None:
    """Or the command that reuses it reports its retirement, and an outside owner drops the new request."""
    node = SourceNode()
    node.hold("h", PROMPT)
    node.scheduler.transfer_started(H, 1)
    node.scheduler.apply(ReleaseSource(H))
    node.scheduler.transfer_quiet(H, 1)
    refuse(node.scheduler, Submit(request("h", [1])), match="already active")
    assert node.boundary().retired == ("h",)


def test_rejected_submit_is_atomic() -> None:
    node = SourceNode(3)
    node.submit("h", PROMPT)
    plan = launch_step(node)
    refuse(node.scheduler, Submit(request("a", range(20))), match="KV blocks")
    refuse(node.scheduler, SubmitHandoffPrefill(handoff("b"), request("b", range(20))), match="KV blocks")
    node.settle(plan)
    node.boundary()
    assert phase_of(node.scheduler, "h") == "held"
