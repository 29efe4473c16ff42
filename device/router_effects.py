"""Effects that belong to a router: the last step's logits, copies beside the steps, mirror ranks. The others go on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import structlog
import torch
from torch import Tensor

from device.copy_lane import CopyLane
from device.effects import EffectApplier
from device.model_runner import StepInput
from scheduler.contract import DeviceError, Fault
from scheduler.effects import (
    Done,
    Effect,
    EffectOutcome,
    EpShutdown,
    HostLogits,
    MarconiCheckpoint,
    Quiesce,
    ReadLogits,
    Reserved,
    ReserveKv,
    Rollback,
    SyncSecondary,
    Ticket,
)

Stop: TypeAlias = Callable[[], object]
"""Tells one mirror rank to stop. It must not wait for long."""

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Logits:
    """Of the step settled last. places: by row of the step, where its logits stand; None for a row without a draw."""

    ticket: Ticket
    places: Sequence[int | None]
    values: Tensor


class RouterEffects:
    """Owns `lane`. mirrors: the other ranks of a model that runs on several."""

    def __init__(self, applier: EffectApplier, lane: CopyLane, mirrors: Sequence[Stop]) -> None:
        self.lane = lane
        self._applier = applier
        self._mirrors = list(mirrors)
        self._logits: _Logits | None = None

    def keep_logits(self, ticket: Ticket, step: StepInput, values: Tensor) -> None:
        """A step was settled. values: [rows with a draw, vocabulary]."""
        drawn = range(len(values))
        if len(drawn) < len(step.rows):
            left = iter(drawn)
            places: Sequence[int | None] = [None if row.draw is None else next(left) for row in step.rows]
        else:
            places = drawn
        self._logits = _Logits(ticket, places, values)

    def drop_logits(self) -> None:
        """A step is launched."""
        self._logits = None

    def apply(self, effect: Effect) -> EffectOutcome:
        """See DeviceIo."""
        match effect:
            case ReadLogits(ticket, rows):
                return self._read_logits(ticket, rows)
            case MarconiCheckpoint():
                # The next step changes the slot that is copied.
                self.lane.submit(partial(self._applier.apply, effect))
                self.lane.fence()
            case SyncSecondary():
                self.lane.fence()
            case EpShutdown():
                self._stop_mirrors()
            case Quiesce():
                self.lane.drain()
                return self._applier.apply(effect)
            case ReserveKv(_, blocks):
                return Reserved(blocks)
            case Rollback(request_id):
                raise DeviceError(Fault.UNSUPPORTED, f"{request_id}: this router never runs ahead")
            case _:
                self.lane.before_effect()
                return self._applier.apply(effect)
        return Done()

    def close(self) -> None:
        """The copies end; what is saved is dropped, whatever became of them."""
        self._logits = None
        try:
            self.lane.close()
        finally:
            self._applier.close()

    @torch.inference_mode()
    def _read_logits(self, ticket: Ticket, rows: Sequence[int]) -> HostLogits:
        logits = self._logits
        if logits is None or logits.ticket != ticket:
            held = "none are held" if logits is None else f"those of {logits.ticket} are held"
            raise _failed(f"the logits of ticket {ticket}: {held}; read them before the next launch")
        places = [self._place(logits, row) for row in rows]
        host = logits.values[places].cpu().contiguous()
        return HostLogits(host.view(torch.uint8).numpy().tobytes(), host.element_size())

    @staticmethod
    def _place(logits: _Logits, row: int) -> int:
        if not 0 <= row < len(logits.places):
            raise _failed(f"logits of row {row}: the step of ticket {logits.ticket} has {len(logits.places)} rows")
        place = logits.places[row]
        if place is None:
            raise _failed(f"logits of row {row} of ticket {logits.ticket}: it had no draw, so none were computed")
        return place

    def _stop_mirrors(self) -> None:
        """Each of them once, whatever the others did."""
        mirrors, self._mirrors = self._mirrors, []
        for number, stop in enumerate(mirrors):
            try:
                stop()
            except Exception:
                _log.exception("mirror rank could not be stopped", mirror=number)


def _failed(message: str) -> DeviceError:
    return DeviceError(Fault.EFFECT, message)
