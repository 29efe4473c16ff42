"""What a settled step has ready and nobody outside has seen: it can still be suppressed by a cancel."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduler.events import LifecycleEvent, Outputs
from scheduler.ids import RequestId


@dataclass(slots=True)
class Retained:
    outputs: Outputs = field(default_factory=Outputs)
    events: list[LifecycleEvent] = field(default_factory=list)
    retired: list[RequestId] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.outputs.request_ids or self.events or self.retired)

    def add(self, outputs: Outputs, events: Iterable[LifecycleEvent], retired: Iterable[RequestId]) -> None:
        self.outputs = outputs
        self.events += events
        self.retired += retired

    def mentions(self, request_id: RequestId) -> bool:
        """Whether the outside is yet to hear of this request."""
        return request_id in self.retired or request_id in self.outputs.request_ids

    def suppress(self, request_id: RequestId) -> bool:
        """Drop the outputs and events of a request; False if there are none."""
        rows = [row for row, name in enumerate(self.outputs.request_ids) if name == request_id]
        events = [event for event in self.events if event.request_id != request_id]
        dropped = bool(rows) or len(events) < len(self.events)
        self.outputs = self.outputs.without(rows)
        self.events = events
        return dropped

    def withdraw_retirement(self, request_id: RequestId) -> bool:
        """Take a retirement back, for a caller that reports it by itself; False if there is none."""
        if request_id not in self.retired:
            return False
        self.retired.remove(request_id)
        return True

    def release(self) -> "Retained":
        """Everything, once."""
        released = Retained(self.outputs, self.events, self.retired)
        self.outputs, self.events, self.retired = Outputs(), [], []
        return released
