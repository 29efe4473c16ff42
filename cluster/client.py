"""A small client of the HTTP API, for the command line."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 600.0


class ApiFailed(RuntimeError):
    """The server can't be reached, or answered with an error; the message is the server's."""


@dataclass(slots=True)
class Answer:
    """One streamed answer. times: seconds since the request was sent, one for each piece of text."""

    answer_id: str = ""
    text: str = ""
    times: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def ttft_s(self) -> float:
        return self.times[0] if self.times else 0.0

    @property
    def itl_s(self) -> float:
        """Mean time between pieces of text."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1) if len(self.times) > 1 else 0.0


class Client:
    """url: the server's address, without /v1. read_timeout_s: of each answer. api_key: None sends none.

    Use as a context manager. Raises ApiFailed for what can't be a key.
    """

    def __init__(self, url: str, read_timeout_s: float = READ_TIMEOUT_S, api_key: str | None = None) -> None:
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise ApiFailed("this is no API key: they are printable ASCII")
        timeout = httpx.Timeout(read_timeout_s, connect=CONNECT_TIMEOUT_S)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=url.rstrip("/"), timeout=timeout, trust_env=False, headers=headers)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str) -> dict[str, Any]:
        """A JSON document. Raises ApiFailed."""
        try:
            response = self._http.get(path)
        except httpx.HTTPError as error:
            raise ApiFailed(f"can't reach {self._http.base_url}: {error}") from None
        _require_success(response)
        document: dict[str, Any] = response.json()
        return document

    def model(self) -> str:
        """The name of the served model."""
        name: str = self.get("/v1/models")["data"][0]["id"]
        return name

    def stream_chat(self, answer: Answer, messages: list[dict[str, str]], **options: Any) -> Iterator[str]:
        """Pieces of text as they come; `answer` is filled on the way. Raises ApiFailed."""
        body = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}, **options}
        started = time.monotonic()
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                _require_success(response)
                for event in _events(response):
                    piece = _take(answer, event)
                    if piece:
                        answer.times.append(time.monotonic() - started)
                        answer.text += piece
                        yield piece
        except httpx.HTTPError as error:
            raise ApiFailed(f"the stream broke: {error}") from None


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ApiFailed(event["error"].get("message", "the server failed"))
        yield event


def _take(answer: Answer, event: dict[str, Any]) -> str:
    answer.answer_id = event.get("id") or answer.answer_id
    answer.usage = event.get("usage") or answer.usage
    choices = event.get("choices") or []
    return (choices[0].get("delta", {}).get("content") or "") if choices else ""


def _require_success(response: httpx.Response) -> None:
    if not response.is_error:
        return
    if response.status_code == 401:
        sent = "Authorization" in response.request.headers
        problem = "does not know this API key" if sent else "wants an API key"
        raise ApiFailed(f"the server {problem}: give one of its keys with --api-key, or set PRELAY_API_KEY")
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:500]
    raise ApiFailed(f"{response.status_code}: {message}")
