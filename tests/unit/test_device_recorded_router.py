"""A device's calls as text: written, read, answered again; and what is said when they are others."""

from collections.abc import Callable

import pytest
from kv_machine import KvMachine
from rows import make_row

from device.recorded_router import RecordingRouter, ReplayRouter
from device.scripted_router import DrawsNothing, Script, ScriptedRouter
from device.trace_text import Answer, LostResult, TraceBroken, TraceLine, parse_trace
from scheduler.adapters import AdapterFacts, AdapterRefused, ListAdapters, LoadAdapter, LoraCommand
from scheduler.contract import Decode, DecodeFed, DeviceError, Draw, Fault, KvExhausted, Prefill, Row
from scheduler.effects import (
    CopyBlocks,
    Done,
    Exhausted,
    HostLogits,
    Quiesce,
    Reserved,
    ReserveKv,
    Rollback,
    Saved,
    SaveSequenceState,
)
from scheduler.ids import BlockId, RequestId
from scheduler.request import SamplingParams

FACTS = KvMachine(8, 4).facts()
GREEDY = Draw(SamplingParams())
A = RequestId("a")
TABLE = (AdapterFacts("x", "d1", 8, ("q_proj", "v_proj")), AdapterFacts("y", "d2", 4, ()))


class WithAdapters(DrawsNothing):
    def lora(self, command: LoraCommand) -> tuple[AdapterFacts, ...]:
        if isinstance(command, ListAdapters):
            return TABLE
        raise AdapterRefused("rank 99 is too much")


def recorded(**script: dict[int, DeviceError]) -> RecordingRouter:
    return RecordingRouter(ScriptedRouter(WithAdapters(FACTS, depth=2), Script({A: [11, 12, 13]}, **script)))


def row(tokens: list[int], start: int) -> Row:
    made = make_row("a", tokens, start, [3], GREEDY)
    made.prompt_tokens = 2
    return made


def use(router: RecordingRouter | ReplayRouter) -> list[object]:
    """What each of some calls brought, tickets apart."""
    running = row([11], 2)

    def outcome(call: Callable[[], object]) -> object:
        try:
            return call()
        except (DeviceError, AdapterRefused) as error:
            return type(error), str(error)

    first = router.launch(Prefill((row([1, 2], 0), make_row("b", [1], 0, [4]))))
    before = [
        outcome(lambda: router.await_result(first).tokens),
        outcome(lambda: router.apply(CopyBlocks(((BlockId(1), BlockId(2)),)))),
        outcome(lambda: router.lora(ListAdapters())),
        outcome(lambda: router.lora(LoadAdapter("z", "/somewhere"))),
    ]
    second = router.launch(Decode((running,)))
    reserved = outcome(lambda: router.apply(ReserveKv(A, ())))
    third = router.launch(DecodeFed((running,), (GREEDY,)))
    return [
        *before,
        reserved,
        outcome(lambda: router.await_result(second).tokens),
        outcome(lambda: router.await_result(third).tokens),
        outcome(lambda: router.apply(Rollback(A))),
        outcome(router.teardown),
    ]


def test_what_was_recorded_is_answered_again() -> None:
    router = recorded(awaits={2: DeviceError(Fault.READBACK, "gone")}, effects={0: DeviceError(Fault.EFFECT, "no")})
    answers = use(router)
    assert router.text().splitlines() == [
        "prefill a[0:2], b[0:1] no draw -> [11, null]",
        'copy_blocks pairs=((1,2)) -> {"fault": "effect", "exhausted": false, "says": "no"}',
        'list_adapters -> {"adapters": [["x", "d1", 8, ["q_proj", "v_proj"]], ["y", "d2", 4, []]]}',
        'load_adapter name=z path=/somewhere -> {"refused": "rank 99 is too much"}',
        "decode a[2:3] -> [12]",
        'reserve_kv request_id=a blocks=() -> {"reserved": []}',
        'decode_fed a[3:4] -> {"lost": {"fault": "readback", "exhausted": false, "says": "gone"}}',
        'rollback request_id=a -> {"reserved": []}',
        "teardown -> null",
    ]
    replay = ReplayRouter(router.text(), FACTS, depth=2)
    assert use(replay) == answers
    assert replay.is_over
    assert (replay.max_depth(), replay.facts()) == (2, FACTS)


def test_a_trace_is_written_by_hand() -> None:
    replay = ReplayRouter(
        'decode a[0:1] -> {"fault":"forward","exhausted":true,"says":"full"}\n\nquiesce -> "done"', FACTS
    )
    with pytest.raises(KvExhausted, match="full"):
        replay.launch(Decode((make_row("a", [1], 0, [0], GREEDY),)))
    assert replay.apply(Quiesce()) == Done()
    with pytest.raises(TraceBroken, match="'teardown' is asked after the last line"):
        replay.teardown()


@pytest.mark.parametrize(
    "answer",
    [
        None,
        (1, None, 3),
        Done(),
        Exhausted(),
        Saved(77),
        Reserved((BlockId(4),)),
        HostLogits(b"\x00\x01\xff\x02", 2),
        TABLE,
    ],
)
def test_each_answer_is_read_as_it_was_written(answer: Answer) -> None:
    assert parse_trace(TraceLine("x", answer).text()) == [TraceLine("x", answer)]


@pytest.mark.parametrize("error", [KvExhausted("full"), DeviceError(Fault.UNSUPPORTED, "a -> b"), AdapterRefused("no")])
def test_each_error_is_read_as_it_was_written(error: DeviceError | AdapterRefused) -> None:
    (line,) = parse_trace(TraceLine("x", error).text())
    assert (type(line.answer), str(line.answer)) == (type(error), str(error))
    if isinstance(error, DeviceError):
        (line,) = parse_trace(TraceLine("x", LostResult(error)).text())
        assert isinstance(line.answer, LostResult)
        assert str(line.answer.error) == str(error)


@pytest.mark.parametrize("text", ["quiesce", "quiesce -> {", 'quiesce -> "did"', 'x -> {"fault": "none"}', "x -> 7"])
def test_a_line_that_is_none_is_named(text: str) -> None:
    with pytest.raises(TraceBroken, match="line 2 of the trace can't be read"):
        parse_trace(f'quiesce -> "done"\n{text}')


def test_another_call_than_the_traces_is_named() -> None:
    replay = ReplayRouter('quiesce -> "done"', FACTS)
    with pytest.raises(TraceBroken, match="line 1 of the trace is 'quiesce', and 'save_sequence_state"):
        replay.apply(SaveSequenceState(A, (), 4))


def test_tickets_of_a_replay_settle_once() -> None:
    replay = ReplayRouter("decode a[0:1] -> [5]\ndecode a[0:1] -> null", FACTS)
    plan = Decode((make_row("a", [1], 0, [0], GREEDY),))
    ticket = replay.launch(plan)
    assert replay.await_result(ticket).tokens == (5,)
    with pytest.raises(DeviceError, match="not in flight") as caught:
        replay.await_result(ticket)
    assert caught.value.fault is Fault.EFFECT
    with pytest.raises(TraceBroken, match="has no tokens"):
        replay.await_result(replay.launch(plan))
