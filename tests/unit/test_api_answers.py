"""Tokens of the cluster become answers: whole, streamed, stopped, failed."""

import itertools
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from stand_ins import Script, ScriptedGateway, byte_level_tokenizer

from cluster.api import ApiSettings, ChatTokenizer, create_app
from cluster.gateway import GatewayError, Overloaded, RequestRejected, ServiceFailed, TokenOutput
from scheduler.ids import RequestId
from scheduler.request import FinishReason, Request

TOKENIZER = ChatTokenizer(byte_level_tokenizer(["hello hello world"]))
EOS = 0
SETTINGS = ApiSettings(next_token_timeout_s=0.2, close_timeout_s=0.2, status_timeout_s=0.2)


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def speak(text: str, **script: Any) -> ScriptedGateway:
    return ScriptedGateway(lambda _: Script([*encode(text), EOS], **script))


@pytest.fixture
async def connect() -> AsyncIterator[Callable[[Any], httpx.AsyncClient]]:
    clients: list[httpx.AsyncClient] = []

    def new_client(gateway: Any) -> httpx.AsyncClient:
        ids, ticks = itertools.count(), itertools.count()
        app = create_app(
            gateway,
            TOKENIZER,
            "tiny",
            512,
            frozenset({EOS}),
            SETTINGS,
            lambda: RequestId(f"r{next(ids)}"),
            lambda: float(next(ticks)),
            unix_time=lambda: 1_700_000_000.0,
        )
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        clients.append(httpx.AsyncClient(transport=transport, base_url="http://api"))
        return clients[-1]

    yield new_client
    for client in clients:
        await client.aclose()


Connect = Callable[[Any], httpx.AsyncClient]


async def complete(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 100, **fields})


def events(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def streamed_text(chunks: list[Any]) -> str:
    return "".join(choice["text"] for chunk in chunks[:-1] for choice in chunk["choices"])


async def test_eos_ends_the_text_and_is_not_in_it(connect: Connect) -> None:
    body = (await complete(connect(speak("hello world", cached_tokens=3)))).json()
    assert body["choices"][0]["text"] == "hello world"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == len(encode("hello world")) + 1
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_ignored_eos_is_not_in_the_text_either(connect: Connect) -> None:
    gateway = ScriptedGateway(lambda _: Script([EOS, *encode("hi"), EOS]))
    body = (await complete(connect(gateway), ignore_eos=True, max_tokens=len(encode("hi")) + 2)).json()
    assert body["choices"][0]["text"] == "hi"
    assert body["choices"][0]["finish_reason"] == "length"


async def test_the_clients_stop_token_is_hidden_unless_asked_for(connect: Connect) -> None:
    (w,) = encode("w")
    client = connect(speak("hi w"))
    plain = await complete(client, stop_token_ids=[w])
    shown = await complete(client, stop_token_ids=[w], include_stop_str_in_output=True)
    assert [r.json()["choices"][0]["finish_reason"] for r in (plain, shown)] == ["stop", "stop"]
    assert shown.json()["choices"][0]["text"] == plain.json()["choices"][0]["text"] + "w"


async def test_a_stream_has_one_chunk_per_token(connect: Connect) -> None:
    chunks = events(await complete(connect(speak("hello 🦊")), stream=True))
    assert chunks[-1] == "[DONE]"
    assert streamed_text(chunks) == "hello 🦊"
    assert len(chunks) == len(encode("hello 🦊")) + 1 + 1
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert {chunk["id"] for chunk in chunks[:-1]} == {"cmpl-r0"}


async def test_usage_is_the_last_chunk(connect: Connect) -> None:
    chunks = events(await complete(connect(speak("hi")), stream=True, stream_options={"include_usage": True}))
    assert chunks[-2]["choices"] == []
    n_tokens = len(encode("hi")) + 1
    assert chunks[-2]["usage"]["completion_tokens"] == n_tokens
    assert chunks[0]["usage"] is None


async def test_continuous_usage_counts_up(connect: Connect) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(await complete(connect(speak("hi")), stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]]
    n_tokens = len(encode("hi")) + 1
    assert counts == [*range(1, n_tokens + 1), n_tokens]


async def test_a_chat_stream_names_the_role_once(connect: Connect) -> None:
    response = await connect(speak("hi")).post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "stream": True}
    )
    chunks = events(response)[:-1]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [delta.get("role") for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    assert "".join(delta["content"] for delta in deltas) == "hi"
    assert chunks[0]["object"] == "chat.completion.chunk"


async def test_a_whole_chat_answer(connect: Connect) -> None:
    response = await connect(speak("hi")).post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}
    )
    body = response.json()
    assert body["object"] == "chat.completion"
    assert body["id"] == "chatcmpl-r0"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "hi", "refusal": None}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_request_everywhere(connect: Connect, stream: bool) -> None:
    gateway = speak("hello STOP never sent")
    response = await complete(connect(gateway), stop=["STOP", "zzz"], stream=stream)
    if stream:
        chunks = events(response)
        assert streamed_text(chunks) == "hello "
        assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    else:
        choice = response.json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("hello ", "stop")
    assert gateway.cancelled == ["r0"]


async def test_text_held_for_a_stop_string_comes_at_the_end(connect: Connect) -> None:
    chunks = events(await complete(connect(speak("one STO")), stop="STOP", stream=True))
    assert streamed_text(chunks) == "one STO"
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"


async def test_a_stop_string_may_be_sent_on_request(connect: Connect) -> None:
    body = (await complete(connect(speak("a STOP b")), stop="STOP", include_stop_str_in_output=True)).json()
    assert body["choices"][0]["text"] == "a STOP"


async def test_stop_strings_wait_for_min_tokens(connect: Connect) -> None:
    n_first = len(encode("x STOP"))
    body = (await complete(connect(speak("x STOP y STOP z")), stop="STOP", min_tokens=n_first)).json()
    assert body["choices"][0]["text"] == "x STOP y "


async def test_half_a_character_at_the_end_is_a_replacement(connect: Connect) -> None:
    gateway = ScriptedGateway(lambda _: Script(encode("🦊")))
    body = (await complete(connect(gateway), max_tokens=2)).json()
    assert body["choices"][0]["text"] == "\N{REPLACEMENT CHARACTER}"


async def test_several_prompts_are_answered_side_by_side(connect: Connect) -> None:
    texts = {(1,): "one", (2,): "two", (3,): "three"}
    gateway = ScriptedGateway(lambda request: Script([*encode(texts[request.prompt]), EOS]))
    client = connect(gateway)
    body = (await complete(client, prompt=[[1], [2], [3]])).json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "one"), (1, "two"), (2, "three")]
    chunks = events(await complete(client, prompt=[[1], [2], [3]], stream=True))
    for index, text in enumerate(["one", "two", "three"]):
        mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in mine) == text


async def test_one_failed_prompt_cancels_the_others(connect: Connect) -> None:
    gateway = ScriptedGateway(
        lambda request: Script(error=Overloaded("full")) if request.prompt == (2,) else Script(encode("a"))
    )
    response = await complete(connect(gateway), prompt=[[1], [2], [3]])
    assert response.status_code == 429
    assert sorted(gateway.cancelled) == ["r0", "r1", "r2"]


FAILURES = [
    (RequestRejected("the prompt is too long for any node"), 400, "invalid_request_error"),
    (Overloaded("all nodes are full, try again"), 429, "rate_limit_error"),
    (ServiceFailed("the budget of attempts is spent"), 500, "server_error"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("failure", "status", "type_"), FAILURES)
async def test_a_failure_before_the_first_token_is_a_status(
    connect: Connect, failure: GatewayError, status: int, type_: str, stream: bool
) -> None:
    response = await complete(connect(ScriptedGateway(lambda _: Script(error=failure))), stream=stream)
    assert response.status_code == status
    error = response.json()["error"]
    assert (error["message"], error["type"]) == (str(failure), type_)
    assert response.headers.get("retry-after") == ("1" if status == 429 else None)


@pytest.mark.parametrize(("failure", "status", "type_"), FAILURES)
async def test_a_failure_in_a_stream_is_its_last_event(
    connect: Connect, failure: GatewayError, status: int, type_: str
) -> None:
    gateway = ScriptedGateway(lambda _: Script(encode("hello"), error=failure))
    response = await complete(connect(gateway), stream=True)
    assert response.status_code == 200
    parts = events(response)
    assert parts[-1]["error"]["message"] == str(failure)
    assert parts[-1]["error"]["type"] == type_
    assert "[DONE]" not in parts


async def test_a_silent_cluster_is_given_up(connect: Connect) -> None:
    gateway = ScriptedGateway(lambda _: Script())
    response = await complete(connect(gateway))
    assert response.status_code == 500
    assert "0.2 seconds" in response.json()["error"]["message"]
    assert gateway.cancelled == ["r0"]


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.ERROR])
async def test_an_end_that_the_client_did_not_ask_for_is_a_failure(connect: Connect, reason: FinishReason) -> None:
    response = await complete(connect(ScriptedGateway(lambda _: Script(encode("a"), early_finish=reason))))
    assert response.status_code == 500


class OddGateway(ScriptedGateway):
    """Breaks the port's contract: yields `outputs` whatever the request says."""

    def __init__(self, outputs: list[TokenOutput], error: Exception | None = None) -> None:
        super().__init__(lambda _: Script())
        self.outputs = outputs
        self.error = error

    async def generate(self, request: Request) -> AsyncIterator[TokenOutput]:
        for output in self.outputs:
            yield output
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(
    "outputs",
    [
        [],
        [TokenOutput(0, 5)],
        [TokenOutput(1, 5, FinishReason.LENGTH)],
        [TokenOutput(0, 5), TokenOutput(0, 5), TokenOutput(1, 5, FinishReason.LENGTH)],
    ],
    ids=["nothing", "no finish", "a gap", "a double"],
)
async def test_a_lost_or_doubled_token_is_never_passed_on(connect: Connect, outputs: list[TokenOutput]) -> None:
    assert (await complete(connect(OddGateway(outputs)))).status_code == 500


async def test_our_own_fault_shows_no_details(connect: Connect) -> None:
    client = connect(OddGateway([], KeyError("secret")))
    response = await complete(client)
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.json()["error"]["code"] == "internal_error"
    assert (await client.get("/version")).status_code == 200


async def test_our_own_fault_in_a_stream_is_an_error_event(connect: Connect) -> None:
    parts = events(await complete(connect(OddGateway([TokenOutput(0, 5)], KeyError("secret"))), stream=True))
    assert parts[-1]["error"]["code"] == "internal_error"
