"""Memory pressure on a decode node: who gives way, who comes back when, and that nobody's output shows it."""

import pytest
from handoff_drive import DestinationNode, SourceNode, phase_of, refuse, reserved_in, wind_down
from kv_machine import expected_output
from scheduler_drive import Stepper, handoff, request

from scheduler.batching import BatchLimits
from scheduler.commands import ActivateDestination, CancelDestination, CancelRequest, ReserveDestination, Submit
from scheduler.contract import Draw, StepResult
from scheduler.effects import Ticket
from scheduler.errors import InvariantBroken
from scheduler.events import Output
from scheduler.ids import RequestId
from scheduler.policies import VICTIM_POLICIES, Preemption, SchedulingPolicy
from scheduler.pressure import PressureCounters
from scheduler.request import FinishReason, SamplingParams

H = handoff("h")
PROMPT = tuple(range(10))
OTHER = tuple(range(50, 60))
KINDS = [Preemption.RECOMPUTE, Preemption.SPILL]


def pair(preemption: Preemption = Preemption.RECOMPUTE, max_tokens: int = 8) -> DestinationNode:
    """Six blocks for two requests that need a fourth each at the third step; `h` came last."""
    node = DestinationNode(6, policy=SchedulingPolicy(preemption=preemption))
    node.serve("other", OTHER, max_tokens)
    node.serve("h", PROMPT, max_tokens)
    node.step()
    node.step()
    assert node.scheduler.batcher.pressure.counters.preemptions == 0
    return node


def preempted_pair(preemption: Preemption = Preemption.RECOMPUTE, max_tokens: int = 8) -> DestinationNode:
    node = pair(preemption, max_tokens)
    node.step()
    assert turns_of(node, "h") == ["preempted"]
    return node


def turns_of(node: Stepper, name: str) -> list[str]:
    """When its story tells that it was preempted and came back: the first word of each such line."""
    words = [line.what.split()[0].rstrip(":,") for line in node.scheduler.story(RequestId(name))]
    return [word for word in words if word in ("preempted", "resumed", "restored")]


def counters(node: Stepper) -> PressureCounters:
    return node.scheduler.batcher.pressure.counters


@pytest.mark.parametrize("preemption", KINDS)
def test_a_preempted_destination_goes_on_exactly(preemption: Preemption) -> None:
    node = preempted_pair(preemption)
    outputs: list[Output] = []
    for boundary in node.run():
        outputs += boundary.outputs
    assert node.tokens == {"other": expected_output(OTHER, 8)[1:], "h": expected_output(PROMPT, 8)[1:]}
    # Its index runs on, its prompt's cache hits are not told again.
    mine = [output for output in outputs if output.request_id == "h"]
    assert [(o.index, o.cached_tokens) for o in mine] == [(index, None) for index in range(3, 8)]
    assert mine[-1].finish is FinishReason.LENGTH
    assert node.scheduler.is_drained


@pytest.mark.parametrize("preemption", KINDS)
def test_a_preempted_local_request_goes_on_exactly(preemption: Preemption) -> None:
    node = Stepper(DestinationNode(6, policy=SchedulingPolicy(preemption=preemption)).scheduler)
    for name, prompt in (("other", OTHER), ("h", PROMPT)):
        node.scheduler.apply(Submit(request(name, prompt, 8)))
    node.run()
    assert counters(node).preemptions == 1
    assert node.tokens == {"other": expected_output(OTHER, 8), "h": expected_output(PROMPT, 8)}


def test_draws_see_the_same_history_after_it() -> None:
    """A draw depends on its parameters, its position and the known tokens; none of them shows the preemption."""
    node = pair()
    draws: dict[int, tuple[Draw, tuple[int, ...]]] = {}
    node.boundary()
    while (plan := node.launch()) is not None:
        for row in plan.rows:
            if row.request_id == "h" and row.draw is not None:
                draws[row.end] = (row.draw, tuple(row.known[: row.end]))
        node.settle(plan)
        node.boundary()
    assert turns_of(node, "h") == ["preempted", "resumed"]
    known = (*PROMPT, *expected_output(PROMPT, 8))
    assert draws == {end: (Draw(SamplingParams()), known[:end]) for end in range(13, 18)}


def test_a_preempted_request_gives_all_its_blocks_and_waits() -> None:
    node = preempted_pair()
    metrics = node.scheduler.metrics()
    assert (metrics.running, metrics.waiting, metrics.preempted, metrics.spilled) == (1, 1, 1, 0)
    assert metrics.active == 4
    assert phase_of(node.scheduler, "h") == "active"
    assert node.plans[-1] == "decode other[12..12]"
    assert counters(node) == PressureCounters(preemptions=1, recomputed_tokens=12)


def test_recomputation_counts_what_the_cache_did_not_keep() -> None:
    """Both full blocks of the prompt stay cached while nobody needs them; its tail is evicted by `other`."""
    node = preempted_pair()
    node.run()
    assert turns_of(node, "h") == ["preempted", "resumed"]
    resumed = next(plan for plan in node.plans if plan.startswith("prefill"))
    assert resumed == "prefill h[4..12]"
    assert counters(node) == PressureCounters(preemptions=1, recomputed_tokens=8)
    assert node.device.computed["h"] == 7 + 8


def test_it_comes_back_as_soon_as_its_blocks_are_there() -> None:
    node = preempted_pair()
    node.scheduler.apply(CancelDestination(handoff("other")))
    node.step()
    assert node.plans[-1].startswith("prefill h[")


def victims(victim: str) -> DestinationNode:
    """Three run when `a` needs a block: `c` came first and wrote least, `a` has the least priority, `b` is last."""
    node = DestinationNode(9, policy=SchedulingPolicy(victim=victim))
    asked = {"c": 0, "a": 9, "b": 5}
    for name, priority in asked.items():
        node.reserve(name, [ord(name)] * 9, 8, priority=priority)
        node.land(name, [ord(name)] * 9)
    for name in ("a", "b", "c"):
        node.scheduler.apply(ActivateDestination(handoff(name)))
        node.step()
    node.step()
    return node


@pytest.mark.parametrize(("victim", "loser"), [("last", "b"), ("fewest-outputs", "c"), ("lowest-priority", "a")])
def test_the_victim_is_chosen_by_policy(victim: str, loser: str) -> None:
    node = victims(victim)
    assert {name: turns_of(node, name) for name in "abc"} == {
        name: ["preempted"] if name == loser else [] for name in "abc"
    }
    node.run()
    assert node.tokens == {name: expected_output([ord(name)] * 9, 8)[1:] for name in "abc"}


def test_every_victim_policy_was_tried() -> None:
    assert set(VICTIM_POLICIES) == {"last", "fewest-outputs", "lowest-priority"}


@pytest.mark.parametrize(("immunity", "loser"), [(0, "h"), (4, "h"), (5, "other"), (16, "other")])
def test_a_resumed_request_is_immune_for_some_tokens(immunity: int, loser: str) -> None:
    """`h` gives way with 3 tokens, comes back, and has 7 when the next block is missing."""
    node = DestinationNode(9, policy=SchedulingPolicy(immunity_tokens=immunity))
    prompts = {"short": [1] * 10, "other": [2] * 10, "h": [3] * 10}
    for name, prompt in prompts.items():
        node.serve(name, prompt, 4 if name == "short" else 12)
    for _ in range(8):
        node.step()
    assert turns_of(node, "h") == ["preempted", "resumed", *(["preempted"] if loser == "h" else [])]
    assert turns_of(node, "other") == (["preempted"] if loser == "other" else [])
    node.run()
    assert node.tokens["h"] == expected_output(prompts["h"], 12)[1:]
    assert node.tokens["other"] == expected_output(prompts["other"], 12)[1:]


def test_who_needs_a_block_gives_way_itself_if_all_are_immune() -> None:
    node = DestinationNode(6)
    node.serve("other", OTHER, 8)
    node.serve("h", PROMPT, 8)
    node.step()
    for sequence in node.scheduler.batcher.running_sequences():
        sequence.immune_until = 100
    node.step()
    node.step()
    # The oldest is asked first; it leaves, and its blocks serve the other.
    assert (turns_of(node, "other"), turns_of(node, "h")) == (["preempted"], [])
    node.run()
    assert node.tokens == {"other": expected_output(OTHER, 8)[1:], "h": expected_output(PROMPT, 8)[1:]}


@pytest.mark.parametrize("preemption", KINDS)
def test_preempted_ones_go_before_pending_reservations(preemption: Preemption) -> None:
    """A small reservation would fit beside `other`, again and again; the preempted one would never come back."""
    node = preempted_pair(preemption)
    assert node.scheduler.kv.pool.available == 2
    assert node.reserve("small", [7] * 5) == []
    assert node.boundary().events == ()
    reserved = []
    while turns_of(node, "h") == ["preempted"]:
        assert phase_of(node.scheduler, "small") == "pending"
        done = node.step()
        assert done is not None
        reserved = reserved_in(done.events)
    assert reserved == ["small"]
    wind_down(node)


@pytest.mark.parametrize("preemption", KINDS)
def test_preempted_ones_go_before_new_requests(preemption: Preemption) -> None:
    node = preempted_pair(preemption)
    node.scheduler.apply(Submit(request("new", [7], 1)))
    node.step()
    assert node.plans[-1] == "decode other[13..13]"
    node.run()
    first = [next(i for i, plan in enumerate(node.plans) if name in plan and i > 2) for name in ("h[", "new[")]
    assert first[0] <= first[1]
    assert node.tokens["new"] == expected_output([7], 1)


def test_what_owns_blocks_passes_the_preempted() -> None:
    """A destination that landed needs a place in the batch only, and gives its blocks back sooner if it runs."""
    node = DestinationNode(9)
    node.reserve("landed", [7] * 10, 3)
    node.land("landed", [7] * 10)
    node.serve("other", OTHER, 8)
    node.serve("h", PROMPT, 8)
    for _ in range(3):
        node.step()
    assert node.scheduler.metrics().preempted == 1
    node.scheduler.apply(ActivateDestination(handoff("landed")))
    node.step()
    assert node.plans[-1] == "decode other[13..13], landed[10..10]"


def test_a_landed_destination_is_no_victim() -> None:
    node = DestinationNode(6)
    node.serve("other", OTHER, 8)
    node.reserve("h", PROMPT, 8)
    node.land("h", PROMPT)
    for _ in range(3):
        node.step()
    # Nobody else runs: it gives way itself rather than take blocks that a handoff owns.
    assert (turns_of(node, "other"), phase_of(node.scheduler, "h")) == (["preempted"], "landed")
    node.scheduler.apply(ActivateDestination(H))
    node.run()
    assert node.tokens == {"other": expected_output(OTHER, 8)[1:], "h": expected_output(PROMPT, 8)[1:]}


def test_held_sources_are_no_victims() -> None:
    node = SourceNode(6)
    node.hold("h", PROMPT)
    node.scheduler.apply(Submit(request("local", OTHER, 8)))
    node.run()
    assert turns_of(node, "local") == ["preempted"]
    assert phase_of(node.scheduler, "h") == "held"
    wind_down(node)


def test_a_long_prompt_can_be_a_victim_between_its_chunks() -> None:
    node = DestinationNode(9, limits=BatchLimits(8, 4))
    node.serve("other", OTHER, 10)
    node.step()
    node.scheduler.apply(Submit(request("long", range(100, 124), 2)))
    for _ in range(2):
        node.step()
    node.run()
    assert node.plans[1] == "prefill other[11..11], long[0..6] no draw"
    assert "preempted" in turns_of(node, "long")
    assert node.tokens == {"other": expected_output(OTHER, 10)[1:], "long": expected_output(range(100, 124), 2)}


@pytest.mark.parametrize("preemption", KINDS)
def test_a_preempted_request_keeps_its_ids(preemption: Preemption) -> None:
    node = preempted_pair(preemption)
    refuse(node.scheduler, ReserveDestination(H, request("new", [1])), match="already a destination")
    refuse(node.scheduler, Submit(request("h", [1])), match="already active")


@pytest.mark.parametrize("preemption", KINDS)
@pytest.mark.parametrize("command", [CancelDestination(H), CancelRequest(RequestId("h"))])
def test_a_preempted_request_is_cancelled_once(
    preemption: Preemption, command: CancelDestination | CancelRequest
) -> None:
    node = preempted_pair(preemption)
    assert bool(node.device.saved) == (preemption is Preemption.SPILL)
    assert node.scheduler.apply(command).retired == ("h",)
    assert node.scheduler.apply(command).retired == ()
    node.run()
    assert not node.device.saved
    assert node.tokens == {"other": expected_output(OTHER, 8)[1:], "h": expected_output(PROMPT, 3)[1:]}
    assert node.scheduler.is_drained


def test_admission_by_commitment_preempts_nobody() -> None:
    node = DestinationNode(6, policy=SchedulingPolicy(preemption=Preemption.NONE))
    node.serve("other", OTHER, 8)
    assert node.reserve("h", PROMPT, 8) == []
    boundaries = node.run()
    assert reserved_in(boundaries[-1].events) == ["h"]
    assert counters(node) == PressureCounters()


def test_headroom_keeps_blocks_for_those_who_run() -> None:
    node = DestinationNode(6, policy=SchedulingPolicy(headroom_blocks=1))
    node.serve("other", OTHER, 8)
    node.scheduler.apply(Submit(request("new", [7] * 9, 4)))
    node.step()
    assert node.plans == ["decode other[10..10]"]
    node.run()
    assert counters(node).preemptions == 0
    assert node.tokens["new"] == expected_output([7] * 9, 4)


def test_headroom_is_not_asked_of_one_that_runs_alone() -> None:
    node = DestinationNode(3, policy=SchedulingPolicy(headroom_blocks=1))
    node.scheduler.apply(Submit(request("a", PROMPT, 3)))
    node.run()
    assert node.tokens["a"] == expected_output(PROMPT, 3)


def run_unchecked(node: Stepper) -> None:
    """Steps of which `check` proves nothing."""
    while True:
        node.scheduler.boundary(node.now)
        assert node.scheduler.prepare() == ()
        plan = node.scheduler.plan()
        assert plan is not None
        node.scheduler.settle(node.device.await_result(node.device.launch(plan)))


def test_a_broken_promise_is_told_with_the_story_of_its_request() -> None:
    """Blocks were taken behind the accounting's back: the error says which request noticed, and what it had been."""
    node = DestinationNode(6, policy=SchedulingPolicy(preemption=Preemption.NONE))
    node.serve("h", PROMPT, 8)
    node.step()
    assert node.scheduler.kv.pool.allocate(3) is not None
    with pytest.raises(InvariantBroken, match="no block left although 5 of 6 are promised") as caught:
        run_unchecked(node)
    assert caught.value.request_id == "h"
    assert [line.what for line in caught.value.story] == [
        "accepted as the destination of handoff h, attempt 1",
        "reserved, 3 of 3 blocks missing",
        "landed",
        "activated",
    ]
    assert str(caught.value).splitlines()[1:] == [f"  {line}" for line in caught.value.story]


def test_a_wrong_result_is_told_with_the_story_of_its_request() -> None:
    node = SourceNode()
    node.scheduler.apply(Submit(request("a", PROMPT)))
    node.boundary()
    assert node.launch() is not None
    with pytest.raises(InvariantBroken, match="a token without a draw, or a draw without a token") as caught:
        node.scheduler.settle(StepResult(Ticket(0), (None,)))
    assert [line.what for line in caught.value.story] == ["submitted", "admitted, 0 tokens cached"]


def test_a_failed_check_tells_of_all_that_live() -> None:
    node = preempted_pair()
    assert node.scheduler.kv.pool.allocate(1) is not None
    with pytest.raises(InvariantBroken, match="references differ from ownership at blocks") as caught:
        node.scheduler.check()
    told = str(caught.value)
    assert "h: 2.000 step 2 tokens 13: preempted: 12 tokens of KV are given up" in told
    assert "other: 0.000 step 0 tokens 11: activated" in told
