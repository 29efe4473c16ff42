"""The API's process: the HTTP server, the tokenizer and the token streams, on one event loop."""

import asyncio
import secrets
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import uvicorn

from cluster.api.app import create_app
from cluster.api.settings import ApiSettings
from cluster.api.tokenizer import ChatTokenizer, load_tokenizers
from cluster.api_keys import ApiKeys
from cluster.gateway import ServiceFailed
from cluster.listener import listen_on
from cluster.model_files import eos_token_ids
from cluster.ray_gateway import RayGateway
from cluster.settings import Limits
from cluster.token_streams import TokenStreams
from handoff.logs import configure_logs
from scheduler.events import Output
from scheduler.ids import RequestId

CLOSE_CONNECTIONS_S = 1
STOP_TIMEOUT_S = 3.0


class _QuietServer(uvicorn.Server):
    """A server that waits for its end, where uvicorn's looks for it ten times a second, also when idle."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._asked = asyncio.Event()

    async def main_loop(self) -> None:
        await self._asked.wait()

    def ask_to_stop(self) -> None:
        self.should_exit = True
        self._asked.set()


class ApiActor:
    """Serves HTTP on host:port. deliver and fail are called by nodes and the coordinator."""

    def __init__(self, limits: Limits) -> None:
        load_tokenizers()  # while the nodes load their model
        self._limits = limits
        self._streams = TokenStreams()
        self._server: _QuietServer | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(
        self,
        coordinator: Any,
        model_path: str,
        model_name: str,
        max_model_len: int,
        host: str,
        port: int,
        keys: ApiKeys | None = None,
    ) -> str:
        """Listen, and return the server's URL. keys: see create_app. Raises OSError if the port is taken."""
        configure_logs("api")
        listener = listen_on(host, port)
        tokenizer = await asyncio.to_thread(ChatTokenizer.from_pretrained, model_path)
        app = create_app(
            gateway=RayGateway(coordinator, self._streams, self._limits.max_requests, self._limits.token_s),
            tokenizer=tokenizer,
            model_name=model_name,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids(Path(model_path)),
            settings=ApiSettings(max_body_bytes=self._limits.max_body_bytes, next_token_timeout_s=self._limits.token_s),
            new_request_id=lambda: RequestId(secrets.token_hex(12)),
            clock=time.monotonic,
            keys=keys,
        )
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            date_header=False,
            timeout_graceful_shutdown=CLOSE_CONNECTIONS_S,
        )
        self._server = _QuietServer(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        bound_host, bound_port = listener.getsockname()[:2]
        return f"http://{bound_host}:{bound_port}"

    async def deliver(self, outputs: Iterable[Output]) -> None:
        """A node's tokens of one step."""
        self._streams.deliver(outputs)

    async def fail(self, request_id: RequestId, reason: str) -> None:
        """A running request can't go on."""
        self._streams.fail(request_id, ServiceFailed(f"the request was interrupted: {reason}"))

    async def stop(self) -> None:
        """Stop listening; open streams end with an error event, which cancels their requests."""
        if self._server is None or self._serving is None:
            return
        self._streams.fail_all(ServiceFailed("the server is stopping"))
        self._server.ask_to_stop()
        await asyncio.wait({self._serving}, timeout=STOP_TIMEOUT_S)
