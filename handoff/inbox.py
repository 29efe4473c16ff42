"""What waits for a step loop's next boundary, and the order in which it is done there."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from scheduler.commands import CancelRequest, Command, ReserveDestination, Submit, SubmitHandoffPrefill
from scheduler.ids import RequestId


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """work: to be run on the loop's thread; `future` gets its outcome. command: what it applies, None if no command."""

    work: Callable[[], Any]
    future: "Future[Any]"
    command: Command | None = None


def boundary_order(calls: Iterable[Call]) -> list[Call]:
    """Cancels of requests first, so that nothing more is done for who has left; all others as they came.

    A cancel doesn't overtake the command that starts its request. Source: the lanes of the live driver in the project's
    handoff reference.
    """
    cancels: list[Call] = []
    others: list[Call] = []
    started: set[RequestId] = set()
    for call in calls:
        match call.command:
            case CancelRequest(request_id) if request_id not in started:
                cancels.append(call)
                continue
            case Submit(request) | SubmitHandoffPrefill(request=request) | ReserveDestination(request=request):
                started.add(request.request_id)
        others.append(call)
    return [*cancels, *others]
