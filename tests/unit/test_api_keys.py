"""Who is let in by API keys, and what the others are told."""

from collections.abc import AsyncIterator
from hashlib import sha256

import httpx
import pytest
from api_client import hello_gateway, open_client
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from typer.testing import CliRunner

from cluster import cli
from cluster.api.require_key import RequireKey, tenant_of
from cluster.api_keys import ApiKeys
from cluster.client import ApiFailed, Client
from cluster.listener import is_loopback, open_door

KEYS = ApiKeys.of(["first-key", "second-key"])
BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 2}


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with open_client(hello_gateway(), KEYS) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("key", ["first-key", "second-key"])
async def test_a_key_lets_in(client: httpx.AsyncClient, key: str) -> None:
    assert (await client.post("/v1/completions", json=BODY, headers=bearer(key))).status_code == 200
    assert (await client.get("/cluster/status", headers=bearer(key))).status_code == 200


async def test_the_scheme_is_read_in_any_case(client: httpx.AsyncClient) -> None:
    response = await client.get("/v1/models", headers={"authorization": "bearer  first-key "})
    assert response.status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("third-key"),
        bearer(""),
        bearer("first-key second-key"),
        bearer("First-key"),
        {"Authorization": "first-key"},
        {"Authorization": "Basic first-key"},
        {"Authorization": "Bearer"},
        {"X-Api-Key": "first-key"},
    ],
    ids=str,
)
async def test_everybody_else_is_refused(client: httpx.AsyncClient, headers: dict[str, str]) -> None:
    response = await client.post("/v1/completions", json=BODY, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "invalid_api_key")
    assert "Authorization: Bearer KEY" in error["message"]
    assert "third-key" not in response.text


async def test_two_headers_are_refused(client: httpx.AsyncClient) -> None:
    headers = [("Authorization", "Bearer first-key"), ("Authorization", "Bearer first-key")]
    assert (await client.get("/v1/models", headers=headers)).status_code == 401


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/tiny"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/cluster/status"),
        ("GET", "/cluster/story/r0"),
        ("GET", "/version"),
        ("GET", "/nothing/here"),
        ("GET", "//health"),
        ("GET", "/health/../v1/models"),
        ("OPTIONS", "/v1/models"),
    ],
)
async def test_every_other_route_wants_a_key(client: httpx.AsyncClient, method: str, path: str) -> None:
    assert (await client.request(method, path)).status_code == 401


@pytest.mark.parametrize("path", ["/health", "/metrics", "/prometheus/metrics"])
async def test_health_and_metrics_stay_open(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.get(path)).status_code == 200


async def test_refusals_are_counted(client: httpx.AsyncClient) -> None:
    await client.get("/v1/models")
    assert 'route="unknown",status="401"} 1.0' in (await client.get("/metrics")).text


@pytest.mark.parametrize("keys", [None, ApiKeys.of([])])
async def test_without_keys_everybody_is_let_in(keys: ApiKeys | None) -> None:
    async with open_client(hello_gateway(), keys) as client:
        assert (await client.get("/v1/models")).status_code == 200


async def test_later_code_knows_the_key_by_its_name() -> None:
    async def tenant(request: Request) -> PlainTextResponse:
        return PlainTextResponse(str(tenant_of(request)))

    app = Starlette(routes=[Route("/who", tenant)])
    names = []
    for wrapped, key in ((app, "x"), (RequireKey(app, KEYS), "first-key"), (RequireKey(app, KEYS), "second-key")):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(wrapped), base_url="http://api") as client:
            names.append((await client.get("/who", headers=bearer(key))).text)
    digests = [sha256(key).hexdigest()[:12] for key in (b"first-key", b"second-key")]
    assert names == ["None", f"key-{digests[0]}", f"key-{digests[1]}"]


@pytest.mark.parametrize("key", ["", "two words", "tab\there", "schlüssel", "x" * 1025])
def test_a_key_that_no_header_holds_is_refused_unseen(key: str) -> None:
    with pytest.raises(ValueError, match="printable ASCII") as caught:
        ApiKeys.of(["fine", key])
    assert not key or key not in str(caught.value)


def test_keys_are_not_shown() -> None:
    assert repr(KEYS) == "ApiKeys()"


def answering(status: int) -> httpx.MockTransport:
    return httpx.MockTransport(lambda request: httpx.Response(status, json={"error": {"message": "no"}}))


@pytest.mark.parametrize(("key", "words"), [(None, "wants an API key"), ("mine", "does not know this API key")])
def test_the_command_line_says_what_to_do(key: str | None, words: str) -> None:
    with Client("http://api", api_key=key) as client:
        client._http._transport = answering(401)
        with pytest.raises(ApiFailed, match=words) as caught:
            client.get("/cluster/status")
    assert "--api-key" in str(caught.value)
    assert "PRELAY_API_KEY" in str(caught.value)


@pytest.mark.parametrize("key", ["schlüssel", "line\nbreak"])
def test_the_command_line_sends_nothing_that_is_no_key(key: str) -> None:
    with pytest.raises(ApiFailed, match="this is no API key"):
        Client("http://api", api_key=key)


@pytest.mark.parametrize("command", [["status"], ["story", "r0"], ["chat"], ["doctor"]], ids=" ".join)
@pytest.mark.parametrize("way", ["option", "variable"])
def test_commands_send_the_key(command: list[str], way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str | None] = []

    def client(url: str, read_timeout_s: float = 1.0, api_key: str | None = None) -> Client:
        sent.append(api_key)
        raise ApiFailed("enough")

    def examine(url: str | None, environ: object, server_environ: object, api_key: str | None) -> None:
        sent.append(api_key)
        raise ApiFailed("enough")

    monkeypatch.setattr(cli, "Client", client)
    monkeypatch.setattr("cluster.doctor.examine.examine", examine)
    given = ["--api-key", "mine"] if way == "option" else []
    environ = {"PRELAY_API_KEY": "mine"} if way == "variable" else {"PRELAY_API_KEY": None}
    CliRunner().invoke(cli.app, [*command, "--url", "http://api", *given], env=environ)
    assert sent == ["mine"]


@pytest.mark.parametrize(
    ("host", "only_here"),
    [
        ("127.0.0.1", True),
        ("127.0.0.2", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.1.2.3", False),
        ("gpu-7", False),
    ],
)
def test_what_others_can_reach_is_told_apart(host: str, only_here: bool) -> None:
    assert is_loopback(host) is only_here
    assert host in open_door(host)
