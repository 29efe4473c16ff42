"""Items 12 and 14 of the conformance checklist: a hybrid model sees each position once, and gets its own state back.

Real models under the real scheduler, watched at every step and effect; more on what clients get is in
test_device_hybrid_streams.py.
"""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from device_scenarios import SCENARIOS, play
from driven import Driven, run
from scheduler_drive import BLOCK_SIZE, Stepper, decode_scheduler, handoff, prefill_scheduler, request
from slot_oracle import CLEAN
from state_watch import StateWatch
from tiny_hybrids import VOCABULARY, build_hybrid, save_hybrid

from device.async_router import AsyncRouter
from device.router import SyncRouter
from scheduler.batching import BatchLimits
from scheduler.commands import ReleaseSource, ReserveDestination, Submit, SubmitHandoffPrefill
from scheduler.effects import DropSequenceState, ReleaseSeq, RestoreSequenceState
from scheduler.policies import Preemption, SchedulingPolicy
from scheduler.request import FinishReason, Request
from scheduler.slots import SlotLimits

EDGES = (1, 3, 4, 5, 8, 9, 12, 17)
"""Lengths of prompts: within a block, at its end and behind it, and longer than a chunk."""
SLOTS = SlotLimits(6, 3, recurrent=True)
BY_PRIORITY = SchedulingPolicy(preemption=Preemption.SPILL, victim="lowest-priority", immunity_tokens=2)


@pytest.fixture(scope="module", params=["bamba", "qwen3-next"])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save_hybrid(request.param, path)
    return path


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Callable[[Request], list[int]]]:
    """What a request gets when it is driven by hand, its prompt in one piece."""
    router = build_hybrid(folder)

    @cache
    def answer(asked: Request) -> list[int]:
        router.apply(ReleaseSeq(asked.request_id, 0, "begin"))
        return run(router, Driven(asked.request_id, list(asked.prompt), list(range(40)), 0), asked.max_tokens)

    yield answer
    router.teardown()


@pytest.fixture(scope="module", params=["sync", "async"])
def pair(folder: Path, request: pytest.FixtureRequest) -> Iterator[tuple[SyncRouter | AsyncRouter, ...]]:
    """Two devices, as the tests before left them."""
    inner = [build_hybrid(folder, total_blocks=60, spill_bytes=1 << 22) for _ in range(2)]
    routers = tuple(AsyncRouter(router) if request.param == "async" else router for router in inner)
    yield routers
    for router in routers:
        router.teardown()


@pytest.fixture
def watch(pair: tuple[SyncRouter | AsyncRouter, ...]) -> StateWatch:
    return StateWatch(pair[0])


@pytest.fixture
def other(pair: tuple[SyncRouter | AsyncRouter, ...]) -> StateWatch:
    return StateWatch(pair[1])


def limits(max_tokens: int = 16) -> BatchLimits:
    return BatchLimits(max_tokens, min(max_tokens, 4))


def serve(
    watch: StateWatch, requests: list[Request], blocks: int, batch: BatchLimits, policy: SchedulingPolicy
) -> Stepper:
    """All of them to their ends."""
    scheduler = decode_scheduler(blocks, policy=policy, limits=batch, state=SLOTS, max_model_len=128)
    stepper = Stepper(scheduler, watch.max_depth(), watch)
    for asked in requests:
        scheduler.apply(Submit(asked))
    stepper.run()
    assert set(stepper.finishes.values()) == {FinishReason.LENGTH}
    assert scheduler.is_drained
    assert scheduler.batcher.fed_steps == 0
    assert watch.oracle.records == [CLEAN] * SLOTS.slots
    return stepper


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 31 + i * i * 7 + i) % VOCABULARY for i in range(length)]


@pytest.mark.parametrize("budget", [1, 3, 4, 6, 9])
def test_item_12_chunks_may_end_anywhere(watch: StateWatch, alone: Callable[[Request], list[int]], budget: int) -> None:
    requests = [request(f"r{i}", prompt(i, length), 4) for i, length in enumerate(EDGES)]
    served = serve(watch, requests, 60, limits(budget), SchedulingPolicy())
    assert served.tokens == {asked.request_id: alone(asked) for asked in requests}


@pytest.mark.parametrize("name", ["recomputed", "spilled", "prefix hits", "cancels", "late arrivals"])
def test_item_12_no_position_is_consumed_twice(watch: StateWatch, name: str) -> None:
    """After a preemption, a cache hit that goes on from a snapshot, a cancel, a release."""
    scenario = SCENARIOS[name]
    played = play(scenario, watch)
    counters = played.stepper.scheduler.batcher.pressure.counters
    assert (counters.preemptions > 0) == scenario.preempts
    assert len(watch.restored) == counters.restores == (counters.preemptions if name == "spilled" else 0)
    assert watch.snapshots > 0 or name != "prefix hits"
    assert watch.oracle.records == [CLEAN] * SLOTS.slots


@pytest.mark.parametrize("budget", [3, 4, 16])
def test_item_12_a_handoff_takes_kv_and_state_of_one_count(
    watch: StateWatch, other: StateWatch, alone: Callable[[Request], list[int]], budget: int
) -> None:
    source = Stepper(prefill_scheduler(60, limits=limits(budget), state=SLOTS), io=watch)
    destination = Stepper(decode_scheduler(60, limits=limits(budget), state=SLOTS), io=other)
    for length in EDGES:
        asked = request(f"a{length}", prompt(length, length), 6)
        first = hand_over(source, destination, asked)
        source.run()
        destination.run()
        assert [first, *destination.tokens[asked.request_id]] == alone(asked)
    for stepper in (source, destination):
        assert stepper.device.oracle.records == [CLEAN] * SLOTS.slots


def hand_over(source: Stepper, destination: Stepper, asked: Request) -> int:
    """Prefill, and what a transfer does. Returns the first token."""
    name, length = handoff(asked.request_id), len(asked.prompt)
    source.scheduler.apply(SubmitHandoffPrefill(name, asked))
    destination.scheduler.apply(ReserveDestination(name, asked, activate_when_landed=True))
    source.run()
    given, reserved = source.scheduler.held(name, 1), destination.scheduler.reserved(name, 1)  # type: ignore[attr-defined]
    giving, taking = source.device, destination.device
    assert giving.count(given.slot) == giving.oracle.records[given.slot].tokens == given.prompt_tokens == length
    assert len(given.blocks) == len(reserved.blocks) == -(-length // BLOCK_SIZE)
    missing = slice(reserved.cached_blocks, None)
    taking.pool.tensor[list(reserved.blocks[missing])] = giving.pool.tensor[list(given.blocks[missing])]
    taking.pool.slot_memory[reserved.slot] = giving.pool.slot_memory[given.slot]
    taking.oracle.records[reserved.slot] = giving.oracle.records[given.slot]
    assert destination.scheduler.landed(name, 1, given.first_token)  # type: ignore[attr-defined]
    source.scheduler.apply(ReleaseSource(name))
    return int(given.first_token)


@pytest.mark.parametrize("victim", [0, 1])
def test_item_14_a_spilled_row_that_is_not_the_last_gets_its_own_state_back(
    watch: StateWatch, alone: Callable[[Request], list[int]], victim: int
) -> None:
    """The others run on beside it, and it comes back in another slot and other blocks."""
    requests = [request(f"r{i}", prompt(i, 5 + i), 16, priority=9 if i == victim else 0) for i in range(4)]
    served = serve(watch, requests, 14, limits(), BY_PRIORITY)
    assert served.tokens == {asked.request_id: alone(asked) for asked in requests}
    first = watch.restored[0]
    assert (first.request_id, first.place, first.rows) == (f"r{victim}", victim, 4)
    assert first.moved
    assert len(watch.spilled) == len(watch.restored)


@pytest.mark.parametrize("part", ["state", "KV"])
def test_item_14_the_watch_notices_what_is_anothers(
    watch: StateWatch, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    require_own = StateWatch._require_own

    def spoiled(self: StateWatch, effect: RestoreSequenceState) -> None:
        if part == "state":
            self.pool.slot_memory[effect.slot][8:] = self.pool.slot_memory[effect.slot - 1][8:]
        else:
            self.pool.tensor[effect.blocks[0]] = self.pool.tensor[effect.blocks[-1]]
        require_own(self, effect)

    monkeypatch.setattr(StateWatch, "_require_own", spoiled)
    requests = [request(f"r{i}", prompt(i, 6), 16, priority=0 if i else 9) for i in range(4)]
    with pytest.raises(AssertionError, match=f"r0: the {part} that is back is not its own"):
        serve(watch, requests, 14, limits(), BY_PRIORITY)
    for slot in range(SLOTS.slots):
        watch.apply(ReleaseSeq(requests[0].request_id, slot, "reset"))
    for asked in requests:
        watch.apply(DropSequenceState(asked.request_id))
