"""`prelay doctor` on this machine and on a running server: real UCX, real processes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from served import Served, environment, prelay

TIMEOUT_S = 120.0
LONGEST_S = 20.0
"""It takes 4 s on two free cores; other work on the machine may take its share."""
SHARED_MEMORY = Path("/dev/shm")


def doctor(home: Path, *arguments: str, **environ: str) -> tuple[int, str]:
    """Exit status and stdout, with these UCX settings of the user's and no others."""
    inherited = {name: value for name, value in environment(home).items() if not name.startswith("UCX_")}
    result = subprocess.run(
        [prelay(), "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=inherited | environ,
        check=False,
    )
    return result.returncode, result.stdout


def findings(document: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {finding["title"]: finding for section in document["sections"] for finding in section["findings"]}


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any]]:
    """Exit status and report without a running server."""
    before = set(os.listdir(SHARED_MEMORY))
    status, text = doctor(tmp_path_factory.mktemp("home"), "--json")
    assert {name for name in set(os.listdir(SHARED_MEMORY)) - before if name.startswith("ucx")} == set()
    return status, json.loads(text)


def test_the_exit_status_says_whether_something_is_bad(examined: tuple[int, dict[str, Any]]) -> None:
    status, document = examined
    bad = [finding for finding in findings(document).values() if finding["level"] in ("slow", "broken")]
    assert status == document["exit_status"] == bool(bad)
    assert all(finding["what_to_do"] for finding in bad)


def test_two_processes_of_this_machine_share_memory(examined: tuple[int, dict[str, Any]]) -> None:
    _, document = examined
    assert findings(document)["Lane between two processes: cma"]["level"] == "ok"
    probe = document["facts"]["probe"]
    assert (probe["lane"], probe["warning"], probe["cma_error"], probe["intact"]) == ("cma", None, "", True)
    assert [rate["block"] for rate in probe["rates"]] == [2 << 20, 64 << 10]
    assert all(rate["ours"] > 0 and rate["memcpy"] > 0 for rate in probe["rates"])


def test_the_loaded_ucx_is_named(examined: tuple[int, dict[str, Any]]) -> None:
    _, document = examined
    ucx = document["facts"]["ucx"]
    assert Path(ucx["path"]).is_file()
    assert ucx["version"] in findings(document)["UCX is loaded"]["what"]
    assert "tcp/lo" in ucx["lanes"]
    assert not any(lane.startswith(("posix", "sysv")) for lane in ucx["lanes"])
    assert findings(document)["No running server"]["level"] == "note"


def test_tcp_is_flagged(tmp_path: Path) -> None:
    status, text = doctor(tmp_path, "--json", PRELAY_SHARED_POOLS="n")
    found = findings(json.loads(text))
    assert status == 1
    assert found["Nodes don't read each other's pools"]["level"] == "slow"
    assert found["Lane between two processes: tcp"]["level"] == "slow"
    assert "PRELAY_SHARED_POOLS=n forbids" in found["Lane between two processes: tcp"]["what"]


def test_processes_that_can_not_start_are_a_finding(tmp_path: Path) -> None:
    status, text = doctor(tmp_path, UCX_TLS="nonsense")
    assert status == 1
    assert "broken" in text
    assert "Two processes can't exchange blocks" in text


def test_a_server_that_does_not_answer_is_a_finding(tmp_path: Path) -> None:
    status, text = doctor(tmp_path, "--json", "--url", "http://127.0.0.1:1")
    assert status == 1
    assert findings(json.loads(text))["The server does not answer"]["level"] == "broken"


def test_the_settings_of_the_server_are_checked_and_not_the_doctor_s_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={"PRELAY_SHARED_POOLS": "n"}
    ) as server:
        (tmp_path / "run" / f"{server.pid}.json").write_text(json.dumps({"url": "http://127.0.0.1:1"}))
        status, text = doctor(tmp_path, "--json")
        server.communicate(b"\n")
    found = findings(json.loads(text))
    assert status == 1
    assert found["Settings of the server: Nodes don't read each other's pools"]["level"] == "slow"
    assert found["Settings of yours"]["level"] == "ok"


def test_a_doctor_that_can_not_run_says_so(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / f"{os.getpid()}.json").write_text("not JSON")
    assert doctor(tmp_path)[0] == 2


def test_the_pair_of_a_running_server(pair: Served) -> None:
    started = time.monotonic()
    _, text = doctor(pair.home, "--json")
    seconds = time.monotonic() - started
    found = findings(json.loads(text))
    assert found["Nodes that answer"]["what"] == "prefill-0, decode-0."
    assert found["prefill-0 -> decode-0: cma"]["level"] == "ok"
    assert "No running server" not in found
    assert seconds < LONGEST_S
