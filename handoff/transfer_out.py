"""The source's side of one transfer, as data: what is final, what was sent, what may be sent next.

    OFFERED --Accept--> OPEN --Segment ... Segment with the record--> CLOSED --all sent--> over
        `--Refuse--> over `--ceased, by whom ever-----------------------^

Blocks may be sent as soon as they are final, while the prefill goes on. A prefill that loses its blocks is computed
again, and its old blocks may be overwritten while they are read: what was not surely sent before is sent once more, but
only when nothing of it is under way, or the old bytes might land last. Such bytes do no harm before that: only the
record makes a destination run.

While the chunk that ends the prompt is computed, its blocks may be sent in layers: the first ones of all blocks that
are left, then the next ones, and the last ones with the record. Until then these blocks count as not sent.
"""

from dataclasses import dataclass

from handoff.wire import MAX_SEGMENTS, Accept, Layers, Record


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a source is.

    blocks: its block table. final: how many of the first ones change no more. generation: another one means that it had
    lost its blocks meanwhile. record: once all blocks are final and its slot is; slot: where that state is.
    """

    blocks: tuple[int, ...]
    final: int
    generation: int = 0
    record: Record | None = None
    slot: int = -1


@dataclass(frozen=True, slots=True)
class Cut:
    """What one segment carries. first: the number of its first block in the sequence.

    into: the destination's blocks; None if they are not like the source's, which travel as they are then. layers: those
    of the blocks; None for all.
    """

    number: int
    first: int
    blocks: tuple[int, ...]
    into: tuple[int, ...] | None
    channel: int
    record: Record | None
    slot: int
    layers: Layers | None = None


def first_missing(cached_tokens: int, prompt_tokens: int, block_size: int) -> int:
    """The first block with a token that the destination lacks; how many there are if it lacks none."""
    return cached_tokens // block_size if cached_tokens < prompt_tokens else -(-prompt_tokens // block_size)


SEGMENTS_IN_FLIGHT = 4
"""Of one transfer to a destination that takes small segments only."""


class Outgoing:
    """Pure. prompt_tokens: positions to send. block_size, into_block_size: tokens in a block of source, destination.

    layers: of the model.
    """

    def __init__(self, peer: str, prompt_tokens: int, block_size: int, into_block_size: int, layers: int = 1) -> None:
        self.peer = peer
        self.error: str | None = None
        self.ceased = False
        self._block_size = block_size
        self._into_block_size = into_block_size
        self._prompt_tokens = prompt_tokens
        self._blocks = -(-prompt_tokens // block_size)
        self._accept: Accept | None = None
        self._progress: Progress | None = None
        self._skipped = 0
        self._covered = 0
        self._safe = 0
        self._rewinds = False
        self._layers = layers
        self._layers_final = self._layers_sent = 0
        self._next = 0
        self._in_flight: dict[int, int] = {}
        self._closed = False

    @property
    def is_accepted(self) -> bool:
        return self._accept is not None

    @property
    def is_closed(self) -> bool:
        """No segment follows."""
        return self._closed

    @property
    def is_over(self) -> bool:
        """And nothing is under way: the memory is quiet."""
        return self._closed and not self._in_flight

    def accept(self, accept: Accept) -> None:
        """Raises ValueError when the accepted blocks don't fit."""
        cached, size = accept.cached_tokens, self._into_block_size
        if cached % size or cached // size + len(accept.blocks) != -(-self._prompt_tokens // size):
            raise ValueError(f"accepted: {len(accept.blocks)} blocks of {size} tokens after {cached} tokens")
        self._accept = accept
        self._skipped = self._covered = self._safe = first_missing(cached, self._prompt_tokens, self._block_size)

    def advance(self, progress: Progress) -> None:
        if progress.final > min(self._blocks, len(progress.blocks)):
            raise ValueError(f"{progress.final} blocks are final, the prompt has {self._blocks}")
        if self._progress is not None and progress.generation != self._progress.generation:
            self._rewinds, self._layers_final = True, 0
        elif not self._rewinds:
            # Not later: what ends after this look may have been read when the blocks were another's already.
            self._safe = min(self._in_flight.values(), default=self._covered)
        self._progress = progress

    def layers_final(self, layers: int, generation: int) -> None:
        """While the last chunk is computed: so many first layers of all blocks are final. Late news does no harm."""
        progress = self._progress
        if progress is not None and progress.generation == generation and len(progress.blocks) >= self._blocks:
            self._layers_final = min(layers, self._layers - 1)

    def close(self, error: str | None = None) -> None:
        self._closed = True
        self.error = self.error or error

    def next(self) -> Cut | None:
        """The next segment, which is then under way; None while there is nothing to send."""
        accept, progress = self._accept, self._progress
        if accept is None or progress is None or self._closed:
            return None
        if self._rewinds:
            if self._in_flight:
                return None
            self._covered, self._layers_sent, self._rewinds = self._safe, 0, False
        first, end = self._covered, progress.final
        if accept.segment_blocks:
            if len(self._in_flight) >= SEGMENTS_IN_FLIGHT:
                return None
            end = min(end, first + accept.segment_blocks)
        is_last = progress.record is not None and end == progress.final
        if not is_last and self._next >= MAX_SEGMENTS - 1:
            return None
        layers = None
        if is_last and self._layers_sent:
            layers = self._layers_sent, self._layers
        elif not is_last and end <= first:
            if accept.segment_blocks or first == self._blocks or self._layers_final <= self._layers_sent:
                return None
            end, layers = self._blocks, (self._layers_sent, self._layers_final)
        into = None if accept.segment_blocks else accept.blocks[first - self._skipped : end - self._skipped]
        number = self._next
        self._next, self._closed = number + 1, is_last
        if layers is None:
            self._covered = end
        else:
            self._layers_sent = layers[1]
        self._in_flight[number] = first
        channel = (accept.channel + number) % 2**32
        record = progress.record if is_last else None
        return Cut(number, first, progress.blocks[first:end], into, channel, record, progress.slot, layers)

    def sent(self, number: int, error: str | None) -> None:
        """A segment has ended."""
        del self._in_flight[number]
        if error is not None:
            self.close(error)
