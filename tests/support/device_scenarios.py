"""What a scheduler and its device go through together, to be compared between routers: requests, when they come, when
they are cancelled, how many blocks there are.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scheduler_drive import Stepper, decode_scheduler, request

from scheduler.commands import CancelRequest, Submit
from scheduler.contract import DeviceIo
from scheduler.ids import RequestId
from scheduler.policies import Preemption, SchedulingPolicy
from scheduler.request import FinishReason, Request, SamplingParams
from scheduler.slots import SlotLimits

VOCABULARY = 60
"""Of the tiny models, and so of the machines beside them."""
STOPS = frozenset(range(0, VOCABULARY, 7))
"""So many that an answer soon meets one."""


@dataclass(frozen=True)
class Scenario:
    """arrives: after how many steps, 0 for who is not in it. cancelled: after how many of its tokens were seen.

    runs_ahead, overruns, preempts: what a device of depth 2 must be seen to do, or not to do.
    """

    requests: tuple[Request, ...]
    arrives: Mapping[str, int] = field(default_factory=dict)
    cancelled: Mapping[str, int] = field(default_factory=dict)
    blocks: int = 40
    preemption: Preemption = Preemption.RECOMPUTE
    runs_ahead: bool = True
    overruns: bool = False
    preempts: bool = False


def _many(count: int, **options: Any) -> tuple[Request, ...]:
    """Prompts of 1 to 11 tokens, answers of 3 to 17."""
    return tuple(request(f"r{i}", range(i, i + 1 + i * 7 % 11), 3 + i * 5 % 15, **options) for i in range(count))


def _sampled(i: int) -> SamplingParams:
    return SamplingParams(temperature=0.7, top_p=0.9, top_k=i * 10, seed=i)


SCENARIOS: dict[str, Scenario] = {
    "mixed lengths": Scenario(_many(4)),
    "more than fit": Scenario(_many(9)),
    "late arrivals": Scenario(_many(6), arrives={"r3": 4, "r4": 7, "r5": 8}),
    "stop tokens": Scenario(
        tuple(request(f"r{i}", range(i, i + 5), 30, stop_token_ids=STOPS) for i in range(4)), overruns=True
    ),
    "minimum length": Scenario(
        tuple(request(f"r{i}", range(i, i + 5), 30, stop_token_ids=STOPS, min_tokens=3 * i) for i in range(4)),
        overruns=True,
    ),
    "sampled": Scenario(tuple(request(f"r{i}", range(i, i + 5), 20, sampling=_sampled(i)) for i in range(4))),
    "cancels": Scenario(
        tuple(request(f"r{i}", range(i, i + 5), 20) for i in range(5)),
        cancelled={"r1": 4, "r2": 1, "r3": 11, "r4": 3},
        overruns=True,
    ),
    "recomputed": Scenario(
        tuple(request(f"r{i}", range(i, i + 6), 20) for i in range(4)),
        blocks=14,
        preemption=Preemption.RECOMPUTE,
        preempts=True,
    ),
    "spilled": Scenario(
        tuple(request(f"r{i}", range(i, i + 6), 20) for i in range(4)),
        blocks=14,
        preemption=Preemption.SPILL,
        preempts=True,
    ),
    "prefix hits": Scenario(
        tuple(request(f"r{i}", [*range(8), *range(i)], 9) for i in range(4)),
        arrives={"r1": 6, "r2": 6, "r3": 9},
    ),
    "two tokens each": Scenario(tuple(request(f"r{i}", range(i, i + 4), 2) for i in range(4)), runs_ahead=False),
    "one token each": Scenario(tuple(request(f"r{i}", range(i, i + 4), 1) for i in range(4)), runs_ahead=False),
}


@dataclass(frozen=True)
class Played:
    tokens: Mapping[str, list[int]]
    finishes: Mapping[str, FinishReason]
    stepper: Stepper

    @property
    def streams(self) -> object:
        return self.tokens, self.finishes


def play(scenario: Scenario, io: DeviceIo | None = None, depth: int = 1, **device: Any) -> Played:
    """Drive a scenario to its end on `io`, at its depth, or on a KvMachine. Nothing may be owned then."""
    stepper = stepper_for(scenario, io, depth, **device)
    coming = sorted(scenario.requests, key=lambda asked: scenario.arrives.get(asked.request_id, 0))
    cancelled = dict(scenario.cancelled)
    for step in range(1000):
        while coming and scenario.arrives.get(coming[0].request_id, 0) <= step:
            stepper.scheduler.apply(Submit(coming.pop(0)))
        if stepper.step() is None and not coming:
            break
        for name, count in list(cancelled.items()):
            if len(stepper.tokens.get(name, ())) >= count:
                del cancelled[name]
                stepper.scheduler.apply(CancelRequest(RequestId(name)))
    else:
        raise AssertionError("still running after 1000 steps")
    assert not stepper.in_flight
    assert stepper.scheduler.is_drained
    pool = stepper.scheduler.kv.pool
    assert pool.available == pool.total
    return Played(stepper.tokens, stepper.finishes, stepper)


def stepper_for(scenario: Scenario, io: DeviceIo | None = None, depth: int = 1, **device: Any) -> Stepper:
    """A scheduler that knows the device's slots, on that device."""
    facts = io.facts() if io is not None else None
    if io is None:
        device["vocab_size"] = VOCABULARY
    state = SlotLimits(
        slots=facts.slots if facts else device.get("slots", 0),
        snapshots=facts.snapshots if facts else device.get("snapshots", 0),
        recurrent=bool(facts.slot_bytes) if facts else device.get("recurrent", False),
    )
    policy = SchedulingPolicy(preemption=scenario.preemption)
    scheduler = decode_scheduler(scenario.blocks, policy=policy, state=state)
    return Stepper(scheduler, io.max_depth() if io is not None else depth, io, **device)


def expect_depth_two(scenario: Scenario, played: Played) -> None:
    """It ran ahead, over-ran and preempted as the scenario says."""
    batcher = played.stepper.scheduler.batcher
    assert (batcher.fed_steps > 0) == scenario.runs_ahead
    assert (batcher.overruns > 0) == scenario.overruns
    assert (batcher.pressure.counters.preemptions > 0) == scenario.preempts
