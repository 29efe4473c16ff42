"""Blocks that were reserved for fed steps, so that an over-run can be taken back: exactly its own, no more."""

from collections.abc import Sequence

from scheduler.contract import DecodeFed, DeviceError, Fault
from scheduler.effects import ReserveKv
from scheduler.ids import BlockId, RequestId


class Reservations:
    """Of one router. What was reserved is pending until a fed step is launched, which takes it.

    Of each request the newest fed step counts, also one that needed no block: an older reservation is in use by then.
    A step that is not fed ends it all, since whoever plans one has taken back what was to be taken back.
    """

    def __init__(self) -> None:
        self._pending: dict[RequestId, tuple[BlockId, ...]] = {}
        self._newest: dict[RequestId, tuple[BlockId, ...]] = {}

    def reserve(self, effect: ReserveKv) -> tuple[BlockId, ...]:
        """Raises DeviceError(EFFECT) for a request that has a reservation pending."""
        if effect.request_id in self._pending:
            raise DeviceError(
                Fault.EFFECT, f"{effect.request_id}: blocks are reserved for its next fed step already; launch that"
            )
        self._pending[effect.request_id] = effect.blocks
        return effect.blocks

    def check(self, plan: DecodeFed) -> None:
        """Raise DeviceError(FORWARD) unless all that is pending is for rows of `plan`, at the end of their tables."""
        tables: dict[RequestId, Sequence[BlockId]] = {row.request_id: row.blocks for row in plan.rows}  # type: ignore[misc]
        for request_id, blocks in self._pending.items():
            if request_id not in tables:
                raise _wrong(f"{request_id}: blocks are reserved for it, but it has no row in the fed step")
            if blocks and tuple(tables[request_id][-len(blocks) :]) != blocks:
                raise _wrong(f"{request_id}: the reserved blocks {blocks} are not the last ones of its table")

    def take(self, plan: DecodeFed) -> None:
        """`plan` is launched."""
        for row in plan.rows:
            self._newest[row.request_id] = self._pending.pop(row.request_id, ())

    def clear(self) -> None:
        """A step that is not fed is launched."""
        self._pending.clear()
        self._newest.clear()

    def roll_back(self, request_id: RequestId) -> tuple[BlockId, ...]:
        """Forget its newest reservation, and say what it was. Raises DeviceError(EFFECT) if there is none.

        Of a fed step whose launch failed the reservation is still pending.
        """
        for records in (self._pending, self._newest):
            if request_id in records:
                return records.pop(request_id)
        raise DeviceError(Fault.EFFECT, f"{request_id}: no fed step of it to roll back")


def _wrong(message: str) -> DeviceError:
    return DeviceError(Fault.FORWARD, message)
