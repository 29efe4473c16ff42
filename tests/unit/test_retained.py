"""What a settled step keeps back: released once, or suppressed before."""

from scheduler.events import DestinationFinished, LeaseExpired, Output, Outputs, Side, SourceHeld
from scheduler.ids import HandoffId, RequestId
from scheduler.request import FinishReason
from scheduler.retained import Retained

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")
H = HandoffId("h")
HELD = SourceHeld(H, 1, A, 5, 0)
FINISHED = DestinationFinished(H, 2, B, FinishReason.LENGTH)
OUTPUTS = [Output(A, 0, 1), Output(B, 4, 2, FinishReason.LENGTH), Output(A, 1, 3), Output(C, 0, 4, cached_tokens=4)]


def retained() -> Retained:
    kept = Retained()
    kept.add(Outputs.of(OUTPUTS), [HELD, FINISHED], [B, C])
    return kept


def test_nothing_is_kept_at_first() -> None:
    assert Retained().is_empty
    assert not Retained().suppress(A)
    assert not Retained().withdraw_retirement(A)


def test_one_thing_of_any_kind_is_something() -> None:
    kinds = [(Outputs.of(OUTPUTS[:1]), [], []), (Outputs(), [HELD], []), (Outputs(), [], [A])]
    for outputs, events, retired in kinds:
        kept = Retained()
        kept.add(outputs, events, retired)
        assert not kept.is_empty


def test_everything_is_released_once_and_in_order() -> None:
    kept = retained()
    released = kept.release()
    assert released.outputs == OUTPUTS
    assert (released.events, released.retired) == ([HELD, FINISHED], [B, C])
    assert kept.is_empty
    assert kept.release().is_empty
    kept.add(Outputs.of(OUTPUTS[:1]), [], [])
    assert released.outputs == OUTPUTS


def test_suppression_takes_the_outputs_and_events_of_one_request() -> None:
    kept = retained()
    assert kept.suppress(A)
    assert kept.outputs == [OUTPUTS[1], OUTPUTS[3]]
    assert (kept.events, kept.retired) == ([FINISHED], [B, C])
    assert kept.outputs[0].finish is FinishReason.LENGTH
    assert kept.outputs[1].cached_tokens == 4
    assert not kept.suppress(A)


def test_an_event_alone_is_suppressed() -> None:
    kept = Retained()
    kept.add(Outputs(), [LeaseExpired(H, 1, A, Side.SOURCE)], [])
    assert not kept.suppress(B)
    assert kept.suppress(A)
    assert kept.is_empty


def test_an_output_alone_is_suppressed() -> None:
    kept = Retained()
    kept.add(Outputs.of(OUTPUTS), [], [])
    assert kept.suppress(C)
    assert kept.outputs == OUTPUTS[:3]


def test_suppression_leaves_retirements() -> None:
    kept = Retained()
    kept.add(Outputs(), [], [A])
    assert not kept.suppress(A)
    assert kept.retired == [A]


def test_a_retirement_is_withdrawn_once() -> None:
    kept = retained()
    assert kept.withdraw_retirement(B)
    assert kept.retired == [C]
    assert not kept.withdraw_retirement(B)
    assert kept.events == [HELD, FINISHED]
