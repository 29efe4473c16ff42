"""Copies that run beside the steps: on a thread of their own on a CPU, on a stream of their own on CUDA.

They run one after another, in the order in which they were submitted. A step waits for them only behind a fence.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Protocol

import structlog
import torch

_log = structlog.get_logger()


class CopyLane(Protocol):
    """Used by the thread that drives the router; `before_step` also by the one that runs steps."""

    def submit(self, copy: Callable[[], object]) -> None:
        """Start `copy` after all that was launched or submitted. What it raises is logged.

        It may only touch memory that exists already and that nothing else uses until a fence.
        """
        ...

    def fence(self) -> None:
        """The next step, and what is done to the device's memory after it, wait for all copies so far. The host does
        not wait."""
        ...

    def before_step(self) -> None:
        """Where a step begins to run."""
        ...

    def before_effect(self) -> None:
        """What is done next to the device's memory comes after all copies so far."""
        ...

    def drain(self) -> None:
        """The host waits for all copies so far."""
        ...

    def close(self) -> None:
        """Drain; nothing may be submitted any more."""
        ...


def open_copy_lane(device: torch.device) -> CopyLane:
    return StreamLane(device) if device.type == "cuda" else ThreadLane()


class ThreadLane:
    """See CopyLane. The thread starts with the first copy."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="copies")
        self._newest: Future[None] | None = None
        self._fence: Future[None] | None = None

    def submit(self, copy: Callable[[], object]) -> None:
        self._newest = self._thread.submit(_logged, copy)

    def fence(self) -> None:
        self._fence = self._newest

    def before_step(self) -> None:
        if self._fence is not None:
            wait([self._fence])

    def before_effect(self) -> None:
        self.drain()

    def drain(self) -> None:
        if self._newest is not None:
            wait([self._newest])

    def close(self) -> None:
        self._thread.shutdown()


class StreamLane:
    """See CopyLane."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def submit(self, copy: Callable[[], object]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            _logged(copy)

    def fence(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def before_step(self) -> None:
        """The fence stands in the stream of the steps."""

    def before_effect(self) -> None:
        self.fence()

    def drain(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self.drain()


def _logged(copy: Callable[[], object]) -> None:
    try:
        copy()
    except Exception:
        _log.exception("copy beside the steps failed")
