"""The driver: performs a handoff's actions on real nodes and turns what happens into facts.

One task per handoff feeds the pure coordinator in order: an action's outcome first, then the facts that came meanwhile.
Every wait is bounded; an action that isn't acknowledged in time has failed, and cleanup addresses its side anyway.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from handoff.coordinator import (
    Acknowledged,
    Action,
    ActionKind,
    Cancelled,
    Completion,
    DestinationFailed,
    Event,
    Failed,
    Handoff,
    Order,
    Outcome,
    Phase,
    Start,
    TransferLanded,
    advance,
)
from handoff.drive import Drive, Fact, HandoffRecord, LostNode, fact_of
from handoff.leases import HandoffKey
from handoff.node_port import Choose, NodePort
from handoff.report import NodeReport
from handoff.transfer_ends import Landed, StillSending
from scheduler.commands import (
    ActivateDestination,
    Applied,
    CancelDestination,
    CancelSource,
    Command,
    CommandEffects,
    DestinationAccepted,
    ReleaseSource,
    ReserveDestination,
    SubmitHandoffPrefill,
    Submitted,
)
from scheduler.errors import CommandRejected
from scheduler.events import DestinationFinished, LifecycleEvent, SourceHeld
from scheduler.ids import HandoffId, NodeId, RequestId
from scheduler.request import Request

log = structlog.get_logger()


STILL_SENDING_S = 0.05


class NoOtherDestination(RuntimeError):
    """A destination failed, and no other node can take its place."""


@dataclass(frozen=True, slots=True)
class DriverLimits:
    """action_s: one action's acknowledgement. handoff_s: from start to completion, queueing included.

    redirects: to how many other destinations a source's KV may go before its prefill is done again.
    """

    action_s: float = 30.0
    handoff_s: float = 600.0
    redirects: int = 1


class Driver:
    """Runs many handoffs on one event loop.

    clock: seconds, monotonic. on_record: a handoff ended. on_orphan: a request's decode node was lost under it.
    choose: where a held source's KV goes when its destination has failed.
    """

    def __init__(
        self,
        nodes: NodePort,
        limits: DriverLimits,
        clock: Callable[[], float],
        on_record: Callable[[HandoffRecord], None],
        on_orphan: Callable[[RequestId, str], None],
        choose: Choose = lambda request, not_these: None,
    ) -> None:
        self._choose = choose
        self._nodes = nodes
        self._limits = limits
        self._clock = clock
        self._on_record = on_record
        self._on_orphan = on_orphan
        self._drives: dict[HandoffId, Drive] = {}
        self._by_request: dict[RequestId, Drive] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def active(self) -> int:
        """Handoffs whose request is still somewhere, the decoding ones included."""
        return len(self._drives)

    def phases(self) -> dict[str, int]:
        """How many handoffs are in each phase; done means that the destination decodes."""
        counts: dict[str, int] = {}
        for drive in self._drives.values():
            name = drive.handoff.phase.value
            counts[name] = counts.get(name, 0) + 1
        return counts

    def load(self, node: NodeId) -> int:
        """Requests on a node, as far as this driver sent them there. A source is rid of what was handed over."""
        return sum(
            1
            for d in self._drives.values()
            if node == d.destination or (node == d.source and d.handoff.phase is not Phase.DONE)
        )

    def live_handoffs(self) -> dict[NodeId, list[HandoffKey]]:
        """By node, the handoffs that may own something there and are not done: whose leases are to be renewed."""
        live: dict[NodeId, list[HandoffKey]] = {}
        for drive in self._drives.values():
            if drive.handoff.phase is not Phase.DONE:
                for node in (drive.source, drive.destination):
                    live.setdefault(node, []).append((drive.handoff.handoff_id, drive.handoff.attempt))
        return live

    async def hand_over(
        self, handoff_id: HandoffId, request: Request, source: NodeId, destination: NodeId, order: Order
    ) -> HandoffRecord:
        """Run one handoff; returns when it is handed over, finished at the source, cancelled or failed."""
        if request.request_id in self._by_request or handoff_id in self._drives:
            raise CommandRejected(f"request {request.request_id} or handoff {handoff_id} is already active")
        drive = Drive(
            request=request,
            source=source,
            destination=destination,
            handoff=Handoff(handoff_id, order, redirects_left=self._limits.redirects),
            started=self._clock(),
            finished=asyncio.get_running_loop().create_future(),
        )
        self._drives[handoff_id] = self._by_request[request.request_id] = drive
        task = asyncio.create_task(self._run(drive))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(drive.finished)

    def cancel(self, request_id: RequestId) -> bool:
        """The client went away. False if the request is not here (any more)."""
        drive = self._by_request.get(request_id)
        if drive is None:
            return False
        drive.inbox.put_nowait(Cancelled())
        return True

    def on_report(self, report: NodeReport) -> None:
        """Facts from a node. Those of unknown handoffs are late or stale, and dropped."""
        for event in report.events:
            self._on_event(report.node, event)
        for transfer in report.transfers:
            drive = self._drives.get(transfer.handoff_id)
            if drive is None or drive.handoff.attempt != transfer.attempt:
                continue
            if isinstance(transfer, Landed):
                if report.node == drive.destination:
                    drive.transfer = transfer
                drive.inbox.put_nowait(Fact(report.node, TransferLanded()))
            else:
                failed = DestinationFailed(f"transfer: {transfer.reason}")
                drive.inbox.put_nowait(Fact(report.node, failed))

    def on_node_lost(self, node: NodeId) -> None:
        """A node's process is gone: what it was part of has failed. A decode doesn't need its source any more."""
        for drive in self._drives.values():
            if node in (drive.source, drive.destination):
                drive.inbox.put_nowait(LostNode(node))

    def _on_event(self, node: NodeId, event: LifecycleEvent) -> None:
        drive = self._drives.get(event.handoff_id)
        if drive is None or drive.handoff.attempt != event.attempt:
            return
        fact = fact_of(node, event)
        if isinstance(event, SourceHeld):
            drive.cached_tokens = event.cached_tokens
        drive.inbox.put_nowait(Fact(node, fact))

    async def _run(self, drive: Drive) -> None:
        try:
            await self._feed(drive, Start())
            while not await self._is_over(drive):
                if await self._take(drive, await self._next(drive)):
                    break
        except Exception as error:
            log.exception("handoff driver failed", handoff_id=drive.handoff.handoff_id)
            await self._abandon(drive, str(error))
        finally:
            self._conclude(drive)
            del self._drives[drive.handoff.handoff_id]
            del self._by_request[drive.request.request_id]

    async def _take(self, drive: Drive, item: "Event | Fact | LostNode") -> bool:
        """True if nothing more is to be driven."""
        match item:
            case Fact(node, _) if node not in (drive.source, drive.destination):
                return False
            case Fact(_, DestinationFinished()):
                await self._finish(drive)
                return True
            case Fact(_, event):
                assert not isinstance(event, DestinationFinished)
                await self._feed(drive, event)
            case LostNode(node):
                return await self._lose(drive, node)
            case event:
                await self._feed(drive, event)
        return False

    async def _lose(self, drive: Drive, node: NodeId) -> bool:
        reason = f"{node} was lost"
        if node == drive.destination and drive.handoff.phase is Phase.DONE:
            self._on_orphan(drive.request.request_id, reason)
            return True
        if node == drive.destination:
            await self._feed(drive, DestinationFailed(reason))
        elif node == drive.source:
            await self._feed(drive, Failed(reason))
        return False

    async def _finish(self, drive: Drive) -> None:
        """The decode is over. If its word overtook the landing's, the source is still to be released."""
        if drive.handoff.phase in (Phase.PREFILLING, Phase.TRANSFERRING):
            await self._feed(drive, TransferLanded())

    async def _is_over(self, drive: Drive) -> bool:
        """Publish the record when the handoff is done; the request is over unless its destination decodes."""
        if drive.handoff.phase is not Phase.DONE:
            return False
        self._conclude(drive)
        return drive.handoff.completion is not Completion.HANDED_OVER

    async def _next(self, drive: Drive) -> "Event | Fact | LostNode":
        if drive.handoff.phase is Phase.DONE:
            # The decode's own length bounds this wait; its node's loss arrives as a fact.
            return await drive.inbox.get()
        remaining = drive.started + self._limits.handoff_s - self._clock()
        try:
            return await asyncio.wait_for(drive.inbox.get(), max(0.0, remaining))
        except TimeoutError:
            return Failed(f"not handed over within {self._limits.handoff_s:g} s")

    async def _feed(self, drive: Drive, event: Event) -> None:
        if isinstance(event, DestinationFailed | Acknowledged) and not self._other_destination(drive):
            drive.handoff = replace(drive.handoff, redirects_left=0)
        drive.handoff, actions = advance(drive.handoff, event)
        if drive.handoff.phase is Phase.REDIRECTING and drive.destination not in drive.given_up:
            drive.given_up.append(drive.destination)
        for acknowledged in await asyncio.gather(*(self._perform(drive, action) for action in actions)):
            await self._feed(drive, acknowledged)

    async def _perform(self, drive: Drive, action: Action) -> Acknowledged:
        try:
            outcome, reason = await asyncio.wait_for(self._act(drive, action.kind), self._limits.action_s)
        except CommandRejected as error:
            drive.rejected = True
            outcome, reason = Outcome.FAILED, str(error)
        except TimeoutError:
            outcome, reason = Outcome.FAILED, f"not acknowledged within {self._limits.action_s:g} s"
        except Exception as error:
            outcome, reason = Outcome.FAILED, f"{type(error).__name__}: {error}"
        if outcome is Outcome.FAILED:
            log.warning(
                "handoff action failed",
                handoff_id=drive.handoff.handoff_id,
                request_id=drive.request.request_id,
                attempt=drive.handoff.attempt,
                action=action.kind.value,
                reason=reason,
            )
        return Acknowledged(action.action_id, outcome, reason)

    async def _act(self, drive: Drive, kind: ActionKind) -> tuple[Outcome, str]:
        if kind is ActionKind.START_TRANSFER:
            started = await self._start_transfer(drive)
            return (Outcome.SCHEDULED, "") if started else (Outcome.NOOP, "nothing is held")
        if kind is ActionKind.RESERVE_DESTINATION and drive.destination in drive.given_up:
            self._choose_anew(drive)
        if kind is ActionKind.SUBMIT_PREFILL:
            effects = await self._submit_prefill(drive)
        else:
            effects = await self._nodes.apply(*self._command(drive, kind))
        for event in effects.events:
            self._on_event(drive.source if kind is ActionKind.SUBMIT_PREFILL else drive.destination, event)
        match effects.result:
            case Submitted():
                return Outcome.SUBMITTED, ""
            case DestinationAccepted():
                return Outcome.ACCEPTED, ""
            case Applied():
                return Outcome.APPLIED, ""
            case _:
                return Outcome.NOOP, f"nothing to {kind.value.replace('_', ' ')}"

    async def _start_transfer(self, drive: Drive) -> bool:
        """As soon as the source is rid of what it sent elsewhere; the action's limit bounds this."""
        while True:
            handoff = drive.handoff
            try:
                return await self._nodes.start_transfer(
                    drive.source, handoff.handoff_id, handoff.attempt, drive.destination
                )
            except StillSending:
                await asyncio.sleep(STILL_SENDING_S)

    def _other_destination(self, drive: Drive) -> NodeId | None:
        return self._choose(drive.request, [*drive.given_up, drive.destination])

    def _choose_anew(self, drive: Drive) -> None:
        """Raises NoOtherDestination."""
        chosen = self._other_destination(drive)
        if chosen is None:
            raise NoOtherDestination(f"{drive.handoff.reason}; no other destination is left")
        log.info(
            "handoff redirected",
            handoff_id=drive.handoff.handoff_id,
            request_id=drive.request.request_id,
            attempt=drive.handoff.attempt,
            given_up=drive.destination,
            destination=chosen,
            reason=drive.handoff.reason,
        )
        drive.destination, drive.rejected, drive.transfer = chosen, False, None

    async def _submit_prefill(self, drive: Drive) -> CommandEffects:
        handoff = drive.handoff
        command = SubmitHandoffPrefill(handoff.handoff_id, drive.request, handoff.attempt)
        armed = handoff.order is Order.DESTINATION_FIRST
        return await self._nodes.submit_prefill(drive.source, command, drive.destination if armed else None)

    def _command(self, drive: Drive, kind: ActionKind) -> tuple[NodeId, Command]:
        handoff_id, attempt = drive.handoff.handoff_id, drive.handoff.attempt
        match kind:
            case ActionKind.RESERVE_DESTINATION:
                reserve = ReserveDestination(
                    handoff_id, drive.request, attempt, activate_when_landed=True, source=drive.source
                )
                return drive.destination, reserve
            case ActionKind.ACTIVATE_DESTINATION:
                return drive.destination, ActivateDestination(handoff_id, attempt)
            case ActionKind.RELEASE_SOURCE:
                return drive.source, ReleaseSource(handoff_id, attempt)
            case ActionKind.CANCEL_SOURCE:
                return drive.source, CancelSource(handoff_id, attempt)
            case ActionKind.CANCEL_DESTINATION:
                return drive.destination, CancelDestination(handoff_id, attempt)
            case ActionKind.START_TRANSFER | ActionKind.SUBMIT_PREFILL:
                raise AssertionError(f"{kind} has a call of its own")

    async def _abandon(self, drive: Drive, reason: str) -> None:
        """A bug of ours ended the drive: cancel both sides, so that nothing stays owned."""
        drive.handoff, actions = advance(drive.handoff, Failed(reason))
        await asyncio.gather(*(self._perform(drive, action) for action in actions))

    def _conclude(self, drive: Drive) -> None:
        """Make the outcome known, once."""
        if drive.finished.done():
            return
        handoff = drive.handoff
        record = HandoffRecord(
            handoff_id=handoff.handoff_id,
            request_id=drive.request.request_id,
            source=drive.source,
            destination=drive.destination,
            completion=handoff.completion or Completion.FAILED,
            rejected=drive.rejected,
            reason=handoff.reason,
            prompt_tokens=len(drive.request.prompt),
            cached_tokens=drive.cached_tokens,
            total_s=self._clock() - drive.started,
            transfer=drive.transfer,
            redirects=len(drive.given_up),
        )
        drive.finished.set_result(record)
        self._on_record(record)
        log.info(
            "handoff ended",
            handoff_id=record.handoff_id,
            request_id=record.request_id,
            attempt=handoff.attempt,
            source=record.source,
            destination=record.destination,
            completion=record.completion.value,
            reason=record.reason,
            total_ms=round(record.total_s * 1e3, 2),
        )
