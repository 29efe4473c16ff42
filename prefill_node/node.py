"""A prefill replica: reads prompts, holds their KV, offers it to decode nodes."""

from concurrent.futures import Future

from handoff.exchange import Broken, Landed, TransferEnd
from handoff.node import Node
from scheduler.commands import Command, CommandEffects
from scheduler.ids import HandoffId, NodeId
from scheduler.prefill_scheduler import PrefillScheduler


class PrefillNode(Node[PrefillScheduler]):
    role = "prefill"

    def start_transfer(self, handoff_id: HandoffId, attempt: int, destination: NodeId) -> "Future[bool]":
        """Offer a held source to its destination. False if nothing is held under this id."""
        return self._loop.call(lambda: self._offer(handoff_id, attempt, destination))

    def _offer(self, handoff_id: HandoffId, attempt: int, destination: NodeId) -> bool:
        held = self._scheduler.held(handoff_id, attempt)
        if held is None:
            return False
        self._scheduler.transfer_started(handoff_id, attempt)
        self._exchange.offer(destination, handoff_id, attempt, held)
        return True

    def _apply(self, command: Command) -> CommandEffects:
        return self._scheduler.apply(command)

    def _settle(self, end: TransferEnd) -> tuple[Landed | Broken, ...]:
        self._scheduler.transfer_quiet(end.handoff_id, end.attempt)
        return (end,) if isinstance(end, Broken) else ()
