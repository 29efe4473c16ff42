"""The doctor's child processes: one that hangs, dies or talks nonsense is told of, and ends."""

import os
import time
from pathlib import Path

import psutil
import pytest

from cluster.doctor.children import NoAnswer, ask
from cluster.doctor.cuda_facts import CudaFacts

CHILDREN = {
    "sleeper": ("import sys, time; print('I wait.', file=sys.stderr, flush=True); time.sleep(60)", "no answer.*I wait"),
    "crasher": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended with -11"),
    "loser": ("raise RuntimeError('all is lost')", "ended with 1: RuntimeError: all is lost"),
    "liar": ("print('hello')", "no proper answer"),
    "stranger": ("print('[1]')", "no proper answer"),
    "writer": ("import sys; sys.stderr.write('x' * 1_000_000); print('{\"driver\": \"5\"}')", ""),
}


@pytest.mark.parametrize("name", CHILDREN)
def test_what_a_child_does_is_told(name: str, tmp_path: Path) -> None:
    code, expected = CHILDREN[name]
    (tmp_path / f"{name}.py").write_text(code)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    started = time.monotonic()
    if expected:
        with pytest.raises(NoAnswer, match=expected):
            ask(name, CudaFacts, environ, 2.0)
    else:
        assert ask(name, CudaFacts, environ, 10.0) == CudaFacts(driver="5")
    assert time.monotonic() - started < 10.0
    assert [child for child in psutil.Process().children() if name in child.cmdline()] == []
