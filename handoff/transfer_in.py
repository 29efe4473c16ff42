"""The destination's side of one transfer, as data.

    EXPECTED --Offer--> OPEN --Segment: receives are posted ... Segment with the record--> CLOSED --all landed--> over
        `--withdrawn--> over `--Cease of the source-----------------------------------------^

Receives are posted only for segments that are on their way, so that the bytes that end them always come. A destination
that wants no more says so and takes what is under way: its memory is quiet when the source has answered.
"""

from handoff.relayout.routes import Route
from handoff.transfer_out import first_missing
from handoff.wire import Layers, Offer, Record, Segment
from scheduler.decode_scheduler import ReservedKv


class BadSegment(ValueError):
    """A segment that can't be true; its sender is at fault."""


class Incoming:
    """Pure. route: None if the source's blocks are like ours.

    blocks_moved, bytes_moved: of all segments so far; exposed_bytes: of the last one.
    receiving_s: seconds during which anything was under way. exposed_s: from the last segment's message to the end.
    """

    def __init__(self, expected: ReservedKv, layers: int = 1) -> None:
        self.expected = expected
        self.offer: Offer | None = None
        self.peer = ""
        self.route: Route | None = None
        self.channel = 0
        self.record: Record | None = None
        self.is_withdrawn = False
        self.error: str | None = None
        self.blocks_moved = self.bytes_moved = self.exposed_bytes = 0
        self.receiving_s = self.exposed_s = 0.0
        self._blocks = len(expected.blocks)
        self._first = self._covered = expected.cached_blocks
        self._segment_blocks = self._blocks
        self._layers = layers
        self._layers_covered = 0
        """Of all blocks from `_covered` on."""
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
        """From a source whose blocks are like ours."""
        self.peer, self.offer, self.channel = peer, offer, channel

    def open_staged(self, peer: str, offer: Offer, channel: int, route: Route, segment_blocks: int) -> None:
        """From one whose blocks are not: segments count its blocks, and have at most `segment_blocks`."""
        self.open(peer, offer, channel)
        self.route, self._segment_blocks = route, segment_blocks
        size = route.source.block_size
        self._blocks = -(-offer.prompt_tokens // size)
        cached = self.expected.cached_blocks * route.destination.block_size
        self._first = self._covered = first_missing(cached, offer.prompt_tokens, size)

    def take(self, segment: Segment, now: float) -> None:
        """A segment is on its way. Raises BadSegment."""
        first, blocks = segment.first_block, self._blocks
        end = first + len(segment.blocks)
        if self._closed or segment.number != self._next:
            raise BadSegment(f"segment {segment.number} comes after {self._next - 1}")
        if not self._first <= first <= self._covered or end > blocks or end - first > self._segment_blocks:
            raise BadSegment(f"blocks {first} to {end - 1} of {blocks}, after {self._covered}")
        high = self._layers if segment.layers is None else self._checked_end(segment.layers, end)
        if segment.record is not None:
            if end != blocks or high != self._layers:
                raise BadSegment(f"the record comes with block {end - 1} of {blocks}, layer {high} of {self._layers}")
            self._last_came, self._closed, self.record = now, True, segment.record
        if high == self._layers:
            self.blocks_moved += end - first
            self._covered = max(self._covered, end)
        else:
            self._layers_covered = max(self._layers_covered, high)
        self._next += 1
        if not self._pending:
            self._busy_since = now
        self._pending.add(segment.number)

    def _checked_end(self, layers: Layers, end: int) -> int:
        """Only of the prompt's last blocks, which then go on to its end, from where the last ones ended."""
        low, high = layers
        if (
            self.route is not None
            or end != self._blocks
            or not low < high <= self._layers
            or low > self._layers_covered
        ):
            raise BadSegment(f"layers {low} to {high - 1} of {self._layers}, after {self._layers_covered}")
        return high

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
