"""Connections that end early, or over which nothing moves."""

import asyncio
import itertools
import json
from typing import Any

import httpx
import pytest
from api_client import EOS, TOKENIZER, hello_gateway
from stand_ins import Script, ScriptedGateway

from cluster.api import ApiSettings, create_app
from cluster.api.connection import ClientLeft, run_while_connected
from scheduler.ids import RequestId


async def test_work_is_cancelled_once_and_may_clean_up() -> None:
    steps: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            steps.append("cleaned up")

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientLeft):
        await run_while_connected(receive, work(), 1.0)
    assert steps == ["cleaned up"]


async def test_work_ends_when_the_server_stops() -> None:
    gone = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    request = asyncio.create_task(run_while_connected(receive, work(), 1.0))
    await asyncio.sleep(0.01)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert gone.is_set()


def asgi_call(body: bytes) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A scope and the first messages of a `POST /v1/completions`, for tests below HTTP."""
    headers = [(b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": headers,
        "client": None,
        "server": None,
    }
    return scope, [{"type": "http.request", "body": body, "more_body": False}]


def small_app(gateway: ScriptedGateway, settings: ApiSettings) -> Any:
    return create_app(gateway, TOKENIZER, "tiny", 512, EOS, settings, lambda: RequestId("r0"), lambda: 0.0)


async def test_a_client_that_stops_reading_is_dropped() -> None:
    gateway = ScriptedGateway(lambda _: Script(itertools.repeat(70)))
    app = small_app(gateway, ApiSettings(client_write_timeout_s=0.05))
    scope, incoming = asgi_call(b'{"prompt": "x", "stream": true, "max_tokens": 400}')
    sent = 0

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        nonlocal sent
        sent += 1
        if sent > 3:
            await asyncio.Event().wait()

    async with asyncio.timeout(5):
        await app(scope, receive, send)
    assert gateway.cancelled == ["r0"]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api") as client:
        metrics = (await client.get("/metrics")).text
    assert 'prelay_finished_total{reason="cancelled"} 1.0' in metrics


async def test_a_body_that_does_not_come_is_given_up() -> None:
    app = small_app(hello_gateway(), ApiSettings(body_timeout_s=0.05))
    scope, _ = asgi_call(b"")
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async with asyncio.timeout(5):
        await app(scope, receive, send)
    assert sent[0]["status"] == 408
    assert json.loads(sent[1]["body"])["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", ["true", "false"])
async def test_a_client_that_leaves_before_the_first_token_cancels(stream: str) -> None:
    gateway = ScriptedGateway(lambda _: Script())
    app = small_app(gateway, ApiSettings())
    scope, incoming = asgi_call(f'{{"prompt": "x", "stream": {stream}}}'.encode())

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop()
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        """Nobody listens."""

    async with asyncio.timeout(5):
        await app(scope, receive, send)
    assert gateway.cancelled == ["r0"]
