"""What a prefill and a decode replica have in common: a step loop, a scheduler and an exchange, joined, without Ray.

Commands and the ends of transfers run on the step loop's thread, so the scheduler has one user.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, ClassVar, Generic, TypeVar

from handoff.exchange import Broken, Exchange, Landed, PeerInfo, TransferEnd
from handoff.report import NodeReport
from handoff.step_loop import StepLoop
from scheduler.base import SchedulerBase
from scheduler.commands import BoundaryEffects, Command, CommandEffects
from scheduler.contract import DeviceIo
from scheduler.errors import InvariantBroken
from scheduler.ids import NodeId

S = TypeVar("S", bound=SchedulerBase)

Publish = Callable[[NodeReport], None]
MakeExchange = Callable[[Callable[[TransferEnd], None]], Exchange]


class Node(ABC, Generic[S]):
    """publish: called on the step loop's thread, must return at once."""

    role: ClassVar[str]

    def __init__(
        self,
        node: NodeId,
        incarnation: int,
        scheduler: S,
        device: DeviceIo,
        make_exchange: MakeExchange,
        publish: Publish,
    ) -> None:
        self._node = node
        self._incarnation = incarnation
        self._scheduler = scheduler
        self._facts = device.facts()
        self._publish = publish
        self._exchange = make_exchange(lambda end: self._on_transfer_end(end))
        self._loop = StepLoop(scheduler, device, self._on_boundary, node)

    def start(self, pool: object) -> PeerInfo:
        """pool: the KV pool's bytes, see Transport.start. Returns what peers connect to."""
        self._exchange.start(pool)
        self._loop.start()
        return self._exchange.info

    def connect(self, peer: PeerInfo) -> None:
        """Both nodes of a pair connect to each other. Raises IncompatiblePeer."""
        self._exchange.connect(peer)

    def disconnect(self, peer: NodeId) -> None:
        """Give a peer up; its transfers end as broken."""
        self._exchange.disconnect(peer)

    def apply(self, command: Command) -> "Future[CommandEffects]":
        """Perform a command at the next boundary. The future raises CommandRejected or LoopStopped."""
        return self._loop.call(lambda: self._apply(command))

    def status(self) -> "Future[dict[str, Any]]":
        """This node's line in `prelay status`, as plain data; proves the block accounting on the way."""
        return self._loop.call(self._status)

    @property
    def ended(self) -> "Future[None]":
        """Done when the step loop is over."""
        return self._loop.ended

    @property
    def failure(self) -> BaseException | None:
        """Why the step loop ended by itself; None while it runs, and after a stop that was asked for."""
        return self._loop.failure

    def stop(self, timeout_s: float) -> None:
        """The transport ends first: nothing may touch the pool once the device is torn down."""
        self._exchange.close()
        self._loop.stop(timeout_s)

    @abstractmethod
    def _apply(self, command: Command) -> CommandEffects:
        """On the loop's thread."""

    @abstractmethod
    def _settle(self, end: TransferEnd) -> tuple[Landed | Broken, ...]:
        """A transfer has ended and its memory is quiet. Returns what the coordinator must know of it."""

    def _observe(self, effects: BoundaryEffects) -> None:
        """Events became visible; runs before they are published."""

    def _on_boundary(self, effects: BoundaryEffects) -> None:
        self._observe(effects)
        self._emit(effects, ())

    def _on_transfer_end(self, end: TransferEnd) -> None:
        self._loop.call(lambda: self._end_transfer(end))

    def _end_transfer(self, end: TransferEnd) -> None:
        try:
            transfers = self._settle(end)
        except Exception as error:
            # Nobody waits for this call, and blocks whose transfer is not booked would stay owned for ever.
            raise InvariantBroken(f"the end of a transfer could not be booked: {end}") from error
        effects = self._scheduler.take_effects()
        self._observe(effects)
        self._emit(effects, transfers)

    def _emit(self, effects: BoundaryEffects, transfers: tuple[Landed | Broken, ...]) -> None:
        report = NodeReport(self._node, self._incarnation, effects.outputs, effects.events, transfers)
        if not report.is_empty:
            self._publish(report)

    def _status(self) -> dict[str, Any]:
        self._scheduler.check()
        occupancy = asdict(self._scheduler.occupancy())
        requests = {
            "waiting": occupancy.pop("waiting_requests"),
            "running": occupancy.pop("running_requests"),
        }
        return {
            "node": self._node,
            "role": self.role,
            "incarnation": self._incarnation,
            "drained": self._scheduler.is_drained,
            "blocks": occupancy,
            "requests": requests,
            "device": asdict(self._facts),
            "links": [asdict(link) for link in self._exchange.links()],
            "counters": {
                "prompt_tokens": self._scheduler.prompt_tokens_total,
                "cached_tokens": self._scheduler.cached_tokens_total,
                **asdict(self._loop.counters),
            },
        }
