"""A waiting queue of sequences: ordered by a static key, removal from anywhere, all in O(log n)."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from scheduler.policies import QueueKey
from scheduler.sequence import Sequence


class WaitingQueue:
    """Ties go by arrival. A removed sequence stays in the heap as a corpse until it comes up or corpses prevail."""

    def __init__(self, key: QueueKey) -> None:
        self._key = key
        self._heap: list[tuple[float, int, Sequence]] = []
        self._members: dict[Sequence, None] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        """In order of entry, not of the key."""
        return iter(self._members)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._members

    def push(self, sequence: Sequence) -> None:
        self._members[sequence] = None
        heappush(self._heap, (self._key(sequence), sequence.arrival, sequence))

    def head(self) -> Sequence | None:
        """The next one; it stays in the queue."""
        heap, members = self._heap, self._members
        while heap:
            sequence = heap[0][2]
            if sequence in members:
                return sequence
            heappop(heap)
        return None

    def remove(self, sequence: Sequence) -> None:
        """Raises KeyError if it is not here."""
        del self._members[sequence]
        if self._heap[0][2] is sequence:
            heappop(self._heap)
        elif len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [entry for entry in self._heap if entry[2] in self._members]
            heapify(self._heap)
