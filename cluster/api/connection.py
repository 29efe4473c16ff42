"""Work for a client ends when the client leaves."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog
from starlette.types import Receive

T = TypeVar("T")

log = structlog.get_logger()


class ClientLeft(Exception):
    """The client closed its connection, or stopped reading for too long: nobody waits for the answer."""


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, T], close_timeout_s: float) -> T:
    """The result of `work`; or, once the client leaves, cancel it, wait for its cleanup and raise ClientLeft.

    The work is a task of its own and is cancelled once, so that its cleanup may await (an anyio cancel scope
    would cancel each of those awaits too). The request's body must have been read.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        watch.cancel()
        await _stop(task, close_timeout_s)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _stop(task: "asyncio.Task[T]", timeout_s: float) -> None:
    if task.done():
        return
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=timeout_s)
    if not done:
        log.error("a cancelled request did not stop", timeout_s=timeout_s)
    elif not task.cancelled() and (error := task.exception()) is not None:
        log.warning("a cancelled request failed", exc_info=error)
