"""The two nodes of a run, each in a process of its own or both in this one, behind one asynchronous door.

A node process serves one pipe: calls come in as (number, method, arguments), answers go out as (number, result), and
its reports as (None, seconds, report). It ends when the pipe does, so it never outlives its parent.
"""

import asyncio
import multiprocessing as mp
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from random import Random
from threading import Lock, Thread
from typing import Any, Protocol

from cluster.handoff_bench.device import BlockMover
from cluster.handoff_bench.scatter import scatter
from cluster.handoff_bench.spec import Spec
from decode_node.node import DecodeNode
from handoff.compatibility import Compatibility
from handoff.exchange import Exchange
from handoff.logs import quiet_logs
from handoff.node import MakeExchange, Node
from handoff.pool_layout import PoolLayout
from handoff.report import NodeReport
from handoff.transfer_ends import TransferEnd
from handoff.transports.base import Transport
from handoff.transports.registry import make_transport
from handoff.wire import PROTOCOL_VERSION
from handoff.wiring import PeerInfo
from prefill_node.node import PrefillNode
from scheduler.decode_scheduler import DecodeScheduler
from scheduler.ids import NodeId
from scheduler.prefill_scheduler import PrefillScheduler

SOURCE, DESTINATION = NodeId("prefill-0"), NodeId("decode-0")
START_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
NO_SECRET = b""
"""Made-up bytes, between two processes of this machine, for some seconds."""

OnReport = Callable[[float, NodeReport], None]
"""(seconds of the machine's monotonic clock, report). Called on any thread."""


class NodeDoor(Protocol):
    """A node, wherever it runs."""

    pid: int
    info: PeerInfo

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the node; its result, or that of the future that it returns. Raises what it raises."""
        ...

    async def stop(self) -> None: ...


class Host:
    """A node that runs in this process, with its device."""

    def __init__(self, name: NodeId, spec: Spec, transport: Transport, on_report: OnReport) -> None:
        device = BlockMover(spec.total_blocks, spec.block_bytes, max_model_len=spec.prompt_tokens + 1)
        self._spec, self._random = spec, Random(name)
        self.node = _build(name, spec, device, transport, lambda report: on_report(time.monotonic(), report))
        self.info = self.node.start(device.pool)

    def call(self, method: str, *arguments: Any) -> Any:
        if method == "scatter":
            return scatter(self.node, self._spec.total_blocks, self._random)
        return getattr(self.node, method)(*arguments)

    def stop(self) -> None:
        self.node.stop(STOP_TIMEOUT_S)


def _build(
    name: NodeId, spec: Spec, device: BlockMover, transport: Transport, publish: Callable[[NodeReport], None]
) -> Node[Any]:
    facts = device.facts()

    def make_exchange(report: Callable[[TransferEnd], None], adapter_digest: Callable[[str], str]) -> Exchange:
        return Exchange(
            node=name,
            incarnation=1,
            transport=transport,
            compatibility=Compatibility.of(facts, PROTOCOL_VERSION),
            layout=PoolLayout.of(facts),
            report=report,
            clock=time.monotonic,
            adapter_digest=adapter_digest,
            checksums=spec.checksums,
        )

    make: MakeExchange = make_exchange
    sizes = facts.total_blocks, facts.block_size, spec.limits
    if name == SOURCE:
        prefill = PrefillScheduler(
            *sizes, max_model_len=facts.max_model_len, max_handoffs=spec.total_blocks, prefix_caching=False
        )
        return PrefillNode(name, 1, prefill, device, make, publish, time.monotonic)
    decode = DecodeScheduler(
        *sizes, max_model_len=facts.max_model_len, max_reservations=spec.total_blocks, prefix_caching=False
    )
    return DecodeNode(name, 1, decode, device, make, publish, time.monotonic)


class LocalNode:
    """A node of this process."""

    def __init__(self, host: Host, pid: int) -> None:
        self._host, self.pid, self.info = host, pid, host.info

    async def call(self, method: str, *arguments: Any) -> Any:
        answer = await asyncio.to_thread(self._host.call, method, *arguments)
        if isinstance(answer, Future):
            return await asyncio.wait_for(asyncio.wrap_future(answer), CALL_TIMEOUT_S)
        return answer

    async def stop(self) -> None:
        await asyncio.to_thread(self._host.stop)


class ProcessNode:
    """A node in a process of its own. Made and used on one event loop."""

    def __init__(self, name: NodeId, spec: Spec, on_report: OnReport) -> None:
        spawn = mp.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(name, spec, theirs), name=name, daemon=True)
        self._process.start()
        theirs.close()
        self._name, self._on_report = name, on_report
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._last = 0
        self._started: asyncio.Future[PeerInfo] = self._loop.create_future()
        self._waiting[0] = self._started
        Thread(target=self._read, name=f"{name}-pipe", daemon=True).start()
        self.pid = self._process.pid or 0

    async def started(self) -> None:
        """Raises TimeoutError, or ConnectionError when the process has ended."""
        self.info = await asyncio.wait_for(self._started, START_TIMEOUT_S)

    async def call(self, method: str, *arguments: Any) -> Any:
        self._last += 1
        number, future = self._last, self._loop.create_future()
        self._waiting[number] = future
        try:
            self._pipe.send((number, method, arguments))
            return await asyncio.wait_for(future, CALL_TIMEOUT_S)
        finally:
            self._waiting.pop(number, None)

    async def stop(self) -> None:
        """Kills it if it does not end by itself."""
        with suppress(OSError):
            self._pipe.send(None)
        await asyncio.to_thread(self._process.join, STOP_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join, STOP_TIMEOUT_S)
        self._pipe.close()

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, *content = self._pipe.recv()
                if number is None:
                    self._on_report(*content)
                else:
                    self._loop.call_soon_threadsafe(self._answer, number, *content)
        with suppress(RuntimeError):  # the event loop has ended before the process
            self._loop.call_soon_threadsafe(self._lose)

    def _answer(self, number: int, result: Any) -> None:
        future = self._waiting.pop(number, None)
        if future is None or future.done():
            return
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)

    def _lose(self) -> None:
        for number in list(self._waiting):
            self._answer(number, ConnectionError(f"the process of {self._name} has ended"))


def _serve(name: NodeId, spec: Spec, pipe: Connection) -> None:
    """A node process, until the pipe ends or says so."""
    quiet_logs()
    lock = Lock()

    def tell(*message: Any) -> None:
        with lock, suppress(OSError):
            pipe.send(message)

    host = Host(
        name, spec, make_transport(spec.transport, NO_SECRET), lambda seconds, report: tell(None, seconds, report)
    )
    tell(0, host.info)
    with suppress(EOFError, OSError):
        while (message := pipe.recv()) is not None:
            _answer_call(host, tell, *message)
    host.stop()


def _answer_call(host: Host, tell: Callable[..., None], number: int, method: str, arguments: tuple[Any, ...]) -> None:
    try:
        answer = host.call(method, *arguments)
    except Exception as error:
        tell(number, error)
        return
    if isinstance(answer, Future):
        answer.add_done_callback(lambda done: tell(number, done.exception() or done.result()))
    else:
        tell(number, answer)
