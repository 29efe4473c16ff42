"""One peer as the UCX thread sees it: its endpoint, its numbers, its silence, its pending pieces, messages, notes.

Everything here runs on the thread that owns the UCX worker.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog
from ucxx._lib.arr import Array
from ucxx._lib.libucxx import UCXEndpoint, UCXError, UCXRequest, UCXXTag

from handoff.transports.base import MAX_MESSAGE_BYTES, TransferError
from handoff.transports.liveness import Liveness, Verdict
from handoff.transports.ucx_offer import MAX_PART_BYTES
from handoff.transports.ucx_seal import SEAL_BYTES, FramesMissing, NotAuthentic, Opener, Sealer
from handoff.transports.ucx_shared import SharedLane
from handoff.transports.ucx_transfer import Receive, Send, Transfer
from handoff.transports.ucx_wire import (
    HELLO_TAG,
    NOTE_BYTES,
    Address,
    Note,
    Pairing,
    Tell,
    is_note,
    is_offer,
    message_tag,
    note_tag,
    offer_tag,
)

log = structlog.get_logger()

MESSAGES_IN_FLIGHT = 64
UNOPENED_FRAMES = 64
"""Frames that may wait for the hello before them, which came earlier; more are not of the peer."""
OUTBOX_BYTES = 256 << 20
"""Messages that may wait for a peer. A peer that takes none for so long is given up."""

Bytes = npt.NDArray[np.uint8]


class UcxPeer:
    """Made for each `connect`; `pairing` says whether what is sent to it may leave yet."""

    def __init__(
        self,
        name: str,
        address: Address,
        endpoint: UCXEndpoint,
        shared: SharedLane,
        same_host: bool,
        silence_s: float,
        nonce: bytes,
    ) -> None:
        self.name = name
        self.identity = address.identity
        self.place = address.place
        self.pairing = Pairing(shared.number, nonce)
        self.endpoint = endpoint
        self.shared = shared
        self.same_host = same_host
        self.liveness = Liveness(silence_s)
        self.sends: list[Send] = []
        self.receives: list[Receive] = []
        self._ends: Counter[int] = Counter()
        """By channel: ends of the peer's sends that no receive has heard of; negative: to be ignored when they come."""
        self._outbox: deque[bytes] = deque()
        self._outbox_bytes = 0
        self._outgoing: deque[tuple[UCXRequest, Any]] = deque()
        self._incoming: deque[tuple[UCXRequest, Bytes, int]] = deque()
        """Each with its tag."""
        self._unbegun: deque[Callable[[], None]] = deque()
        self._seals: tuple[Sealer, Opener] | None = None
        self._forged = 0

    def open(self, seals: tuple[Sealer, Opener]) -> None:
        """The pairing has opened: from now on frames leave and are let in."""
        self._seals = seals

    @property
    def busy(self) -> bool:
        return self.pending or bool(self._outbox or self._outgoing or self._incoming)

    @property
    def pending(self) -> bool:
        """An operation was posted and has not ended."""
        return bool(self._unbegun or self.sends or self.receives) or self.shared.busy

    @property
    def failed(self) -> bool:
        return any(transfer.error for transfer in (*self.receives, *self.sends))

    @property
    def overrun(self) -> bool:
        return self._outbox_bytes > OUTBOX_BYTES

    def send_message(self, frame: bytes) -> None:
        self._outbox.append(frame)
        self._outbox_bytes += len(frame)

    def send_hello(self, hello: bytes) -> None:
        """Raises UCXError when the endpoint has failed."""
        self._post(hello, HELLO_TAG)

    def _post(self, frame: bytes, tag: int) -> None:
        """Raises UCXError when the endpoint has failed."""
        # UCX reads the bytes until the request has completed, and ucxx doesn't keep them alive.
        buffer = Array(frame)
        self._outgoing.append((self.endpoint.tag_send(buffer, UCXXTag(tag)), buffer))

    def _send_now(self, content: bytes, tag: int) -> None:
        """Sealed, on an open pairing. Raises UCXError when the endpoint has failed."""
        assert self._seals is not None
        self._post(self._seals[0].seal(tag, content), tag)

    def add_send(self, begin: Callable[[], None]) -> None:
        """begin: puts the send where the lane says, which is known only when the connection is open."""
        self._unbegun.append(begin)

    def add_receive(self, receive: Receive) -> None:
        self.receives.append(receive)
        if self._ends[receive.channel] > 0:
            self._count_end(receive.channel, -1)
            receive.confirm(None)

    def takes(self, tag: int, length: int) -> bool:
        """Whether a frame of so many bytes may be what the tag says, and there is room for it."""
        limit = NOTE_BYTES if is_note(tag) else MAX_PART_BYTES if is_offer(tag) else MAX_MESSAGE_BYTES
        room = self.pairing.is_open or len(self._incoming) < UNOPENED_FRAMES
        return room and SEAL_BYTES < length <= SEAL_BYTES + limit

    def expect(self, probe: Any) -> None:
        """Receive the frame that a probe has found and left in its place, which this peer `takes`."""
        buffer = np.empty(probe.length, np.uint8)
        request = self.endpoint.tag_recv(Array(buffer), probe.sender_tag)
        self._incoming.append((request, buffer, probe.sender_tag.value))

    def arrived(self) -> Iterator[bytes]:
        """Messages that have arrived, in the order they were sent.

        Raises UCXError when one has failed, FramesMissing when some will never come.
        """
        while self._incoming and self._incoming[0][0].completed and self._seals is not None:
            request, buffer, tag = self._incoming.popleft()
            request.check_error()
            try:
                content = self._seals[1].open(tag, buffer.data)
            except FramesMissing:
                raise
            except NotAuthentic as error:
                self._count_forged(str(error))
                continue
            self.liveness.heard()
            if is_note(tag):
                self._take_note(content)
            elif is_offer(tag):
                self._take_offer(content)
            else:
                yield content

    def _count_forged(self, reason: str) -> None:
        """It is not the peer's doing, so the peer stays."""
        self._forged += 1
        if self._forged == 1:
            log.warning("forged frame dropped; no other one from here will be logged", peer=self.name, reason=reason)

    def advance(self) -> bool:
        """Move messages and pieces on; True if anything changed. Raises UCXError when the endpoint has failed."""
        changed = self._advance_messages()
        for receive in self.receives:
            changed |= self._advance_transfer(receive)
            if receive.credit_due():
                self._tell(Note(Tell.LANDED, receive.channel, receive.landed))
        if self.pairing.peer_number is not None:
            tag = offer_tag(self.pairing.peer_number)
            self._begin_sends()
            for send in self.sends:
                changed |= self._advance_transfer(send)
            changed |= self.shared.offer(lambda part: self._send_now(part, tag))
            changed |= self.shared.copy(self._tell)
        return changed

    def take_ended(self) -> list[Transfer]:
        """Remove and return the transfers that have ended."""
        ended: list[Transfer] = []
        for receive in [receive for receive in self.receives if receive.ended]:
            self.receives.remove(receive)
            ended.append(receive)
            if not receive.confirmed:
                self._count_end(receive.channel, -1)
        for send in [send for send in self.sends if send.ended]:
            self.sends.remove(send)
            ended.append(send)
            self._tell(Note(Tell.FAILED if send.error else Tell.SENT, send.channel))
        return ended

    def watch(self, now: float) -> bool:
        """Ask a silent peer; False when it has been silent for too long."""
        verdict = self.liveness.check(now, pending=self.pairing.is_open and self.pending)
        if verdict is Verdict.ASK:
            self._tell(Note(Tell.PING))
        return verdict is not Verdict.LOST

    def abandon(self, error: TransferError) -> list[Transfer]:
        """Every pending transfer of UCX's, abandoned with `error`."""
        self._begin_sends()
        transfers = [*self.receives, *self.sends]
        for transfer in transfers:
            transfer.abandon(error)
        return transfers

    def unsettled(self) -> list[tuple[UCXRequest, Any]]:
        """Requests for messages that UCX still holds, with the buffers that must outlive them."""
        return [*self._outgoing, *((request, buffer) for request, buffer, _ in self._incoming)]

    def _begin_sends(self) -> None:
        while self._unbegun:
            self._unbegun.popleft()()

    def _take_offer(self, data: bytes) -> None:
        try:
            self.shared.take_offer(data)
        except ValueError as error:
            log.warning("offer dropped", peer=self.name, error=str(error))

    def _take_note(self, data: bytes) -> None:
        try:
            note = Note.unpack(data)
        except ValueError as error:
            log.warning("note dropped", peer=self.name, error=str(error))
            return
        match note.tell:
            case Tell.PING:
                self._tell(Note(Tell.PONG))
            case Tell.LANDED:
                send = next((send for send in self.sends if send.channel == note.channel), None)
                if send is not None:
                    send.credit(note.count)
            case Tell.SENT:
                self._end_of_send(note.channel, None)
            case Tell.FAILED:
                self._end_of_send(note.channel, TransferError(f"{self.name} could not send"))
            case Tell.TAKEN:
                self.shared.take_answer(note.channel, None)
            case Tell.REFUSED:
                refused = TransferError(f"{self.name} refused the pieces on channel {note.channel}; its log says why")
                self.shared.take_answer(note.channel, refused)

    def _end_of_send(self, channel: int, error: TransferError | None) -> None:
        waiting = (receive for receive in self.receives if receive.channel == channel and not receive.confirmed)
        receive = next(waiting, None) if self._ends[channel] >= 0 else None
        if receive is None:
            self._count_end(channel, 1)
        else:
            receive.confirm(error)

    def _count_end(self, channel: int, change: int) -> None:
        self._ends[channel] += change
        if self._ends[channel] == 0:
            del self._ends[channel]

    def _advance_transfer(self, transfer: Transfer) -> bool:
        landed = transfer.landed
        changed = transfer.advance()
        if transfer.landed != landed:
            self.liveness.heard()
        return changed

    def _tell(self, note: Note) -> None:
        """Dropped when the endpoint has failed: the peer is given up soon."""
        if self.pairing.peer_number is not None:
            with suppress(UCXError):
                self._send_now(note.pack(), note_tag(self.pairing.peer_number))

    def _advance_messages(self) -> bool:
        changed = False
        while self._outgoing and self._outgoing[0][0].completed:
            self._outgoing.popleft()[0].check_error()
            changed = True
        peer_number = self.pairing.peer_number
        while self._outbox and peer_number is not None and len(self._outgoing) < MESSAGES_IN_FLIGHT:
            frame = self._outbox.popleft()
            self._outbox_bytes -= len(frame)
            self._send_now(frame, message_tag(peer_number))
            changed = True
        return changed
