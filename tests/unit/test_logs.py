"""One JSON object a line, on stderr, with the process's name."""

import json
from collections.abc import Iterator

import pytest
import structlog

from handoff.logs import configure_logs


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def test_a_line_is_json_with_the_process_and_the_bound_ids(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("decode-0")
    structlog.get_logger().bind(request_id="r1", handoff_id="h1", attempt=1).info("handoff ended", total_ms=2.5)
    captured = capsys.readouterr()
    assert captured.out == ""
    line = json.loads(captured.err)
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "handoff ended",
        "level": "info",
        "node": "decode-0",
        "request_id": "r1",
        "handoff_id": "h1",
        "attempt": 1,
        "total_ms": 2.5,
    }


def test_a_line_about_another_node_keeps_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("coordinator")
    structlog.get_logger().error("node lost", node="decode-0")
    assert json.loads(capsys.readouterr().err)["node"] == "decode-0"


def test_an_exception_is_part_of_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("api")
    try:
        raise ValueError("no")
    except ValueError:
        structlog.get_logger().exception("it failed")
    line = json.loads(capsys.readouterr().err)
    assert line["exception"][0]["exc_value"] == "no"
