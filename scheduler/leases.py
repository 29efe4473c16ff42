"""Leases: how long a hold or a reservation lives without any sign of progress.

A lease runs only while its handoff owns KV and is expected to move: not while it queues for blocks or for a prefill,
and not once it decodes. Whoever follows the handoff renews it.
"""

from collections.abc import Iterator
from math import inf

from scheduler.ids import HandoffId


class Leases:
    """Deadlines by handoff. duration_s: seconds without progress; inf switches expiry off."""

    def __init__(self, duration_s: float) -> None:
        if not duration_s > 0:
            raise ValueError(f"a lease lasts longer than 0 s, not {duration_s}")
        self.duration_s = duration_s
        self._deadlines: dict[HandoffId, float] = {}
        self._next = inf

    def renew(self, handoff_id: HandoffId, now: float) -> None:
        """Start a lease, or prolong one."""
        deadline = self._deadlines[handoff_id] = now + self.duration_s
        self._next = min(self._next, deadline)

    def end(self, handoff_id: HandoffId) -> None:
        """There is nothing to lease any more; nothing happens if there was nothing."""
        self._deadlines.pop(handoff_id, None)

    def __contains__(self, handoff_id: HandoffId) -> bool:
        return handoff_id in self._deadlines

    def __iter__(self) -> Iterator[HandoffId]:
        return iter(self._deadlines)

    def left(self, handoff_id: HandoffId, now: float) -> float | None:
        """Seconds to its end; None if there is no lease."""
        deadline = self._deadlines.get(handoff_id)
        return None if deadline is None else deadline - now

    @property
    def next_deadline(self) -> float:
        """A time before which none expires; inf if there is none."""
        return self._next

    def take_expired(self, now: float) -> list[HandoffId]:
        """Those whose deadline has come, oldest deadline first. Their leases end."""
        if now < self._next:
            return []
        expired = sorted((h for h, at in self._deadlines.items() if at <= now), key=self._deadlines.__getitem__)
        for handoff_id in expired:
            del self._deadlines[handoff_id]
        self._next = min(self._deadlines.values(), default=inf)
        return expired
