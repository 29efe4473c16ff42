"""Many requests of random lengths, cancelled, preempted and spilled at random, on both routers: nothing leaks.

100 sequences, or 1,000 with PRELAY_SOAK set (`make soak`).
"""

import gc
import random
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from determinism import SOAK, seeds
from scheduler_drive import Stepper, decode_scheduler, request
from tiny_model import build_tiny, save_tiny_model

from device.async_router import AsyncRouter
from scheduler.batching import BatchLimits
from scheduler.commands import CancelRequest, Submit
from scheduler.contract import DeviceIo
from scheduler.ids import RequestId
from scheduler.policies import Preemption, SchedulingPolicy
from scheduler.request import FinishReason, Request, SamplingParams
from scheduler.slots import SlotLimits

SEQUENCES = 1000 if SOAK else 100
BLOCKS = 30
SLOTS = 8
VOCABULARY = 60
GROWTH_BYTES = 256 << 10
"""What Python may own more after the second half than after the first: the stories of the last requests and the like,
and far less than one request's traces would be, kept of each."""
LIMITS = BatchLimits(max_tokens=24, max_sequences=6)
ROUTERS = ("sync", "async at depth 1", "async at depth 2")


@dataclass(frozen=True)
class Client:
    """at: the step in which it comes. leaves_after: tokens after which it cancels, None for never."""

    request: Request
    at: int
    leaves_after: int | None


@dataclass
class Soaked:
    """grown: bytes that Python owns more at the end than at half of the requests."""

    tokens: dict[str, list[int]]
    finishes: dict[str, FinishReason]
    grown: int
    fed_steps: int


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_tiny_model(path)
    return path


def clients() -> list[Client]:
    """A third of them sample, a quarter share a prefix, a fifth leave early; about as many as can be served."""
    rng = random.Random(seeds(1)[0])
    prefix = tuple(rng.randrange(VOCABULARY) for _ in range(10))
    coming, at = [], 0
    for i in range(SEQUENCES):
        own = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 20)))
        prompt = prefix + own if rng.random() < 0.25 else own
        sampling = SamplingParams(temperature=0.8, top_k=20, seed=i) if rng.random() < 0.33 else SamplingParams()
        stops = frozenset(rng.sample(range(VOCABULARY), 2))
        asked = request(f"r{i}", prompt, rng.randint(1, 30), sampling=sampling, stop_token_ids=stops)
        coming.append(Client(asked, at, rng.randint(0, 12) if rng.random() < 0.2 else None))
        at += rng.choice((0, 0, 1, 3, 6))
    return coming


def soak(name: str, folder: Path, preemption: Preemption, spill: Path) -> Soaked:
    inner = build_tiny(folder, total_blocks=BLOCKS, slots=SLOTS, spill_bytes=1 << 20, spill_path=spill)
    io: DeviceIo = inner if name == "sync" else AsyncRouter(inner)
    policy = SchedulingPolicy(preemption=preemption, immunity_tokens=2)
    scheduler = decode_scheduler(BLOCKS, policy=policy, state=SlotLimits(SLOTS), limits=LIMITS, max_model_len=64)
    stepper = Stepper(scheduler, 2 if name.endswith("2") else 1, io)
    counters = scheduler.batcher.pressure.counters
    coming = clients()
    half = len(coming) // 2
    tracemalloc.start()
    serve(stepper, coming[:half])
    before = owned_by_python(stepper)
    serve(stepper, coming[half:])
    grown = owned_by_python(stepper) - before
    tracemalloc.stop()
    assert scheduler.is_drained
    assert scheduler.kv.pool.available == BLOCKS
    assert scheduler.kv.slots.free == SLOTS
    assert counters.preemptions > 0
    if preemption is Preemption.SPILL:
        assert counters.restores > 0
    assert counters.restore_failures == counters.spill_failures == 0
    assert [path for path in spill.rglob("*") if path.is_file() and path.suffix != ".lock"] == []
    io.teardown()
    assert list(spill.iterdir()) == []
    return Soaked(stepper.tokens, stepper.finishes, grown, scheduler.batcher.fed_steps)


def serve(stepper: Stepper, coming: Sequence[Client]) -> None:
    """From the first one's arrival until all are gone and the device has done all that it was asked for."""
    waiting, leaving = (
        list(coming),
        {c.request.request_id: c.leaves_after for c in coming if c.leaves_after is not None},
    )
    step = waiting[0].at
    while True:
        while waiting and waiting[0].at <= step:
            stepper.scheduler.apply(Submit(waiting.pop(0).request))
        asked = len(stepper.effects)
        idle = stepper.step() is None and len(stepper.effects) == asked
        for name, count in list(leaving.items()):
            if len(stepper.tokens.get(name, ())) >= count and stepper.scheduler.story(RequestId(name)):
                del leaving[name]
                stepper.scheduler.apply(CancelRequest(RequestId(name)))
                idle = False
        if idle and not waiting:
            return
        step += 1


def owned_by_python(stepper: Stepper) -> int:
    """Without what this test keeps itself."""
    stepper.plans.clear()
    stepper.effects.clear()
    gc.collect()
    kept = sum(len(tokens) for tokens in stepper.tokens.values()) * 40 + len(stepper.tokens) * 500
    return tracemalloc.get_traced_memory()[0] - kept


@pytest.mark.timeout(0 if SOAK else 300)
@pytest.mark.parametrize("preemption", [Preemption.RECOMPUTE, Preemption.SPILL], ids=lambda p: p.value)
def test_routers_answer_alike_and_nothing_is_left(folder: Path, tmp_path: Path, preemption: Preemption) -> None:
    soaked = {}
    for name in ROUTERS:
        spill = tmp_path / name.replace(" ", "-")
        spill.mkdir()
        soaked[name] = soak(name, folder, preemption, spill)
    stayed = [c.request for c in clients() if c.leaves_after is None]
    right = soaked["sync"]
    for name, other in soaked.items():
        for asked in stayed:
            key = asked.request_id
            assert other.finishes[key] in (FinishReason.STOP, FinishReason.LENGTH)
            assert (other.tokens[key], other.finishes[key]) == (right.tokens[key], right.finishes[key]), (name, key)
        assert other.grown < GROWTH_BYTES, f"{name}: {other.grown} bytes more"
    assert soaked["async at depth 2"].fed_steps > 0
    assert soaked["async at depth 1"].fed_steps == soaked["sync"].fed_steps == 0
