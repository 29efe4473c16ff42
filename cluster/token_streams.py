"""Tokens of each request, put in order: index n + 1 follows n, once, whatever order and how often they arrive."""

import asyncio
from collections.abc import Iterable

from cluster.gateway import GatewayError, ServiceFailed, TokenOutput
from scheduler.events import Output
from scheduler.ids import RequestId
from scheduler.request import FinishReason


class TokenStream:
    """One request's tokens. Written and read on one event loop."""

    def __init__(self) -> None:
        self._next_index = 0
        self._early: dict[int, TokenOutput] = {}
        self._ready: asyncio.Queue[TokenOutput | GatewayError] = asyncio.Queue()

    def accept(self, token: TokenOutput) -> None:
        """A token that came twice changes nothing; one that came early waits for those before it."""
        if token.index < self._next_index:
            return
        self._early[token.index] = token
        while (following := self._early.pop(self._next_index, None)) is not None:
            self._next_index += 1
            self._ready.put_nowait(following)

    def fail(self, error: GatewayError) -> None:
        """After the tokens so far, the reader gets `error`."""
        self._ready.put_nowait(error)

    async def next(self, timeout_s: float) -> TokenOutput:
        """The next token. Raises GatewayError."""
        try:
            item = await asyncio.wait_for(self._ready.get(), timeout_s)
        except TimeoutError:
            raise ServiceFailed(f"no token for {timeout_s:g} s") from None
        if isinstance(item, GatewayError):
            raise item
        return item


class TokenStreams:
    """The open streams, by request. Outputs of requests that are not open are dropped: their client has left."""

    def __init__(self) -> None:
        self._streams: dict[RequestId, TokenStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, request_id: RequestId) -> TokenStream:
        stream = self._streams[request_id] = TokenStream()
        return stream

    def close(self, request_id: RequestId) -> None:
        self._streams.pop(request_id, None)

    def deliver(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.token is None or output.finish is FinishReason.ERROR:
                stream.fail(ServiceFailed("a step failed on the node that served this request"))
                continue
            stream.accept(TokenOutput(output.index, output.token, output.finish, output.cached_tokens))

    def fail_all(self, error: GatewayError) -> None:
        for stream in self._streams.values():
            stream.fail(error)

    def fail(self, request_id: RequestId, error: GatewayError) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.fail(error)
