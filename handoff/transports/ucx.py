"""The UCX transport: one thread that owns UCX, and blocks while nothing happens.

Tags, addresses and hellos: `ucx_wire`. Who may speak: `ucx_seal`. Peers and transfers: `ucx_worker`, `ucx_peer`. UCX's
settings: `ucx_env`.

The thread polls while there's work, spins SPIN_S longer (the next piece or answer is often near), then arms UCX's
event descriptor and sleeps on it and on an event of its own, which commands raise.
"""

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from handoff.transports.base import Done, Link, OnMessage, PeerLost, Piece, TransferError
from handoff.transports.liveness import PEER_SILENCE_S, QUESTIONS
from handoff.transports.pieces import check_frame, check_pieces, pool_bytes, run_callback
from handoff.transports.ucx_env import prepare_ucx
from handoff.transports.ucx_wire import Address

if TYPE_CHECKING:
    from handoff.transports.ucx_worker import UcxWorker

log = structlog.get_logger()

SPIN_S = 100e-6
BUSY_SLEEP_S = 0.02
"""Longest sleep with operations pending: UCX queues what a full channel refused, and no event tells of room."""
IDLE_SLEEP_S = 0.5
TICK_S = 0.5
START_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class _Command:
    run: "Callable[[UcxWorker], None]"
    done: Done | None

    def refuse(self) -> None:
        """The transport is closed: end what the command would have posted."""
        if self.done is not None:
            run_callback(self.done, PeerLost("the transport is closed"))


class UcxTransport:
    """A `Transport` over UCX. After `close`, what is posted ends with PeerLost on the caller's thread."""

    name = "ucx"

    def __init__(self, peer_silence_s: float = PEER_SILENCE_S, secret: bytes = b"") -> None:
        """peer_silence_s: how long a peer with pending operations may be silent; then they end with PeerLost.

        secret: the cluster's. Peers with another one are refused, see `ucx_seal`; what was posted for them ends with
        PeerLost.
        """
        self._peer_silence_s = peer_silence_s
        self._secret = secret
        self._commands: deque[_Command] = deque()
        self._lock = threading.Lock()
        self._stopping = False
        self._closed = False
        self._started = threading.Event()
        self._failure: Exception | None = None
        self._worker: UcxWorker | None = None
        self._thread: threading.Thread | None = None
        self._address = b""
        self._pool_size = 0
        self._wake = -1

    @property
    def address(self) -> bytes:
        return self._address

    def start(self, node: str, pool: Any, on_message: OnMessage) -> None:
        """Raises TransferError when UCX can't start, TypeError for a pool that isn't flat bytes."""
        if self._thread is not None:
            raise RuntimeError("a transport starts once")
        self._pool_size = pool_bytes(pool)
        prepare_ucx()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, args=(pool, on_message), name=f"ucx-{node}", daemon=True)
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S):
            raise TransferError(f"UCX did not start within {START_TIMEOUT_S:.0f} s")
        if self._failure is not None:
            raise TransferError(f"UCX can't start: {self._failure}") from self._failure

    def connect(self, peer: str, address: bytes) -> None:
        """Raises ValueError when `address` isn't of this kind of transport."""
        remote = Address.unpack(address)
        self._submit(lambda worker: worker.connect(peer, remote))

    def disconnect(self, peer: str) -> None:
        self._submit(lambda worker: worker.disconnect(peer))

    def send_message(self, peer: str, frame: bytes) -> None:
        check_frame(frame)
        self._submit(lambda worker: worker.send_message(peer, frame))

    def post_send(self, peer: str, channel: int, pieces: Sequence[Piece], done: Done) -> None:
        check_pieces(channel, pieces, self._pool_size)
        self._submit(lambda worker: worker.post_send(peer, channel, pieces, done), done)

    def post_receive(self, peer: str, channel: int, pieces: Sequence[Piece], done: Done) -> None:
        check_pieces(channel, pieces, self._pool_size)
        self._submit(lambda worker: worker.post_receive(peer, channel, pieces, done), done)

    def links(self) -> list[Link]:
        worker = self._worker
        return list(worker.links.values()) if worker is not None else []

    def close(self) -> None:
        with self._lock:
            self._stopping = True
            self._raise_event()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(CLOSE_TIMEOUT_S)
        if thread.is_alive():
            log.error("the ucx thread did not stop", seconds=CLOSE_TIMEOUT_S)

    def _submit(self, run: "Callable[[UcxWorker], None]", done: Done | None = None) -> None:
        with self._lock:
            if not self._closed:
                self._commands.append(_Command(run, done))
                self._raise_event()
                return
        _Command(run, done).refuse()

    def _raise_event(self) -> None:
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def _run(self, pool: Any, on_message: OnMessage) -> None:
        try:
            # Here, since it loads UCX, which reads the settings and belongs to this thread.
            from handoff.transports.ucx_pool import make_device_current
            from handoff.transports.ucx_worker import UcxWorker

            make_device_current(pool)
            worker = UcxWorker(pool, on_message, self._peer_silence_s, self._secret)
        except Exception as error:
            self._failure = error
            self._shut(None)
            self._started.set()
            return
        self._worker, self._address = worker, worker.address
        self._started.set()
        try:
            self._loop(worker)
        except Exception:
            log.exception("the ucx thread failed; the transport closes")
        self._worker = None
        self._shut(worker)

    def _loop(self, worker: "UcxWorker") -> None:
        with select.epoll() as events:
            events.register(worker.event_fd, select.EPOLLIN)
            events.register(self._wake, select.EPOLLIN)
            active = ticked = watched = time.monotonic()
            watch_s = self._peer_silence_s / QUESTIONS / 4
            while not self._stopping:
                changed = self._turn(worker)
                now = time.monotonic()
                if now - ticked > TICK_S:
                    worker.tick()
                    ticked = now
                if now - watched > watch_s:
                    worker.watch()
                    watched = now
                if changed:
                    active = now
                elif now - active <= SPIN_S:
                    # The kernel often wakes the peer's thread on the core that woke it, which is this one.
                    os.sched_yield()
                elif self._sleep(worker, events):
                    active = time.monotonic()

    def _turn(self, worker: "UcxWorker") -> bool:
        changed = self._run_commands(worker)
        changed |= worker.progress()
        # A hello must find every command that was given before the peer sent it.
        changed |= self._run_commands(worker)
        return worker.serve() or changed

    def _sleep(self, worker: "UcxWorker", events: select.epoll) -> bool:
        """Sleep until something happens; False if nothing did."""
        if not worker.arm():
            return True
        happened = events.poll(BUSY_SLEEP_S if worker.busy else IDLE_SLEEP_S)
        if any(fd == self._wake for fd, _ in happened):
            os.eventfd_read(self._wake)
        return bool(happened)

    def _run_commands(self, worker: "UcxWorker") -> bool:
        ran = False
        while self._commands:
            self._commands.popleft().run(worker)
            ran = True
        return ran

    def _shut(self, worker: "UcxWorker | None") -> None:
        if worker is not None:
            worker.close()
        with self._lock:
            self._closed = True
            commands, self._commands = self._commands, deque()
            os.close(self._wake)
            self._wake = -1
        for command in commands:
            command.refuse()
