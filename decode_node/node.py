"""A decode replica: reserves blocks, lets them be filled, writes the answers."""

from collections.abc import Callable, Sequence

from handoff.node import MakeExchange, Node, Publish
from handoff.transfer_ends import Broken, Landed, TransferEnd
from scheduler.commands import CancelDestination, Command, CommandEffects
from scheduler.contract import DeviceIo
from scheduler.decode_scheduler import DecodeScheduler
from scheduler.events import DestinationReserved, LeaseExpired, LifecycleEvent
from scheduler.ids import HandoffId, NodeId, RequestId


class DecodeNode(Node[DecodeScheduler]):
    role = "decode"

    def __init__(
        self,
        node: NodeId,
        incarnation: int,
        scheduler: DecodeScheduler,
        device: DeviceIo,
        make_exchange: MakeExchange,
        publish: Publish,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(node, incarnation, scheduler, device, make_exchange, publish, clock)
        self._unlaunched: dict[RequestId, tuple[HandoffId, int]] = {}

    def _apply(self, command: Command) -> CommandEffects:
        effects = super()._apply(command)
        if isinstance(command, CancelDestination):
            self._exchange.withdraw(command.handoff_id, command.attempt)
        return effects

    def _on_event(self, event: LifecycleEvent) -> None:
        match event:
            case DestinationReserved(handoff_id, attempt):
                # It can be filled from the moment that the outside may know of it.
                reserved = self._scheduler.reserved(handoff_id, attempt)
                if reserved is not None:
                    self._scheduler.transfer_started(handoff_id, attempt)
                    self._exchange.expect(handoff_id, attempt, reserved)
            case LeaseExpired(handoff_id, attempt):
                self._exchange.withdraw(handoff_id, attempt)

    def _settle(self, end: TransferEnd) -> tuple[Landed | Broken, ...]:
        if isinstance(end, Landed):
            reserved = self._scheduler.reserved(end.handoff_id, end.attempt)
            wanted = self._scheduler.landed(end.handoff_id, end.attempt, end.first_token)
            if wanted and reserved is not None:
                self._mark_booked(reserved.request_id, (end.handoff_id, end.attempt))
            return (end,) if wanted else ()
        self._scheduler.transfer_quiet(end.handoff_id, end.attempt)
        return (end,) if isinstance(end, Broken) else ()

    def _mark_booked(self, request_id: RequestId, key: tuple[HandoffId, int]) -> None:
        self._timeline.mark(key, "booked", self._clock())
        self._timeline.mark(key, "free_before_booked", self._loop.settled_at)
        self._unlaunched[request_id] = key

    def _on_launch(self, request_ids: Sequence[RequestId]) -> None:
        if not self._unlaunched:
            return
        for request_id in request_ids:
            key = self._unlaunched.pop(request_id, None)
            if key is not None:
                self._timeline.mark(key, "launched", self._clock())
                self._timeline.mark(key, "free_before_launched", self._loop.settled_at)

    def _on_retired(self, request_id: RequestId) -> None:
        self._unlaunched.pop(request_id, None)
