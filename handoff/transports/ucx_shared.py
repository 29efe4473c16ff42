"""Between nodes of one machine the receiver copies from the sender's pool by itself (`shared_pool`).

UCX carries words only:

    sender:   Offer (where the pieces lie in its pool)   ->
                                                         receiver: copies them when it has posted the receive
                                                      <- Note TAKEN, or REFUSED

The receiver decides the lane when it connects, by reaching the sender's pool or not, and says so in each hello of that
connection; a sender sends nothing before such a hello. So both use the same lane for every operation in a direction.

A sender that gives the receiver up clears its connection in its control file before its operations end; the receiver
looks there after each copy, so a receive succeeds only if the bytes were in place to its end.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import structlog

from handoff.transports import shared_copy
from handoff.transports.base import Done, Piece, TransferError
from handoff.transports.pieces import run_callback
from handoff.transports.shared_copy import PieceCopy
from handoff.transports.shared_pool import PeerPool
from handoff.transports.ucx_offer import Offer, OfferPart, columns, parts_of
from handoff.transports.ucx_wire import Note, Tell

log = structlog.get_logger()

TURN_OPERATIONS = 16
"""How many short operations may be copied before the transport looks after messages again."""


class SharedOperation:
    """One posted operation; `error` is why it ended, None for success."""

    def __init__(self, channel: int, pieces: Sequence[Piece], done: Done) -> None:
        self.channel = channel
        self.offsets, self.lengths = columns(pieces)
        self.error: TransferError | None = None
        self._done = done

    def finish(self) -> None:
        run_callback(self._done, self.error)


class SharedReceive(SharedOperation):
    """Copies once it has the offer."""

    copy: PieceCopy | None = None
    offer: Offer | None = None

    @property
    def copied(self) -> bool:
        """Nothing more is to be copied: all was, or the offer does not fit."""
        return self.error is not None or (self.copy is not None and self.copy.ended)

    def begin(self, offer: Offer, source: PeerPool, target: int) -> None:
        """target: our pool's address. Raises TransferError when the offer does not fit."""
        self.offer = offer
        theirs, lengths = offer.offsets, self.lengths
        if not np.array_equal(offer.lengths, lengths):
            raise TransferError(f"channel {self.channel}: the sender's pieces have other lengths than ours")
        if (theirs < 0).any() or (theirs > source.size - lengths).any():
            raise TransferError(f"channel {self.channel}: the sender's pieces reach outside its pool")
        self.copy = PieceCopy(target + self.offsets, source.base + theirs, lengths)


class SharedLane:
    """The operations with one peer that use this lane, in both directions."""

    def __init__(self, number: int, source: PeerPool | None, pool: Any) -> None:
        """number: ours, of the connection. source: the peer's pool; None if receives use UCX. pool: ours."""
        self.source = source
        self.given_up = False
        """The peer has given us up, or is no more."""
        self.number = number
        self._pool = pool
        self._unoffered: deque[SharedOperation] = deque()
        self._offered: list[SharedOperation] = []
        self._waiting: dict[int, deque[SharedReceive]] = {}
        self._copying: deque[SharedReceive] = deque()
        self._offers: dict[int, deque[Offer]] = {}
        self._ended: list[SharedOperation] = []

    @property
    def busy(self) -> bool:
        return bool(self._unoffered or self._offered or self._waiting or self._copying or self._ended)

    def post_send(self, channel: int, pieces: Sequence[Piece], done: Done) -> None:
        self._unoffered.append(SharedOperation(channel, pieces, done))

    def post_receive(self, channel: int, pieces: Sequence[Piece], done: Done) -> None:
        self._waiting.setdefault(channel, deque()).append(SharedReceive(channel, pieces, done))
        self._match(channel)

    def take_offer(self, data: bytes) -> None:
        """Raises ValueError for what is no part of an offer."""
        part = OfferPart.unpack(data)
        offers = self._offers.setdefault(part.channel, deque())
        if offers and not offers[-1].complete:
            offers[-1].add(part)
        else:
            offers.append(Offer(part))
        self._match(part.channel)

    def take_answer(self, channel: int, error: TransferError | None) -> None:
        """The receiver is through with our oldest operation on `channel`."""
        send = next((send for send in self._offered if send.channel == channel), None)
        if send is not None:
            self._offered.remove(send)
            self._end(send, error)

    def offer(self, send_frame: Callable[[bytes], None]) -> bool:
        """Offer what was posted; the peer's hello must have come. True if there was anything."""
        offered = bool(self._unoffered)
        while self._unoffered:
            send = self._unoffered.popleft()
            self._offered.append(send)
            for part in parts_of(send.channel, self.number, send.offsets, send.lengths):
                send_frame(part.pack())
        return offered

    def copy(self, tell: Callable[[Note], None]) -> bool:
        """Copy about a slice: one of the oldest operation, more of others if it is short. True if anything changed."""
        changed = bool(self._copying)
        room = shared_copy.SLICE_BYTES
        while self._copying and room > 0 and not self.given_up:
            receive = self._copying.popleft()
            room -= max(self._copy_slice(receive), shared_copy.SLICE_BYTES // TURN_OPERATIONS)
            if self.given_up or not receive.copied:
                self._copying.append(receive)
                continue
            self._end(receive, receive.error)
            tell(Note(Tell.REFUSED if receive.error else Tell.TAKEN, receive.channel))
        return changed

    def take_ended(self) -> list[SharedOperation]:
        ended, self._ended = self._ended, []
        return ended

    def abandon(self, error: TransferError) -> list[SharedOperation]:
        """Every operation that was not taken yet; the pending ones with `error`. Lets go of the peer's pool."""
        waiting = [receive for queue in self._waiting.values() for receive in queue]
        for operation in (*self._unoffered, *self._offered, *waiting, *self._copying):
            self._end(operation, error)
        self._unoffered.clear()
        self._offered.clear()
        self._waiting.clear()
        self._copying.clear()
        self._offers.clear()
        if self.source is not None:
            self.source.close()
            self.source = None
        return self.take_ended()

    def _match(self, channel: int) -> None:
        waiting, offers = self._waiting.get(channel), self._offers.get(channel)
        if self.source is None or not waiting or not offers or not offers[0].complete:
            return
        receive, offer = waiting.popleft(), offers.popleft()
        for queues in (self._waiting, self._offers):
            if not queues[channel]:
                del queues[channel]
        self._copying.append(receive)
        try:
            receive.begin(offer, self.source, self._pool.ctypes.data)
        except TransferError as error:
            log.error("a receive does not fit what was sent", error=str(error))
            receive.error = error

    def _copy_slice(self, receive: SharedReceive) -> int:
        """Returns how many bytes were copied; notices when the peer is lost."""
        copied = 0
        try:
            if receive.copy is not None and self.source is not None:
                copied = receive.copy.advance(self.source.copy)
        except OSError as error:
            log.warning("the peer's pool can't be read any more", error=str(error))
            self.given_up = True
        if receive.copied and not self._source_stands(receive):
            self.given_up = True
        return copied

    def _source_stands(self, receive: SharedReceive) -> bool:
        return self.source is not None and receive.offer is not None and self.source.stands(receive.offer.number)

    def _end(self, operation: SharedOperation, error: TransferError | None) -> None:
        operation.error = error
        self._ended.append(operation)
