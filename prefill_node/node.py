"""A prefill replica: reads prompts, holds their KV, offers it to decode nodes."""

from collections.abc import Callable
from concurrent.futures import Future

from handoff.exchange import Broken, Landed, TransferEnd
from handoff.node import MakeExchange, Node, Publish
from scheduler.commands import CommandEffects, SubmitHandoffPrefill
from scheduler.contract import DeviceIo
from scheduler.events import LeaseExpired, LifecycleEvent, SourceHeld
from scheduler.ids import HandoffId, NodeId, RequestId
from scheduler.prefill_scheduler import PrefillScheduler


class PrefillNode(Node[PrefillScheduler]):
    role = "prefill"

    def __init__(
        self,
        node: NodeId,
        incarnation: int,
        scheduler: PrefillScheduler,
        device: DeviceIo,
        make_exchange: MakeExchange,
        publish: Publish,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(node, incarnation, scheduler, device, make_exchange, publish, clock)
        self._armed: dict[RequestId, NodeId] = {}

    def submit_prefill(self, command: SubmitHandoffPrefill, send_to: NodeId | None) -> "Future[CommandEffects]":
        """Prefill and hold; with `send_to`, offer the KV in the very boundary in which it is held."""
        return self._loop.call(lambda: self._submit(command, send_to), command)

    def start_transfer(self, handoff_id: HandoffId, attempt: int, destination: NodeId) -> "Future[bool]":
        """Offer a held source to its destination. False if nothing is held under this id."""
        return self._loop.call(lambda: self._offer(handoff_id, attempt, destination))

    def _submit(self, command: SubmitHandoffPrefill, send_to: NodeId | None) -> CommandEffects:
        effects = self._apply(command)
        if send_to is not None:
            self._armed[command.request.request_id] = send_to
        return effects

    def _offer(self, handoff_id: HandoffId, attempt: int, destination: NodeId) -> bool:
        held = self._scheduler.held(handoff_id, attempt)
        if held is None:
            return False
        self._scheduler.transfer_started(handoff_id, attempt)
        self._exchange.offer(destination, handoff_id, attempt, held)
        return True

    def _on_event(self, event: LifecycleEvent) -> None:
        match event:
            case SourceHeld(handoff_id, attempt, request_id):
                destination = self._armed.pop(request_id, None)
                if destination is not None:
                    self._offer(handoff_id, attempt, destination)
            case LeaseExpired(request_id=request_id):
                self._armed.pop(request_id, None)

    def _on_retired(self, request_id: RequestId) -> None:
        """However a request ended, nothing of it will be held."""
        self._armed.pop(request_id, None)

    def _settle(self, end: TransferEnd) -> tuple[Landed | Broken, ...]:
        self._scheduler.transfer_quiet(end.handoff_id, end.attempt)
        return (end,) if isinstance(end, Broken) else ()
