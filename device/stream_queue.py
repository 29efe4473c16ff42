"""Launched steps on a CUDA stream: issued without waiting, read through page-locked memory behind an event."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from device.copy_lane import CopyLane
from device.model_runner import ModelRunner, StepInput
from device.step_queue import READBACK_SLOTS, Issued, Outcome, ReadbackRing
from device.upload import upload
from scheduler.contract import DeviceError, Fault

POLLS = 2000
"""How often an event is asked before the host blocks on it: a step is often nearly done, and blocking costs more."""
ROWS = 256
"""Rows that a readback slot holds at first; it grows with the steps."""


class _Slot:
    """Page-locked memory for one step's ids, and the event behind their copy."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._memory = torch.empty(ROWS, dtype=torch.int64, pin_memory=True)
        self._rows = 0

    def start(self, ids: Tensor) -> None:
        self._rows = len(ids)
        if self._rows > len(self._memory):
            self._memory = torch.empty(2 * self._rows, dtype=torch.int64, pin_memory=True)
        self._memory[: self._rows].copy_(ids, non_blocking=True)
        self.event.record()

    def wait(self) -> list[int]:
        if not any(self.event.query() for _ in range(POLLS)):  # type: ignore[no-untyped-call]
            self.event.synchronize()
        ids: list[int] = self._memory[: self._rows].tolist()
        return ids


class StreamQueue:
    """See StepQueue. Steps go to the current stream."""

    def __init__(self, runner: ModelRunner, lane: CopyLane) -> None:
        self._runner = runner
        self._lane = lane
        self._ring = ReadbackRing([_Slot() for _ in range(READBACK_SLOTS)])
        self._cells: Tensor | None = None

    def issue(self, step: StepInput, fed: Sequence[int] | None) -> Issued:
        slot = self._ring.take()
        try:
            self._lane.before_step()
            if fed is not None:
                self._feed(step, fed)
            logits = self._runner.forward(step)
            ids = self._runner.draw(step, logits)
            self._start_readback(slot, ids)
        except BaseException:
            self._ring.give_back(slot)
            raise
        self._cells = ids
        return _OnStream(self._runner, step, logits, slot, lambda: self._ring.give_back(slot))

    def run(self, work: Callable[[], object]) -> None:
        work()

    def drain(self) -> None:
        torch.cuda.current_stream(self._runner.device).synchronize()

    def close(self) -> None:
        self.drain()

    def _feed(self, step: StepInput, fed: Sequence[int]) -> None:
        if self._cells is None:
            raise DeviceError(Fault.FORWARD, "a fed step before any other")
        self._runner.feed(step, self._cells, *upload(self._runner.device, fed))

    @staticmethod
    def _start_readback(slot: _Slot, ids: Tensor) -> None:
        try:
            slot.start(ids)
        except RuntimeError as error:
            raise _not_read(error) from error


@dataclass(frozen=True, slots=True)
class _OnStream:
    """See Issued."""

    runner: ModelRunner
    step: StepInput
    logits: Tensor
    slot: _Slot
    free: Callable[[], None]

    def wait(self) -> Outcome:
        try:
            ids = self.slot.wait()
        except RuntimeError as error:
            raise _not_read(error) from error
        finally:
            self.free()
        return Outcome(self.runner.read(self.step, ids), self.logits)


def _not_read(error: RuntimeError) -> DeviceError:
    return DeviceError(Fault.READBACK, f"{type(error).__name__}: {error}")
