"""The order in which a boundary does what waited for it."""

from concurrent.futures import Future

from scheduler_drive import handoff, request

from handoff.inbox import Call, boundary_order
from scheduler.commands import (
    CancelRequest,
    CancelSource,
    Command,
    ReleaseSource,
    ReserveDestination,
    Submit,
    SubmitHandoffPrefill,
)
from scheduler.ids import RequestId

A, B = RequestId("a"), RequestId("b")
RELEASE, CANCEL_SOURCE = ReleaseSource(handoff("x")), CancelSource(handoff("y"))


def ordered(*commands: Command | None) -> list[Command | None]:
    return [call.command for call in boundary_order([Call(lambda: None, Future(), command) for command in commands])]


def test_cancels_of_requests_go_first_and_the_others_keep_their_order() -> None:
    submit = Submit(request("c", [1]))
    assert ordered(RELEASE, None, CancelRequest(A), submit, CANCEL_SOURCE, CancelRequest(B)) == [
        CancelRequest(A),
        CancelRequest(B),
        RELEASE,
        None,
        submit,
        CANCEL_SOURCE,
    ]


def test_a_cancel_does_not_overtake_what_starts_its_request() -> None:
    for start in (
        Submit(request("a", [1])),
        SubmitHandoffPrefill(handoff("h"), request("a", [1])),
        ReserveDestination(handoff("h"), request("a", [1])),
    ):
        assert ordered(RELEASE, start, CancelRequest(A), CancelRequest(B)) == [
            CancelRequest(B),
            RELEASE,
            start,
            CancelRequest(A),
        ]
        assert ordered(CancelRequest(A), start) == [CancelRequest(A), start]


def test_nothing_is_lost() -> None:
    assert ordered() == []
    assert ordered(None, None) == [None, None]
