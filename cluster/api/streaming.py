"""Server-sent events."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import structlog
from fastapi.responses import Response
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from cluster.api.connection import ClientLeft, run_while_connected
from cluster.api.errors import ApiError, gateway_api_error, internal_error
from cluster.api.settings import ApiSettings
from cluster.gateway import GatewayError

log = structlog.get_logger()

DONE = b"data: [DONE]\n\n"


class EventSink:
    """Where a stream's work puts its events. The status line leaves with the first event, not before."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]], timeout_s: float) -> None:
        self._send = send
        self._headers = headers
        self._timeout_s = timeout_s
        self.has_started = False

    async def event(self, data: BaseModel) -> None:
        await self.write(b"data: " + data.model_dump_json().encode() + b"\n\n")

    async def error(self, error: ApiError) -> None:
        """OpenAI clients raise on this event; no [DONE] may follow, as the answer is not complete."""
        await self.write(b"data: " + to_json(error.body()) + b"\n\n")

    async def done(self) -> None:
        await self.write(DONE)

    async def write(self, data: bytes) -> None:
        """Raises ClientLeft when the client reads nothing for the timeout."""
        try:
            async with asyncio.timeout(self._timeout_s):
                if not self.has_started:
                    self.has_started = True
                    await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
        except TimeoutError:
            raise ClientLeft from None

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


class EventStream(Response):
    """Runs `work`, which writes events, for as long as the client stays.

    A failure before the first event is raised, and so becomes a plain HTTP error; a later one becomes an
    error event that ends the stream.
    """

    media_type = "text/event-stream"

    def __init__(self, work: Callable[[EventSink], Awaitable[None]], settings: ApiSettings) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._work = work
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sink = EventSink(send, self.raw_headers, self._settings.client_write_timeout_s)
        # Left unfinished, so that the server closes the connection of a client that only stopped reading.
        with suppress(ClientLeft):
            await run_while_connected(receive, self._run(sink), self._settings.close_timeout_s)

    async def _run(self, sink: EventSink) -> None:
        try:
            await self._work(sink)
            await sink.done()
        except ClientLeft:
            raise
        except Exception as error:
            if not sink.has_started:
                raise
            await sink.error(self._as_api_error(error))
        await sink.end()

    def _as_api_error(self, error: Exception) -> ApiError:
        if isinstance(error, GatewayError):
            return gateway_api_error(error, self._settings.retry_after_s)
        log.error("stream failed", exc_info=error)
        return internal_error()
