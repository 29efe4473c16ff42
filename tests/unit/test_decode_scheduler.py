"""The destination side: reservation, landing, activation, and how they end."""

from collections.abc import Iterable

import pytest
from handoff_drive import DestinationNode, phase_of, refuse, reserved_in, wind_down
from kv_machine import expected_output
from scheduler_drive import handoff, request

from scheduler.batching import BatchLimits
from scheduler.commands import (
    ActivateDestination,
    Applied,
    CancelDestination,
    CancelRequest,
    DestinationAccepted,
    Noop,
    ReserveDestination,
    Submit,
)
from scheduler.decode_scheduler import ReservedKv
from scheduler.events import DestinationFinished, DestinationReserved, Output
from scheduler.ids import NodeId, RequestId
from scheduler.request import FinishReason

H = handoff("h")
PROMPT = range(10)


def reserved(node: DestinationNode, name: str = "h") -> ReservedKv:
    found = node.scheduler.reserved(handoff(name), 1)
    assert found is not None
    return found


def test_a_reservation_takes_the_prompt_and_one_token() -> None:
    scheduler = DestinationNode().scheduler
    effects = scheduler.apply(ReserveDestination(H, request("a", range(12), max_tokens=2)))
    assert effects.result == DestinationAccepted(RequestId("a"))
    assert effects.events == (DestinationReserved(H, 1, RequestId("a"), prompt_blocks=3, missing_blocks=3),)
    assert scheduler.metrics().reserved == 4
    found = scheduler.reserved(H, 1)
    assert found is not None
    assert (found.request_id, found.prompt_tokens, len(found.blocks), found.cached_blocks) == ("a", 12, 3, 0)


@pytest.mark.parametrize("source", [None, NodeId("prefill-3")])
def test_a_reservation_is_of_the_source_that_was_commanded(source: NodeId | None) -> None:
    scheduler = DestinationNode().scheduler
    scheduler.apply(ReserveDestination(H, request("a", PROMPT, max_tokens=2), source=source))
    found = scheduler.reserved(H, 1)
    assert found is not None
    assert found.source == source


@pytest.mark.parametrize("max_tokens", [2, 40])
def test_a_reservation_takes_no_headroom_for_the_output(max_tokens: int) -> None:
    node = DestinationNode()
    node.reserve("h", PROMPT, max_tokens)
    assert node.scheduler.metrics().reserved == 3


def test_one_token_needs_no_room_after_the_prompt() -> None:
    node = DestinationNode(blocks=3)
    assert node.reserve("h", range(12), max_tokens=1) == [H]


def test_a_request_of_one_token_never_runs_here() -> None:
    """It ends at its source; what lands for it is not wanted, and its reservation waits to be cancelled."""
    node = DestinationNode()
    node.reserve("h", PROMPT, max_tokens=1)
    node.scheduler.transfer_started(H, 1)
    assert not node.land("h", PROMPT)
    assert phase_of(node.scheduler, "h") == "reserved"
    assert node.scheduler.apply(ActivateDestination(H)).result == Noop()
    assert node.scheduler.apply(CancelDestination(H)).retired == ("h",)


def test_an_activated_destination_goes_on_from_the_second_token() -> None:
    node = DestinationNode()
    node.serve("h", PROMPT)
    boundaries = node.run()
    tokens = expected_output(PROMPT, 4)
    outputs = [output for boundary in boundaries for output in boundary.outputs]
    assert outputs == [
        Output(RequestId("h"), 1, tokens[1]),
        Output(RequestId("h"), 2, tokens[2]),
        Output(RequestId("h"), 3, tokens[3], FinishReason.LENGTH),
    ]
    assert boundaries[-1].events == (DestinationFinished(H, 1, RequestId("h"), FinishReason.LENGTH),)
    assert boundaries[-1].retired == ("h",)
    assert node.scheduler.is_drained


def test_a_stop_token_finishes_a_destination() -> None:
    tokens = expected_output(PROMPT, 3)
    node = DestinationNode()
    node.serve("h", PROMPT, 9, stop_token_ids=frozenset({tokens[2]}))
    last = node.run()[-1]
    assert last.events == (DestinationFinished(H, 1, RequestId("h"), FinishReason.STOP),)
    assert node.tokens["h"] == tokens[1:]


def test_no_prompt_token_is_computed_by_the_destination() -> None:
    node = DestinationNode()
    node.serve("h", PROMPT)
    node.run()
    assert node.device.computed["h"] == 3
    assert node.plans == [f"decode h[{position}..{position}]" for position in (10, 11, 12)]


def test_blocks_are_findable_from_activation_on_and_not_before() -> None:
    node = DestinationNode()
    node.reserve("h", PROMPT)
    node.land("h", PROMPT)
    node.reserve("before", PROMPT)
    node.scheduler.apply(ActivateDestination(H))
    node.reserve("after", PROMPT)
    assert [reserved(node, name).cached_blocks for name in ("before", "after")] == [0, 2]


def test_a_cached_prompt_needs_no_bytes() -> None:
    node = DestinationNode()
    node.serve("first", range(12))
    node.run()
    effects = node.scheduler.apply(ReserveDestination(H, request("h", range(12))))
    assert effects.events == (DestinationReserved(H, 1, RequestId("h"), prompt_blocks=3, missing_blocks=0),)
    assert node.land("h", range(12))
    node.scheduler.apply(ActivateDestination(H))
    node.run()
    assert node.tokens["h"] == expected_output(range(12), 4)[1:]
    assert (node.scheduler.counters.prompt_tokens, node.scheduler.counters.cached_tokens) == (24, 12)


def test_pinned_hits_are_not_evicted_by_the_rest_of_the_reservation() -> None:
    node = DestinationNode(blocks=5)
    node.serve("first", range(12), max_tokens=2)
    node.run()
    prompt = [*range(12), 50, 51, 52, 53]
    node.serve("h", prompt)
    assert node.scheduler.counters.cached_tokens == 12
    node.run()
    assert node.tokens["h"] == expected_output(prompt, 4)[1:]


def test_activate_is_a_noop_until_the_bytes_have_landed_and_after() -> None:
    node = DestinationNode()
    scheduler = node.scheduler
    assert scheduler.apply(ActivateDestination(H)).result == Noop()
    node.reserve("h", PROMPT)
    assert scheduler.apply(ActivateDestination(H)).result == Noop()
    node.land("h", PROMPT)
    assert scheduler.apply(ActivateDestination(H, attempt=2)).result == Noop()
    assert scheduler.apply(ActivateDestination(H)).result == Applied()
    assert scheduler.apply(ActivateDestination(H)).result == Noop()


def test_bytes_land_once() -> None:
    node = DestinationNode()
    node.reserve("h", PROMPT)
    assert node.land("h", PROMPT)
    assert not node.scheduler.landed(H, 1, first_token=5)
    node.scheduler.apply(ActivateDestination(H))
    assert not node.scheduler.landed(H, 1, first_token=5)
    node.run()
    assert node.tokens["h"] == expected_output(PROMPT, 4)[1:]


def armed(max_tokens: int) -> DestinationNode:
    """A destination that has landed and was told beforehand to run then."""
    node = DestinationNode()
    node.reserve("h", PROMPT, max_tokens, armed=True)
    assert node.land("h", PROMPT)
    return node


def test_an_armed_destination_runs_as_soon_as_it_has_landed() -> None:
    node = armed(4)
    assert node.scheduler.metrics().waiting == 1
    assert phase_of(node.scheduler, "h") == "active"
    node.run()
    assert node.tokens["h"] == expected_output(PROMPT, 4)[1:]


def test_the_activation_that_follows_an_armed_one_is_acknowledged_once() -> None:
    scheduler = armed(4).scheduler
    assert scheduler.apply(ActivateDestination(H)).result == Applied()
    assert scheduler.apply(ActivateDestination(H)).result == Noop()


def test_an_armed_request_that_has_ended_is_still_acknowledged() -> None:
    node = armed(2)
    node.run()
    assert node.scheduler.is_drained
    assert node.scheduler.apply(ActivateDestination(H)).result == Applied()
    assert node.scheduler.apply(ActivateDestination(H)).result == Noop()


def test_an_armed_destination_can_be_cancelled_before_its_activation_is_acknowledged() -> None:
    scheduler = armed(4).scheduler
    assert scheduler.apply(CancelDestination(H)).result == Applied()
    assert scheduler.apply(ActivateDestination(H)).result == Noop()
    assert scheduler.is_drained


def test_an_old_acknowledgement_is_not_for_a_new_reservation() -> None:
    node = armed(2)
    node.run()
    node.reserve("h", PROMPT, 2)
    assert node.scheduler.apply(ActivateDestination(H)).result == Noop()
    assert phase_of(node.scheduler, "h") == "reserved"


def test_acknowledgements_that_nobody_asks_for_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.decode_scheduler.MAX_UNACKNOWLEDGED", 3)
    scheduler = DestinationNode().scheduler
    for index in range(4):
        handoff_id = handoff(f"h{index}")
        scheduler.apply(ReserveDestination(handoff_id, request("a", [1]), activate_when_landed=True))
        scheduler.landed(handoff_id, 1, first_token=5)
        scheduler.apply(CancelRequest(RequestId("a")))
    assert scheduler.apply(ActivateDestination(handoff("h0"))).result == Noop()
    assert scheduler.apply(ActivateDestination(handoff("h1"))).result == Applied()


def test_queue_position_is_that_of_the_reservation() -> None:
    """Whoever lands first: the arrival ordinal is taken by ReserveDestination."""
    node = DestinationNode(blocks=40, limits=BatchLimits(16, 1))
    for name in ("x", "y"):
        node.reserve(name, PROMPT)
    for name in ("y", "x"):
        node.land(name, PROMPT)
        node.scheduler.apply(ActivateDestination(handoff(name)))
    node.step()
    assert node.plans == ["decode x[10..10]"]


def test_bytes_that_may_come_keep_the_blocks_until_quiet() -> None:
    node = DestinationNode(blocks=4)
    scheduler = node.scheduler
    node.reserve("h", PROMPT)
    scheduler.transfer_started(H, 1)
    effects = scheduler.apply(CancelDestination(H))
    assert (effects.result, effects.retired) == (Applied(), ())
    assert (scheduler.metrics().draining, scheduler.metrics().reserved) == (3, 0)
    assert scheduler.reserved(H, 1) is None
    assert scheduler.apply(CancelDestination(H)).result == Noop()
    assert node.reserve("x", PROMPT) == []
    scheduler.transfer_quiet(H, 2)
    assert scheduler.metrics().draining == 3
    scheduler.transfer_quiet(H, 1)
    boundary = node.boundary()
    assert boundary.retired == ("h",)
    assert reserved_in(boundary.events) == ["x"]


def test_bytes_that_land_after_the_cancel_are_not_wanted() -> None:
    node = DestinationNode()
    node.reserve("h", PROMPT)
    node.scheduler.transfer_started(H, 1)
    node.scheduler.apply(CancelDestination(H))
    assert not node.scheduler.landed(H, 1, first_token=5)
    assert node.boundary().retired == ("h",)
    assert node.scheduler.is_drained
    assert node.scheduler.metrics().free == 16
    assert not node.scheduler.landed(H, 1, first_token=5)


def test_a_broken_transfer_leaves_the_reservation() -> None:
    node = DestinationNode()
    node.reserve("h", PROMPT)
    node.scheduler.transfer_started(H, 1)
    node.scheduler.transfer_quiet(H, 1)
    assert reserved(node).request_id == "h"
    assert node.scheduler.apply(CancelDestination(H)).retired == ("h",)


def test_a_second_transfer_into_the_same_reservation_lands() -> None:
    node = DestinationNode()
    node.reserve("h", PROMPT)
    for _ in range(2):
        node.scheduler.transfer_started(H, 1)
        node.scheduler.transfer_quiet(H, 1)
    assert node.land("h", PROMPT)


def test_cancel_request_reaches_an_active_destination_only() -> None:
    node = DestinationNode()
    scheduler = node.scheduler
    node.reserve("h", PROMPT)
    assert scheduler.apply(CancelRequest(RequestId("h"))).result == Noop()
    node.land("h", PROMPT)
    assert scheduler.apply(CancelRequest(RequestId("h"))).result == Noop()
    scheduler.apply(ActivateDestination(H))
    assert scheduler.apply(CancelRequest(RequestId("h"))).retired == ("h",)
    assert scheduler.apply(CancelDestination(H)).result == Noop()
    assert scheduler.is_drained


def test_a_failed_step_finishes_its_destinations_with_an_error() -> None:
    node = DestinationNode(fail_at={1})
    node.serve("h", PROMPT)
    node.step()
    failed = node.step()
    assert failed is not None
    assert failed.events == (DestinationFinished(H, 1, RequestId("h"), FinishReason.ERROR),)
    assert failed.outputs == [Output(RequestId("h"), 2, None, FinishReason.ERROR)]
    assert node.scheduler.is_drained
    # The prompt's full blocks were good before it; the block that the step wrote into is not trusted.
    assert (node.scheduler.metrics().cached, node.scheduler.metrics().free) == (2, 14)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "reason"),
    [(range(14), 4, "need 5 KV blocks, the node has 4"), (range(30), 10, "exceed the model's 32 positions")],
)
def test_what_can_never_fit_is_rejected_and_leaves_ids_and_room(
    prompt: Iterable[int], max_tokens: int, reason: str
) -> None:
    node = DestinationNode(blocks=4, max_model_len=32)
    refuse(node.scheduler, ReserveDestination(H, request("h", prompt, max_tokens)), match=reason)
    assert node.scheduler.is_drained
    assert node.reserve("h", range(13), 4) == [H]


def test_live_ids_are_rejected_in_every_phase_and_reusable_after() -> None:
    node = DestinationNode()
    scheduler = node.scheduler
    node.reserve("h", PROMPT)
    for phase in ("reserved", "draining"):
        assert phase_of(scheduler, "h") == phase
        refuse(scheduler, ReserveDestination(H, request("b", [1])), match="already a destination")
        refuse(scheduler, ReserveDestination(handoff("other"), request("h", [1])), match="already active")
        scheduler.transfer_started(H, 1)
        scheduler.apply(CancelDestination(H))
    scheduler.transfer_quiet(H, 1)
    node.boundary()
    assert node.reserve("h", PROMPT) == [H]


def test_a_local_request_prefills_and_decodes_beside_destinations() -> None:
    node = DestinationNode(blocks=24)
    node.serve("h", PROMPT)
    node.scheduler.apply(Submit(request("local", range(50, 57), max_tokens=3)))
    node.run()
    assert node.plans[0] == "prefill h[10..10], local[0..6]"
    assert node.tokens == {"h": expected_output(PROMPT, 4)[1:], "local": expected_output(range(50, 57), 3)}


def test_limits_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="max_reservations is 0, must be at least 1"):
        DestinationNode(max_reservations=0)


def test_many_handoffs_in_a_row_leave_no_trace() -> None:
    node = DestinationNode(blocks=6)
    for index in range(16):
        node.serve(f"r{index}", [index] * 9)
        node.run()
        assert node.tokens[f"r{index}"] == expected_output([index] * 9, 4)[1:]
    assert node.scheduler.is_drained
    wind_down(node)
