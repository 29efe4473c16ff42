"""SIGTERM while the nodes load ends the command as Ctrl-C does: no abort, no stack trace, nothing left."""

import subprocess
from pathlib import Path

from served import environment, prelay, stop


def test_sigterm_while_the_nodes_load_ends_cleanly(server_home: Path) -> None:
    process = subprocess.Popen(
        [prelay(), "serve", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(server_home),
        start_new_session=True,
    )
    assert process.stdout is not None
    with process.stdout as lines:
        assert any(line.startswith("Loading smollm2 on") for line in lines)
        stop(process)
        rest = lines.read()
    assert process.returncode == 130
    assert "SIGTERM received" not in rest
    assert "Traceback" not in rest
