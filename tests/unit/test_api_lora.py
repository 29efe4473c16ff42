"""Adapters are loaded, listed, named as a model, and unloaded over HTTP."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from api_client import MAX_MODEL_LEN, hello_gateway, open_client
from stand_ins import ScriptedGateway

from cluster.gateway import RequestRejected, ServiceFailed


@pytest.fixture
def gateway() -> ScriptedGateway:
    return hello_gateway()


@pytest.fixture
async def client(gateway: ScriptedGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with open_client(gateway) as client:
        yield client


async def load(client: httpx.AsyncClient, name: str = "sql", path: str = "/adapters/sql") -> httpx.Response:
    return await client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})


async def unload(client: httpx.AsyncClient, name: str = "sql") -> httpx.Response:
    return await client.post("/v1/unload_lora_adapter", json={"lora_name": name})


async def complete(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2, **fields})


async def listed(client: httpx.AsyncClient) -> list[str]:
    return [card["id"] for card in (await client.get("/v1/models")).json()["data"]]


def error_of(response: httpx.Response) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    return response.status_code, error["message"], error["param"]


async def test_an_adapter_is_loaded_and_listed(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    response = await load(client)
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert gateway.adapters == {"sql": "/adapters/sql"}
    base, card = (await client.get("/v1/models")).json()["data"]
    assert (base["id"], base["root"], base["parent"]) == ("tiny", "tiny", None)
    assert (card["id"], card["root"], card["parent"]) == ("sql", "/adapters/sql", "tiny")
    assert (card["created"], card["max_model_len"]) == (1_700_000_000, MAX_MODEL_LEN)
    assert (await client.get("/v1/models/sql")).json() == card
    assert (await client.get("/v1/models/tiny")).json() == base


async def test_requests_that_name_it_run_under_it(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    assert (await complete(client, model="sql")).status_code == 404
    await load(client)
    answer = (await complete(client, model="sql")).json()
    assert (answer["model"], gateway.requests[-1].adapter) == ("sql", "sql")
    chat = {"model": "sql", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    answer = (await client.post("/v1/chat/completions", json=chat)).json()
    assert (answer["model"], gateway.requests[-1].adapter) == ("sql", "sql")
    stream = (await complete(client, model="sql", stream=True)).text
    assert stream.count('"model":"sql"') == 2
    for fields in ({}, {"model": None}, {"model": "tiny"}):
        answer = (await complete(client, **fields)).json()
        assert (answer["model"], gateway.requests[-1].adapter) == ("tiny", None)


async def test_an_unloaded_adapter_is_gone(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    await load(client)
    response = await unload(client)
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    assert gateway.adapters == {}
    assert await listed(client) == ["tiny"]
    assert (await complete(client, model="sql")).status_code == 404
    assert (await load(client)).status_code == 200


async def test_an_unknown_adapter_cannot_be_unloaded(client: httpx.AsyncClient) -> None:
    assert error_of(await unload(client, "nope")) == (404, "The LoRA adapter 'nope' is not loaded here.", "lora_name")
    assert (await unload(client, "tiny")).status_code == 404


async def test_a_refused_load_leaves_nothing(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    gateway.adapter_error = RequestRejected("rank 512 is over 256")
    status, message, _ = error_of(await load(client))
    assert (status, message) == (400, "rank 512 is over 256")
    assert await listed(client) == ["tiny"]
    assert (await unload(client)).status_code == 404
    gateway.adapter_error = None
    assert (await load(client)).status_code == 200


async def test_after_a_failed_load_it_must_be_unloaded(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    gateway.adapter_error = ServiceFailed("decode-0 may have it: unload it")
    status, message, _ = error_of(await load(client))
    assert (status, message) == (500, "decode-0 may have it: unload it")
    gateway.adapter_error = None
    gateway.adapters["sql"] = "/adapters/sql"
    status, message, param = error_of(await load(client))
    assert (status, param) == (400, "lora_name")
    assert "unload it first" in message
    assert await listed(client) == ["tiny"]
    assert (await unload(client)).status_code == 200
    assert (await load(client)).status_code == 200


async def test_a_refused_unload_has_taken_the_name_away(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    await load(client)
    gateway.adapter_error = RequestRejected("2 requests wait for adapter sql")
    status, message, _ = error_of(await unload(client))
    assert (status, message) == (400, "2 requests wait for adapter sql")
    assert (await complete(client, model="sql")).status_code == 404
    gateway.adapter_error = None
    assert (await unload(client)).status_code == 200
    assert (await unload(client)).status_code == 404


async def test_names_that_are_taken_are_refused(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    status, message, param = error_of(await load(client, "tiny"))
    assert (status, param) == (400, "lora_name")
    assert message.startswith("'tiny' is the name of the base model")
    await load(client)
    status, message, param = error_of(await load(client, path="/other"))
    assert (status, param) == (400, "lora_name")
    assert "loaded already" in message
    assert gateway.adapters == {"sql": "/adapters/sql"}


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("load", {"lora_path": "/a"}, "lora_name"),
        ("load", {"lora_name": "a"}, "lora_path"),
        ("load", {"lora_name": "", "lora_path": "/a"}, "lora_name"),
        ("load", {"lora_name": "a", "lora_path": ""}, "lora_path"),
        ("load", {"lora_name": 5, "lora_path": "/a"}, "lora_name"),
        ("unload", {}, "lora_name"),
        ("unload", {"lora_name": None}, "lora_name"),
    ],
)
async def test_bad_fields_are_named(
    client: httpx.AsyncClient, gateway: ScriptedGateway, route: str, body: dict[str, Any], param: str
) -> None:
    status, _, named = error_of(await client.post(f"/v1/{route}_lora_adapter", json=body))
    assert (status, named) == (400, param)
    assert gateway.adapters == {}
