"""The official OpenAI client, vLLM's load client and rude clients against a listening server.

Most tests take only `base_url` and `model`, and hold for any Prelay server.
"""

import contextlib
import itertools
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from stand_ins import Script, ScriptedGateway, byte_level_tokenizer

from cluster.api import ApiSettings, ChatTokenizer, create_app
from cluster.gateway import Overloaded, ServiceFailed
from scheduler.ids import RequestId
from scheduler.request import Request

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 30.0
CORPUS = ["the quick brown fox jumps over the lazy dog", "once upon a time there was a naïve café 🦊"]
FAIL_EARLY, FAIL_LATE = 3, 4
"""Prompts of this one token make the scripted cluster fail."""


def babble(request: Request) -> Script:
    """Random tokens that follow from the prompt, and from the seed unless greedy, as a model's would."""
    if request.prompt == (FAIL_EARLY,):
        return Script(error=Overloaded("all nodes are full; try again"))
    if request.prompt == (FAIL_LATE,):
        return Script([70, 71, 72], error=ServiceFailed("the decode node died and no other is left"))
    seed = 0 if request.sampling.is_greedy else request.sampling.seed
    rng = random.Random(f"{request.prompt} {seed}")
    return Script((rng.randrange(60, 390) for _ in itertools.count()), step_s=0.002)


@contextlib.contextmanager
def listening(app: Any) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(TIMEOUT_S)
        listener.close()
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def scripted_url() -> Iterator[str]:
    ids = itertools.count()
    app = create_app(
        ScriptedGateway(babble, status_json={"nodes": []}),
        ChatTokenizer(byte_level_tokenizer(CORPUS)),
        "tiny",
        2048,
        frozenset({0}),
        ApiSettings(),
        lambda: RequestId(f"r{next(ids)}"),
        time.monotonic,
    )
    with listening(app) as url:
        yield url


@pytest.fixture(scope="module")
def base_url(scripted_url: str) -> str:
    return scripted_url


@pytest.fixture(scope="module")
def model() -> str:
    return "tiny"


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
        yield client


def test_the_model_is_listed(client: openai.OpenAI, model: str) -> None:
    assert [card.id for card in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def greedy(client: openai.OpenAI, model: str, prompt: Any, max_tokens: int = 24, **fields: Any) -> Any:
    return client.completions.create(model=model, prompt=prompt, max_tokens=max_tokens, temperature=0, **fields)


def test_a_completion_counts_its_tokens(client: openai.OpenAI, model: str) -> None:
    answer = greedy(client, model, "once upon a time", extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24


def test_a_stream_is_the_same_answer(client: openai.OpenAI, model: str) -> None:
    whole = greedy(client, model, "once upon a time")
    stream = greedy(client, model, "once upon a time", stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_token_ids_and_text_are_the_same_prompt(client: openai.OpenAI, base_url: str, model: str) -> None:
    tokens = httpx.post(f"{base_url}/tokenize", json={"model": model, "prompt": "once upon"}).json()["tokens"]
    texts = [greedy(client, model, prompt).choices[0].text for prompt in ("once upon", tokens, [tokens])]
    assert texts[0] == texts[1] == texts[2]


def test_several_prompts_in_one_request(client: openai.OpenAI, model: str) -> None:
    prompts = ["once upon", "the quick brown"]
    answer = greedy(client, model, prompts, extra_body={"ignore_eos": True})
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage.completion_tokens == 48


def test_a_seed_repeats_and_no_seed_does_not(client: openai.OpenAI, model: str) -> None:
    def sample(**fields: Any) -> str:
        return client.completions.create(model=model, prompt="once", max_tokens=24, **fields).choices[0].text

    assert sample(seed=5) == sample(seed=5)
    assert len({sample() for _ in range(5)}) > 1


def test_a_stop_string_cuts_the_answer(client: openai.OpenAI, model: str) -> None:
    text = greedy(client, model, "once upon a time").choices[0].text
    stop = text[len(text) // 2 :][:3]
    for stream in (False, True):
        answer = greedy(client, model, "once upon a time", stop=["never to be seen", stop], stream=stream)
        chunks = list(answer) if stream else [answer]
        assert "".join(chunk.choices[0].text for chunk in chunks) == text[: text.index(stop)]
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_chat_is_answered_whole_and_streamed(client: openai.OpenAI, model: str) -> None:
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Tell a tale."}]},
    ]
    fields: Any = {"model": model, "messages": messages, "temperature": 0, "max_completion_tokens": 16}
    whole = client.chat.completions.create(**fields)
    assert whole.choices[0].message.role == "assistant"
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant", None]
    assert chunks[-1].usage == whole.usage


async def test_the_asynchronous_client_streams_many_at_once(base_url: str, model: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", timeout=TIMEOUT_S) as client:
        streams = [
            await client.completions.create(
                model=model, prompt=f"tale {i}", max_tokens=8, stream=True, extra_body={"ignore_eos": True}
            )
            for i in range(16)
        ]
        for stream in streams:
            chunks = [chunk async for chunk in stream]
            assert len(chunks) == 8
            assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 0},
        {"max_tokens": 10**7},
        {"temperature": 3},
        {"n": 2},
        {"logprobs": 1},
        {"prompt": ""},
        {"prompt": [10**7]},
        {"extra_body": {"top_k": "many"}},
    ],
    ids=str,
)
def test_bad_requests_are_refused_and_the_server_goes_on(
    client: openai.OpenAI, model: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.completions.create(**{"model": model, "prompt": "once", **fields})
    assert refusal.value.param in {"top_k", *fields}
    assert greedy(client, model, "once", max_tokens=1).usage.completion_tokens == 1


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refusal:
        greedy(client, "gpt-9", "once")
    assert refusal.value.code == "model_not_found"


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_huge_body_is_refused(base_url: str, is_chunked: bool) -> None:
    piece = b" " * 1_000_000
    body = (piece for _ in range(64)) if is_chunked else piece * 64
    headers = {"Content-Type": "application/json"}
    response = httpx.post(f"{base_url}/v1/completions", content=body, headers=headers, timeout=TIMEOUT_S)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"


def vllm_bench_events(base_url: str, path: str, payload: dict[str, Any]) -> list[dict[str, Any]]:
    """The events as `vllm bench serve` reads them: split at blank lines, `data: ` removed, [DONE] last."""
    headers = {"x-request-id": "bench-0", "Authorization": "Bearer none"}
    with httpx.stream("POST", base_url + path, json=payload, headers=headers, timeout=TIMEOUT_S) as response:
        assert response.status_code == 200
        messages = [m for m in "".join(response.iter_text()).split("\n\n") if m]
    assert messages[-1] == "data: [DONE]"
    return [json.loads(message.removeprefix("data: ")) for message in messages[:-1]]


def test_vllm_bench_serve_completions(base_url: str, model: str) -> None:
    payload = {
        "model": model,
        "prompt": "the quick brown fox",
        "repetition_penalty": 1.0,
        "max_tokens": 12,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0.0,
    }
    events = vllm_bench_events(base_url, "/v1/completions", payload)
    timed = [event for event in events if event["choices"]]
    assert len(timed) == 12
    assert all(isinstance(event["choices"][0]["text"], str) for event in timed)
    assert [event["usage"]["completion_tokens"] for event in events if not event["choices"]] == [12]


def test_vllm_bench_serve_chat(base_url: str, model: str) -> None:
    payload = {
        "model": model,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "the quick brown fox"}]}],
        "max_completion_tokens": 12,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0.0,
        "top_p": 1.0,
    }
    events = vllm_bench_events(base_url, "/v1/chat/completions", payload)
    timed = [event for event in events if event["choices"]]
    assert len(timed) == 12
    assert all("content" in event["choices"][0]["delta"] for event in timed)
    assert events[-1]["usage"]["completion_tokens"] == 12


def run_load_client(base_url: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.serve", "--url", base_url, *options]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT_S)


@pytest.mark.parametrize("form", [["--chat"], ["--token-ids", "100:300"], ["--request-rate", "200"]], ids=" ".join)
def test_the_load_client_measures(base_url: str, model: str, tmp_path: Path, form: list[str]) -> None:
    report = tmp_path / "report.json"
    sizes = ["--requests", "6", "--concurrency", "3", "--input-length", "uniform:8:16", "--output-length", "5"]
    run = run_load_client(base_url, "--model", model, "--warmups", "1", "--json", str(report), *sizes, *form)
    assert run.returncode == 0, run.stdout + run.stderr
    summary = json.loads(report.read_text())["summary"]
    assert (summary["requests"], summary["failed"], summary["output_tokens"]) == (6, 0, 30)
    assert 0 < summary["ttft_ms"]["p50"] <= summary["ttft_ms"]["p99"] <= summary["end_to_end_ms"]["p99"]
    assert "throughput" in run.stdout


def test_the_load_client_counts_failures(base_url: str) -> None:
    run = run_load_client(base_url, "--model", "other", "--requests", "3")
    assert run.returncode == 1
    assert "3 failed" in run.stdout
    assert "status 404" in run.stdout


def metric(base_url: str, name: str) -> float:
    text = httpx.get(f"{base_url}/metrics", timeout=TIMEOUT_S).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not within the time"
        time.sleep(0.02)


CANCELLED = 'prelay_finished_total{reason="cancelled"}'
LONG = {"prompt": "once upon a time", "max_tokens": 1500, "temperature": 0, "ignore_eos": True}


def test_a_client_that_leaves_a_stream_cancels_it(base_url: str, model: str) -> None:
    before = metric(base_url, CANCELLED)
    payload = {"model": model, "stream": True, **LONG}
    with httpx.stream("POST", f"{base_url}/v1/completions", json=payload, timeout=TIMEOUT_S) as response:
        lines = (line for line in response.iter_lines() if line)
        assert next(lines).startswith("data: ")
    wait_until(lambda: metric(base_url, CANCELLED) == before + 1)
    wait_until(lambda: metric(base_url, "prelay_running") == 0)


def test_a_client_that_leaves_without_a_stream_cancels_too(base_url: str, model: str) -> None:
    before = metric(base_url, CANCELLED)
    host, _, port = base_url.removeprefix("http://").partition(":")
    body = json.dumps({"model": model, **LONG}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection((host, int(port)), TIMEOUT_S) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        wait_until(lambda: metric(base_url, "prelay_running") == 1)
    wait_until(lambda: metric(base_url, CANCELLED) == before + 1)
    wait_until(lambda: metric(base_url, "prelay_running") == 0)


def test_a_client_that_leaves_within_its_body_harms_nobody(base_url: str, client: openai.OpenAI, model: str) -> None:
    host, _, port = base_url.removeprefix("http://").partition(":")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n{"
    with socket.create_connection((host, int(port)), TIMEOUT_S) as connection:
        connection.sendall(head)
    assert greedy(client, model, "once", max_tokens=1).usage.completion_tokens == 1


@pytest.fixture
def scripted_client(scripted_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scripted_url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_an_overloaded_cluster_is_a_rate_limit(scripted_client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.RateLimitError, match="all nodes are full") as refusal:
        greedy(scripted_client, "tiny", [FAIL_EARLY], stream=stream)
    assert refusal.value.response.headers["retry-after"] == "1"


def test_a_failure_in_a_stream_raises_in_the_client(scripted_client: openai.OpenAI) -> None:
    stream = iter(greedy(scripted_client, "tiny", [FAIL_LATE], stream=True))
    assert len(list(itertools.islice(stream, 3))) == 3
    with pytest.raises(openai.APIError, match="decode node died"):
        next(stream)


def test_a_failure_in_a_whole_answer_is_a_server_error(scripted_client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="decode node died"):
        greedy(scripted_client, "tiny", [FAIL_LATE])
