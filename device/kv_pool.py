"""The KV cache of one device: a pool of blocks, each one contiguous piece of memory.

Layout: [blocks, layers, 2, kv_heads, block_size, head_dim]; index 0 of the third axis is K, 1 is V. A token's place in
the pool is block * block_size + offset in the block.

The records of the slots (device/state.py) lie behind the last block in the same allocation, and a staging area for KV
that is not laid out like ours behind them, so that a transport, which knows one flat piece of memory, moves all alike.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from device.errors import DeviceSetupError
from device.host_memory import pool_memory
from scheduler.contract import DeviceError, Fault

Bytes: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.uint8]]"
"""Flat host memory."""
ALIGNMENT = 64
"""Bytes. Where a record begins, and each tensor in it: what vector loads and RDMA like."""


def aligned(size: int) -> int:
    """`size` rounded up to the next multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """The shape of one block."""

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        elements = self.layers * 2 * self.kv_heads * self.block_size * self.head_dim
        return elements * self.dtype.itemsize

    def blocks_in(self, budget_bytes: int) -> int:
        """How many blocks fit in `budget_bytes`. Raises DeviceSetupError when not even one does."""
        blocks = budget_bytes // self.block_bytes
        if blocks < 1:
            raise DeviceSetupError(
                f"a KV budget of {budget_bytes} bytes holds no block: one takes {self.block_bytes} bytes;"
                " raise the budget or lower the block size"
            )
        return blocks


class KvPool:
    """The pool's tensor, and the ways into it: write tokens, gather blocks, whole blocks in and out, raw bytes.

    slot_memory: the records of the slots, uint8 [slots, slot_bytes], all zeros at first.
    """

    def __init__(
        self,
        geometry: KvGeometry,
        total_blocks: int,
        device: torch.device,
        slots: int = 0,
        slot_bytes: int = 0,
        staging_bytes: int = 0,
    ) -> None:
        g = geometry
        shape = (total_blocks, g.layers, 2, g.kv_heads, g.block_size, g.head_dim)
        kv_bytes, records = total_blocks * g.block_bytes, slots * slot_bytes
        self._first_slot = aligned(kv_bytes) if records else kv_bytes
        records_end = self._first_slot + records
        self.first_staging = aligned(records_end) if staging_bytes else records_end
        self.staging_bytes = staging_bytes
        # Zeros, not whatever was there: a masked position still meets V in 0 * V, and 0 * NaN is NaN.
        size = self.first_staging + staging_bytes
        if device.type == "cpu":
            self._memory = torch.frombuffer(pool_memory(size), dtype=torch.uint8)
        else:
            self._memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self._blocks = self._memory[:kv_bytes].view(total_blocks, g.block_bytes)
        self.tensor = self._memory[:kv_bytes].view(g.dtype).view(shape)
        self.slot_memory = self._memory[self._first_slot : records_end].view(slots, slot_bytes)
        self.geometry = geometry
        self.total_blocks = total_blocks
        pages_per_layer = 2 * g.kv_heads
        pages = self.tensor.view(-1, g.block_size * g.head_dim)
        tokens = self.tensor.view(-1, g.head_dim)
        # Layer l's pages begin l * pages_per_layer further on, so the page numbers of layer 0 serve all layers.
        self._pages = [pages[layer * pages_per_layer :] for layer in range(g.layers)]
        self._first_pages = torch.arange(pages_per_layer, dtype=torch.int64, device=device)
        self._tokens = [tokens[layer * pages_per_layer * g.block_size :] for layer in range(g.layers)]

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    @property
    def block_bytes(self) -> int:
        return self.geometry.block_bytes

    def bytes_view(self) -> Any:
        """The pool as flat bytes, sharing its memory; block b is bytes [b * block_bytes, (b + 1) * block_bytes), slot s
        is slot_bytes bytes from `slot_offset(s)` on.

        A numpy uint8 array on a CPU; on CUDA a uint8 tensor, which has `__cuda_array_interface__`.
        """
        return self._memory.numpy() if self.device.type == "cpu" else self._memory

    def slot_offset(self, slot: int) -> int:
        """Where a slot's record begins in `bytes_view`. Raises DeviceError(EFFECT) for a slot that isn't there."""
        slots, slot_bytes = self.slot_memory.shape
        if not 0 <= slot < slots:
            raise DeviceError(Fault.EFFECT, f"slot {slot}: this device has {slots} slots")
        return self._first_slot + slot * slot_bytes

    def place_index(self, places: Tensor) -> Tensor:
        """Where `write` puts tokens. places: int64 [tokens]. Returns int64 [2, tokens * kv_heads]."""
        g = self.geometry
        block, offset = places // g.block_size, places % g.block_size
        page = (block * (g.layers * 2 * g.kv_heads)).view(1, -1, 1) + self._first_pages.view(2, 1, g.kv_heads)
        return (page * g.block_size + offset.view(1, -1, 1)).view(2, -1)

    def write(self, layer: int, index: Tensor, key: Tensor, value: Tensor) -> None:
        """Store new K and V. index: from `place_index`; key, value: [tokens, kv_heads, head_dim]."""
        tokens, head_dim = self._tokens[layer], self.geometry.head_dim
        tokens.index_copy_(0, index[0], key.reshape(-1, head_dim))
        tokens.index_copy_(0, index[1], value.reshape(-1, head_dim))

    def page_index(self, tables: Tensor) -> Tensor:
        """What `gather` reads. tables: block ids, int64 [sequences, n]. Returns int64 [2 * pages]."""
        g = self.geometry
        page = (tables * (g.layers * 2 * g.kv_heads)).view(1, tables.shape[0], 1, -1)
        return (page + self._first_pages.view(2, 1, g.kv_heads, 1)).view(-1)

    def gather(self, layer: int, index: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
        """K and V of whole blocks, copied: each [sequences, kv_heads, n * block_size, head_dim]."""
        g = self.geometry
        pages = self._pages[layer].index_select(0, index)
        both = pages.view(2, sequences, g.kv_heads, -1, g.head_dim)
        return both[0], both[1]

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy blocks within the pool, each (source, target) after the one before it."""
        for source, target in pairs:
            self.tensor[target].copy_(self.tensor[source])

    def read_blocks(self, blocks: Sequence[int], into: Bytes) -> None:
        """Put the content of `blocks`, one after another, into host memory; it is there when this returns.

        Block by block into pageable memory: no room is needed on the device, and none stays pinned on the host.
        """
        for own, block in zip(self._rows_of(into), blocks, strict=True):
            own.copy_(self._blocks[block])

    def write_blocks(self, blocks: Sequence[int], content: Bytes) -> None:
        """The reverse of `read_blocks`; `content` may be reused when this returns."""
        for own, block in zip(self._rows_of(content), blocks, strict=True):
            self._blocks[block].copy_(own)

    def scrub(self, blocks: list[int]) -> None:
        """Replace what is not finite in `blocks` by zeros, so that it cannot reach their next owner."""
        ids = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        self.tensor[ids] = self.tensor[ids].nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    def _rows_of(self, content: Bytes) -> Tensor:
        return torch.from_numpy(content).view(-1, self.block_bytes)
