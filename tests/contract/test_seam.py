"""Item 15 of the conformance checklist: no clock, randomness, I/O, actor, tensor or metric is in reach of the cores.

import-linter forbids whole modules by name (`make check`). Here the cores may import what is listed and nothing else,
and use no builtin that reaches outside.
"""

import ast
from pathlib import Path

import pytest

import handoff.coordinator
import scheduler

PURE = {
    "abc", "array", "bisect", "collections", "contextlib", "dataclasses", "enum", "functools", "hashlib", "heapq",
    "itertools", "math", "operator", "struct", "typing",
}  # fmt: skip
PURE_NAMES = {("sys", "byteorder")}
OUTSIDE = {"open", "print", "input", "exec", "eval", "compile", "__import__", "breakpoint"}
CORES = [*sorted(Path(scheduler.__file__).parent.rglob("*.py")), Path(handoff.coordinator.__file__)]


def violations(source: str) -> list[str]:
    """What in a core's source reaches outside, by line."""
    return [f"{line}: {what}" for node in ast.walk(ast.parse(source)) for line, what in _of_node(node)]


def _of_node(node: ast.AST) -> list[tuple[int, str]]:
    match node:
        case ast.Import(names):
            return [(node.lineno, alias.name) for alias in names if not _is_pure(alias.name)]
        case ast.ImportFrom(module, names, level):
            whole = level == 0 and _is_pure(module or "")
            return [] if whole else [
                (node.lineno, f"{module}.{alias.name}") for alias in names if (module, alias.name) not in PURE_NAMES
            ]  # fmt: skip
        case ast.Name(name) if name in OUTSIDE:
            return [(node.lineno, name)]
        case ast.AsyncFunctionDef() | ast.Await():
            return [(node.lineno, "async")]
        case _:
            return []


def _is_pure(module: str) -> bool:
    return module.partition(".")[0] in {*PURE, "scheduler"}


def test_item_15_all_of_the_scheduler_is_looked_at() -> None:
    assert len(CORES) > 30
    assert {"base.py", "batching.py", "contract.py", "coordinator.py"} <= {path.name for path in CORES}


@pytest.mark.parametrize("core", CORES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_item_15_the_cores_touch_nothing_outside(core: Path) -> None:
    assert violations(core.read_text()) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import time", ["1: time"]),
        ("from time import monotonic", ["1: time.monotonic"]),
        ("def f():\n    import random", ["2: random"]),
        ("import ray.util", ["1: ray.util"]),
        ("import torch\nx = torch.cuda.is_available()", ["1: torch"]),
        ("from prometheus_client import Counter", ["1: prometheus_client.Counter"]),
        ("from handoff.step_loop import StepLoop", ["1: handoff.step_loop.StepLoop"]),
        ("from . import kv", ["1: None.kv"]),
        ("from sys import byteorder, stdout", ["1: sys.stdout"]),
        ("read = open", ["1: open"]),
        ("m = __import__('ti' + 'me')", ["1: __import__"]),
        ("async def f(): ...", ["1: async"]),
        ("import math\nfrom scheduler.ids import BlockId\nfrom collections.abc import Sequence", []),
    ],
)
def test_item_15_the_check_finds_what_it_looks_for(source: str, found: list[str]) -> None:
    assert violations(source) == found
