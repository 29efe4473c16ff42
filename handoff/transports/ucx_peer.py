"""One peer as the UCX thread sees it: its endpoint, its numbers, its pending pieces and messages.

Everything here runs on the thread that owns the UCX worker.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from ucxx._lib.arr import Array
from ucxx._lib.libucxx import UCXEndpoint, UCXError, UCXRequest, UCXXTag

from handoff.transports.base import Done, Piece, TransferError
from handoff.transports.pieces import run_callback
from handoff.transports.ucx_wire import Address, Pairing, message_tag

PIECES_IN_FLIGHT = 256
"""Pieces of one posted operation that UCX holds at a time. Per operation, so that none can starve another; many,
since a Python-busy process may let this thread run only once in 5 ms (the interpreter's switch interval)."""
MESSAGES_IN_FLIGHT = 64
OUTBOX_BYTES = 256 << 20
"""Messages that may wait for a peer. A peer that takes none for so long is given up."""

Bytes = npt.NDArray[np.uint8]
Post = Callable[[Piece], UCXRequest]


class Transfer:
    """One posted operation: its pieces pass through UCX in order, PIECES_IN_FLIGHT at a time."""

    __slots__ = ("_done", "_in_flight", "_next", "_pieces", "_post", "error")

    def __init__(self, pieces: Sequence[Piece], post: Post, done: Done) -> None:
        self._pieces = tuple(pieces)
        self._post = post
        self._done = done
        self._next = 0
        self._in_flight: deque[UCXRequest] = deque()
        self.error: TransferError | None = None

    @property
    def ended(self) -> bool:
        """Nothing is in flight and nothing more will be posted: its memory is quiet."""
        return not self._in_flight and (self.error is not None or self._next == len(self._pieces))

    def advance(self) -> bool:
        """Collect what UCX has completed and post more. True if anything changed."""
        before = (self._next, len(self._in_flight))
        in_flight = self._in_flight
        while in_flight and in_flight[0].completed:
            self._collect(in_flight.popleft())
        while self._next < len(self._pieces) and len(in_flight) < PIECES_IN_FLIGHT and self.error is None:
            try:
                in_flight.append(self._post(self._pieces[self._next]))
            except UCXError as error:
                self.error = _typed(error)
            self._next += 1
        return before != (self._next, len(in_flight))

    def abandon(self, error: TransferError) -> None:
        """Post no more; the operation ends with `error` once UCX has let go of what is in flight."""
        self.error = error

    def finish(self) -> None:
        run_callback(self._done, self.error)

    def release(self) -> None:
        """Let go of UCX's requests and endpoint, so that the worker can be destroyed."""
        self._in_flight.clear()
        del self._post

    def _collect(self, request: UCXRequest) -> None:
        try:
            request.check_error()
        except UCXError as error:
            self.error = self.error or _typed(error)


class UcxPeer:
    """Made for each `connect`; `pairing` says whether what is sent to it may leave yet."""

    def __init__(self, name: str, address: Address, number: int, endpoint: UCXEndpoint, same_host: bool) -> None:
        self.name = name
        self.identity = address.identity
        self.pairing = Pairing(number)
        self.endpoint = endpoint
        self.same_host = same_host
        self.sends: list[Transfer] = []
        self.receives: list[Transfer] = []
        self._outbox: deque[bytes] = deque()
        self._outbox_bytes = 0
        self._outgoing: deque[tuple[UCXRequest, Any]] = deque()
        self._incoming: deque[tuple[UCXRequest, Bytes]] = deque()

    @property
    def busy(self) -> bool:
        return bool(self.sends or self.receives or self._outbox or self._outgoing or self._incoming)

    @property
    def failed(self) -> bool:
        return any(transfer.error for transfer in (*self.receives, *self.sends))

    @property
    def overrun(self) -> bool:
        return self._outbox_bytes > OUTBOX_BYTES

    def send_message(self, frame: bytes) -> None:
        self._outbox.append(frame)
        self._outbox_bytes += len(frame)

    def send_now(self, frame: bytes, tag: int) -> None:
        """Raises UCXError when the endpoint has failed."""
        # UCX reads the bytes until the request has completed, and ucxx doesn't keep them alive.
        buffer = Array(frame)
        self._outgoing.append((self.endpoint.tag_send(buffer, UCXXTag(tag)), buffer))

    def expect(self, probe: Any) -> None:
        """Receive the message that a probe has found."""
        buffer = np.empty(probe.length, np.uint8)
        self._incoming.append((self.endpoint.tag_recv_with_handle(Array(buffer), probe), buffer))

    def arrived(self) -> Iterator[bytes]:
        """Messages that have arrived, in the order they were sent. Raises UCXError when one has failed."""
        while self._incoming and self._incoming[0][0].completed:
            request, buffer = self._incoming.popleft()
            request.check_error()
            yield buffer.tobytes()

    def advance(self) -> bool:
        """Move messages and pieces on; True if anything changed. Raises UCXError when the endpoint has failed."""
        changed = self._advance_messages()
        for transfer in self.receives:
            changed |= transfer.advance()
        if self.pairing.is_open:
            for transfer in self.sends:
                changed |= transfer.advance()
        return changed

    def take_ended(self) -> list[Transfer]:
        """Remove and return the transfers that have ended."""
        ended = [transfer for transfer in (*self.receives, *self.sends) if transfer.ended]
        if ended:
            self.receives = [transfer for transfer in self.receives if not transfer.ended]
            self.sends = [transfer for transfer in self.sends if not transfer.ended]
        return ended

    def abandon(self, error: TransferError) -> list[Transfer]:
        """Every pending transfer, abandoned with `error`."""
        transfers = [*self.receives, *self.sends]
        for transfer in transfers:
            transfer.abandon(error)
        return transfers

    def unsettled(self) -> list[tuple[UCXRequest, Any]]:
        """Requests for messages that UCX still holds, with the buffers that must outlive them."""
        return [*self._outgoing, *self._incoming]

    def _advance_messages(self) -> bool:
        changed = False
        while self._outgoing and self._outgoing[0][0].completed:
            self._outgoing.popleft()[0].check_error()
            changed = True
        peer_number = self.pairing.peer_number
        while self._outbox and peer_number is not None and len(self._outgoing) < MESSAGES_IN_FLIGHT:
            frame = self._outbox.popleft()
            self._outbox_bytes -= len(frame)
            self.send_now(frame, message_tag(peer_number))
            changed = True
        return changed


def _typed(error: UCXError) -> TransferError:
    return TransferError(f"UCX ended the transfer: {type(error).__name__}: {error}")
