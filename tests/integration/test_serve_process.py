"""The command as an operator sees it: sockets, stopping, status, chat, what stays behind."""

import ipaddress
import json
import secrets
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx
import psutil
import pytest
from served import Served, environment, pools, prelay, serve, stop, wait_until

from benchmarks.idle import measure
from cluster.running import find

SHARED_MEMORY = Path("/dev/shm")
SMALL_MIB = 128
"""Holds one request of 2,000 tokens."""


def shared_memory_files() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()


def test_nothing_listens_beyond_loopback(pair: Served) -> None:
    listening = [
        (process.name(), connection.laddr.ip, connection.laddr.port)
        for process in pair.family()
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN or (connection.type == socket.SOCK_DGRAM and not connection.raddr)
    ]
    assert listening
    assert [item for item in listening if not _is_loopback(item[1])] == []


def test_the_nodes_give_way_to_nobody(pair: Served) -> None:
    """Left to itself, Ray starts its workers at niceness 15, and any other busy process starves them."""
    nodes = {process.name(): process.nice() for process in pair.family() if _is_node(process)}
    assert len(nodes) == 2
    assert set(nodes.values()) == {psutil.Process(pair.process.pid).nice()}, nodes


def test_no_log_monitor_runs(pair: Served) -> None:
    commands = [" ".join(process.cmdline()) for process in pair.family()]
    assert any("gcs_server" in command for command in commands)
    assert [command for command in commands if "log_monitor" in command] == []


def test_an_idle_cluster_does_not_spin(pair: Served) -> None:
    """The measured figure is near 4 % of a core (benchmarks/idle.py); one spinning thread would be 100 %."""
    assert sum(percent for _, percent in measure(pair.process.pid, 5.0)) < 30


def _is_node(process: psutil.Process) -> bool:
    """Ray names it by its class and what it does, in 15 letters."""
    return process.name().startswith(("ray::PrefillActo", "ray::DecodeActo"))


def _is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def test_status_names_devices_links_and_blocks(pair: Served) -> None:
    document = json.loads(pair.command("status", "--json"))
    assert {node["role"] for node in document["nodes"]} == {"prefill", "decode"}
    for node in document["nodes"]:
        assert node["device"]["attention"]
        assert node["device"]["dtype"] == "fp32"
        assert [link["warning"] for link in node["links"]] == [None]
    table = pair.command("status")
    assert "prefill-0" in table
    assert "decode-0" in table


def test_a_story_tells_what_happened_on_both_nodes(pair: Served) -> None:
    request = {"model": "smollm2", "prompt": "Once", "max_tokens": 3, "ignore_eos": True, "priority": 1}
    answer = httpx.post(f"{pair.url}/v1/completions", json=request, timeout=60, trust_env=False).json()
    wait_until(lambda: "transfer quiet" in pair.command("story", answer["id"]), 10)
    lines = pair.command("story", answer["id"]).splitlines()
    times = [line[: len("2026-01-01 00:00:00.000")] for line in lines]
    assert times == sorted(times)
    prefill = [line for line in lines if "  prefill-0  " in line]
    decode = [line for line in lines if "  decode-0   " in line]
    assert len(prefill) + len(decode) == len(lines)
    for words, told in (("held", prefill), ("released", prefill), ("landed", decode), ("ended: length", decode)):
        assert any(words in line for line in told), words
    document = json.loads(pair.command("story", answer["id"].removeprefix("cmpl-"), "--json"))
    assert len(document["lines"]) == len(lines)
    assert abs(document["lines"][0]["at"] - time.time()) < 60


def test_the_story_of_an_unknown_request_is_one_clear_sentence(pair: Served) -> None:
    result = subprocess.run(
        [prelay(), "story", "cmpl-nope/..", "--url", pair.url],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(pair.home),
        check=False,
    )
    assert result.returncode == 1
    assert "No node knows the request" in result.stderr


def test_the_nodes_count_what_their_schedulers_do(pair: Served) -> None:
    text = httpx.get(f"{pair.url}/metrics", timeout=60, trust_env=False).text
    for name in ("preemptions", "recomputed_tokens", "spills", "restores", "expired_leases", "prefix_hits"):
        assert f"prelay_node_{name}_total" in text
    assert 'prelay_work_requests{kind="queued_decodes",node="decode-0",role="decode"} 0.0' in text


def test_chat_answers_a_line(pair: Served) -> None:
    result = subprocess.run(
        [prelay(), "chat", "--url", pair.url, "--max-tokens", "16", "--temperature", "0"],
        input="What is the capital of France?\n\n",
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(pair.home),
        check=True,
    )
    assert "Paris" in result.stdout


def test_commands_without_a_server_say_what_to_do(tmp_path: Path) -> None:
    for command in (["status"], ["story", "r"], ["chat"]):
        result = subprocess.run(
            [prelay(), *command], capture_output=True, text=True, timeout=60, env=environment(tmp_path), check=False
        )
        assert result.returncode == 1
        assert "prelay serve" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prefill", "0"], "prefill.nodes"),
        (["--dtype", "int3"], "dtype"),
        (["--config", "missing.yaml"], "missing.yaml"),
        (["--model", "./no-such-folder"], "no-such-folder"),
    ],
)
def test_wrong_settings_are_refused_in_one_sentence(tmp_path: Path, arguments: list[str], words: str) -> None:
    result = subprocess.run(
        [prelay(), "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(tmp_path),
        cwd=tmp_path,
        check=False,
    )
    assert result.returncode == 1
    assert words in result.stderr.replace("\n", "")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_it_stops_within_five_seconds_and_leaves_nothing(server_home: Path, how: signal.Signals) -> None:
    before = shared_memory_files()
    with serve(server_home, pools(kv_mib=SMALL_MIB)) as served:
        port = int(served.url.rsplit(":", 1)[1])
        with httpx.stream(
            "POST",
            f"{served.url}/v1/completions",
            json={"model": "smollm2", "prompt": "Once", "max_tokens": 2000, "stream": True, "ignore_eos": True},
            timeout=60,
            trust_env=False,
        ) as response:
            lines = response.iter_lines()
            next(lines)
            family = served.family()
            assert find(server_home) == served.url
            started = time.monotonic()
            served.process.send_signal(how)
            served.process.wait(20)
            assert time.monotonic() - started < 5
            assert "the server is stopping" in [line for line in lines if line][-1]
        assert served.process.returncode == 0
        wait_until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family), 5)
        assert shared_memory_files() <= before
        with socket.create_server(("127.0.0.1", port)):
            pass
        assert stop(served.process) < 1


def test_a_killed_decode_node_ends_its_requests_with_an_error(server_home: Path) -> None:
    with serve(server_home, pools(kv_mib=SMALL_MIB)) as served:
        request = {"model": "smollm2", "prompt": "Once", "max_tokens": 2000, "stream": True, "ignore_eos": True}
        with httpx.stream(
            "POST", f"{served.url}/v1/completions", json=request, timeout=30, trust_env=False
        ) as response:
            lines = response.iter_lines()
            next(lines)
            next(p for p in served.family() if "DecodeActo" in p.name()).kill()
            rest = [line for line in lines if line]
        assert "decode-0 was lost" in rest[-1]
        assert httpx.get(f"{served.url}/health", timeout=30, trust_env=False).status_code == 503
        answer = httpx.post(f"{served.url}/v1/completions", json={**request, "stream": False}, trust_env=False)
        assert answer.status_code == 500
        assert "decode node" in answer.json()["error"]["message"]
        survivor = next(node for node in served.status()["nodes"] if "blocks" in node)
        assert survivor["drained"]


def test_a_taken_port_is_said_and_nothing_stays(server_home: Path) -> None:
    mark = secrets.token_hex(8)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = subprocess.run(
            [prelay(), "serve", "--port", str(taken.getsockname()[1])],
            capture_output=True,
            text=True,
            timeout=180,
            env={**environment(server_home), "PRELAY_TEST_MARK": mark},
            check=False,
        )
    assert result.returncode == 1
    assert "--port" in result.stderr
    assert "Traceback" not in result.stderr
    wait_until(lambda: not any(_has_mark(process, mark) for process in psutil.process_iter()), 10)


def _has_mark(process: psutil.Process, mark: str) -> bool:
    """Whether this process descends from the command that was started with the mark in its environment."""
    try:
        return process.environ().get("PRELAY_TEST_MARK") == mark
    except psutil.Error:
        return False
