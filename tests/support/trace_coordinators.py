"""The coordinators of a golden trace: facts are fed to them in order, what they decide is written to `lines`."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from handoff.coordinator import Acknowledged, Action, Cancelled, Event, Handoff, Order, Outcome, Start, advance
from scheduler.ids import HandoffId
from scheduler.request import Request


@dataclass(slots=True)
class Client:
    """A request and its coordinator. armed: its reservation activates itself."""

    request: Request
    armed: bool
    handoff: Handoff


@dataclass(slots=True)
class _Delay:
    """What these nodes have reported and the coordinator has not heard."""

    nodes: str
    facts: list[Event] = field(default_factory=list)


class Coordinators:
    """perform: does what a coordinator asks for, and calls `acknowledge`, at once or later."""

    def __init__(self, perform: Callable[[Client, Action], None], lines: list[str]) -> None:
        self._perform = perform
        self._lines = lines
        self._clients: dict[str, Client] = {}
        self._facts: deque[tuple[str, Event]] = deque()
        self._delays: dict[str, _Delay] = {}

    def open(self, request: Request, order: Order, *, armed: bool) -> None:
        name = str(request.request_id)
        self._clients[name] = Client(request, armed, Handoff(HandoffId(name), order))
        self._facts.append((name, Start()))

    def get(self, name: str) -> Client | None:
        return self._clients.get(name)

    def cancel(self, name: str) -> None:
        """Goes before what is delayed."""
        self._facts.append((name, Cancelled()))

    def report(self, node: str, name: str, fact: Event) -> None:
        """A node tells what happened; nobody listens where no client opened the request."""
        delay = self._delays.get(name)
        if delay is not None and node in delay.nodes:
            delay.facts.append(fact)
        elif name in self._clients:
            self._facts.append((name, fact))

    def acknowledge(self, client: Client, action: Action, outcome: Outcome, reason: str = "") -> None:
        """Goes before the facts that the action caused."""
        self._facts.appendleft((str(client.handoff.handoff_id), Acknowledged(action.action_id, outcome, reason)))

    def delay(self, name: str, nodes: str) -> None:
        self._delays[name] = _Delay(nodes)

    def deliver(self, name: str) -> None:
        facts = self._delays.pop(name).facts
        self._lines += [f"{name} is told late: {type(fact).__name__}" for fact in facts]
        self._facts += [(name, fact) for fact in facts]

    def run(self) -> None:
        """Feed them until all wait for a node."""
        while self._facts:
            name, event = self._facts.popleft()
            self._feed(name, self._clients[name], event)

    def _feed(self, name: str, client: Client, event: Event) -> None:
        before = client.handoff.phase
        client.handoff, actions = advance(client.handoff, event)
        after = client.handoff
        if after.phase is not before:
            ending = f" ({after.completion.value})" if after.completion else ""
            reason = f": {after.reason}" if after.reason else ""
            self._lines.append(f"  {name} {before.value} -> {after.phase.value}{ending}{reason}")
        for action in actions:
            self._perform(client, action)
