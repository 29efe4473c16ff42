"""Effects of a router on a tiny model: logits of the last step, copies beside the steps, checkpoints, mirrors."""

from collections.abc import Iterator
from pathlib import Path
from threading import Event, Timer
from typing import Any

import numpy as np
import pytest
import torch
from rows import make_row
from tiny_model import build_tiny, save_tiny_model

from device.async_router import AsyncRouter
from device.effects import EffectApplier
from device.router import SyncRouter
from scheduler.contract import Decode, DecodeFed, DeviceError, Draw, Fault, Prefill, Row
from scheduler.effects import Done, HostLogits, MarconiCheckpoint, ReadLogits, ReleaseSeq, SyncSecondary, Ticket
from scheduler.ids import RequestId
from scheduler.request import SamplingParams

GREEDY = Draw(SamplingParams())
WAIT_S = 10.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_model(path)
    return path


@pytest.fixture(params=["sync", "async"])
def router(folder: Path, request: pytest.FixtureRequest) -> Iterator[SyncRouter | AsyncRouter]:
    inner = build_tiny(folder, slots=4)
    built = AsyncRouter(inner) if request.param == "async" else inner
    yield built
    built.teardown()


@pytest.fixture
def ahead(folder: Path) -> Iterator[AsyncRouter]:
    built = AsyncRouter(build_tiny(folder, slots=4))
    yield built
    built.teardown()


def row(tokens: list[int], start: int, blocks: list[int], name: str = "a", draw: Draw | None = GREEDY) -> Row:
    return make_row(name, tokens, start, blocks, draw)


def logits(outcome: Any) -> "np.ndarray[Any, np.dtype[np.float32]]":
    assert isinstance(outcome, HostLogits)
    assert outcome.element_bytes == 4
    return np.frombuffer(outcome.content, np.float32).reshape(-1, 60)


def test_the_logits_of_the_last_step_can_be_read(router: SyncRouter | AsyncRouter) -> None:
    rows = row([1, 2, 3], 0, [0]), row([7, 7], 0, [1], "b", None), row([9], 0, [2], "c")
    ticket = router.launch(Prefill(rows))
    tokens = router.await_result(ticket).tokens
    read = logits(router.apply(ReadLogits(ticket, (2, 0))))
    assert read.shape == (2, 60)
    assert [int(values.argmax()) for values in read] == [tokens[2], tokens[0]]
    assert np.array_equal(logits(router.apply(ReadLogits(ticket, (0,))))[0], read[1])


def test_logits_are_two_bytes_wide_in_bf16(folder: Path) -> None:
    router = build_tiny(folder, dtype="bf16")
    ticket = router.launch(Prefill((row([1], 0, [0]),)))
    read = router.apply(ReadLogits(ticket, (0,)))
    assert isinstance(read, HostLogits)
    assert (read.element_bytes, len(read.content)) == (2, 120)
    values = torch.frombuffer(bytearray(read.content), dtype=torch.bfloat16)
    assert (int(values.argmax()),) == router.await_result(ticket).tokens
    router.teardown()


@pytest.mark.parametrize(
    ("ticket", "rows", "message"),
    [
        (1, (0,), "logits of ticket 1: those of 0 are held"),
        (0, (2,), "row 2: the step of ticket 0 has 2 rows"),
        (0, (0, -1), "row -1"),
        (0, (1,), "row 1 of ticket 0: it had no draw"),
    ],
)
def test_logits_that_there_are_not(
    router: SyncRouter | AsyncRouter, ticket: int, rows: tuple[int, ...], message: str
) -> None:
    router.await_result(router.launch(Prefill((row([1, 2], 0, [0]), row([1, 2], 0, [1], "b", None)))))
    with pytest.raises(DeviceError, match=message) as caught:
        router.apply(ReadLogits(Ticket(ticket), rows))
    assert caught.value.fault is Fault.EFFECT


def test_logits_are_dropped_at_the_next_launch(router: SyncRouter | AsyncRouter) -> None:
    ticket = router.launch(Prefill((row([1], 0, [0]),)))
    router.await_result(ticket)
    router.launch(Prefill((row([1], 0, [0]),)))
    with pytest.raises(DeviceError, match=f"logits of ticket {ticket}"):
        router.apply(ReadLogits(ticket, (0,)))


def test_logits_of_the_settled_step_are_there_while_the_next_runs(ahead: AsyncRouter) -> None:
    running = row([5], 0, [0])
    first = ahead.launch(Decode((running,)))
    second = ahead.launch(DecodeFed((running,), (GREEDY,)))
    with pytest.raises(DeviceError, match="none are held"):
        ahead.apply(ReadLogits(first, (0,)))
    for ticket in (first, second):
        tokens = ahead.await_result(ticket).tokens
        assert (int(logits(ahead.apply(ReadLogits(ticket, (0,)))).argmax()),) == tokens


class Held:
    """A copy beside the steps that ends some time after it was let go."""

    def __init__(self) -> None:
        self.is_done = False
        self._go = Event()

    def run(self) -> None:
        assert self._go.wait(WAIT_S)
        self.is_done = True

    def let_go_later(self) -> None:
        Timer(0.1, self._go.set).start()


def assert_next_step_waits(router: SyncRouter | AsyncRouter, held: Held) -> None:
    """Its launch does not, where the host need not compute."""
    held.let_go_later()
    ticket = router.launch(Prefill((row([1], 0, [0]),)))
    if isinstance(router, AsyncRouter):
        assert not held.is_done
    router.await_result(ticket)
    assert held.is_done


def test_the_next_step_waits_for_copies_behind_it(router: SyncRouter | AsyncRouter) -> None:
    router.await_result(router.launch(Prefill((row([1], 0, [0]),))))
    held = Held()
    effects = router._inner.effects if isinstance(router, AsyncRouter) else router.effects
    effects.lane.submit(held.run)
    router.await_result(router.launch(Prefill((row([1], 0, [0]),))))
    assert not held.is_done
    assert router.apply(SyncSecondary()) == Done()
    assert_next_step_waits(router, held)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    """Checkpoints are held."""
    made, apply = Held(), EffectApplier.apply

    def slow(self: EffectApplier, effect: Any) -> Any:
        if isinstance(effect, MarconiCheckpoint):
            made.run()
        elif isinstance(effect, ReleaseSeq):
            assert made.is_done
        return apply(self, effect)

    monkeypatch.setattr(EffectApplier, "apply", slow)
    return made


def test_a_checkpoint_is_made_beside_the_steps_and_before_its_slot_changes(
    router: SyncRouter | AsyncRouter, held: Held
) -> None:
    assert router.apply(MarconiCheckpoint(RequestId("a"), 0, 4, 0)) == Done()
    assert not held.is_done
    assert_next_step_waits(router, held)


def test_a_checkpoint_comes_before_the_release_of_its_slot(router: SyncRouter | AsyncRouter, held: Held) -> None:
    router.apply(MarconiCheckpoint(RequestId("a"), 0, 4, 0))
    held.let_go_later()
    router.apply(ReleaseSeq(RequestId("a"), 0, "over"))
    assert held.is_done
