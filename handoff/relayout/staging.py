"""The staging area of a destination: one half is filled while the other is emptied, and who comes later waits."""

from collections import deque
from collections.abc import Callable

ALIGNMENT = 64
HALVES = 2


class Staging:
    """Called under one lock. first: offset in the registered memory. total: bytes."""

    def __init__(self, first: int, total: int) -> None:
        self.half_bytes = total // HALVES // ALIGNMENT * ALIGNMENT
        self._free = [first + number * self.half_bytes for number in range(HALVES)]
        self._waiting: deque[Callable[[int], None]] = deque()

    def acquire(self, use: Callable[[int], None]) -> None:
        """Call `use` with the offset of a free half, now or when one is; in the order of asking."""
        self._waiting.append(use)
        self._serve()

    def release(self, offset: int) -> None:
        self._free.append(offset)
        self._serve()

    def _serve(self) -> None:
        while self._free and self._waiting:
            self._waiting.popleft()(self._free.pop())
