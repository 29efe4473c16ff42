"""Random lives of requests of a hybrid model: the state in a slot sees each token once, whatever fails or gives way.

The device asserts it (SlotOracle): a row goes on where its state ends, nobody moves into a slot in use, and a snapshot
that was never made is not read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from determinism import deterministic
from hypothesis import given
from hypothesis import strategies as st
from kv_machine import expected_output
from scheduler_drive import Stepper, decode_scheduler, request

from scheduler.commands import CancelRequest, Submit
from scheduler.contract import DeviceError, Fault
from scheduler.effects import (
    Effect,
    MarconiCheckpoint,
    ReleaseSeq,
    RestoreSequenceState,
    SaveSequenceState,
    SsmSnapshotRestore,
)
from scheduler.policies import Preemption, SchedulingPolicy
from scheduler.request import FinishReason
from scheduler.slots import SlotLimits

PREFIXES = (range(16), range(100, 108), range(0))
MAY_FAIL = (MarconiCheckpoint, SsmSnapshotRestore, SaveSequenceState, RestoreSequenceState)
ROUNDS = 2000


@dataclass(frozen=True)
class Life:
    """at: the round it comes in. cancel_after: rounds after which it is cancelled, None for never."""

    at: int
    prefix: int
    own: int
    outputs: int
    cancel_after: int | None


@dataclass
class Guard:
    """Between scheduler and device: fails chosen effects, and knows which slots are zeroed.

    unmade: places of snapshots whose last checkpoint failed; restoring from an empty place fails on a real device too.
    """

    device: Any
    failing: frozenset[int]
    dirty: set[int] = field(default_factory=set)
    unmade: set[int] = field(default_factory=set)
    seen: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.device, name)

    def launch(self, plan: Any) -> Any:
        assert not self.dirty & {row.slot for row in plan.rows}, "a slot was handed out before it was zeroed"
        return self.device.launch(plan)

    def apply(self, effect: Effect) -> Any:
        if isinstance(effect, ReleaseSeq):
            self.dirty.discard(effect.slot)
        if isinstance(effect, MAY_FAIL):
            self.seen += 1
            if self.seen in self.failing:
                self.device.fail_effects = {len(self.device.effects)}
                if isinstance(effect, MarconiCheckpoint):
                    self.unmade.add(effect.snapshot)
        if isinstance(effect, SsmSnapshotRestore) and self._is_empty(effect.snapshot):
            raise DeviceError(Fault.EFFECT, f"snapshot {effect.snapshot} is empty")
        return self.device.apply(effect)

    def _is_empty(self, place: int) -> bool:
        return place in self.unmade and self.device.slots.snapshots[place] is None


lives = st.builds(
    Life,
    at=st.integers(0, 12),
    prefix=st.integers(0, len(PREFIXES) - 1),
    own=st.integers(1, 9),
    outputs=st.integers(1, 14),
    cancel_after=st.none() | st.none() | st.integers(0, 12),
)


@given(
    asked=st.lists(lives, min_size=1, max_size=9),
    slots=st.integers(1, 5),
    snapshots=st.integers(0, 4),
    blocks=st.integers(11, 26),
    preemption=st.sampled_from(list(Preemption)),
    spill_blocks=st.sampled_from([0, 6, 50]),
    failing=st.frozensets(st.integers(1, 20), max_size=5),
)
@deterministic(150)
def test_answers_are_right_and_every_slot_comes_back(
    asked: Sequence[Life],
    slots: int,
    snapshots: int,
    blocks: int,
    preemption: Preemption,
    spill_blocks: int,
    failing: frozenset[int],
) -> None:
    state = SlotLimits(slots, snapshots, recurrent=True)
    policy = SchedulingPolicy(preemption=preemption, immunity_tokens=2)
    scheduler = decode_scheduler(blocks, state=state, policy=policy)
    stepper = Stepper(scheduler, slots=slots, snapshots=snapshots, recurrent=True, spill_blocks=spill_blocks)
    guard = stepper.device = Guard(stepper.device, failing)
    give_back = scheduler.kv.slots.give_back

    def watched(sequence: Any, what: str) -> ReleaseSeq | None:
        released = give_back(sequence, what)
        if released is not None:
            guard.dirty.add(released.slot)
        return released

    scheduler.kv.slots.give_back = watched  # type: ignore[method-assign]
    requests = {
        f"r{i}": request(f"r{i}", [*PREFIXES[life.prefix], *range(200 + i, 200 + i + life.own)], life.outputs)
        for i, life in enumerate(asked)
    }
    live_until_told(stepper, asked, requests)
    assert scheduler.is_drained
    assert scheduler.kv.slots.free == slots
    assert scheduler.kv.pool.available == blocks
    assert not guard.device.saved
    for (name, one), life in zip(requests.items(), asked, strict=True):
        right = expected_output(one.prompt, one.max_tokens)
        drawn = stepper.tokens.get(name, [])
        assert drawn == right[: len(drawn)], name
        assert life.cancel_after is not None or stepper.finishes[name] is FinishReason.LENGTH, name


def live_until_told(stepper: Stepper, asked: Sequence[Life], requests: dict[str, Any]) -> None:
    """Submit and cancel as planned, and step until nothing is left to do."""
    last = max(life.at + (life.cancel_after or 0) for life in asked)
    for now in range(ROUNDS):
        for i, life in enumerate(asked):
            one = requests[f"r{i}"]
            if life.at == now:
                stepper.scheduler.apply(Submit(one))
            if life.cancel_after is not None and life.at + life.cancel_after == now:
                stepper.scheduler.apply(CancelRequest(one.request_id))
        before = len(stepper.effects)
        if stepper.step() is None and now > last and len(stepper.effects) == before:
            return
    raise AssertionError(f"still running after {ROUNDS} rounds")
