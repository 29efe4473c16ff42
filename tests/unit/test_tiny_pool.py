"""A pool of one and a half requests and many requests at once: nothing deadlocks, nothing starves, outputs exact."""

from collections.abc import Iterator
from itertools import product

import pytest
from handoff_drive import DestinationNode, SourceNode, reserved_in, wind_down
from kv_machine import expected_output
from scheduler_drive import BLOCK_SIZE, handoff, request

from scheduler.batching import BatchLimits
from scheduler.commands import ReleaseSource, Submit
from scheduler.events import SourceHeld
from scheduler.policies import QUEUE_POLICIES, VICTIM_POLICIES, Preemption, SchedulingPolicy
from scheduler.request import Request

PROMPT_TOKENS, MAX_TOKENS, REQUESTS = 9, 12, 16
FOOTPRINT = -(-(PROMPT_TOKENS + MAX_TOKENS - 1) // BLOCK_SIZE)
POOL = FOOTPRINT * 3 // 2
LIMITS = BatchLimits(max_tokens=8, max_sequences=4)

POLICIES = [
    pytest.param(SchedulingPolicy(preemption=kind, victim=victim), id=f"{kind.value}-{victim}")
    for kind, victim in product(Preemption, VICTIM_POLICIES)
]
STRESSED = [
    pytest.param(SchedulingPolicy(preemption=kind, immunity_tokens=immunity, headroom_blocks=headroom), id=name)
    for name, kind, immunity, headroom in (
        ("no-immunity", Preemption.RECOMPUTE, 0, 0),
        ("no-immunity-spill", Preemption.SPILL, 0, 0),
        ("all-immune", Preemption.RECOMPUTE, 100, 0),
        ("all-immune-spill", Preemption.SPILL, 100, 0),
        ("headroom", Preemption.RECOMPUTE, 16, 2),
        ("headroom-spill", Preemption.SPILL, 16, 2),
        ("headroom-by-commitment", Preemption.NONE, 16, 2),
    )
]


def test_the_pool_holds_one_and_a_half() -> None:
    assert (FOOTPRINT, POOL) == (5, 7)


def requests() -> list[Request]:
    """Different prompts, some with a common beginning; priorities so that each policy has something to choose."""
    prompts = [[index % 5, *range(index, index + PROMPT_TOKENS - 1)] for index in range(REQUESTS)]
    prompts[3] = [*prompts[2][:8], 99]
    prompts[7] = list(prompts[2])
    return [request(f"r{index}", prompt, MAX_TOKENS, priority=index % 3) for index, prompt in enumerate(prompts)]


def right(asked: Request, first: int = 0) -> list[int]:
    return expected_output(asked.prompt, asked.max_tokens)[first:]


@pytest.mark.parametrize("policy", [*POLICIES, *STRESSED])
def test_handoffs(policy: SchedulingPolicy) -> None:
    node = DestinationNode(POOL, policy=policy, limits=LIMITS)
    node.serve_all(requests())
    assert node.tokens == {asked.request_id: right(asked, 1) for asked in requests()}
    assert (node.scheduler.batcher.pressure.counters.preemptions > 0) == (policy.preemption is not Preemption.NONE)
    wind_down(node)


@pytest.mark.parametrize("policy", [*POLICIES, *STRESSED])
def test_local_requests(policy: SchedulingPolicy) -> None:
    node = DestinationNode(POOL, policy=policy, limits=LIMITS)
    for asked in requests():
        node.scheduler.apply(Submit(asked))
    node.run(5000)
    assert node.tokens == {asked.request_id: right(asked) for asked in requests()}
    wind_down(node)


@pytest.mark.parametrize("policy", POLICIES)
def test_handoffs_and_local_requests_together(policy: SchedulingPolicy) -> None:
    """A stream of handoffs doesn't starve local requests, nor the other way round."""
    node = DestinationNode(POOL, policy=policy, limits=LIMITS)
    local = [request(f"local{index}", [200 + index] * 6, 9) for index in range(6)]
    for asked in local[:3]:
        node.scheduler.apply(Submit(asked))
    node.step()
    for asked in local[3:]:
        node.scheduler.apply(Submit(asked))
    node.serve_all(requests())
    assert node.tokens == {
        **{asked.request_id: right(asked) for asked in local},
        **{asked.request_id: right(asked, 1) for asked in requests()},
    }
    wind_down(node)


@pytest.mark.parametrize("queue", QUEUE_POLICIES)
@pytest.mark.parametrize("preemption", Preemption)
def test_every_queue_policy(queue: str, preemption: Preemption) -> None:
    node = DestinationNode(POOL, policy=SchedulingPolicy(queue=queue, preemption=preemption), limits=LIMITS)
    for asked in requests():
        node.scheduler.apply(Submit(asked))
    node.run(5000)
    assert node.tokens == {asked.request_id: right(asked) for asked in requests()}


@pytest.mark.parametrize("preemption", Preemption)
def test_sources_that_are_released_late(preemption: Preemption) -> None:
    """Each is held for two steps before its release: the pool has room for two of them, and all get their turn."""
    node = SourceNode(POOL, policy=SchedulingPolicy(preemption=preemption), limits=LIMITS)
    for asked in requests():
        node.submit(asked.request_id, asked.prompt, asked.max_tokens)
    for names in held_for_two_steps(node):
        for name in names:
            assert node.scheduler.apply(ReleaseSource(handoff(name))).retired == (name,)
    assert node.tokens == {asked.request_id: right(asked)[:1] for asked in requests()}
    assert node.scheduler.is_drained


def held_for_two_steps(node: SourceNode) -> Iterator[list[str]]:
    waiting: list[list[str]] = [[], []]
    for _ in range(200):
        done = node.step()
        events = done.events if done is not None else ()
        waiting.append([event.handoff_id for event in events if isinstance(event, SourceHeld)])
        yield waiting.pop(0)
        if node.scheduler.is_drained:
            return
    raise AssertionError("not all sources had their turn")


@pytest.mark.parametrize("fail_effects", [range(0, 1000, 3), range(0, 1000, 2), range(1000)])
def test_a_spill_store_that_fails_again_and_again(fail_effects: range) -> None:
    policy = SchedulingPolicy(preemption=Preemption.SPILL)
    node = DestinationNode(POOL, policy=policy, limits=LIMITS, fail_effects=fail_effects)
    node.serve_all(requests())
    assert node.tokens == {asked.request_id: right(asked, 1) for asked in requests()}
    counters = node.scheduler.batcher.pressure.counters
    assert counters.spill_failures + counters.restore_failures > 0
    assert not node.device.saved


@pytest.mark.parametrize(("blocks", "spill_blocks", "spills"), [(POOL, 0, False), (2 * POOL, 4, True)])
def test_a_spill_store_with_little_room(blocks: int, spill_blocks: int, spills: bool) -> None:
    policy = SchedulingPolicy(preemption=Preemption.SPILL)
    node = DestinationNode(blocks, policy=policy, limits=LIMITS, spill_blocks=spill_blocks)
    node.serve_all(requests())
    assert node.tokens == {asked.request_id: right(asked, 1) for asked in requests()}
    counters = node.scheduler.batcher.pressure.counters
    assert counters.spill_failures > 0
    assert (counters.spills > 0) == spills
    assert not node.device.saved


@pytest.mark.parametrize("preemption", Preemption)
def test_one_reservation_at_a_time(preemption: Preemption) -> None:
    policy = SchedulingPolicy(preemption=preemption)
    node = DestinationNode(POOL, policy=policy, limits=LIMITS, max_reservations=1)
    node.serve_all(requests())
    assert node.tokens == {asked.request_id: right(asked, 1) for asked in requests()}


@pytest.mark.parametrize("preemption", Preemption)
def test_a_request_as_large_as_the_pool_among_small_ones(preemption: Preemption) -> None:
    node = DestinationNode(POOL, policy=SchedulingPolicy(preemption=preemption), limits=LIMITS)
    large = request("large", range(300, 300 + POOL * BLOCK_SIZE - 5), 6)
    asked = [*requests()[:4], large, *requests()[4:8]]
    node.serve_all(asked)
    assert node.tokens == {one.request_id: right(one, 1) for one in asked}
    assert reserved_in(node.boundary().events) == []
    wind_down(node)
