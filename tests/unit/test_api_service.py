"""Models, health, version, status and metrics."""

import itertools
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from stand_ins import Script, ScriptedGateway, byte_level_tokenizer

from cluster.api import ApiSettings, ChatTokenizer, create_app
from cluster.api.cluster_metrics import render_status
from cluster.gateway import Overloaded
from scheduler.ids import RequestId

TOKENIZER = ChatTokenizer(byte_level_tokenizer(["hello hello world"]))
STATUS = {
    "nodes": [
        {
            "node": "p0",
            "role": "prefill",
            "blocks": {"total": 10, "free": 7, "cached": 2, "held": 1},
            "requests": {"waiting": 1, "running": 2, "preempted": 1},
            "work": {"queued_prefills": {"count": 1, "sum": 300, "variance": 2.5}},
            "kv_usage": 0.25,
            "prefix_blocks": 6,
        },
        {"node": "d0", "role": "decode", "blocks": {"total": 20, "free": 20}},
    ],
    "handoffs": {"active": 2, "completed": 30, "cancelled": 4, "failed": 1},
    "counters": {"bytes_sent_total": 99, "retries": 3, "odd name!": 1, "running": 5, "note": "text"},
}


@pytest.fixture
def gateway() -> ScriptedGateway:
    return ScriptedGateway(lambda _: Script(itertools.repeat(5), cached_tokens=2), status_json=dict(STATUS))


@pytest.fixture
async def client(gateway: ScriptedGateway) -> AsyncIterator[httpx.AsyncClient]:
    ids, ticks = itertools.count(), itertools.count()
    app = create_app(
        gateway,
        TOKENIZER,
        "org/tiny",
        512,
        frozenset({0}),
        ApiSettings(status_timeout_s=0.05),
        lambda: RequestId(f"r{next(ids)}"),
        lambda: float(next(ticks)),
        unix_time=lambda: 1_700_000_000.0,
    )
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
        yield client


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    return found


async def test_the_model_is_listed(client: httpx.AsyncClient) -> None:
    (card,) = (await client.get("/v1/models")).json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("org/tiny", "model", 512)
    assert (await client.get("/v1/models/org/tiny")).json() == card
    assert (await client.get("/v1/models/other")).status_code == 404


async def test_health_is_bad_while_a_pool_has_no_node(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    gateway.status_json = {"missing_roles": ["decode"], "nodes": []}
    response = await client.get("/health")
    assert response.status_code == 503
    assert "decode" in response.json()["error"]["message"]


async def test_health_follows_the_cluster(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    assert (await client.get("/health")).status_code == 200
    gateway.status_error = RuntimeError("no coordinator")
    response = await client.get("/health")
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "server_error"


async def test_status_is_the_gateways(client: httpx.AsyncClient) -> None:
    assert (await client.get("/cluster/status")).json() == STATUS


async def test_the_version_is_a_string(client: httpx.AsyncClient) -> None:
    assert isinstance((await client.get("/version")).json()["version"], str)


LINES = [
    {"node": "d0", "at": 1.5, "step": 0, "tokens": 3, "what": "accepted"},
    {"node": "p0", "at": 2.25, "step": 7, "tokens": 3, "what": "submitted"},
]


@pytest.mark.parametrize("name", ["abc", "cmpl-abc", "chatcmpl-abc"])
async def test_a_story_is_found_by_the_requests_or_the_answers_id(
    client: httpx.AsyncClient, gateway: ScriptedGateway, name: str
) -> None:
    gateway.stories["abc"] = LINES
    response = await client.get(f"/cluster/story/{name}")
    assert response.json() == {"request_id": "abc", "lines": LINES, "silent": []}


async def test_a_request_that_nobody_knows_is_404(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    response = await client.get("/cluster/story/cmpl-nope%2F..")
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "request_not_found")
    assert error["message"].startswith("No node knows the request 'nope/..'")
    gateway.silent.append({"node": "d0", "reason": "it was lost"})
    response = await client.get("/cluster/story/nope")
    assert response.json()["error"]["message"].endswith("d0 does not answer (it was lost).")


async def test_no_story_comes_from_a_cluster_that_fails(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    gateway.status_error = RuntimeError("no coordinator")
    response = await client.get("/cluster/story/abc")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_story")


async def test_metrics_count_requests_and_tokens(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    await client.post("/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 4})
    await client.post("/v1/completions", json={"prompt": ""})
    await client.get("/made/up/path")
    gateway.script = lambda _: Script(error=Overloaded("full"))
    await client.post("/v1/completions", json={"prompt": "x"})
    found = samples((await client.get("/metrics")).text)
    route = ("route", "/v1/completions")
    assert found["prelay_http_requests_total", (route, ("status", "200"))] == 1
    assert found["prelay_http_requests_total", (route, ("status", "400"))] == 1
    assert found["prelay_http_requests_total", (route, ("status", "429"))] == 1
    assert found["prelay_http_requests_total", (("route", "unknown"), ("status", "404"))] == 1
    assert found["prelay_prompt_tokens_total", ()] == 3
    assert found["prelay_generation_tokens_total", ()] == 4
    assert found["prelay_cached_tokens_total", ()] == 2
    assert found["prelay_time_to_first_token_seconds_count", ()] == 1
    assert found["prelay_time_to_first_token_seconds_sum", ()] == 1
    assert found["prelay_inter_token_seconds_count", ()] == 3
    assert found["prelay_end_to_end_seconds_count", ()] == 1
    assert found["prelay_finished_total", (("reason", "length"),)] == 1
    assert found["prelay_finished_total", (("reason", "error"),)] == 1
    assert found["prelay_running", ()] == 0


async def test_metrics_show_the_cluster(client: httpx.AsyncClient) -> None:
    found = samples((await client.get("/prometheus/metrics")).text)

    def of_node(node: str, role: str, state: str) -> tuple[tuple[str, str], ...]:
        return ("node", node), ("role", role), ("state", state)

    assert found["prelay_up", ()] == 1
    assert found["prelay_blocks", of_node("p0", "prefill", "held")] == 1
    assert found["prelay_blocks", of_node("d0", "decode", "free")] == 20
    assert found["prelay_requests", of_node("p0", "prefill", "running")] == 2
    assert found["prelay_requests", of_node("p0", "prefill", "preempted")] == 1
    p0 = ("node", "p0"), ("role", "prefill")
    assert (found["prelay_kv_usage", p0], found["prelay_prefix_blocks", p0]) == (0.25, 6)
    queued = ("kind", "queued_prefills"), *p0
    assert [found[f"prelay_work_{name}", queued] for name in ("requests", "tokens", "tokens_variance")] == [1, 300, 2.5]
    assert found["prelay_handoffs_total", (("outcome", "completed"),)] == 30
    assert found["prelay_handoffs_active", ()] == 2
    assert found["prelay_bytes_sent_total", ()] == 99
    assert found["prelay_retries", ()] == 3
    assert found["prelay_odd_name_", ()] == 1
    assert found["prelay_running", ()] == 0
    assert found["prelay_counter_running", ()] == 5


async def test_metrics_outlive_the_cluster(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    gateway.status_error = RuntimeError("no coordinator")
    response = await client.get("/metrics")
    assert response.status_code == 200
    found = samples(response.text)
    assert found["prelay_up", ()] == 0
    assert ("prelay_generation_tokens_total", ()) in found


@pytest.mark.parametrize(
    "status",
    [
        {},
        {"nodes": None, "handoffs": None, "counters": None},
        {"nodes": ["x", {}, {"node": "a", "blocks": 5}], "handoffs": [], "counters": 3},
        {"nodes": [{"node": "a", "blocks": {"free": "many"}}, {"node": "a", "blocks": {"free": 1}}]},
        {"nodes": [{"node": "a", "work": {"decodes": 5, "prefills": {"count": "no"}}, "kv_usage": "half"}] * 2},
        {"nodes": [{"work": [1]}], "counters": {"work_tokens": 1, "kv_usage": 2}},
        {"counters": {"": 1, "x": 1, "x_total": 2, "up": 1, "X Y": 1, "X-Y": 2}},
    ],
)
def test_an_odd_status_never_breaks_metrics(status: dict[str, Any]) -> None:
    assert samples(render_status(status, frozenset()).decode())["prelay_up", ()] == 1
