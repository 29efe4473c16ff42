"""LoRA commands of a node: they wait until nothing is on the device, and admission is held meanwhile."""

from collections import deque
from concurrent.futures import Future

from scheduler.adapters import AdapterFacts, AdapterRefused, ListAdapters, LoraCommand
from scheduler.base import SchedulerBase
from scheduler.contract import DeviceIo

Answer = tuple[AdapterFacts, ...]


class AdapterDesk:
    """Used on the step loop's thread. digests: of the loaded adapters by name; may be read on any thread."""

    def __init__(self, scheduler: SchedulerBase, device: DeviceIo) -> None:
        self.digests: dict[str, str] = {}
        self._scheduler = scheduler
        self._device = device
        self._queue: deque[tuple[LoraCommand, Future[Answer]]] = deque()

    def ask(self, command: LoraCommand, future: "Future[Answer]") -> None:
        """`future` gets the table after the command, or AdapterRefused; cancelling it withdraws the command."""
        self._queue.append((command, future))
        self._scheduler.is_admission_held = True

    def close(self, reason: Exception) -> None:
        """Nothing is served any more: whoever waits is told so."""
        while self._queue:
            _, future = self._queue.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(reason)

    def serve(self) -> None:
        """At a boundary: do what was asked for if the device is quiet. Admission goes on when nothing is asked."""
        while self._queue and (self._scheduler.is_quiescent or self._queue[0][1].cancelled()):
            command, future = self._queue.popleft()
            if future.set_running_or_notify_cancel():
                self._answer(command, future)
        self._scheduler.is_admission_held = bool(self._queue)

    def _answer(self, command: LoraCommand, future: "Future[Answer]") -> None:
        try:
            self._require_unused(command)
            table = self._device.lora(command)
        except Exception as error:
            future.set_exception(error)
            return
        self.digests = {facts.name: facts.digest for facts in table}
        self._scheduler.set_adapters(self.digests)
        future.set_result(table)

    def _require_unused(self, command: LoraCommand) -> None:
        if isinstance(command, ListAdapters):
            return
        waiting = self._scheduler.count_adapter(command.name)
        if waiting and command.name in self.digests:
            raise AdapterRefused(f"adapter {command.name} has requests that wait ({waiting}): ask when they are done")
