"""One posted operation: its pieces pass through UCX in order, a window at a time.

Pieces are cut at MAX_PIECE_BYTES, on both sides alike, so the window is bounded in bytes and in pieces: a long
operation holds the wire for one window at most before one posted after it gets its share.

A short piece leaves the sender at once, and lies in the receiver's UCX until it is received. So the sender is never
further ahead than CREDIT_BYTES and CREDIT_PIECES of what the receiver told has landed. That is several windows, for the
sender to hear of it in time: a receiver that copies (CMA) tells nothing before it has copied all that was announced.

Where the receiver reads the sender's memory (CMA), nothing tells it that the sender has given up and uses that memory
for something else. So a receive succeeds only when the sender says, at its end, that it has kept everything in place.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from ucxx._lib.libucxx import UCXError

from handoff.transports.base import Done, Piece, TransferError
from handoff.transports.pieces import run_callback

MAX_PIECE_BYTES = 4 << 20
"""Shorter cuts cost: each piece is an exchange of its own, about 10 us."""
WINDOW_BYTES = 16 << 20
WINDOW_PIECES = 1024
"""Per operation, so that none can starve another; large, since a Python-busy process may let the transport's thread
run only once in 5 ms (the interpreter's switch interval)."""
CREDIT_BYTES = 4 * WINDOW_BYTES
CREDIT_PIECES = 4 * WINDOW_PIECES
CREDIT_NOTES = 4
"""The receiver tells what has landed so many times per CREDIT_BYTES or CREDIT_PIECES."""


class Request(Protocol):
    """Of ucxx: `check_error` raises UCXError when it has failed."""

    @property
    def completed(self) -> bool: ...

    def check_error(self) -> None: ...


Post = Callable[[Piece], Request]


def cut(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """The same bytes in the same order, in pieces of at most MAX_PIECE_BYTES."""
    for piece in pieces:
        if piece.length <= MAX_PIECE_BYTES:
            yield piece
            continue
        end = piece.offset + piece.length
        for offset in range(piece.offset, end, MAX_PIECE_BYTES):
            yield Piece(offset, min(MAX_PIECE_BYTES, end - offset))


class Transfer:
    """What sends and receives have in common."""

    __slots__ = (
        "_done",
        "_flying",
        "_landed_bytes",
        "_pieces",
        "_post",
        "_posted",
        "_posted_bytes",
        "channel",
        "error",
        "landed",
    )

    def __init__(self, channel: int, pieces: Sequence[Piece], post: Post, done: Done) -> None:
        self.channel = channel
        self.error: TransferError | None = None
        self.landed = 0
        """Pieces that UCX has completed."""
        self._pieces = tuple(cut(pieces))
        self._post = post
        self._done = done
        self._flying: deque[Request] = deque()
        self._posted = self._posted_bytes = 0
        self._landed_bytes = 0

    @property
    def quiet(self) -> bool:
        """Nothing is in flight and nothing more will be posted: UCX doesn't touch its memory."""
        return not self._flying and (self.error is not None or self._posted == len(self._pieces))

    @property
    def ended(self) -> bool:
        return self.quiet

    def advance(self) -> bool:
        """Collect what UCX has completed and post more. True if anything changed."""
        before = self._posted + self.landed
        if self._flying:
            self._collect()
        if self._posted < len(self._pieces) and self.error is None:
            self._fill()
        return before != self._posted + self.landed

    def abandon(self, error: TransferError) -> None:
        """Post no more; the operation ends with `error` once UCX has let go of what is in flight."""
        self.error = error

    def finish(self) -> None:
        run_callback(self._done, self.error)

    def release(self) -> None:
        """Let go of UCX's requests and endpoint, so that the worker can be destroyed."""
        self._flying.clear()
        del self._post

    def _collect(self) -> None:
        flying = self._flying
        while flying and flying[0].completed:
            try:
                flying.popleft().check_error()
            except UCXError as error:
                self.error = self.error or _typed(error)
            self._landed_bytes += self._pieces[self.landed].length
            self.landed += 1

    def _fill(self) -> None:
        pieces, fly, post = self._pieces, self._flying.append, self._post
        end, room = self._room()
        while self._posted < end and (length := pieces[self._posted].length) <= room:
            try:
                fly(post(pieces[self._posted]))
            except UCXError as error:
                self.error = _typed(error)
                return
            room -= length
            self._posted += 1
            self._posted_bytes += length

    def _room(self) -> tuple[int, int]:
        """How many pieces may have been posted, and how many more bytes."""
        end = min(len(self._pieces), self.landed + WINDOW_PIECES)
        return end, self._landed_bytes + WINDOW_BYTES - self._posted_bytes


class Send(Transfer):
    """Isn't too far ahead of what the receiver told has landed."""

    __slots__ = ("_credited", "_credited_bytes")

    def __init__(self, channel: int, pieces: Sequence[Piece], post: Post, done: Done) -> None:
        super().__init__(channel, pieces, post, done)
        self._credited = self._credited_bytes = 0

    def credit(self, landed: int) -> None:
        """The receiver has the first `landed` pieces."""
        # More than were posted: told of an operation that used the channel before. It only widens the credit once.
        landed = min(landed, self._posted)
        for piece in self._pieces[self._credited : landed]:
            self._credited_bytes += piece.length
        self._credited = max(self._credited, landed)

    def _room(self) -> tuple[int, int]:
        end, room = super()._room()
        ahead = self._credited_bytes + CREDIT_BYTES - self._posted_bytes
        return min(end, self._credited + CREDIT_PIECES), min(room, ahead)


class Receive(Transfer):
    """Tells what has landed, and waits at the end for the sender's word."""

    __slots__ = ("_confirmed", "_told", "_told_bytes")

    def __init__(self, channel: int, pieces: Sequence[Piece], post: Post, done: Done) -> None:
        super().__init__(channel, pieces, post, done)
        self._confirmed = False
        self._told = self._told_bytes = 0

    @property
    def confirmed(self) -> bool:
        return self._confirmed

    @property
    def ended(self) -> bool:
        return self.quiet and (self._confirmed or self.error is not None)

    def confirm(self, error: TransferError | None) -> None:
        """The sender's operation has ended, so with `error`."""
        self._confirmed = True
        self.error = self.error or error

    def credit_due(self) -> bool:
        """Enough has landed since this was True before, and the sender has more to send."""
        if self.landed == len(self._pieces) or not self._is_worth_telling():
            return False
        self._told, self._told_bytes = self.landed, self._landed_bytes
        return True

    def _is_worth_telling(self) -> bool:
        pieces, length = self.landed - self._told, self._landed_bytes - self._told_bytes
        return pieces >= CREDIT_PIECES // CREDIT_NOTES or length >= CREDIT_BYTES // CREDIT_NOTES


def _typed(error: UCXError) -> TransferError:
    return TransferError(f"UCX ended the transfer: {type(error).__name__}: {error}")
