"""What a settled step has ready and a cancel takes back before anybody has seen it (section 4 of the reference)."""

import pytest
from handoff_drive import DestinationNode, SourceNode, launch_step, phase_of, refuse, settle_step, snapshot, wind_down
from kv_machine import expected_output
from scheduler_drive import handoff, request

from scheduler.commands import (
    ActivateDestination,
    Applied,
    CancelDestination,
    CancelRequest,
    CancelSource,
    Command,
    Noop,
    ReleaseSource,
    ReserveDestination,
    Submit,
    SubmitHandoffPrefill,
)
from scheduler.events import DestinationFinished, Output, SourceFinished, SourceHeld
from scheduler.ids import RequestId
from scheduler.request import FinishReason

A, H = RequestId("a"), handoff("a")
PROMPT = tuple(range(10))
OTHER = tuple(range(50, 60))
CANCEL = CancelRequest(A)
DISCARD = CancelRequest(A, discard_pending_output=True)


def first_token_ready(max_tokens: int = 4) -> SourceNode:
    """A local request whose first token is settled and not released."""
    node = SourceNode()
    node.scheduler.apply(Submit(request("a", PROMPT, max_tokens)))
    settle_step(node)
    return node


def just_held() -> SourceNode:
    """A source that is held, which nobody knows yet."""
    node = SourceNode()
    node.submit("a", PROMPT)
    settle_step(node)
    assert phase_of(node.scheduler, "a") == "held"
    return node


def token_ready(max_tokens: int = 4) -> DestinationNode:
    """A destination whose second token is settled and not released."""
    node = DestinationNode()
    node.serve("a", PROMPT, max_tokens)
    settle_step(node)
    return node


def test_an_applied_cancel_suppresses_the_output() -> None:
    node = first_token_ready()
    effects = node.scheduler.apply(CANCEL)
    assert (effects.result, effects.retired, effects.suppressed_pending_output) == (Applied(), ("a",), True)
    assert node.boundary().is_empty
    assert node.scheduler.counters.suppressed_outputs == 1
    wind_down(node)


def test_a_noop_cancel_keeps_the_output() -> None:
    """The last token is ready, so the request is over for the scheduler; its client still gets the end."""
    node = first_token_ready(max_tokens=1)
    effects = node.scheduler.apply(CANCEL)
    assert (effects.result, effects.retired, effects.suppressed_pending_output) == (Noop(), (), False)
    boundary = node.boundary()
    token = expected_output(PROMPT, 1)[0]
    assert boundary.outputs == [Output(A, 0, token, FinishReason.LENGTH, cached_tokens=0)]
    assert boundary.retired == ("a",)
    assert node.scheduler.counters.suppressed_outputs == 0


def test_a_noop_cancel_that_discards_suppresses_and_retires_exactly_once() -> None:
    node = first_token_ready(max_tokens=1)
    effects = node.scheduler.apply(DISCARD)
    assert (effects.result, effects.retired, effects.suppressed_pending_output) == (Applied(), ("a",), True)
    again = node.scheduler.apply(DISCARD)
    assert (again.result, again.retired, again.suppressed_pending_output) == (Noop(), (), False)
    assert node.boundary().is_empty
    assert node.scheduler.counters.suppressed_outputs == 1


def test_cancel_source_after_the_step_that_finished_the_prefill_strips_source_held() -> None:
    node = just_held()
    effects = node.scheduler.apply(CancelSource(H))
    assert (effects.result, effects.retired, effects.suppressed_pending_output) == (Applied(), ("a",), True)
    assert node.boundary().is_empty
    assert node.scheduler.is_drained
    assert node.scheduler.apply(CancelSource(H)).result == Noop()


def test_cancel_source_while_it_is_sent_strips_source_held_and_drains() -> None:
    """The transport can be told of held KV before the coordinator is: the blocks wait, the announcement is void."""
    node = just_held()
    node.scheduler.transfer_started(H, 1)
    effects = node.scheduler.apply(CancelSource(H))
    assert (effects.result, effects.retired, effects.suppressed_pending_output) == (Applied(), (), True)
    node.scheduler.transfer_quiet(H, 1)
    boundary = node.boundary()
    assert (boundary.events, list(boundary.outputs), boundary.retired) == ((), [], ("a",))


def test_cancel_source_of_a_draining_one_keeps_the_output() -> None:
    """Released while it was sent: the cancel finds nothing to cancel, and leaves the first token alone."""
    node = just_held()
    node.scheduler.transfer_started(H, 1)
    node.scheduler.apply(ReleaseSource(H))
    effects = node.scheduler.apply(CancelSource(H))
    assert (effects.result, effects.suppressed_pending_output) == (Noop(), False)
    assert [output.token for output in node.boundary().outputs] == expected_output(PROMPT, 1)


def test_cancel_source_of_a_request_that_its_first_token_ended_keeps_all() -> None:
    node = SourceNode()
    node.submit("a", PROMPT, max_tokens=1)
    settle_step(node)
    assert node.scheduler.apply(CancelSource(H)).result == Noop()
    boundary = node.boundary()
    assert boundary.events == (SourceFinished(H, 1, A, FinishReason.LENGTH),)
    assert [output.finish for output in boundary.outputs] == [FinishReason.LENGTH]
    assert boundary.retired == ("a",)


def test_discard_of_a_finished_source_strips_its_event() -> None:
    node = SourceNode()
    node.submit("a", PROMPT, max_tokens=1)
    settle_step(node)
    effects = node.scheduler.apply(DISCARD)
    assert (effects.result, effects.retired, effects.suppressed_pending_output) == (Applied(), ("a",), True)
    assert node.boundary().is_empty


def test_discard_of_a_held_source_drops_the_announcement_and_not_the_kv() -> None:
    """CancelRequest never frees held KV; whoever discards owes it a CancelSource, or its lease ends it."""
    node = just_held()
    effects = node.scheduler.apply(DISCARD)
    assert (effects.result, effects.retired, effects.suppressed_pending_output) == (Applied(), (), True)
    assert node.boundary().is_empty
    assert phase_of(node.scheduler, "a") == "held"
    assert node.scheduler.apply(CancelSource(H)).retired == ("a",)


def test_a_plain_cancel_of_a_held_source_keeps_the_announcement() -> None:
    node = just_held()
    assert node.scheduler.apply(CANCEL).result == Noop()
    boundary = node.boundary()
    assert boundary.events == (SourceHeld(H, 1, A, prompt_tokens=10, cached_tokens=0),)
    assert [output.token for output in boundary.outputs] == expected_output(PROMPT, 1)


def test_cancel_destination_suppresses_the_token_of_an_active_one() -> None:
    node = token_ready()
    effects = node.scheduler.apply(CancelDestination(H))
    assert (effects.result, effects.retired, effects.suppressed_pending_output) == (Applied(), ("a",), True)
    assert node.boundary().is_empty
    wind_down(node)


def test_cancel_request_suppresses_the_token_of_an_active_one() -> None:
    node = token_ready()
    effects = node.scheduler.apply(CANCEL)
    assert (effects.result, effects.retired, effects.suppressed_pending_output) == (Applied(), ("a",), True)
    assert node.boundary().is_empty


def test_cancel_destination_after_the_last_token_keeps_all() -> None:
    node = token_ready(max_tokens=2)
    assert node.scheduler.apply(CancelDestination(H)).result == Noop()
    boundary = node.boundary()
    assert boundary.outputs == [Output(A, 1, expected_output(PROMPT, 2)[1], FinishReason.LENGTH)]
    assert boundary.events == (DestinationFinished(H, 1, A, FinishReason.LENGTH),)
    assert boundary.retired == ("a",)


def test_discard_of_a_finished_destination_strips_its_event() -> None:
    node = token_ready(max_tokens=2)
    effects = node.scheduler.apply(DISCARD)
    assert (effects.retired, effects.suppressed_pending_output) == (("a",), True)
    assert node.boundary().is_empty
    assert node.scheduler.is_drained


def test_discard_of_a_failed_request_strips_its_error() -> None:
    node = DestinationNode(fail_at={0})
    node.serve("a", PROMPT)
    settle_step(node)
    assert node.scheduler.apply(DISCARD).retired == ("a",)
    assert node.boundary().is_empty


def test_release_source_never_suppresses() -> None:
    node = just_held()
    effects = node.scheduler.apply(ReleaseSource(H))
    assert (effects.result, effects.retired, effects.suppressed_pending_output) == (Applied(), ("a",), False)
    boundary = node.boundary()
    assert boundary.outputs == [Output(A, 0, expected_output(PROMPT, 1)[0], cached_tokens=0)]
    assert boundary.events == (SourceHeld(H, 1, A, prompt_tokens=10, cached_tokens=0),)
    # It was told with the command, and is not told again.
    assert boundary.retired == ()


def test_activate_destination_never_suppresses() -> None:
    node = DestinationNode()
    node.serve("other", OTHER)
    node.reserve("a", PROMPT)
    node.land("a", PROMPT)
    settle_step(node)
    assert not node.scheduler.apply(ActivateDestination(H)).suppressed_pending_output
    assert [output.request_id for output in node.boundary().outputs] == ["other"]


@pytest.mark.parametrize(
    "command", [Submit(request("new", [1])), ReserveDestination(handoff("new"), request("new", [1]))]
)
def test_a_command_that_starts_something_never_suppresses(command: Command) -> None:
    node = token_ready()
    assert not node.scheduler.apply(command).suppressed_pending_output
    assert [output.token for output in node.boundary().outputs] == expected_output(PROMPT, 2)[1:]


def test_only_the_cancelled_requests_rows_go() -> None:
    """The others stay in their order, each with its own finish and cached tokens."""
    node = SourceNode()
    prompts = {name: [ord(name)] * 4 for name in "bacd"}
    for name, prompt in prompts.items():
        node.scheduler.apply(Submit(request(name, prompt, 1 if name in "bd" else 4)))
    settle_step(node)
    node.scheduler.apply(CANCEL)
    boundary = node.boundary()
    first = {name: expected_output(prompt, 1)[0] for name, prompt in prompts.items()}
    assert boundary.outputs == [
        Output(RequestId("b"), 0, first["b"], FinishReason.LENGTH, 0),
        Output(RequestId("c"), 0, first["c"], None, 0),
        Output(RequestId("d"), 0, first["d"], FinishReason.LENGTH, 0),
    ]
    assert boundary.retired == ("b", "d")


def test_only_the_cancelled_handoffs_events_go() -> None:
    node = SourceNode()
    for name in "bac":
        node.submit(name, [ord(name)] * 5)
    settle_step(node)
    node.scheduler.apply(CancelSource(H))
    boundary = node.boundary()
    held = [event.handoff_id for event in boundary.events if isinstance(event, SourceHeld)]
    assert (held, [output.request_id for output in boundary.outputs]) == (["b", "c"], ["b", "c"])


def test_a_cancel_without_retained_output_suppresses_nothing() -> None:
    node = SourceNode()
    node.submit("a", range(40))
    settle_step(node)
    effects = node.scheduler.apply(CancelSource(H))
    assert (effects.result, effects.retired, effects.suppressed_pending_output) == (Applied(), ("a",), False)
    assert node.scheduler.counters.suppressed_outputs == 0


def test_what_was_released_can_no_longer_be_suppressed() -> None:
    node = first_token_ready()
    assert len(node.boundary().outputs) == 1
    effects = node.scheduler.apply(DISCARD)
    assert (effects.result, effects.suppressed_pending_output) == (Applied(), False)


def test_discard_for_an_unknown_request_is_a_noop() -> None:
    node = first_token_ready()
    before = snapshot(node.scheduler)
    effects = node.scheduler.apply(CancelRequest(RequestId("unknown"), discard_pending_output=True))
    assert (effects.result, effects.retired, effects.suppressed_pending_output) == (Noop(), (), False)
    assert snapshot(node.scheduler) == before
    assert len(node.boundary().outputs) == 1


def test_a_cancel_of_another_attempt_keeps_the_output() -> None:
    node = just_held()
    effects = node.scheduler.apply(CancelSource(H, attempt=2))
    assert (effects.result, effects.suppressed_pending_output) == (Noop(), False)
    assert len(node.boundary().events) == 1


def test_a_doomed_request_retires_once_and_has_nothing_to_suppress() -> None:
    """Cancelled while the step runs: what the step draws for it is dropped at settlement, not taken back after it."""
    node = DestinationNode()
    node.serve("a", PROMPT)
    plan = launch_step(node)
    effects = node.scheduler.apply(DISCARD)
    assert (effects.result, effects.retired, effects.suppressed_pending_output) == (Applied(), ("a",), False)
    node.settle(plan)
    again = node.scheduler.apply(DISCARD)
    assert (again.result, again.retired, again.suppressed_pending_output) == (Noop(), (), False)
    assert node.boundary().is_empty


def test_an_id_is_taken_until_its_retirement_is_told() -> None:
    """Or a cancel of the new request would suppress the end of the old one."""
    node = first_token_ready(max_tokens=1)
    refuse(node.scheduler, Submit(request("a", [1])), match="already active")
    refuse(node.scheduler, SubmitHandoffPrefill(H, request("a", [1])), match="already active")
    # Discarding it tells it, with the command.
    node.scheduler.apply(DISCARD)
    node.scheduler.apply(Submit(request("a", [7] * 5, 2)))
    boundary = node.boundary()
    assert boundary.is_empty
    node.run()
    assert node.tokens["a"] == expected_output([7] * 5, 2)


def test_a_suppressed_request_leaves_its_kv_as_prefix_cache() -> None:
    """The batch was computed; only its news is taken back."""
    node = just_held()
    node.scheduler.apply(CancelSource(H))
    node.submit("b", PROMPT)
    (boundary,) = node.run()
    assert boundary.events == (SourceHeld(handoff("b"), 1, RequestId("b"), prompt_tokens=10, cached_tokens=9),)


def test_kv_events_are_not_suppressed() -> None:
    """The blocks are findable whoever computed them."""
    node = SourceNode(kv_events=True)
    node.submit("a", PROMPT)
    settle_step(node)
    node.scheduler.apply(CancelSource(H))
    boundary = node.boundary()
    assert [len(event.hashes) for event in boundary.kv_events] == [2]
    assert (list(boundary.outputs), boundary.events, boundary.retired) == ([], (), ())
