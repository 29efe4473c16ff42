"""Bodies: their JSON, type and size; and the routes that only turn text into tokens and back."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from api_client import HELLO, MAX_MODEL_LEN, TOKENIZER, hello_gateway, open_client


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with open_client(hello_gateway()) as client:
        yield client


async def post_raw(client: httpx.AsyncClient, content: bytes, content_type: str = "application/json") -> httpx.Response:
    return await client.post("/v1/completions", content=content, headers={"Content-Type": content_type})


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"prompt": "\\ud800"}', b"[" * 3000, b'{"prompt": NaN'],
)
async def test_what_is_no_json_object_is_refused(client: httpx.AsyncClient, content: bytes) -> None:
    response = await post_raw(client, content)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "repetition_penalty"])
async def test_numbers_are_finite(client: httpx.AsyncClient, field: str, number: str) -> None:
    response = await post_raw(client, f'{{"prompt": "x", "{field}": {number}}}'.encode())
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-www-form-urlencoded"])
async def test_the_content_type_must_be_json(client: httpx.AsyncClient, content_type: str) -> None:
    response = await post_raw(client, b'{"prompt": "x"}', content_type)
    assert response.status_code == 415
    assert "application/json" in response.json()["error"]["message"]


async def test_a_body_over_the_limit_is_refused(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json={"prompt": "x" * 5000})
    assert response.status_code == 413
    assert "4096" in response.json()["error"]["message"]


async def test_a_chunked_body_over_the_limit_is_refused_while_it_comes(client: httpx.AsyncClient) -> None:
    sent = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(100):
            sent += 1000
            yield b"x" * 1000

    response = await client.post("/v1/completions", content=body(), headers={"Content-Type": "application/json"})
    assert response.status_code == 413
    assert sent <= 6000


async def test_tokenize_and_detokenize_are_vllms(client: httpx.AsyncClient) -> None:
    response = await client.post("/tokenize", json={"model": "tiny", "prompt": "hello", "return_token_strs": True})
    body = response.json()
    assert body["tokens"] == list(HELLO)
    assert body["count"] == len(HELLO)
    assert body["max_model_len"] == MAX_MODEL_LEN
    assert "".join(body["token_strs"]) == "hello"
    back = await client.post("/detokenize", json={"tokens": body["tokens"]})
    assert back.json() == {"prompt": "hello"}


async def test_tokenize_takes_messages(client: httpx.AsyncClient) -> None:
    response = await client.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]})
    text = await client.post("/detokenize", json={"tokens": response.json()["tokens"]})
    assert text.json()["prompt"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("body", [{}, {"prompt": "x", "messages": []}, {"prompt": 5}])
async def test_tokenize_wants_one_of_prompt_and_messages(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    assert (await client.post("/tokenize", json=body)).status_code == 400


async def test_detokenize_checks_the_ids(client: httpx.AsyncClient) -> None:
    response = await client.post("/detokenize", json={"tokens": [TOKENIZER.vocab_size]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tokens"
