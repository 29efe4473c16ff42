"""Traces of the protocol as text: each file's directives must cause exactly what the file says.

`pytest tests/golden --rewrite-golden` writes what they cause now. See tests/support/trace_world.py for the directives.
"""

from pathlib import Path

import pytest
from trace_world import TraceWorld

TRACES = sorted((Path(__file__).parent / "traces").glob("*.txt"))


def execute(text: str) -> str:
    """The trace that the directives and comments of `text` give now."""
    world = TraceWorld()
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("#"):
            lines += ["", line] if lines else [line]
        elif line.startswith("> "):
            lines += [line] if lines and lines[-1].startswith("#") else ["", line]
            lines += world.execute(line[2:])
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_trace(path: Path, request: pytest.FixtureRequest) -> None:
    wanted = path.read_text()
    got = execute(wanted)
    if request.config.getoption("--rewrite-golden"):
        path.write_text(got)
    else:
        assert got == wanted


def test_there_are_traces() -> None:
    assert len(TRACES) >= 80
