"""When each step of a handoff happened on this node, for the last handoffs: what `benchmarks.overhead` takes apart.

    source        computed -> posted
    destination   landed -> booked -> launched, and what its device was busy with meanwhile

Times are of the node's clock, which all processes of one machine share.
"""

from collections import OrderedDict
from typing import Any, TypeAlias

Key: TypeAlias = tuple[str, int]
"""(handoff_id, attempt)"""

KEPT = 1024


class Timeline:
    """Marks come from the step loop and the transport's thread, each name once per handoff."""

    def __init__(self) -> None:
        self._handoffs: OrderedDict[Key, dict[str, float]] = OrderedDict()

    def mark(self, key: Key, name: str, at: float) -> None:
        self._handoffs.setdefault(key, {})[name] = at
        while len(self._handoffs) > KEPT:
            self._handoffs.popitem(last=False)

    def all(self) -> list[dict[str, Any]]:
        """Oldest first: handoff_id, attempt and a time in seconds by name."""
        return [
            {"handoff_id": handoff_id, "attempt": attempt, **times}
            for (handoff_id, attempt), times in list(self._handoffs.items())
        ]
