"""Numbers of 64 bits kept as two words of KV: a KvMachine's pool is laid out like that of a small fp32 model."""

from typing import Any, TypeAlias

import numpy as np

Values: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
_LOW = 0xFFFFFFFF


class SplitValues:
    """int64 [blocks, block_size] over uint8 memory of blocks [2, block_size] of words: the low ones, the high ones."""

    def __init__(self, memory: "np.ndarray[Any, np.dtype[np.uint8]]", block_size: int) -> None:
        words = memory.view(np.uint32).reshape(-1, 2, block_size)
        self._low, self._high = words[:, 0], words[:, 1]

    def __getitem__(self, index: Any) -> Any:
        low, high = (words[index].astype(np.uint64) for words in (self._low, self._high))
        return (low | high << np.uint64(32)).astype(np.int64)

    def __setitem__(self, index: Any, values: Any) -> None:
        values = np.asarray(values, np.int64)
        self._low[index] = (values & _LOW).astype(np.uint32)
        self._high[index] = (values >> 32 & _LOW).astype(np.uint32)
