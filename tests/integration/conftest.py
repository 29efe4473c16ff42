"""The real model, real servers and real nodes, shared by the tests that use them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from reference import ANSWER_TOKENS, answers, main_prompts
from remote_nodes import RemoteNode, StartNode, StartPair, join
from served import Served, pools, serve
from torch_threads import one_thread

from device.models import default_home, resolve_model

__all__ = ["one_thread"]


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """SmolLM2, fetched into the user's cache the first time."""
    return resolve_model("smollm2", default_home(), print).path


@pytest.fixture(scope="session")
def server_home(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A home of the tests' own that shares the model cache."""
    home = tmp_path_factory.mktemp("home")
    (home / "models").symlink_to(default_home() / "models")
    return home


@pytest.fixture(scope="session")
def questions(model_folder: Path) -> list[tuple[int, ...]]:
    return main_prompts(model_folder)


@pytest.fixture(scope="session")
def expected(model_folder: Path, questions: list[tuple[int, ...]]) -> list[list[int]]:
    return answers(model_folder, questions, ANSWER_TOKENS)


@pytest.fixture(scope="session")
def pair(server_home: Path) -> Iterator[Served]:
    """One prefill and one decode node, fp32, destination first."""
    with serve(server_home, {"dtype": "fp32", **pools()}) as served:
        yield served


@pytest.fixture
def start_node() -> Iterator[StartNode]:
    """Starts a node in a process of its own: name, seed of its pool (0: zeros), the user's UCX settings."""
    nodes: list[RemoteNode] = []

    def start(name: str, seed: int = 0, environ: dict[str, str] | None = None) -> RemoteNode:
        nodes.append(RemoteNode(name, seed, environ or {}))
        return nodes[-1]

    yield start
    for node in nodes:
        node.end()


@pytest.fixture
def start_pair(start_node: StartNode) -> StartPair:
    """Starts (source, destination) in processes of their own, joined, with these UCX settings of the user's."""

    def start(environ: dict[str, str]) -> tuple[RemoteNode, RemoteNode]:
        source, destination = start_node("source", 1, environ), start_node("destination", 0, environ)
        join(source, destination)
        return source, destination

    return start
