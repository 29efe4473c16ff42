"""A router that does what a test says, over a device or over nothing."""

import pytest
from device_scenarios import SCENARIOS, VOCABULARY, Scenario, play
from kv_machine import KvMachine
from rows import make_row
from scheduler_drive import BLOCK_SIZE, request

from device.scripted_router import DrawsNothing, Script, ScriptedRouter
from scheduler.adapters import AdapterRefused, ListAdapters
from scheduler.contract import Decode, DecodeFed, DeviceError, Draw, Fault, KvExhausted
from scheduler.effects import (
    DropSequenceState,
    Exhausted,
    Quiesce,
    ReadLogits,
    Reserved,
    ReserveKv,
    RestoreSequenceState,
    Rollback,
    SaveSequenceState,
    Ticket,
)
from scheduler.ids import BlockId, RequestId
from scheduler.request import FinishReason, SamplingParams

GREEDY = Draw(SamplingParams())
FACTS = KvMachine(40, BLOCK_SIZE, vocab_size=VOCABULARY).facts()
A = RequestId("a")


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_script_alone_serves_clients(depth: int, newest_first: bool) -> None:
    """And an over-run takes nothing from it."""
    scenario = Scenario(
        (request("a", range(5), 9, stop_token_ids=frozenset({7})), request("b", range(3), 6), request("c", range(4), 3))
    )
    tokens = {A: [1, 2, 3, 7, 5, 6], RequestId("b"): [9, 8, 9, 8, 9, 8]}
    played = play(scenario, ScriptedRouter(DrawsNothing(FACTS, depth), Script(tokens, newest_first=newest_first)))
    assert played.tokens == {"a": [1, 2, 3, 7], "b": [9, 8, 9, 8, 9, 8], "c": [0, 0, 0]}
    assert played.finishes["a"] is FinishReason.STOP
    assert (played.stepper.scheduler.batcher.overruns > 0) == (depth == 2)


def test_faults_come_at_the_chosen_calls() -> None:
    script = Script(
        launches={1: KvExhausted("full")},
        awaits={1: DeviceError(Fault.READBACK, "gone")},
        effects={1: DeviceError(Fault.EFFECT, "no")},
    )
    router = ScriptedRouter(DrawsNothing(FACTS), script)
    plan = Decode((make_row("a", [1], 0, [0], GREEDY),))
    router.await_result(router.launch(plan))
    with pytest.raises(KvExhausted):
        router.launch(plan)
    ticket = router.launch(plan)
    with pytest.raises(DeviceError, match="gone"):
        router.await_result(ticket)
    router.await_result(router.launch(plan))
    router.apply(Quiesce())
    with pytest.raises(DeviceError, match="no"):
        router.apply(Quiesce())
    router.apply(Quiesce())


def test_a_restore_that_fails_drops_what_was_saved() -> None:
    machine = KvMachine(8, BLOCK_SIZE)
    router = ScriptedRouter(machine, Script(effects={1: DeviceError(Fault.EFFECT, "no")}))
    router.apply(SaveSequenceState(A, (BlockId(0),), 4))
    with pytest.raises(DeviceError, match="no"):
        router.apply(RestoreSequenceState(A, (BlockId(1),), 4))
    assert not machine.saved
    assert isinstance(machine.effects[-1], DropSequenceState)


def test_lag_is_asked_before_each_result() -> None:
    asked: list[Ticket] = []
    scenario = SCENARIOS["mixed lengths"]
    inner = KvMachine(scenario.blocks, BLOCK_SIZE, vocab_size=VOCABULARY, depth=2)
    played = play(scenario, ScriptedRouter(inner, Script(lag=asked.append)))
    assert asked == list(range(len(played.stepper.plans)))


def test_a_device_without_a_model_keeps_the_rules() -> None:
    device = DrawsNothing(FACTS, depth=2)
    running = make_row("a", [1], 0, [0], GREEDY)
    fed = DecodeFed((running,), (GREEDY,))
    with pytest.raises(DeviceError, match="without a step in flight"):
        device.launch(fed)
    tickets = [device.launch(Decode((running,)))]
    assert device.apply(ReserveKv(A, (BlockId(0),))) == Reserved((BlockId(0),))
    tickets.append(device.launch(fed))
    with pytest.raises(DeviceError, match="2 steps are in flight"):
        device.launch(fed)
    assert [device.await_result(ticket).tokens for ticket in tickets] == [(0,), (0,)]
    with pytest.raises(DeviceError, match="not in flight") as caught:
        device.await_result(tickets[0])
    assert caught.value.fault is Fault.EFFECT
    assert device.apply(Rollback(A)) == Reserved((BlockId(0),))
    assert device.apply(SaveSequenceState(A, (BlockId(0),), 4)) == Exhausted()
    for effect in (ReadLogits(tickets[0], (0,)), RestoreSequenceState(A, (BlockId(0),), 4)):
        with pytest.raises(DeviceError) as caught:
            device.apply(effect)
        assert caught.value.fault is Fault.UNSUPPORTED
    with pytest.raises(DeviceError) as caught:
        DrawsNothing(FACTS).apply(Rollback(A))
    assert caught.value.fault is Fault.UNSUPPORTED
    with pytest.raises(AdapterRefused):
        device.lora(ListAdapters())
