"""Slot-addressed state: what a device keeps for each running sequence besides its KV blocks.

A slot's record is what travels when its sequence is handed over or spilled: one contiguous piece that begins with the
count of tokens that its state has seen, then the tensors that a model declared, each at a multiple of 64 bytes. The
count says at any time, and on any machine, whether a record fits the KV beside it. What else is kept by slot, and does
not leave the device, is zeroed and moved along (`follow`).

While a step runs, and for good if it fails, the record of a slot in it has the count UNKNOWN, and is refused everywhere
until the slot is zeroed or overwritten.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from device.kv_pool import Bytes, aligned
from device.upload import upload
from scheduler.contract import DeviceError, Fault

UNKNOWN = -1
"""The count of a record that must not be used."""
_COUNT_BYTES = 8


@dataclass(frozen=True, slots=True)
class SlotTensor:
    """A tensor in the record. shape: of one slot's part."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class SlotLayout:
    """Where each tensor lies in a record. slot_bytes: the size of a record; 0 when there are no tensors."""

    def __init__(self, tensors: Sequence[SlotTensor]) -> None:
        end = aligned(_COUNT_BYTES) if tensors else 0
        self.offsets: list[tuple[SlotTensor, int]] = []
        for tensor in tensors:
            self.offsets.append((tensor, end))
            end = aligned(end + tensor.nbytes)
        self.slot_bytes = end


class Follower(Protocol):
    """Something else that is kept by slot."""

    def zero(self, slot: int) -> None: ...

    def move(self, slot: int, target: int) -> None: ...


class SlotState:
    """All slot-addressed tensors of a device. What is refused is a DeviceError(EFFECT) and has changed nothing.

    memory: uint8 [slots, slot_bytes]. snapshots: places for copies of records, none where there are no records.
    """

    def __init__(self, layout: SlotLayout, memory: Tensor, snapshots: int) -> None:
        self._memory = memory
        snapshots = snapshots if layout.slot_bytes else 0
        self._snapshots = torch.zeros((snapshots, layout.slot_bytes), dtype=torch.uint8, device=memory.device)
        self._tensors = {tensor.name: _view(memory, tensor, offset) for tensor, offset in layout.offsets}
        self._followers: list[Follower] = []
        # Notes of the counts in the records, which cost a wait to read on CUDA. A transport changes records behind
        # our back, so a note is only believed when it is the expected one.
        self._counts = [0] * len(memory)
        self._snapshot_counts = [UNKNOWN] * snapshots
        if layout.slot_bytes:
            self._record_counts = _view(memory, SlotTensor("count", (), torch.int64), 0)

    @property
    def device(self) -> torch.device:
        return self._memory.device

    @property
    def slots(self) -> int:
        return len(self._memory)

    @property
    def slot_bytes(self) -> int:
        """The size of a record."""
        return self._memory.shape[1]

    @property
    def snapshots(self) -> int:
        return len(self._snapshots)

    def tensor(self, name: str) -> Tensor:
        """A tensor of the record for all slots, [slots, *shape], sharing their memory."""
        return self._tensors[name]

    def follow(self, follower: Follower) -> None:
        """`follower` is zeroed and moved with each slot from now on."""
        self._followers.append(follower)

    def begin_step(self, slots: Sequence[int], fresh: Sequence[int]) -> None:
        """A step computes on the records of `slots`; those of `fresh` among them begin as zeros."""
        if fresh:
            (zeroed,) = upload(self.device, fresh)
            self._memory.index_fill_(0, zeroed, 0)
        self.void(slots)

    def void(self, slots: Sequence[int]) -> None:
        """The records of `slots` must not be used."""
        (index,) = upload(self.device, slots)
        self._record_counts.index_fill_(0, index, UNKNOWN)
        for slot in slots:
            self._counts[slot] = UNKNOWN

    def end_step(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """The step is through: the state in slots[i] has seen counts[i] tokens."""
        self._record_counts.index_copy_(0, *upload(self.device, slots, counts))
        for slot, count in zip(slots, counts, strict=True):
            self._counts[slot] = count

    def count(self, slot: int, expected: int | None = None) -> int:
        """How many tokens the state in `slot` has seen. Waits for the device unless our note says `expected`."""
        self._check_slot(slot)
        if expected is None or self._counts[slot] != expected:
            self._counts[slot] = int(self._record_counts[slot])
        return self._counts[slot]

    def zero(self, slot: int) -> None:
        self._check_slot(slot)
        self._memory[slot].zero_()
        self._counts[slot] = 0
        for follower in self._followers:
            follower.zero(slot)

    def move(self, slot: int, target: int) -> None:
        """All state of `slot` becomes that of `target`. What stays behind in `slot` has no meaning."""
        self._check_slot(slot)
        self._check_slot(target)
        if slot == target:
            return
        self._memory[target].copy_(self._memory[slot])
        self._counts[target] = self._counts[slot]
        for follower in self._followers:
            follower.move(slot, target)

    def save(self, slot: int, snapshot: int, tokens: int | None = None) -> None:
        """Copy a record into a snapshot, which holds nothing if this fails. tokens: what the record must have seen."""
        self._check_snapshot(snapshot)
        self._snapshot_counts[snapshot] = UNKNOWN
        count = self.require(slot, tokens)
        self._snapshots[snapshot].copy_(self._memory[slot])
        self._snapshot_counts[snapshot] = count

    def restore(self, snapshot: int, slot: int) -> None:
        """Copy a snapshot into a record."""
        self._check_snapshot(snapshot)
        self._check_slot(slot)
        if self._snapshot_counts[snapshot] == UNKNOWN:
            raise _refused(f"snapshot {snapshot} holds nothing: save one there first")
        self._memory[slot].copy_(self._snapshots[snapshot])
        self._counts[slot] = self._snapshot_counts[snapshot]

    def read(self, slot: int, into: Bytes) -> None:
        """Put a record into host memory of slot_bytes bytes; it is there when this returns."""
        self._check_slot(slot)
        torch.from_numpy(into).copy_(self._memory[slot])

    def write(self, slot: int, content: Bytes, tokens: int) -> None:
        """The reverse of `read`, of a record that has seen `tokens` tokens; `content` may be reused after it."""
        self.check_record(slot, content, tokens)
        self._memory[slot].copy_(torch.from_numpy(content))
        self._counts[slot] = tokens

    def check_record(self, slot: int, content: Bytes, tokens: int) -> None:
        """Refuse what `write` would refuse."""
        self._check_slot(slot)
        count = int(content[:_COUNT_BYTES].view(np.int64)[0])
        if count != tokens:
            raise _refused(f"a record of {count} tokens for slot {slot}, where {tokens} are expected")

    def require(self, slot: int, tokens: int | None) -> int:
        """The count of `slot`, which must be known, and `tokens` if that is given."""
        count = self.count(slot, tokens)
        if count == UNKNOWN or tokens not in (None, count):
            raise _refused(f"slot {slot} {_seen(count)}" + ("" if tokens is None else f", not {tokens}"))
        return count

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.slots:
            raise _refused(f"slot {slot}: this device has {self.slots} slots")

    def _check_snapshot(self, snapshot: int) -> None:
        if not 0 <= snapshot < self.snapshots:
            raise _refused(f"snapshot {snapshot}: this device has {self.snapshots} places")


def _view(memory: Tensor, tensor: SlotTensor, offset: int) -> Tensor:
    return memory[:, offset : offset + tensor.nbytes].view(tensor.dtype).view(len(memory), *tensor.shape)


def _seen(count: int) -> str:
    return "was in a step that failed" if count == UNKNOWN else f"holds the state after {count} tokens"


def _refused(message: str) -> DeviceError:
    return DeviceError(Fault.EFFECT, message)
