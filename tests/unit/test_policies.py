"""Policies by name: who is next, who gives way, and that a wait always ends."""

from random import Random
from typing import Any

import pytest
from kv_machine import expected_output
from scheduler_drive import Stepper, handoff, prefill_scheduler, request

from scheduler.batching import BatchLimits
from scheduler.commands import ReleaseSource, Submit, SubmitHandoffPrefill
from scheduler.events import SourceHeld
from scheduler.policies import QUEUE_POLICIES, VICTIM_POLICIES, Preemption, SchedulingPolicy
from scheduler.sequence import Sequence

ONE_AT_A_TIME = BatchLimits(max_tokens=16, max_sequences=1)


def single(**policy: Any) -> Stepper:
    """A scheduler that runs one request at a time."""
    return Stepper(prefill_scheduler(32, limits=ONE_AT_A_TIME, policy=SchedulingPolicy(**policy)))


def submit(stepper: Stepper, name: str, prompt_tokens: int = 1, priority: int = 0) -> None:
    """One that takes one step, and shares no prefix with another."""
    prompt = [sum(map(ord, name)), *range(1, prompt_tokens)]
    stepper.scheduler.apply(Submit(request(name, prompt, max_tokens=1, priority=priority)))


def served(stepper: Stepper) -> list[str]:
    """Who ran, step by step."""
    return [plan.split()[1].split("[")[0] for plan in stepper.plans]


def sequence(name: str, arrival: int = 0, outputs: int = 0, priority: int = 0, immune_until: int = 0) -> Sequence:
    running = Sequence(request(name, [1], 99, priority=priority), arrival, 99)
    running.known += [5] * outputs
    running.immune_until = immune_until
    return running


def test_fifo_serves_in_order_of_arrival() -> None:
    stepper = single(queue="fifo")
    for name, size, priority in (("a", 9, 2), ("b", 1, 0), ("c", 5, 1)):
        submit(stepper, name, size, priority)
    stepper.run()
    assert served(stepper) == ["a", "b", "c"]


def test_priority_serves_the_lowest_number_first_and_equals_in_order_of_arrival() -> None:
    stepper = single(queue="priority")
    for name, priority in (("a", 2), ("b", -1), ("c", 0), ("d", 2), ("e", -1)):
        submit(stepper, name, priority=priority)
    stepper.run()
    assert served(stepper) == ["b", "e", "c", "a", "d"]


def test_shortest_prefill_serves_short_prompts_first_and_equals_in_order_of_arrival() -> None:
    stepper = single(queue="shortest-prefill")
    for name, size in (("a", 9), ("b", 3), ("c", 16), ("d", 3), ("e", 1)):
        submit(stepper, name, size)
    stepper.run()
    assert served(stepper) == ["e", "b", "d", "a", "c"]


def test_a_low_priority_is_served_after_its_wait_whatever_comes() -> None:
    stepper = single(queue="priority", priority_ageing_s=5.0)
    submit(stepper, "old", priority=3)
    for second in range(20):
        submit(stepper, f"new {second}", priority=0)
        stepper.step()
    # A better one comes every second, and one is served. Three levels are made up for by 15 s.
    assert served(stepper).index("old") == 15


def test_a_long_prompt_is_served_after_its_wait_whatever_comes() -> None:
    stepper = single(queue="shortest-prefill", prefill_ageing_tokens_per_s=2.0)
    submit(stepper, "old", prompt_tokens=15)
    for second in range(12):
        submit(stepper, f"new {second}", prompt_tokens=1)
        stepper.step()
    assert served(stepper).index("old") == 7


@pytest.mark.parametrize("policy", QUEUE_POLICIES)
def test_nothing_starves_under_an_endless_stream_of_better_ones(policy: str) -> None:
    stepper = single(queue=policy, priority_ageing_s=4.0, prefill_ageing_tokens_per_s=3.0)
    for number in range(8):
        submit(stepper, f"old {number}", prompt_tokens=10 + number % 3, priority=number % 4)
    for second in range(40):
        submit(stepper, f"new {second}")
        stepper.step()
    old = [name for name in stepper.tokens if name.startswith("old")]
    assert len(old) == 8
    # The load is above what is served, so the backlog is of new ones.
    assert len(stepper.tokens) == 40


def test_the_order_is_that_of_the_aged_keys() -> None:
    random = Random(3)
    stepper = single(queue="priority", priority_ageing_s=4.0)
    keys = {}
    for number in range(40):
        priority = random.randrange(-3, 4)
        name = f"r{number}"
        keys[name] = (priority + stepper.scheduler.now / 4.0, number)
        submit(stepper, name, priority=priority)
        if number % 10 == 9:
            stepper.step()
    ran = len(stepper.plans)
    stepper.run()
    assert len(stepper.plans) == 40
    rest = served(stepper)[ran:]
    assert rest == sorted(rest, key=keys.__getitem__)


def test_sources_beyond_the_limit_of_handoffs_queue_by_the_policy_too() -> None:
    scheduler = prefill_scheduler(32, max_handoffs=1, policy=SchedulingPolicy(queue="priority"))
    stepper = Stepper(scheduler)
    for name, priority in (("first", 5), ("low", 9), ("high", 1)):
        scheduler.apply(SubmitHandoffPrefill(handoff(name), request(name, [priority], priority=priority)))
    order = []
    for _ in range(3):
        (held,) = [event for effects in stepper.run() for event in effects.events]
        assert isinstance(held, SourceHeld)
        order.append(held.handoff_id)
        scheduler.apply(ReleaseSource(held.handoff_id))
    # The first one had its place before the others came.
    assert order == ["first", "high", "low"]


def test_victim_policies_choose_by_arrival_outputs_or_priority() -> None:
    running = [
        sequence("early", arrival=1, outputs=2, priority=0),
        sequence("fresh", arrival=2, outputs=0, priority=4),
        sequence("idle", arrival=3, outputs=5, priority=7),
        sequence("late", arrival=4, outputs=9, priority=1),
    ]
    chosen = {
        name: SchedulingPolicy(victim=name).choose_victim(running, running[0]).request_id for name in VICTIM_POLICIES
    }
    assert chosen == {"last": "late", "fewest-outputs": "fresh", "lowest-priority": "idle"}


@pytest.mark.parametrize("name", VICTIM_POLICIES)
def test_among_equals_the_last_one_gives_way(name: str) -> None:
    running = [sequence("middle", 2), sequence("last", 3), sequence("first", 1)]
    assert SchedulingPolicy(victim=name).choose_victim(running, running[0]) is running[1]


def test_the_needy_one_gives_way_itself_if_it_is_the_victim_by_policy() -> None:
    running = [sequence("first", 1), sequence("needy", 2)]
    assert SchedulingPolicy().choose_victim(running, running[1]) is running[1]


def test_an_immune_one_is_spared_until_it_has_sampled_enough() -> None:
    needy, resumed = sequence("needy", 1), sequence("resumed", 2, outputs=7, immune_until=8)
    policy = SchedulingPolicy()
    assert policy.choose_victim([needy, resumed], needy) is needy
    resumed.known.append(5)
    assert policy.choose_victim([needy, resumed], needy) is resumed


def test_the_needy_one_gives_way_if_all_are_immune() -> None:
    running = [sequence(str(arrival), arrival, immune_until=9) for arrival in range(3)]
    assert SchedulingPolicy().choose_victim(running, running[1]) is running[1]
    assert SchedulingPolicy().choose_victim([], running[2]) is running[2]


@pytest.mark.parametrize(("victim", "preempted"), [("last", "b"), ("fewest-outputs", "b"), ("lowest-priority", "a")])
def test_a_full_pool_takes_from_the_victim_and_nobody_s_answer_changes(victim: str, preempted: str) -> None:
    stepper = Stepper(prefill_scheduler(6, policy=SchedulingPolicy(victim=victim)))
    prompts = {"a": range(8), "b": range(50, 58)}
    for priority, (name, prompt) in zip((5, 0), prompts.items(), strict=True):
        stepper.scheduler.apply(Submit(request(name, prompt, max_tokens=12, priority=priority)))
    # Three blocks each are enough for 12 positions; the first one to need a fourth finds none.
    for _ in range(6):
        stepper.step()
    story = [line.what for line in stepper.scheduler.story(request(preempted, [1]).request_id)]
    assert "preempted: 12 tokens of KV are given up" in story
    assert stepper.scheduler.batcher.pressure.counters.preemptions == 1
    stepper.run()
    assert stepper.tokens == {name: expected_output(prompt, 12) for name, prompt in prompts.items()}


@pytest.mark.parametrize("spill_blocks", [None, 0])
def test_one_that_gives_way_and_finds_room_again_at_once_goes_on(spill_blocks: int | None) -> None:
    policy = SchedulingPolicy(victim="lowest-priority", preemption=Preemption.SPILL)
    stepper = Stepper(prefill_scheduler(6, policy=policy), spill_blocks=spill_blocks)
    # Two need a block at a time. The first takes the small one's only one; the large one then leaves room for both.
    prompts = {"small": range(10, 11), "needy": range(20, 23), "needy too": range(30, 33), "large": range(40, 49)}
    for (name, prompt), priority in zip(prompts.items(), (9, 0, 0, 8), strict=True):
        stepper.scheduler.apply(Submit(request(name, prompt, max_tokens=6, priority=priority)))
    stepper.run()
    assert stepper.tokens == {name: expected_output(prompt, 6) for name, prompt in prompts.items()}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"queue": "lifo"}, "unknown queue policy 'lifo': choose one of fifo, priority, shortest-prefill"),
        (
            {"victim": "oldest"},
            "unknown victim policy 'oldest': choose one of last, fewest-outputs, lowest-priority",
        ),
        ({"priority_ageing_s": 0.0}, "priority_ageing_s is 0.0, must be over 0: without ageing requests can starve"),
        ({"priority_ageing_s": float("nan")}, "priority_ageing_s is nan, must be over 0"),
        ({"prefill_ageing_tokens_per_s": -1.0}, "prefill_ageing_tokens_per_s is -1.0, must be over 0"),
        ({"immunity_tokens": -1}, "immunity_tokens is -1, must be at least 0"),
        ({"headroom_blocks": -2}, "headroom_blocks is -2, must be at least 0"),
    ],
)
def test_what_is_unknown_or_impossible_is_refused_with_the_choices(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        SchedulingPolicy(**bad)
    assert message in str(raised.value)


def test_every_name_that_is_offered_is_accepted() -> None:
    for queue in QUEUE_POLICIES:
        assert SchedulingPolicy(queue=queue).queue == queue
    for victim in VICTIM_POLICIES:
        assert SchedulingPolicy(victim=victim).victim == victim
    assert SchedulingPolicy(immunity_tokens=0, headroom_blocks=0).preemption is Preemption.RECOMPUTE
