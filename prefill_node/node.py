"""A prefill replica: reads prompts, holds their KV, hands it to decode nodes, the first blocks while it still reads.

The last chunk of a prompt, if it is long, goes out layer by layer while its later layers are computed.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from handoff.node import MakeExchange, Node, Publish
from handoff.transfer_ends import Broken, Landed, StillSending, TransferEnd
from handoff.transfer_out import Progress
from scheduler.commands import CancelSource, Command, CommandEffects, SubmitHandoffPrefill
from scheduler.contract import DeviceIo, LayerWatch, Prefill, Row
from scheduler.events import BoundaryEffects, LeaseExpired, LifecycleEvent, SourceHeld
from scheduler.ids import HandoffId, NodeId, RequestId
from scheduler.prefill_scheduler import PrefillScheduler, SourceProgress

LAYER_GROUPS = 4
"""In how many segments the last chunk goes out layer by layer."""


def layers_told(layers: int, groups: int) -> tuple[int, ...]:
    """After how many layers a group ends; the last one ends with the step."""
    return tuple(sorted({layers * part // groups for part in range(1, groups)} - {0}))


NOTHING = SourceProgress((), 0, 0)


@dataclass(slots=True)
class _Stream:
    """A prefill whose blocks travel as they become final. known: what was told of it."""

    handoff_id: HandoffId
    attempt: int
    known: SourceProgress = NOTHING


@dataclass(frozen=True, slots=True)
class _Tail:
    """A last chunk that is about to be computed."""

    handoff_id: HandoffId
    attempt: int
    progress: SourceProgress


class PrefillNode(Node[PrefillScheduler]):
    """layerwise_tokens: a last chunk of at least so many goes out layer by layer; 0: none does."""

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
        layerwise_tokens: int = 0,
    ) -> None:
        super().__init__(node, incarnation, scheduler, device, make_exchange, publish, clock)
        self._layerwise_tokens = layerwise_tokens
        self._layers_told = layers_told(self._facts.layers, LAYER_GROUPS)
        self._streams: dict[RequestId, _Stream] = {}

    def submit_prefill(self, command: SubmitHandoffPrefill, send_to: NodeId | None) -> "Future[CommandEffects]":
        """Prefill and hold; with `send_to`, the KV is on its way there from the first block that is final."""
        return self._loop.call(lambda: self._submit(command, send_to), command)

    def start_transfer(self, handoff_id: HandoffId, attempt: int, destination: NodeId) -> "Future[bool]":
        """Send a held source to its destination. False if nothing is held under this id. Raises StillSending."""
        return self._loop.call(lambda: self._start(handoff_id, attempt, destination))

    def _submit(self, command: SubmitHandoffPrefill, send_to: NodeId | None) -> CommandEffects:
        effects = self._apply(command)
        if send_to is not None:
            request = command.request
            self._streams[request.request_id] = _Stream(command.handoff_id, command.attempt)
            self._exchange.offer(
                send_to, command.handoff_id, command.attempt, request.request_id, len(request.prompt), request.adapter
            )
        return effects

    def _start(self, handoff_id: HandoffId, attempt: int, destination: NodeId) -> bool:
        held = self._scheduler.held(handoff_id, attempt)
        if held is None:
            return False
        under_way_to = self._exchange.sending_to(handoff_id, attempt)
        if under_way_to not in (None, destination):
            self._exchange.cease(handoff_id, attempt, "redirected")
            raise StillSending(f"{handoff_id} is still being sent to {under_way_to}")
        self._exchange.offer(destination, handoff_id, attempt, held.request_id, held.prompt_tokens, held.adapter)
        self._complete(handoff_id, attempt)
        return True

    def _complete(self, handoff_id: HandoffId, attempt: int) -> None:
        held = self._scheduler.held(handoff_id, attempt)
        if held is not None and self._exchange.complete(handoff_id, attempt, held):
            self._scheduler.transfer_started(handoff_id, attempt)
            self._timeline.mark((handoff_id, attempt), "computed", self._loop.settled_at)
            self._timeline.mark((handoff_id, attempt), "posted", self._clock())

    def _apply(self, command: Command) -> CommandEffects:
        effects = super()._apply(command)
        if isinstance(command, CancelSource):
            self._exchange.cease(command.handoff_id, command.attempt, "cancelled")
        return effects

    def _on_boundary(self, effects: BoundaryEffects) -> None:
        super()._on_boundary(effects)
        for stream in self._streams.values():
            progress = self._scheduler.progress(stream.handoff_id, stream.attempt, stream.known)
            if progress is not None:
                stream.known = progress
                self._advance(stream.handoff_id, stream.attempt, progress)

    def _advance(self, handoff_id: HandoffId, attempt: int, progress: SourceProgress) -> None:
        self._exchange.advance(handoff_id, attempt, Progress(progress.blocks, progress.final, progress.generation))

    def _watch(self, plan: Prefill) -> LayerWatch | None:
        tails = [tail for row in plan.rows if (tail := self._tail(row)) is not None]
        if not tails or not self._layers_told:
            return None
        for tail in tails:
            self._advance(tail.handoff_id, tail.attempt, tail.progress)

        def tell(layers: int) -> None:
            for tail in tails:
                self._exchange.layers_final(tail.handoff_id, tail.attempt, layers, tail.progress.generation)

        return LayerWatch(self._layers_told, tell)

    def _tail(self, row: Row) -> _Tail | None:
        """None if the row's KV is not to be sent layer by layer."""
        if not 0 < self._layerwise_tokens <= row.count or row.draw is None:
            return None
        stream = self._streams.get(row.request_id)
        if stream is None:
            return None
        progress = self._scheduler.progress(stream.handoff_id, stream.attempt)
        return None if progress is None else _Tail(stream.handoff_id, stream.attempt, progress)

    def _on_event(self, event: LifecycleEvent) -> None:
        match event:
            case SourceHeld(handoff_id, attempt, request_id):
                if self._streams.pop(request_id, None) is not None:
                    self._complete(handoff_id, attempt)
            case LeaseExpired(handoff_id, attempt):
                self._exchange.cease(handoff_id, attempt, "its lease expired")

    def _on_retired(self, request_id: RequestId) -> None:
        """However a request ended, nothing more of it will be sent."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self._exchange.cease(stream.handoff_id, stream.attempt, "the request ended at its source")

    def _settle(self, end: TransferEnd) -> tuple[Landed | Broken, ...]:
        self._scheduler.transfer_quiet(end.handoff_id, end.attempt)
        return (end,) if isinstance(end, Broken) else ()
