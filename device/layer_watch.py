"""How far a running step is, told to who asked for it with the plan. Steps that nobody watches are not touched.

On a CPU a layer is done when its attention returns. On CUDA it is only queued then: an event behind it is waited for on
a thread of its own.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from device.attention import AttentionStep
from scheduler.contract import LayerWatch, Prefill, StepPlan


def watch_of(plan: StepPlan) -> LayerWatch | None:
    return plan.watch if isinstance(plan, Prefill) else None


class LayerTeller:
    """Of one device."""

    def __init__(self, device: torch.device) -> None:
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="layers") if device.type == "cuda" else None

    def watched(self, step: AttentionStep, watch: LayerWatch) -> AttentionStep:
        return _WatchedStep(step, frozenset(watch.at), lambda layers: self._done(watch, layers))

    def close(self) -> None:
        """Who is still to be told is told first."""
        if self._waiter is not None:
            self._waiter.shutdown()

    def _done(self, watch: LayerWatch, layers: int) -> None:
        """Called by the thread that computes, or queues what is computed."""
        if self._waiter is None:
            watch.tell(layers)
            return
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        self._waiter.submit(_tell_after, event, watch, layers)


def _tell_after(event: "torch.cuda.Event", watch: LayerWatch, layers: int) -> None:
    event.synchronize()  # raises where the step has failed: nobody is told then
    watch.tell(layers)


class _WatchedStep:
    """See AttentionStep. at: numbers of first layers of which `done` is told."""

    def __init__(self, step: AttentionStep, at: frozenset[int], done: Callable[[int], None]) -> None:
        self._step = step
        self._at = at
        self._done = done

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        out = self._step.attend(layer, query, key, value, scaling, window)
        if layer + 1 in self._at:
            self._done(layer + 1)
        return out
