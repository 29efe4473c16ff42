"""A run: the driver that the coordinator uses hands `handoffs` requests over between two nodes.

Each request has two tokens: one is sampled at the source, the other by a step of the destination after which its blocks
are free again.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from cluster.handoff_bench.device import DAMAGED, UNCHECKED
from cluster.handoff_bench.figures import Figures, Moved, figures
from cluster.handoff_bench.nodes import DESTINATION, SOURCE, Host, LocalNode, NodeDoor, OnReport, ProcessNode
from cluster.handoff_bench.spec import Spec
from handoff.coordinator import Completion, Order
from handoff.drive import HandoffRecord
from handoff.driver import Driver, DriverLimits
from handoff.report import NodeReport
from handoff.transports.memory import MemoryFabric, MemoryTransport
from scheduler.commands import Command, CommandEffects, SubmitHandoffPrefill
from scheduler.ids import HandoffId, NodeId, RequestId
from scheduler.request import Request

LIMITS = DriverLimits(action_s=20.0, handoff_s=60.0)
END_TIMEOUT_S = 20.0
_LOOK_S = 0.005


class Doors:
    """How the driver reaches the two nodes."""

    def __init__(self, source: NodeDoor, destination: NodeDoor) -> None:
        self.of = {SOURCE: source, DESTINATION: destination}

    async def apply(self, node: NodeId, command: Command) -> CommandEffects:
        effects: CommandEffects = await self.of[node].call("apply", command)
        return effects

    async def submit_prefill(
        self, node: NodeId, command: SubmitHandoffPrefill, send_to: NodeId | None
    ) -> CommandEffects:
        effects: CommandEffects = await self.of[node].call("submit_prefill", command, send_to)
        return effects

    async def start_transfer(self, node: NodeId, handoff_id: HandoffId, attempt: int, destination: NodeId) -> bool:
        return bool(await self.of[node].call("start_transfer", handoff_id, attempt, destination))


class Run:
    """One after the other: `hand_over` some, `settle`, `figures`."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._loop = asyncio.get_running_loop()
        self._driver: Driver | None = None
        self._doors: Doors | None = None
        self._number = 0
        self._sampled_at: dict[RequestId, float] = {}
        self._landed_at: dict[HandoffId, float] = {}
        self._moved: list[Moved] = []
        self._failed = self._checked = self._damaged = 0
        self._lost = 0
        self._wall_s = 0.0

    def open(self, doors: Doors) -> None:
        self._doors = doors
        self._driver = Driver(doors, LIMITS, time.monotonic, lambda record: None, lambda request_id, reason: None)

    @property
    def pids(self) -> tuple[int, int]:
        doors = self._open_doors.of
        return doors[SOURCE].pid, doors[DESTINATION].pid

    def report(self, seconds: float, report: NodeReport) -> None:
        """A node's report; called on any thread."""
        self._loop.call_soon_threadsafe(self._take, seconds, report)

    async def hand_over(self, count: int, *, counts: bool = True, checked: bool = False) -> None:
        """This many handoffs, `parallel` at a time. counts: they are part of the figures. checked: so are their bytes,
        which takes longer than to move them.
        """
        numbers = iter(range(self._number, self._number + count))
        self._number += count
        started = time.monotonic()

        async def lane() -> None:
            for number in numbers:
                await self._hand_over(number, counts, checked)

        await asyncio.gather(*(lane() for _ in range(self.spec.parallel)))
        if counts:
            self._wall_s += time.monotonic() - started

    async def settle(self) -> None:
        """Wait until the nodes own nothing any more; what stays after END_TIMEOUT_S is lost."""
        deadline = time.monotonic() + END_TIMEOUT_S
        while True:
            statuses = [await door.call("status") for door in self._open_doors.of.values()]
            self._lost = sum(status["blocks"]["total"] - status["blocks"]["free"] for status in statuses)
            is_quiet = not self._lost and all(status["drained"] for status in statuses)
            if (is_quiet and not self._open_driver.active) or time.monotonic() > deadline:
                return
            await asyncio.sleep(_LOOK_S)

    def figures(self) -> Figures:
        return figures(
            self._moved,
            self._wall_s,
            failed=self._failed,
            checked=self._checked,
            damaged=self._damaged,
            lost_blocks=self._lost,
        )

    async def _hand_over(self, number: int, counts: bool, checked: bool) -> None:
        request_id, handoff_id = RequestId(f"r{number}"), HandoffId(f"h{number}")
        seed = number + 1 if checked else UNCHECKED
        request = Request(request_id, (seed,) * self.spec.prompt_tokens, max_tokens=2)
        record = await self._open_driver.hand_over(handoff_id, request, SOURCE, DESTINATION, Order.DESTINATION_FIRST)
        self._checked += checked
        sampled_at = self._sampled_at.pop(request_id, 0.0)
        landed_at = self._landed_at.pop(handoff_id, 0.0)
        moved = _moved(record, sampled_at, landed_at)
        if moved is None:
            self._failed += 1
        elif counts:
            self._moved.append(moved)

    def _take(self, seconds: float, report: NodeReport) -> None:
        for output in report.outputs:
            if output.index == 0:
                self._sampled_at[output.request_id] = seconds
            elif output.token == DAMAGED:
                self._damaged += 1
        for transfer in report.transfers:
            self._landed_at[transfer.handoff_id] = seconds
        self._open_driver.on_report(report)

    @property
    def _open_doors(self) -> Doors:
        assert self._doors is not None
        return self._doors

    @property
    def _open_driver(self) -> Driver:
        assert self._driver is not None
        return self._driver


def _moved(record: HandoffRecord, sampled_at: float, landed_at: float) -> Moved | None:
    transfer = record.transfer
    if transfer is None or record.completion is not Completion.HANDED_OVER:
        return None
    return Moved(transfer.bytes_moved, transfer.lane, sampled_at, landed_at, transfer.seconds, transfer.exposed_s)


@asynccontextmanager
async def opened(spec: Spec) -> AsyncIterator[Run]:
    """A run on two joined nodes, which are stopped on the way out."""
    run = Run(spec)
    nodes: list[NodeDoor] = []
    try:
        source, destination = await _start(spec, run.report, nodes.append)
        run.open(Doors(source, destination))
        await source.call("connect", destination.info)
        await destination.call("connect", source.info)
        if spec.layout == "scattered":
            await asyncio.gather(source.call("scatter"), destination.call("scatter"))
        yield run
    finally:
        await asyncio.gather(*(node.stop() for node in nodes))


async def _start(spec: Spec, on_report: OnReport, started: Callable[[NodeDoor], None]) -> tuple[NodeDoor, NodeDoor]:
    """Both nodes, not joined yet. started: called with each that has to be stopped."""
    if spec.transport == "memory":
        fabric = MemoryFabric()
        local = [
            LocalNode(Host(name, spec, MemoryTransport(fabric), on_report), os.getpid())
            for name in (SOURCE, DESTINATION)
        ]
        for node in local:
            started(node)
        return local[0], local[1]
    processes = [ProcessNode(name, spec, on_report) for name in (SOURCE, DESTINATION)]
    for process in processes:
        started(process)
    await asyncio.gather(*(process.started() for process in processes))
    return processes[0], processes[1]


async def measure(spec: Spec) -> Figures:
    """One whole run. Every wait is bounded. Raises TimeoutError or ConnectionError when a node doesn't start."""
    async with opened(spec) as run:
        await run.hand_over(spec.warmups, counts=False)
        await run.hand_over(spec.handoffs)
        await run.hand_over(spec.checked, counts=False, checked=True)
        await run.settle()
        return run.figures()
