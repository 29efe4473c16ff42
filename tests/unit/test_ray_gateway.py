import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from cluster.adapter_rollout import AdapterUnsettled
from cluster.gateway import GatewayError, RequestRejected, ServiceFailed
from cluster.launch import coordinator_calls
from cluster.ray_gateway import RayGateway
from cluster.settings import Limits
from cluster.token_streams import TokenStreams
from handoff.coordinator import Completion
from handoff.drive import HandoffRecord
from scheduler.adapters import AdapterRefused
from scheduler.ids import HandoffId, NodeId, RequestId
from scheduler.request import Request

RAY_ASYNC_ACTOR_CALLS = 1000
REQUEST = Request(RequestId("r"), prompt=(1, 2, 3), max_tokens=4)
CANCELLED = HandoffRecord(
    handoff_id=HandoffId("h"),
    request_id=REQUEST.request_id,
    source=NodeId("prefill-0"),
    destination=NodeId("decode-0"),
    completion=Completion.CANCELLED,
    rejected=False,
    reason="",
    prompt_tokens=3,
    cached_tokens=0,
    total_s=0.0,
    transfer=None,
)


class Method:
    """`handle.method`, called as `.remote(...)`."""

    def __init__(self, function: Callable[..., Awaitable[Any]]) -> None:
        self._function = function

    def remote(self, *arguments: Any) -> Awaitable[Any]:
        return asyncio.ensure_future(self._function(*arguments))


class LateCoordinator:
    """Learns of a request only after `unknown` cancels of it have come."""

    def __init__(self, unknown: int) -> None:
        self.cancels = 0
        self._unknown = unknown
        self._cancelled = asyncio.Event()
        self.serve = Method(self._serve)
        self.cancel = Method(self._cancel)

    async def _serve(self, request: Request) -> HandoffRecord:
        await self._cancelled.wait()
        return CANCELLED

    async def _cancel(self, request_id: RequestId) -> bool:
        self.cancels += 1
        if self.cancels <= self._unknown:
            return False
        self._cancelled.set()
        return True


def gateway_to(coordinator: Any) -> RayGateway:
    return RayGateway(coordinator, TokenStreams(), max_requests=4, token_timeout_s=0.01)


@pytest.mark.parametrize("unknown", [0, 1, 3])
async def test_a_cancel_that_overtakes_its_request_is_asked_again(
    unknown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.ray_gateway.CANCEL_RETRY_S", 0.001)
    coordinator = LateCoordinator(unknown)
    outputs = gateway_to(coordinator).generate(REQUEST)
    with pytest.raises(ServiceFailed, match="no token"):
        await anext(outputs)
    async with asyncio.timeout(5):
        await coordinator._cancelled.wait()
    await asyncio.sleep(0.02)
    assert coordinator.cancels == unknown + 1


async def test_a_request_that_is_over_is_not_cancelled_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.ray_gateway.CANCEL_RETRY_S", 0.001)
    coordinator = LateCoordinator(unknown=1_000_000)
    coordinator._cancelled.set()
    with pytest.raises(ServiceFailed, match="cancelled"):
        await anext(gateway_to(coordinator).generate(REQUEST))
    await asyncio.sleep(0.02)
    assert coordinator.cancels <= 2


@pytest.mark.parametrize("max_requests", [1, 256, 3000])
def test_calls_that_wait_for_a_report_leave_room_for_it(max_requests: int) -> None:
    limits = Limits.model_validate({"max_requests": max_requests})
    assert coordinator_calls(limits.max_requests) >= 2 * max_requests + RAY_ASYNC_ACTOR_CALLS


class AdapterCoordinator:
    """Answers each change of adapters with `error`, wrapped as Ray wraps a remote one; None: it succeeds."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.asked: list[tuple[str, ...]] = []
        self.load_adapter = Method(self._change)
        self.unload_adapter = Method(self._change)

    async def _change(self, *arguments: str) -> None:
        self.asked.append(arguments)
        if self.error is not None:
            raise self.error


def of_a_task(cause: Exception) -> Exception:
    error: Exception = RayTaskError("load_adapter", "traceback", cause)
    return error


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (of_a_task(AdapterRefused("rank 512 is over 256")), RequestRejected, "rank 512 is over 256"),
        (of_a_task(AdapterUnsettled("d0 may have it")), ServiceFailed, "d0 may have it"),
        (ConnectionError("dead"), ServiceFailed, "the coordinator can't be reached: try again"),
    ],
)
async def test_how_a_change_of_adapters_fails(error: Exception, kind: type[GatewayError], message: str) -> None:
    gateway = gateway_to(AdapterCoordinator(error))
    for change in (gateway.load_adapter("sql", "/a"), gateway.unload_adapter("sql")):
        with pytest.raises(kind) as raised:
            await change
        assert str(raised.value) == message


async def test_the_coordinator_is_asked_to_change_adapters() -> None:
    coordinator = AdapterCoordinator(None)
    await gateway_to(coordinator).load_adapter("sql", "/a")
    await gateway_to(coordinator).unload_adapter("sql")
    assert coordinator.asked == [("sql", "/a"), ("sql",)]


async def test_a_coordinator_that_does_not_answer_a_change_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.ray_gateway.ADAPTER_TIMEOUT_S", 0.01)
    coordinator = AdapterCoordinator(None)
    coordinator.load_adapter = Method(lambda *_: asyncio.Event().wait())
    with pytest.raises(ServiceFailed, match="can't be reached"):
        await gateway_to(coordinator).load_adapter("sql", "/a")
