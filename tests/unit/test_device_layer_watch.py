"""Who watches a prefill step is told of layers when they are written, and nobody else costs the step anything."""

from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from tiny_hybrids import build_hybrid, save_hybrid
from tiny_model import build_tiny, save_tiny_model

from device.async_router import AsyncRouter
from device.layer_watch import LayerTeller
from device.router import SyncRouter
from device.torch_attention import TorchAttentionStep
from scheduler.contract import Decode, DeviceError, Draw, LayerWatch, Prefill, Row
from scheduler.ids import RequestId
from scheduler.request import SamplingParams

WAIT_S = 20.0
BLOCKS = [5, 2]


@pytest.fixture(scope="module", params=["llama", "bamba"])
def build(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], SyncRouter]:
    """Of two attention layers each."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    if request.param == "llama":
        save_tiny_model(folder)
        return lambda: build_tiny(folder, slots=1)
    save_hybrid(request.param, folder)
    return lambda: build_hybrid(folder)


def row(tokens: int = 7) -> Row:
    draw = Draw(SamplingParams())
    return Row(RequestId("a"), [*range(1, tokens + 1)], 0, tokens, BLOCKS, draw, slot=0, prompt_tokens=tokens)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_layer_is_told_of_when_it_is_written_and_the_next_is_not(
    build: Callable[[], SyncRouter], is_async: bool
) -> None:
    inner = build()
    router = AsyncRouter(inner) if is_async else inner
    told: list[tuple[int, Any, bool]] = []

    def tell(layers: int) -> None:
        written = inner.pool.tensor[BLOCKS]
        told.append((layers, written[:, :layers].clone(), bool((written[:, layers:] == 0).all())))

    router.await_result(router.launch(Prefill((row(),), LayerWatch((1,), tell))))
    ((layers, early, rest_is_untouched),) = told
    assert layers == 1
    assert rest_is_untouched
    assert early.any()
    assert torch.equal(early, inner.pool.tensor[BLOCKS][:, :1])
    router.teardown()


def test_a_step_that_fails_tells_nothing_of_what_it_did_not_write(
    build: Callable[[], SyncRouter], monkeypatch: pytest.MonkeyPatch
) -> None:
    router, attend, told = build(), TorchAttentionStep.attend, []

    def failing(self: TorchAttentionStep, layer: int, *others: Any) -> Any:
        if layer == 1:
            raise RuntimeError("no")
        return attend(self, layer, *others)

    monkeypatch.setattr(TorchAttentionStep, "attend", failing)
    with pytest.raises(DeviceError):
        router.launch(Prefill((row(),), LayerWatch((1, 2), told.append)))
    assert told == [1]
    router.teardown()


def test_steps_that_nobody_watches_are_not_wrapped(build: Callable[[], SyncRouter]) -> None:
    router, wrapped = build(), []
    watched = router.runner._teller.watched
    router.runner._teller.watched = lambda *given: wrapped.append(1) or watched(*given)  # type: ignore[method-assign, func-returns-value]
    router.await_result(router.launch(Prefill((row(),))))
    decode = Row(RequestId("a"), [*range(1, 9)], 7, 8, BLOCKS, Draw(SamplingParams()), slot=0, prompt_tokens=7)
    router.await_result(router.launch(Decode((decode,))))
    assert wrapped == []
    router.teardown()


class StreamEvent:
    """Stands for torch.cuda.Event: done when `reached` is set, or fails."""

    def __init__(self, blocking: bool) -> None:
        self.reached = Event()
        self.error: Exception | None = None
        self.recorded = False
        EVENTS.append(self)

    def record(self) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        assert self.recorded
        assert self.reached.wait(WAIT_S)
        if self.error is not None:
            raise self.error


EVENTS: list[StreamEvent] = []


def test_on_a_stream_layers_are_told_of_when_their_event_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", StreamEvent)
    EVENTS.clear()
    teller, told = LayerTeller(torch.device("cuda")), []
    watch = LayerWatch((1, 2, 3), told.append)
    for layers in watch.at:
        teller._done(watch, layers)
    first, second, third = EVENTS
    assert told == []
    second.error = RuntimeError("the step failed")
    for event in (first, second, third):
        event.reached.set()
    teller.close()
    assert told == [1, 3]
