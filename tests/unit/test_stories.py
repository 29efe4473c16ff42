"""`prelay story`: the nodes' lines of one request, put together and shown."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any

import pytest
from ray.exceptions import RayActorError

from cluster import coordinator_actor
from cluster.coordinator_actor import CoordinatorActor
from cluster.ray_gateway import RayGateway
from cluster.story_view import story_lines
from cluster.token_streams import TokenStreams
from handoff.driver import DriverLimits
from scheduler.ids import NodeId, RequestId

P, D = NodeId("prefill-0"), NodeId("decode-0")
R = RequestId("r")
Answer = Callable[[RequestId], Awaitable[Any]]


class Method:
    def __init__(self, function: Answer) -> None:
        self._function = function

    def remote(self, request_id: RequestId) -> Awaitable[Any]:
        return self._function(request_id)


class Handle:
    """An actor handle with one method, `story`."""

    def __init__(self, function: Answer) -> None:
        self.story = Method(function)


def line(at: float, what: str) -> dict[str, Any]:
    return {"at": at, "step": 1, "tokens": 2, "what": what}


def telling(*lines: dict[str, Any]) -> Handle:
    async def story(request_id: RequestId) -> list[dict[str, Any]]:
        return list(lines) if request_id == R else []

    return Handle(story)


def coordinator(handles: dict[NodeId, Handle]) -> CoordinatorActor:
    actor = CoordinatorActor("destination_first", DriverLimits(), 60.0, 10.0, 10.0)
    actor._handles = handles
    return actor


async def test_the_lines_of_all_nodes_are_in_order_of_time() -> None:
    actor = coordinator({P: telling(line(2.0, "held"), line(4.0, "released")), D: telling(line(3.0, "landed"))})
    story = await actor.story(R)
    assert [(entry["node"], entry["what"]) for entry in story["lines"]] == [
        (P, "held"),
        (D, "landed"),
        (P, "released"),
    ]
    assert (story["request_id"], story["silent"]) == (R, [])
    assert (await actor.story(RequestId("other")))["lines"] == []


async def test_a_node_that_does_not_answer_is_named_and_the_others_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_actor, "ANSWER_TIMEOUT_S", 0.01)

    async def die(_: RequestId) -> Any:
        raise RayActorError

    async def hang(_: RequestId) -> Any:
        await asyncio.Event().wait()

    names = [NodeId(f"decode-{i}") for i in range(3)]
    handles = {P: telling(line(1.0, "held")), **dict(zip(names, map(Handle, (die, hang, hang)), strict=True))}
    actor = coordinator(handles)
    actor._lost[names[2]] = "it was killed"
    story = await actor.story(R)
    assert [entry["node"] for entry in story["lines"]] == [P]
    assert [answer["node"] for answer in story["silent"]] == names
    reasons = [answer["reason"] for answer in story["silent"]]
    assert reasons[0].startswith("RayActorError")
    assert reasons[1].startswith("TimeoutError")
    assert reasons[2] == "it was killed"


async def test_the_gateway_asks_the_coordinator() -> None:
    gateway = RayGateway(telling(line(1.0, "held")), TokenStreams(), 1, 1.0)
    assert await gateway.story(R) == [line(1.0, "held")]


def test_a_story_is_shown_line_by_line_with_local_times() -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, 678_000).timestamp()
    lines = story_lines(
        {
            "lines": [
                {"node": "prefill-0", **line(at, "held")},
                {"node": "decode-0", **line(at + 1, "landed")},
            ],
            "silent": [{"node": "decode-1", "reason": "it was lost"}],
        }
    )
    assert list(lines) == [
        "2026-01-02 03:04:05.678  prefill-0  step 1, 2 tokens: held",
        "2026-01-02 03:04:06.678  decode-0   step 1, 2 tokens: landed",
        "decode-1 does not answer: it was lost",
    ]
