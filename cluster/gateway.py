"""The port between the HTTP API and the cluster behind it."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

from scheduler.ids import RequestId
from scheduler.request import FinishReason, Request


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """The `index`-th sampled token (from 0) of a request. `finish` is set on the last one.

    cached_tokens: prompt tokens that the prefill node found in its prefix cache; set on index 0.
    """

    index: int
    token: int
    finish: FinishReason | None = None
    cached_tokens: int | None = None


class GatewayError(RuntimeError):
    """The cluster could not serve the request; the message is for the client."""


class RequestRejected(GatewayError):
    """The request can never be served as it is (HTTP 400)."""


class Overloaded(GatewayError):
    """Try again later (HTTP 429)."""


class ServiceFailed(GatewayError):
    """A fault of ours (HTTP 500 before the first token, an error event after it)."""


class Gateway(Protocol):
    def generate(self, request: Request) -> AsyncIterator[TokenOutput]:
        """Serve one request: tokens in order, each index once, the last with `finish`.

        Closing the iterator early (a client that left) cancels the request everywhere. Raises GatewayError.
        """
        ...

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter on all nodes; path: its folder there. The name must be new.

        Raises RequestRejected when no node has it in the end, another GatewayError when some may.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """Unload it from all nodes; no new request may name it any more. May be asked again after a GatewayError."""
        ...

    async def status(self) -> dict[str, Any]:
        """Nodes, links, handoffs: what `prelay status --json` prints."""
        ...

    async def story(self, request_id: RequestId) -> dict[str, Any]:
        """What the nodes know of a request: what `prelay story` prints."""
        ...
