"""The gateway over Ray: requests go to the coordinator, tokens come from the nodes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine
from typing import Any

import structlog
from ray.exceptions import RayTaskError

from cluster.gateway import GatewayError, Overloaded, RequestRejected, ServiceFailed, TokenOutput
from cluster.token_streams import TokenStreams
from handoff.coordinator import Completion
from handoff.drive import HandoffRecord
from scheduler.adapters import AdapterRefused
from scheduler.ids import RequestId
from scheduler.request import Request

log = structlog.get_logger()

ANSWER_TIMEOUT_S = 30.0
"""The coordinator's answer to a question of an operator."""
CANCEL_RETRY_S = 0.05
ADAPTER_TIMEOUT_S = 3600.0
"""The coordinator's answer when an adapter is loaded or unloaded, one node after another and back again."""


class RayGateway:
    """coordinator: an actor handle. Used on one event loop."""

    def __init__(self, coordinator: Any, streams: TokenStreams, max_requests: int, token_timeout_s: float) -> None:
        self._coordinator = coordinator
        self._streams = streams
        self._max_requests = max_requests
        self._token_timeout_s = token_timeout_s
        self._tasks: set[asyncio.Task[None]] = set()

    async def generate(self, request: Request) -> AsyncIterator[TokenOutput]:
        if len(self._streams) >= self._max_requests:
            raise Overloaded(f"{self._max_requests} requests are being served: try again later")
        stream = self._streams.open(request.request_id)
        # A handoff that doesn't succeed ends its request's stream; the wait is bounded by the driver's limits.
        serving = self._start(self._fail_unless_served(request.request_id, self._coordinator.serve.remote(request)))
        finished = False
        try:
            while not finished:
                token = await stream.next(self._token_timeout_s)
                finished = token.finish is not None
                yield token
        finally:
            self._streams.close(request.request_id)
            if not finished:
                # Not awaited: the coordinator's cleanup is bounded on its side.
                self._start(self._cancel(request.request_id, serving))

    async def load_adapter(self, name: str, path: str) -> None:
        await _change_adapters(self._coordinator.load_adapter.remote(name, path))

    async def unload_adapter(self, name: str) -> None:
        await _change_adapters(self._coordinator.unload_adapter.remote(name))

    async def status(self) -> dict[str, Any]:
        status: dict[str, Any] = await _answer(self._coordinator.status.remote())
        status["requests"] = {"open": len(self._streams), "max": self._max_requests}
        return status

    async def story(self, request_id: RequestId) -> dict[str, Any]:
        story: dict[str, Any] = await _answer(self._coordinator.story.remote(request_id))
        return story

    def _start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _cancel(self, request_id: RequestId, serving: "asyncio.Task[None]") -> None:
        """Calls are not ordered: a cancel that overtook its request is unknown there, and asked again."""
        try:
            while not await self._coordinator.cancel.remote(request_id) and not serving.done():
                await asyncio.wait({serving}, timeout=CANCEL_RETRY_S)
        except Exception as lost:
            log.error("request not cancelled", request_id=request_id, reason=str(lost))

    async def _fail_unless_served(self, request_id: RequestId, serving: Awaitable[HandoffRecord]) -> None:
        error: GatewayError | None
        try:
            error = failure_of(await serving)
        except RayTaskError as failed:
            error = ServiceFailed(f"the request could not be served: {failed.cause}")
        except Exception as lost:
            log.error("coordinator call failed", request_id=request_id, reason=str(lost))
            error = ServiceFailed("the coordinator can't be reached: try again")
        if error is not None:
            self._streams.fail(request_id, error)


def failure_of(record: HandoffRecord) -> GatewayError | None:
    """What the client is told, None if the request goes on or has ended well."""
    if record.completion in (Completion.HANDED_OVER, Completion.FINISHED_AT_SOURCE):
        return None
    if record.rejected:
        return RequestRejected(record.reason)
    if record.completion is Completion.CANCELLED:
        return ServiceFailed("the request was cancelled")
    return ServiceFailed(f"the request could not be served: {record.reason}")


async def _change_adapters(call: Awaitable[Any]) -> None:
    """Raises RequestRejected when the nodes refuse, ServiceFailed when it is open what they did."""
    try:
        await _answer(call, ADAPTER_TIMEOUT_S)
    except RayTaskError as failed:
        if isinstance(failed.cause, AdapterRefused):
            raise RequestRejected(str(failed.cause)) from None
        raise ServiceFailed(str(failed.cause)) from None
    except Exception as lost:
        log.error("coordinator call failed", reason=repr(lost))
        raise ServiceFailed("the coordinator can't be reached: try again") from lost


async def _answer(call: Awaitable[Any], timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
    """Raises TimeoutError."""

    async def wait() -> Any:
        return await call

    return await asyncio.wait_for(wait(), timeout_s)
