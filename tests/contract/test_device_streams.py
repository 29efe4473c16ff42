"""What a client gets does not depend on the router: the conformance checklist of the device contract, by its numbers.

Items 1, 4 to 9, 12 and 13; those of the calls themselves are in test_device_contract.py. "model" is the tiny model
in fp32, "machine" the oracle for KV.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Semaphore
from typing import Any

import pytest
from device_scenarios import SCENARIOS, VOCABULARY, Played, Scenario, expect_depth_two, play, stepper_for
from kv_machine import KvMachine
from routers import build
from rows import make_row
from scheduler_drive import BLOCK_SIZE, Stepper, decode_scheduler, handoff, prefill_scheduler, request
from tiny_model import save_tiny_model

from device.async_router import AsyncRouter
from device.model_runner import ModelRunner
from device.recorded_router import RecordingRouter
from device.scripted_router import Script, ScriptedRouter
from device.trace_text import parse_trace
from scheduler.batching import Batcher
from scheduler.blocks import BlockPool
from scheduler.commands import ReserveDestination, Submit, SubmitHandoffPrefill
from scheduler.contract import DeviceError, DeviceIo, Draw, Fault, KvExhausted, Prefill
from scheduler.effects import Reserved
from scheduler.events import Output
from scheduler.request import FinishReason, SamplingParams
from scheduler.running import RunningSet
from scheduler.sequence import Sequence, SequenceState

BY_DEPTH = {1: "sync", 2: "async"}
KINDS = ["model", "machine"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_model(path)
    return path


@pytest.fixture
def device(folder: Path, request: pytest.FixtureRequest) -> Callable[..., DeviceIo]:
    """Makes a device of a kind and depth for a scenario."""

    def make(kind: str, depth: int, scenario: Scenario, **changes: Any) -> DeviceIo:
        if kind == "machine":
            return KvMachine(scenario.blocks, BLOCK_SIZE, vocab_size=VOCABULARY, depth=depth, **changes)
        made = build(BY_DEPTH[depth], folder, total_blocks=scenario.blocks, **changes)
        request.addfinalizer(made.teardown)
        return made

    return make


@pytest.fixture(scope="module")
def plain(folder: Path) -> Callable[[str, str], Played]:
    """A scenario as it goes one step at a time."""

    @cache
    def run(kind: str, name: str) -> Played:
        scenario = SCENARIOS[name]
        if kind == "machine":
            return play(scenario)
        router = build("sync", folder, total_blocks=scenario.blocks)
        played = play(scenario, router)
        router.teardown()
        return played

    return run


def test_item_01_the_circle_has_one_order(device: Callable[..., DeviceIo]) -> None:
    """Effects before the step that needs them, reservations before their fed step, taking back before anything new."""
    tokens = play(Scenario((request("a", range(3), 12),))).tokens["a"]
    recorded = RecordingRouter(KvMachine(40, BLOCK_SIZE, vocab_size=VOCABULARY, depth=2, slots=4))
    scenario = Scenario((request("a", range(3), 12, stop_token_ids=frozenset({tokens[5]})), request("b", range(9), 9)))
    played = play(replace(scenario, arrives={"b": 9}), recorded)
    assert played.tokens["a"] == tokens[: tokens.index(tokens[5]) + 1]
    assert [line.asked for line in parse_trace(recorded.text())][:12] == [
        "prefill a[0:3]",
        "decode a[3:4]",
        "reserve_kv request_id=a blocks=(1)",
        "decode_fed a[4:5]",
        "decode_fed a[5:6]",
        "decode_fed a[6:7]",
        "decode_fed a[7:8]",
        "reserve_kv request_id=a blocks=(2)",
        "decode_fed a[8:9]",
        "rollback request_id=a",
        "release_seq request_id=a slot=0 what=dropped",
        "prefill b[0:9]",
    ]


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("router", ["async", "newest first"])
def test_item_04_streams_of_a_model_are_those_of_the_synchronous_router(
    folder: Path, plain: Callable[[str, str], Played], router: str, name: str
) -> None:
    scenario = SCENARIOS[name]
    ahead = build(router, folder, total_blocks=scenario.blocks)
    played = play(scenario, ahead)
    ahead.teardown()
    assert played.streams == plain("model", name).streams
    assert set(played.tokens) == {asked.request_id for asked in scenario.requests}
    expect_depth_two(scenario, played)


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("name", SCENARIOS)
def test_item_04_streams_of_the_oracle_are_the_same_at_both_depths(
    plain: Callable[[str, str], Played], name: str, newest_first: bool
) -> None:
    played = play(SCENARIOS[name], depth=2, newest_first=newest_first)
    assert played.streams == plain("machine", name).streams
    expect_depth_two(SCENARIOS[name], played)


@pytest.mark.parametrize("kind", KINDS)
def test_item_04_a_handed_over_sequence_joins_one_that_runs_ahead(kind: str, device: Callable[..., DeviceIo]) -> None:
    def run(depth: int) -> tuple[dict[str, list[int]], int]:
        scenario = Scenario(())
        source, destination = device(kind, 1, scenario), device(kind, depth, scenario)
        held = Stepper(prefill_scheduler(40), io=source)
        stepper = Stepper(decode_scheduler(40), depth, destination)
        moved = request("moved", range(20, 31), 12, sampling=SamplingParams(temperature=0.8, seed=5))
        held.scheduler.apply(SubmitHandoffPrefill(handoff("h"), moved))
        held.run()
        stepper.scheduler.apply(Submit(request("own", range(5), 25)))
        stepper.scheduler.apply(ReserveDestination(handoff("h"), moved, activate_when_landed=True))
        for _ in range(6):
            stepper.step()
        first = hand_over(source, held, destination, stepper)
        stepper.run()
        assert stepper.finishes == {"own": FinishReason.LENGTH, "moved": FinishReason.LENGTH}
        return {**stepper.tokens, "moved": [first, *stepper.tokens["moved"]]}, stepper.scheduler.batcher.fed_steps

    (one_by_one, never), (ahead, fed) = run(1), run(2)
    assert ahead == one_by_one
    assert fed > 10
    assert never == 0


def hand_over(source: Any, held: Any, destination: Any, stepper: Any) -> int:
    """What a transfer does, while whatever runs ahead runs on. Returns the first token."""
    given = held.scheduler.held(handoff("h"), 1)
    taken = stepper.scheduler.reserved(handoff("h"), 1)
    size = source.facts().block_bytes
    memories = [io.pool if isinstance(io, KvMachine) else io.pool.bytes_view() for io in (source, destination)]
    blocks = [memory[: size * 40].reshape(40, size) for memory in memories]
    blocks[1][list(taken.blocks)] = blocks[0][list(given.blocks)]
    assert stepper.scheduler.landed(handoff("h"), 1, given.first_token)
    return int(given.first_token)


@pytest.mark.parametrize("depth", [1, 2])
def test_item_05_without_the_discard_the_output_is_another(
    plain: Callable[[str, str], Played], monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    settle = RunningSet._settle_special

    def keep_all(self: RunningSet, sequence: Sequence, token: int, settled: Any) -> None:
        if sequence.state is not SequenceState.RUNNING:
            settled.outputs.add(Output(sequence.request_id, sequence.outputs, token))
        settle(self, sequence, token, settled)

    monkeypatch.setattr(RunningSet, "_settle_special", keep_all)
    changed = play(SCENARIOS["stop tokens"], depth=depth).streams != plain("machine", "stop tokens").streams
    assert changed == (depth == 2)


@pytest.mark.parametrize("kind", KINDS)
def test_item_06_an_over_run_across_a_blocks_edge_gives_back_that_block(
    kind: str, device: Callable[..., DeviceIo], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request("a", range(3), 30, sampling=SamplingParams(temperature=1.0, seed=1))
    tokens = play(Scenario((asked,)), device(kind, 1, Scenario(()))).tokens["a"]
    stop = next(i for i, t in enumerate(tokens) if i > 4 and (3 + i) % BLOCK_SIZE == 0 and t not in tokens[:i])
    scenario = Scenario((replace(asked, stop_token_ids=frozenset({tokens[stop]})),))
    released = watch_releases(monkeypatch)
    frees = []
    for depth in (1, 2):
        released.clear()
        recorded = RecordingRouter(device(kind, depth, scenario))
        played = play(scenario, recorded)
        assert played.tokens["a"] == tokens[: stop + 1]
        frees.append(list(released))
    lines = parse_trace(recorded.text())
    reserved = [line.answer for line in lines if line.asked.startswith("reserve_kv")]
    (rollback,) = [line.answer for line in lines if line.asked.startswith("rollback")]
    assert rollback == reserved[-1]
    assert isinstance(rollback, Reserved)
    assert len(rollback.blocks) == 1
    assert sorted(frees[1]) == sorted([*frees[0], *rollback.blocks])


def watch_releases(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The blocks that are released from now on."""
    released: list[int] = []
    release = BlockPool.release

    def spy(self: BlockPool, blocks: Any) -> None:
        released.extend(blocks)
        release(self, blocks)

    monkeypatch.setattr(BlockPool, "release", spy)
    return released


def test_item_07_a_device_that_lags_changes_nothing(
    plain: Callable[[str, str], Played], device: Callable[..., DeviceIo], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step begins before its result is asked for, so the next one was always launched blindly."""
    scenario, expected = SCENARIOS["stop tokens"], plain("model", "stop tokens")
    lagging = Lagging(device("model", 2, scenario), monkeypatch)
    played = play(scenario, ScriptedRouter(lagging.router, Script(lag=lagging.let_run)))
    assert played.streams == expected.streams
    expect_depth_two(scenario, played)
    assert lagging.ahead > 10


class Lagging:
    """A device that holds each step until its result is asked for. ahead: how often a later step waited meanwhile."""

    def __init__(self, router: DeviceIo, monkeypatch: pytest.MonkeyPatch) -> None:
        self.router = router
        self.ahead = 0
        self._allowed = Semaphore(0)
        forward = ModelRunner.forward

        def held(runner: ModelRunner, step: Any) -> Any:
            assert self._allowed.acquire(timeout=30), "a step's result was never asked for"
            return forward(runner, step)

        monkeypatch.setattr(ModelRunner, "forward", held)

    def let_run(self, ticket: int) -> None:
        assert isinstance(self.router, AsyncRouter)
        self.ahead += len(self.router._in_flight) == 2
        self._allowed.release()


@pytest.mark.parametrize("fault", [Fault.FORWARD, Fault.READBACK])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_item_07_a_fault_fails_the_rows_of_its_step_and_nobody_else(
    plain: Callable[[str, str], Played], device: Callable[..., DeviceIo], kind: str, depth: int, fault: Fault
) -> None:
    scenario = SCENARIOS["late arrivals"]
    inner = device(kind, depth, scenario)
    error = KvExhausted("told so") if fault is Fault.FORWARD else DeviceError(fault, "told so")
    script = Script(launches={3: error}) if fault is Fault.FORWARD else Script(awaits={3: error})
    played = play(scenario, ScriptedRouter(inner, script))
    failed = {name for name, finish in played.finishes.items() if finish is FinishReason.ERROR}
    assert failed
    expected = plain(kind, "late arrivals")
    for name, tokens in expected.tokens.items():
        got = played.tokens.get(name, [])
        assert got == tokens if name not in failed else got == tokens[: len(got)] != tokens
    assert {"r3", "r4", "r5"} & set(played.tokens) - failed, "those who came later live"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_item_08_exhaustion_has_one_victim_and_no_client_sees_it(
    kind: str, depth: int, device: Callable[..., DeviceIo]
) -> None:
    requests = tuple(request(f"r{i}", range(i, i + 6), 12) for i in range(3))
    roomy, tight = Scenario(requests), Scenario(requests, blocks=12, preempts=True)
    expected = play(roomy, device(kind, 1, roomy))
    played = play(tight, device(kind, depth, tight))
    assert played.stepper.scheduler.batcher.pressure.counters.preemptions == 1
    assert played.streams == expected.streams
    assert set(played.finishes.values()) == {FinishReason.LENGTH}


@pytest.mark.parametrize("how", ["fails", "is full"])
@pytest.mark.parametrize("depth", [1, 2])
def test_item_08_what_can_not_be_spilled_is_computed_again(
    plain: Callable[[str, str], Played], device: Callable[..., DeviceIo], depth: int, how: str
) -> None:
    scenario = SCENARIOS["spilled"]
    recorded = RecordingRouter(device("model", depth, scenario))
    play(scenario, recorded)
    effects = [
        line.asked for line in parse_trace(recorded.text()) if "code" not in line.asked and "fill" not in line.asked
    ]
    first = next(i for i, asked in enumerate(effects) if asked.startswith("save_sequence_state"))
    inner = device("model", depth, scenario, spill_bytes=0 if how == "is full" else 1 << 20)
    failing = {first: DeviceError(Fault.EFFECT, "told so")} if how == "fails" else {}
    played = play(scenario, ScriptedRouter(inner, Script(effects=failing)))
    assert played.streams == plain("model", "spilled").streams
    assert played.stepper.scheduler.batcher.pressure.counters.spill_failures > 0


def test_item_09_without_a_block_to_reserve_nothing_runs_ahead_and_nothing_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[tuple[bool, int]] = []
    reserve = Batcher._reserve_ahead

    def spy(self: Batcher, step: Any) -> bool:
        before = self.kv.pool.available
        enough = reserve(self, step)
        answers.append((enough, before - self.kv.pool.available))
        return enough

    monkeypatch.setattr(Batcher, "_reserve_ahead", spy)
    # Both need a block at the same time, and there is one.
    scenario = Scenario((request("a", range(5), 9), request("b", range(1, 6), 9)), blocks=5, preempts=True)
    played = play(scenario, depth=2)
    assert played.streams == play(replace(scenario, blocks=40)).streams
    expect_depth_two(scenario, played)
    assert [taken for enough, taken in answers if not enough] == [0], "blocks were kept of a step that never ran"
    assert len([enough for enough, _ in answers if enough]) == played.stepper.scheduler.batcher.fed_steps


@pytest.mark.parametrize("name", SCENARIOS)
def test_item_12_recurrent_state_sees_each_token_once(plain: Callable[[str, str], Played], name: str) -> None:
    played = play(SCENARIOS[name], depth=2, slots=5, snapshots=4, recurrent=True)
    assert played.streams == plain("machine", name).streams
    assert played.stepper.scheduler.batcher.fed_steps == 0


def test_item_12_the_oracle_notices_a_token_that_is_seen_twice() -> None:
    machine = KvMachine(8, BLOCK_SIZE, slots=1, recurrent=True)
    rows = [make_row("a", [1, 2], 0, [0]), make_row("a", [2], 1, [0], Draw(SamplingParams()), [1])]
    for row in rows:
        row.slot = 0
    machine.await_result(machine.launch(Prefill((rows[0],))))
    with pytest.raises(AssertionError, match="its state has seen 2"):
        machine.launch(Prefill((rows[1],)))


@pytest.mark.parametrize("name", ["stop tokens", "cancels", "recomputed"])
def test_item_13_what_is_known_and_what_is_computed_keep_step(name: str) -> None:
    stepper = stepper_for(SCENARIOS[name], depth=2)
    for asked in SCENARIOS[name].requests:
        stepper.scheduler.apply(Submit(asked))
    while stepper.step() is not None:
        for sequence in stepper.scheduler.batcher.running_sequences():
            if sequence in stepper.scheduler.batcher._running.decoding:
                assert (sequence.start, sequence.end) == (len(sequence.known) - 1, len(sequence.known))


@pytest.mark.parametrize("kind", KINDS)
def test_item_13_a_discarded_row_with_no_other_traffic_ends(kind: str, device: Callable[..., DeviceIo]) -> None:
    scenario = Scenario((request("a", range(5), 50, stop_token_ids=frozenset(range(0, VOCABULARY, 3))),))
    played = play(scenario, device(kind, 2, scenario))
    assert played.finishes == {"a": FinishReason.STOP}
    batcher = played.stepper.scheduler.batcher
    assert (batcher.overruns, batcher.steps_in_flight) == (1, 0)
    assert len(played.stepper.plans) == len(played.tokens["a"]) + 1
