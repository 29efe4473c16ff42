"""Copy pieces from a mapped pool, a slice at a time: plain memcpy, which streams what is long past the caches.

One call per piece, with the interpreter's lock held for short ones: taking the lock again costs more than such a copy,
up to 5 ms when other threads run Python. Long ones are copied without it.
"""

import ctypes
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt

SLICE_BYTES = 8 << 20
SLICE_PIECES = 2048
"""An operation is copied in slices of at most so much, and takes turns with others after each: about 1 ms."""
LOCKED_BYTES = 1 << 20
"""Shorter pieces are copied with the interpreter's lock held."""

Numbers = npt.NDArray[np.int64]


def _memmove(library: ctypes.CDLL) -> Callable[[int, int, int], None]:
    function: Any = library.memmove
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = None
    return cast(Callable[[int, int, int], None], function)


_copy_locked = _memmove(ctypes.PyDLL(None))
_copy_unlocked = _memmove(ctypes.CDLL(None))


class PieceCopy:
    """Copies piece i, `lengths[i]` bytes, from address `sources[i]` to `targets[i]`; all int64 [pieces]."""

    def __init__(self, targets: Numbers, sources: Numbers, lengths: Numbers) -> None:
        self._targets, self._sources, self._lengths = cut_long(targets, sources, lengths)
        self._ends = np.cumsum(self._lengths)
        self._next = 0

    @property
    def ended(self) -> bool:
        return self._next == len(self._lengths)

    def advance(self) -> None:
        """Copy a slice."""
        first = self._next
        copied = int(self._ends[first - 1]) if first else 0
        end = int(np.searchsorted(self._ends, copied + SLICE_BYTES, "right"))
        self._next = end = min(max(end, first + 1), first + SLICE_PIECES)
        lengths = self._lengths[first:end]
        copy = _copy_locked if int(lengths.max()) < LOCKED_BYTES else _copy_unlocked
        calls = map(copy, self._targets[first:end].tolist(), self._sources[first:end].tolist(), lengths.tolist())
        deque(calls, maxlen=0)


def cut_long(targets: Numbers, sources: Numbers, lengths: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """The same bytes in the same order, in pieces of at most SLICE_BYTES."""
    parts = -(-lengths // SLICE_BYTES)
    if int(parts.max()) == 1:
        return targets, sources, lengths
    piece = np.repeat(np.arange(len(lengths)), parts)
    begin = (np.arange(len(piece)) - (np.cumsum(parts) - parts)[piece]) * SLICE_BYTES
    return targets[piece] + begin, sources[piece] + begin, np.minimum(lengths[piece] - begin, SLICE_BYTES)
