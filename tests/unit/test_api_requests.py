"""What a client sends becomes a request to the cluster, or a 400 that says what to change."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from api_client import EOS, HELLO, MAX_MODEL_LEN, TOKENIZER, hello_gateway, open_client
from stand_ins import ScriptedGateway

from scheduler.request import Request


@pytest.fixture
def gateway() -> ScriptedGateway:
    return hello_gateway()


@pytest.fixture
async def client(gateway: ScriptedGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with open_client(gateway) as client:
        yield client


async def complete(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2, **fields})


async def accepted(client: httpx.AsyncClient, gateway: ScriptedGateway, **fields: Any) -> Request:
    response = await complete(client, **fields)
    assert response.status_code == 200, response.text
    return gateway.requests[-1]


async def refused(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await complete(client, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert isinstance(error, dict)
    return error


async def test_defaults_are_openais(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    response = await client.post("/v1/completions", json={"model": "tiny", "prompt": "hello"})
    assert response.status_code == 200
    request = gateway.requests[-1]
    assert request.prompt == HELLO
    assert request.max_tokens == 16
    assert request.min_tokens == 0
    assert request.stop_token_ids == EOS
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert (sampling.seed, sampling.repetition_penalty) == (77, 1.0)


async def test_null_fields_are_defaults(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    names = ["temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "stream"]
    request = await accepted(client, gateway, **dict.fromkeys(names))
    assert request.sampling.temperature == 1.0
    assert request.stop_token_ids == EOS


async def test_sampling_fields_arrive(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    request = await accepted(
        client, gateway, temperature=0.5, top_p=0.9, top_k=7, seed=3, repetition_penalty=1.2, min_tokens=1
    )
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert (sampling.seed, sampling.repetition_penalty, request.min_tokens) == (3, 1.2, 1)


async def test_scheduling_fields_arrive(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    request = await accepted(client, gateway)
    assert (request.priority, request.cache_salt) == (0, None)
    request = await accepted(client, gateway, priority=None, cache_salt=None)
    assert (request.priority, request.cache_salt) == (0, None)
    request = await accepted(client, gateway, priority=-3, cache_salt="tenant 7")
    assert (request.priority, request.cache_salt) == (-3, "tenant 7")
    response = await chat(client, [{"role": "user", "content": "hi"}], priority=5, cache_salt="other")
    assert response.status_code == 200
    assert (gateway.requests[-1].priority, gateway.requests[-1].cache_salt) == (5, "other")


@pytest.mark.parametrize(("asked", "got"), [(0, 0.0), (1e-9, 0.01), (2, 2.0)])
async def test_tiny_temperatures_are_raised(
    client: httpx.AsyncClient, gateway: ScriptedGateway, asked: float, got: float
) -> None:
    assert (await accepted(client, gateway, temperature=asked)).sampling.temperature == got


async def test_top_k_minus_one_is_off(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    assert (await accepted(client, gateway, top_k=-1)).sampling.top_k == 0


async def test_penalties_arrive(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    for value in (0.5, -2, 2, 0):
        sampling = (await accepted(client, gateway, presence_penalty=value, frequency_penalty=-value)).sampling
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (value, -value)
    nulls = dict.fromkeys(["repetition_penalty", "presence_penalty", "frequency_penalty"])
    sampling = (await accepted(client, gateway, **nulls)).sampling
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
async def test_both_routes_know_the_penalties(client: httpx.AsyncClient, gateway: ScriptedGateway, route: str) -> None:
    body = {"prompt": "hello"} if route == "completions" else {"messages": [{"role": "user", "content": "hello"}]}
    penalties = {"repetition_penalty": 1.1, "presence_penalty": 0.25, "frequency_penalty": -0.5}
    response = await client.post(f"/v1/{route}", json={**body, **penalties})
    assert response.status_code == 200
    sampling = gateway.requests[-1].sampling
    assert {name: getattr(sampling, name) for name in penalties} == penalties
    response = await client.post(f"/v1/{route}", json={**body, "presence_penalty": 2.5})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "presence_penalty"


async def test_negative_seeds_are_folded(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    assert (await accepted(client, gateway, seed=-1)).sampling.seed == 2**63 - 1


async def test_ignore_eos_keeps_the_clients_own_stop_tokens(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    assert (await accepted(client, gateway, stop_token_ids=[5])).stop_token_ids == EOS | {5}
    assert (await accepted(client, gateway, stop_token_ids=[5], ignore_eos=True)).stop_token_ids == {5}


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hello", [HELLO]),
        ([3, 4], [(3, 4)]),
        ([[3, 4]], [(3, 4)]),
        (["hello"], [HELLO]),
        ([[3], [4, 5]], [(3,), (4, 5)]),
        (["hello", "hellohello"], [HELLO, HELLO * 2]),
    ],
)
async def test_every_form_of_prompt(
    client: httpx.AsyncClient, gateway: ScriptedGateway, prompt: Any, prompts: list[tuple[int, ...]]
) -> None:
    response = await complete(client, prompt=prompt)
    assert [request.prompt for request in gateway.requests] == prompts
    body = response.json()
    assert [choice["index"] for choice in body["choices"]] == list(range(len(prompts)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert len({request.request_id for request in gateway.requests}) == len(prompts)


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("prompt", ""),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", [""]),
        ("prompt", None),
        ("prompt", 5),
        ("prompt", [1, "a"]),
        ("prompt", ["a", "b", "c", "d"]),
        ("prompt", [TOKENIZER.vocab_size]),
        ("prompt", [-1]),
        ("prompt", [1.5]),
        ("prompt", [True]),
        ("prompt", [0] * MAX_MODEL_LEN),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", "5"),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", MAX_MODEL_LEN),
        ("min_tokens", -1),
        ("min_tokens", 3),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "1"),
        ("temperature", [1]),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 10**6),
        ("seed", 2**63),
        ("seed", "x"),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("repetition_penalty", 0.009),
        ("repetition_penalty", 101),
        ("repetition_penalty", True),
        ("presence_penalty", 2.01),
        ("presence_penalty", -2.01),
        ("presence_penalty", "1"),
        ("frequency_penalty", 3),
        ("frequency_penalty", -3),
        ("frequency_penalty", False),
        ("stop", 5),
        ("stop", [5]),
        ("stop", ""),
        ("stop", ["a", "b", "c"]),
        ("stop", "123456789"),
        ("stop_token_ids", [TOKENIZER.vocab_size]),
        ("stop_token_ids", [1, 2, 3]),
        ("stop_token_ids", 4),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("model", 7),
        ("ignore_eos", 1),
        ("priority", "high"),
        ("priority", 1.5),
        ("priority", True),
        ("priority", 2**31),
        ("priority", -(2**31) - 1),
        ("cache_salt", ""),
        ("cache_salt", 7),
        ("cache_salt", ["a"]),
    ],
)
async def test_a_wrong_field_is_named(
    client: httpx.AsyncClient, gateway: ScriptedGateway, param: str, value: Any
) -> None:
    error = await refused(client, **{param: value})
    assert error["param"] == param
    assert len(error["message"]) > 20
    assert gateway.requests == []
    assert (await complete(client)).status_code == 200


UNSUPPORTED = {
    "n": [2, 0, True, "1"],
    "best_of": [2],
    "echo": [True],
    "suffix": ["x"],
    "logprobs": [True, 0, 5],
    "top_logprobs": [1],
    "tools": [[{"type": "function"}]],
    "response_format": [{"type": "json_object"}],
    "logit_bias": [{"5": 1}],
    "continue_final_message": [True],
    "kv_transfer_params": [{"do_remote_prefill": True, "remote_block_ids": [1]}, {}],
    "disaggregated_params": [{"request_type": "generation_only"}],
    "bootstrap_host": ["10.0.0.1"],
    "bootstrap_port": [1],
    "bootstrap_room": [7],
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in UNSUPPORTED.items() for v in values])
async def test_what_is_not_served_is_refused(client: httpx.AsyncClient, field: str, value: Any) -> None:
    error = await refused(client, **{field: value})
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")


NEUTRAL = [
    {"n": 1, "best_of": 1, "echo": False, "suffix": None, "logprobs": None},
    {"logprobs": False, "top_logprobs": 0, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}},
    {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "use_beam_search": False},
    {"user": "me", "metadata": {"a": "b"}, "some_future_field": [1, {"x": None}]},
]


@pytest.mark.parametrize("fields", NEUTRAL)
async def test_neutral_and_unknown_fields_pass(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    assert (await complete(client, **fields)).status_code == 200


async def test_a_missing_prompt_is_named(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json={})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"


async def test_another_model_is_404(client: httpx.AsyncClient) -> None:
    response = await complete(client, model="gpt-9")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert "tiny" in response.json()["error"]["message"]


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nope", 404), ("GET", "/v1/completions", 405)])
async def test_unknown_routes_have_the_openai_shape(
    client: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    response = await client.request(method, path)
    assert response.status_code == status
    assert path in response.json()["error"]["message"]


async def test_a_prompt_that_fills_the_context_says_how_much_is_too_much(client: httpx.AsyncClient) -> None:
    error = await refused(client, prompt=[1] * 60, max_tokens=5)
    assert error["code"] == "context_length_exceeded"
    assert "room for 4" in error["message"]


async def test_the_default_max_tokens_shrinks_to_the_context(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    await client.post("/v1/completions", json={"prompt": [1] * 60})
    assert gateway.requests[-1].max_tokens == 4


async def chat(client: httpx.AsyncClient, messages: Any, **fields: Any) -> httpx.Response:
    return await client.post("/v1/chat/completions", json={"messages": messages, **fields})


async def test_a_chat_goes_through_the_template_and_fills_the_context(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "developer", "content": "hi"}, {"role": "user", "content": parts}]
    response = await chat(client, messages)
    assert response.status_code == 200, response.text
    request = gateway.requests[-1]
    assert TOKENIZER.decode(request.prompt) == (
        "<|im_start|>system\nhi<|im_end|>\n<|im_start|>user\nhel\nlo<|im_end|>\n<|im_start|>assistant\n"
    )
    assert request.max_tokens == MAX_MODEL_LEN - len(request.prompt)


async def test_max_completion_tokens_wins(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    user = [{"role": "user", "content": "hi"}]
    await chat(client, user, max_tokens=3)
    await chat(client, user, max_tokens=3, max_completion_tokens=2)
    assert [request.max_tokens for request in gateway.requests] == [3, 2]


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "hi",
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "wizard", "content": "x"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        ["hi"],
    ],
)
async def test_bad_messages_are_refused(client: httpx.AsyncClient, messages: Any) -> None:
    response = await chat(client, messages)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"


async def test_a_whole_completion_has_every_field(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json={"prompt": "hello", "max_tokens": len(HELLO)})
    assert response.json() == {
        "id": "cmpl-r0",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": "tiny",
        "choices": [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "length", "token_ids": None}],
        "usage": {
            "prompt_tokens": len(HELLO),
            "completion_tokens": len(HELLO),
            "total_tokens": 2 * len(HELLO),
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
