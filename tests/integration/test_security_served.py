"""A real server with API keys and a secret of its own: who is let in, and what is written down."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from served import Served, environment, prelay, serve

KEY, CLUSTER_SECRET = "key-of-the-tests-5f2e", "secret-of-the-tests-8c1d7a90"
TIMEOUT_S = 120


def private(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.fixture(scope="module")
def served(server_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("secrets")
    settings = {
        "dtype": "fp32",
        "api_keys_file": str(private(folder / "keys", f"{KEY}\n")),
        "cluster_secret_file": str(private(folder / "secret", CLUSTER_SECRET)),
    }
    with serve(server_home, settings) as served:
        yield served


def run(served: Served, *arguments: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [prelay(), *arguments, "--url", served.url],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**environment(served.home), **environ},
        check=False,
    )


def test_only_the_key_lets_in(served: Served) -> None:
    body = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 3}
    answers = [
        httpx.post(f"{served.url}/v1/completions", json=body, headers=headers, timeout=60, trust_env=False)
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {KEY}"})
    ]
    assert [answer.status_code for answer in answers] == [401, 401, 200]
    assert httpx.get(f"{served.url}/health", trust_env=False).status_code == 200


def test_the_nodes_are_joined_and_hand_over(served: Served) -> None:
    """The completion before was handed over, between nodes that proved the file's secret to each other."""
    status = json.loads(run(served, "status", "--json", "--api-key", KEY).stdout)
    assert all(node["links"] for node in status["nodes"])
    assert status["recent"]
    assert status["recent"][0]["transfer"]["bytes_moved"] > 0


def test_a_command_without_the_key_is_told_how_to_give_it(served: Served) -> None:
    refused = run(served, "status")
    assert refused.returncode == 1
    assert "wants an API key: give one of its keys with --api-key" in " ".join(refused.stderr.split())
    assert "Traceback" not in refused.stderr
    wrong = run(served, "status", PRELAY_API_KEY="wrong")
    assert "does not know this API key" in " ".join(wrong.stderr.split())
    assert run(served, "status", PRELAY_API_KEY=KEY).returncode == 0


def test_neither_secret_is_written_down_or_passed_in_the_environment(served: Served) -> None:
    status = run(served, "status", "--json", "--api-key", KEY).stdout
    commands = " ".join(word for process in served.family() for word in process.cmdline())
    (session,) = set(re.findall(r"[^ =]*/session_[0-9_-]+", commands))
    texts = [path.read_text(errors="replace") for path in Path(session, "logs").rglob("*") if path.is_file()]
    assert any("link" in text for text in texts), "these are not the nodes' logs"
    for secret in (KEY, CLUSTER_SECRET):
        assert secret not in status
        assert [text for text in texts if secret in text] == []
        for process in served.family():
            assert secret not in " ".join(process.cmdline())
            assert secret not in " ".join(process.environ().values())


@pytest.mark.parametrize(
    ("setting", "mode", "words"),
    [
        ("cluster_secret_file", 0o644, "run `chmod 600"),
        ("api_keys_file", 0o640, "run `chmod 600"),
        ("cluster_secret_file", None, "can't read"),
    ],
)
def test_a_file_that_is_wrong_is_told_of_before_anything_runs(
    server_home: Path, tmp_path: Path, setting: str, mode: int | None, words: str
) -> None:
    path = tmp_path / "secret"
    if mode is not None:
        private(path, CLUSTER_SECRET, mode)
    config = tmp_path / "serve.yaml"
    config.write_text(f"port: 0\n{setting}: {path}\n")
    result = subprocess.run(
        [prelay(), "serve", "--config", str(config)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment(server_home),
        check=False,
    )
    assert result.returncode == 1
    assert f"{setting}: " in result.stderr
    assert words in " ".join(result.stderr.split())
    assert "Starting Ray" not in result.stderr
    assert "Traceback" not in result.stderr


def test_an_open_door_is_told_of(server_home: Path) -> None:
    """On an address that isn't there, so nothing is opened."""
    result = subprocess.run(
        [prelay(), "serve", "--host", "192.0.2.1", "--model", "/nothing/here"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment(server_home),
        check=False,
    )
    assert "listens on 192.0.2.1 without an API key" in " ".join(result.stderr.split())
