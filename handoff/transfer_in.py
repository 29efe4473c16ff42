"""The destination's side of one transfer, as data.

    EXPECTED --Offer--> OPEN --Segment: receives are posted ... Segment with the record--> CLOSED --all landed--> over
        `--withdrawn--> over `--Cease of the source-----------------------------------------^

Receives are posted only for segments that are on their way, so that the bytes that end them always come. A destination
that wants no more says so and takes what is under way: its memory is quiet when the source has answered.
"""

from handoff.wire import Offer, Record, Segment
from scheduler.decode_scheduler import ReservedKv


class BadSegment(ValueError):
    """A segment that can't be true; its sender is at fault."""


class Incoming:
    """Pure. blocks_moved, bytes_moved: of all segments so far.

    receiving_s: seconds during which anything was under way. exposed_s: from the last segment's message to the end.
    """

    def __init__(self, expected: ReservedKv) -> None:
        self.expected = expected
        self.offer: Offer | None = None
        self.peer = ""
        self.channel = 0
        self.record: Record | None = None
        self.is_withdrawn = False
        self.error: str | None = None
        self.blocks_moved = self.bytes_moved = 0
        self.receiving_s = self.exposed_s = 0.0
        self._covered = expected.cached_blocks
        self._next = 0
        self._pending: set[int] = set()
        self._closed = False
        self._busy_since = self._last_came = 0.0

    @property
    def is_over(self) -> bool:
        """Nothing of this transfer writes the reserved blocks any more."""
        return self._closed and not self._pending

    @property
    def pending(self) -> int:
        """Segments under way."""
        return len(self._pending)

    def open(self, peer: str, offer: Offer, channel: int) -> None:
        self.peer, self.offer, self.channel = peer, offer, channel

    def take(self, segment: Segment, now: float) -> tuple[int, ...]:
        """A segment is on its way; returns the blocks that it is to land in. Raises BadSegment."""
        blocks, first = self.expected.blocks, segment.first_block
        end = first + len(segment.blocks)
        if self._closed or segment.number != self._next:
            raise BadSegment(f"segment {segment.number} comes after {self._next - 1}")
        if not self.expected.cached_blocks <= first <= self._covered or end > len(blocks):
            raise BadSegment(f"blocks {first} to {end - 1} of {len(blocks)}, after {self._covered}")
        if segment.record is not None:
            if end != len(blocks):
                raise BadSegment(f"the record comes with block {end - 1} of {len(blocks)}")
            self._last_came, self._closed, self.record = now, True, segment.record
        self._covered = max(self._covered, end)
        self._next += 1
        if not self._pending:
            self._busy_since = now
        self._pending.add(segment.number)
        return blocks[first:end]

    def landed(self, number: int, error: str | None, now: float) -> None:
        """A segment has ended."""
        self._pending.remove(number)
        self.error = self.error or error
        if not self._pending:
            self.receiving_s += now - self._busy_since
        if self._closed:
            self.exposed_s = now - self._last_came

    def close(self, error: str | None = None) -> None:
        """No segment follows."""
        self._closed = True
        self.error = self.error or error
