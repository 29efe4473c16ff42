"""How a device is given up: in an order in which nothing is freed while something still uses it.

    steps in flight end --> sequences and saved states are released --> mirror ranks stop --> quiet --> memory is freed

Source: sections 1.5 and 3 of the project's device contract reference.
"""

from collections.abc import Callable, Iterable
from functools import partial

from scheduler.contract import DeviceIo
from scheduler.effects import Effect, EpShutdown, Quiesce, Ticket


def shut_down(
    device: DeviceIo,
    report: Callable[[str, Exception], None],
    in_flight: Iterable[Ticket] = (),
    effects: Iterable[Effect] = (),
) -> None:
    """Whatever fails is reported, by what it was, and the rest is done all the same: memory that stays is lost.

    in_flight: steps that nobody will settle. effects: they release the sequences that are left, and saved states.
    """

    def attempt(what: str, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:
            report(what, error)

    for ticket in in_flight:
        attempt(f"step {ticket}", partial(device.await_result, ticket))
    for effect in (*effects, EpShutdown(), Quiesce()):
        attempt(type(effect).__name__, partial(device.apply, effect))
    attempt("teardown", device.teardown)
