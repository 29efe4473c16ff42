"""Continuous batching on one node: who runs in a step, with how many tokens, and what comes of it."""

from random import Random

import pytest
from kv_machine import expected_output
from scheduler_drive import Stepper, decode_scheduler, handoff, prefill_scheduler, request

from scheduler.batching import BatchLimits
from scheduler.commands import CancelRequest, CancelSource, ReserveDestination, Submit, SubmitHandoffPrefill
from scheduler.contract import StepResult
from scheduler.effects import Ticket
from scheduler.errors import CommandRejected, InvariantBroken, StepInFlight
from scheduler.ids import RequestId
from scheduler.policies import Preemption, SchedulingPolicy
from scheduler.request import FinishReason, SamplingParams

GUARANTEED = SchedulingPolicy(preemption=Preemption.NONE)


def test_limits_must_be_able_to_serve() -> None:
    for tokens, sequences in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            BatchLimits(tokens, sequences)
    with pytest.raises(ValueError, match="one token for each of max_sequences"):
        BatchLimits(3, 4)


def test_a_prompt_is_prefilled_in_chunks_of_the_budget_and_drawn_once() -> None:
    stepper = Stepper(prefill_scheduler())
    stepper.scheduler.apply(Submit(request("a", range(35), max_tokens=1)))
    stepper.run()
    assert stepper.plans == ["prefill a[0..15] no draw", "prefill a[16..31] no draw", "prefill a[32..34]"]
    assert stepper.tokens["a"] == expected_output(range(35), 1)


def test_a_step_of_single_tokens_is_a_decode() -> None:
    stepper = Stepper(prefill_scheduler())
    stepper.scheduler.apply(Submit(request("a", [1, 2], max_tokens=3)))
    stepper.run()
    assert stepper.plans == ["prefill a[0..1]", "decode a[2..2]", "decode a[3..3]"]


def test_the_last_token_of_a_prompt_alone_is_a_decode_too() -> None:
    stepper = Stepper(prefill_scheduler())
    stepper.scheduler.apply(Submit(request("a", range(17), max_tokens=1)))
    stepper.scheduler.apply(Submit(request("b", [9], max_tokens=1)))
    stepper.run()
    assert stepper.plans == ["prefill a[0..15] no draw", "decode b[0..0], a[16..16]"]


def test_decodes_come_before_prompt_chunks_and_share_the_budget() -> None:
    stepper = Stepper(prefill_scheduler(blocks=40))
    stepper.scheduler.apply(Submit(request("long", range(50))))
    stepper.step()
    stepper.scheduler.apply(Submit(request("short", [7], max_tokens=6)))
    stepper.run()
    # The short one came after: it gets what the chunks leave over.
    assert stepper.plans[1:5] == [
        "prefill long[16..31] no draw",
        "prefill long[32..47] no draw",
        "prefill short[0..0], long[48..49]",
        "decode short[1..1], long[50..50]",
    ]
    assert stepper.tokens["long"] == expected_output(range(50), 4)
    assert stepper.tokens["short"] == expected_output([7], 6)


def test_a_decode_never_waits_for_a_prompt() -> None:
    stepper = Stepper(prefill_scheduler(blocks=60))
    stepper.scheduler.apply(Submit(request("short", [7], max_tokens=6)))
    stepper.step()
    stepper.scheduler.apply(Submit(request("long", range(100))))
    for _ in range(3):
        stepper.step()
    assert stepper.plans[1:] == [
        "prefill short[1..1], long[0..14] no draw",
        "prefill short[2..2], long[15..29] no draw",
        "prefill short[3..3], long[30..44] no draw",
    ]


def test_several_prompts_share_the_budget_in_order_of_admission() -> None:
    stepper = Stepper(prefill_scheduler())
    for name, size in (("a", 6), ("b", 7), ("c", 9)):
        stepper.scheduler.apply(Submit(request(name, range(ord(name), ord(name) + size), max_tokens=2)))
    stepper.run()
    assert stepper.plans[:3] == [
        "prefill a[0..5], b[0..6], c[0..2] no draw",
        "prefill a[6..6], b[7..7], c[3..8]",
        "decode c[9..9]",
    ]


@pytest.mark.parametrize("preemption", list(Preemption))
@pytest.mark.parametrize("seed", range(3))
def test_no_step_exceeds_its_limits_and_no_answer_depends_on_them(preemption: Preemption, seed: int) -> None:
    random = Random(seed)
    limits = BatchLimits(max_tokens=random.randrange(5, 12), max_sequences=random.randrange(1, 6))
    stepper = Stepper(prefill_scheduler(12, limits=limits, policy=SchedulingPolicy(preemption=preemption)))
    asked = {}
    for number in range(24):
        prompt, count = [random.randrange(3) for _ in range(random.randrange(1, 30))], random.randrange(1, 18)
        asked[str(number)] = expected_output(prompt, count)
        stepper.scheduler.apply(Submit(request(str(number), prompt, count)))
    full = 0
    while (plan := stepper.launch()) is not None:
        computed = sum(row.count for row in plan.rows)
        assert computed <= limits.max_tokens
        assert len(plan.rows) <= limits.max_sequences
        full += computed == limits.max_tokens
        stepper.settle(plan)
        stepper.boundary()
    assert stepper.tokens == asked
    assert stepper.scheduler.is_drained
    assert full > 5


def test_sequences_beyond_the_limit_wait_in_arrival_order() -> None:
    stepper = Stepper(prefill_scheduler())
    for name in "abcdef":
        stepper.scheduler.apply(Submit(request(name, [ord(name)], max_tokens=2)))
    stepper.run()
    assert stepper.plans == [
        "decode a[0..0], b[0..0], c[0..0], d[0..0]",
        "decode a[1..1], b[1..1], c[1..1], d[1..1]",
        "decode e[0..0], f[0..0]",
        "decode e[1..1], f[1..1]",
    ]


def test_a_request_waits_until_its_prompt_fits() -> None:
    stepper = Stepper(prefill_scheduler(blocks=6))
    # 13 tokens are 4 blocks, and 9 are 3; the second one goes on when the first one has ended.
    stepper.scheduler.apply(Submit(request("a", range(13), max_tokens=3)))
    stepper.scheduler.apply(Submit(request("b", range(50, 59), max_tokens=2)))
    stepper.run()
    assert stepper.plans == [
        "prefill a[0..12]",
        "decode a[13..13]",
        "decode a[14..14]",
        "prefill b[0..8]",
        "decode b[9..9]",
    ]


def test_headroom_is_left_to_those_that_run() -> None:
    stepper = Stepper(prefill_scheduler(blocks=6, policy=SchedulingPolicy(headroom_blocks=2)))
    stepper.scheduler.apply(Submit(request("a", range(8), max_tokens=1)))
    stepper.scheduler.apply(Submit(request("b", range(50, 59), max_tokens=1)))
    stepper.run()
    assert stepper.plans == ["prefill a[0..7]", "prefill b[0..8]"]
    for name, first in (("c", 100), ("d", 150)):
        stepper.scheduler.apply(Submit(request(name, range(first, first + 8), max_tokens=1)))
    stepper.run()
    assert stepper.plans[2:] == ["prefill c[0..7], d[0..7]"]


def test_the_first_one_needs_no_headroom() -> None:
    stepper = Stepper(prefill_scheduler(blocks=6, policy=SchedulingPolicy(headroom_blocks=5)))
    for name, first in (("a", 0), ("b", 50)):
        stepper.scheduler.apply(Submit(request(name, range(first, first + 8), max_tokens=1)))
    stepper.run()
    assert stepper.plans == ["prefill a[0..7]", "prefill b[0..7]"]


def test_a_preempted_request_is_not_overtaken_by_a_small_new_one() -> None:
    stepper = Stepper(prefill_scheduler(blocks=6))
    for name, first in (("a", 0), ("b", 50)):
        stepper.scheduler.apply(Submit(request(name, range(first, first + 8), max_tokens=12)))
    while stepper.scheduler.batcher.pressure.counters.preemptions == 0:
        stepper.step()
    assert stepper.plans[-1] == "decode a[12..12]"
    # Two blocks are available, b needs four.
    stepper.scheduler.apply(Submit(request("small", [7], max_tokens=1)))
    stepper.run()
    # b comes back when a has ended, with what is left of its cache, and only then the small one runs.
    assert stepper.plans[11:13] == ["decode a[18..18]", "prefill small[0..0], b[4..12]"]
    assert stepper.tokens["a"] == expected_output(range(8), 12)
    assert stepper.tokens["b"] == expected_output(range(50, 58), 12)


def test_one_that_does_not_fit_is_asked_again_only_when_blocks_became_available() -> None:
    stepper = Stepper(prefill_scheduler(blocks=6))
    stepper.scheduler.apply(Submit(request("a", range(8), max_tokens=4)))
    stepper.scheduler.apply(Submit(request("large", range(50, 71), max_tokens=1)))
    lookups = []
    for _ in range(5):
        stepper.step()
        lookups.append(stepper.scheduler.kv.lookups)
    # One block of a's prompt and five of the large one's at first, five again when a has ended.
    assert lookups == [6, 6, 6, 6, 11]
    assert stepper.plans[4] == "prefill large[0..15] no draw"


def test_without_preemption_a_request_waits_until_its_whole_footprint_fits() -> None:
    stepper = Stepper(prefill_scheduler(blocks=6, policy=GUARANTEED))
    # 13 prompt and 8 new tokens: 20 positions hold KV, 5 blocks. The second one finds one block left.
    stepper.scheduler.apply(Submit(request("a", range(13), max_tokens=8)))
    stepper.scheduler.apply(Submit(request("b", range(50, 57), max_tokens=2)))
    stepper.step()
    assert stepper.plans == ["prefill a[0..12]"]
    assert stepper.scheduler.batcher.waiting == 1
    stepper.run()
    assert stepper.plans[8] == "prefill b[0..6]"
    assert stepper.tokens["a"] == expected_output(range(13), 8)
    assert stepper.tokens["b"] == expected_output(range(50, 57), 2)
    assert stepper.scheduler.batcher.pressure.counters.preemptions == 0


def test_one_that_does_not_fit_blocks_those_behind_it() -> None:
    stepper = Stepper(prefill_scheduler(blocks=6, policy=GUARANTEED))
    stepper.scheduler.apply(Submit(request("a", range(13), max_tokens=8)))
    stepper.step()
    stepper.scheduler.apply(Submit(request("large", range(8), max_tokens=8)))
    stepper.scheduler.apply(Submit(request("small", [1], max_tokens=1)))
    stepper.step()
    assert stepper.plans[1] == "decode a[13..13]"
    stepper.scheduler.apply(CancelRequest(RequestId("large")))
    stepper.step()
    assert stepper.plans[2] == "decode a[14..14], small[0..0]"


def test_a_request_that_just_fits_the_pool_and_the_model_runs() -> None:
    for policy in (SchedulingPolicy(), GUARANTEED):
        stepper = Stepper(prefill_scheduler(blocks=4, max_model_len=16, policy=policy))
        stepper.scheduler.apply(Submit(request("a", range(13), max_tokens=4)))
        stepper.run()
        assert stepper.tokens["a"] == expected_output(range(13), 4)


def test_what_can_never_fit_is_rejected_with_advice_and_leaves_nothing() -> None:
    scheduler = prefill_scheduler(blocks=4, max_model_len=20)
    for length, advice in ((14, "need 5 KV blocks, the node has 4"), (18, "lower max_tokens")):
        with pytest.raises(CommandRejected, match=advice):
            scheduler.apply(Submit(request("a", range(length), max_tokens=4)))
    assert scheduler.is_drained
    scheduler.apply(Submit(request("a", [1])))


def test_the_second_like_prompt_computes_only_its_last_token() -> None:
    stepper = Stepper(prefill_scheduler())
    for name in ("first", "second"):
        stepper.scheduler.apply(Submit(request(name, range(11), max_tokens=1)))
        stepper.run()
    assert stepper.plans == ["prefill first[0..10]", "decode second[10..10]"]
    assert stepper.tokens["second"] == expected_output(range(11), 1)
    assert (stepper.scheduler.counters.prompt_tokens, stepper.scheduler.counters.cached_tokens) == (22, 10)


def test_a_prefix_is_shared_while_its_first_owner_runs() -> None:
    stepper = Stepper(prefill_scheduler())
    stepper.scheduler.apply(Submit(request("first", range(12), max_tokens=4)))
    stepper.step()
    stepper.scheduler.apply(Submit(request("second", [*range(12), 99], max_tokens=4)))
    stepper.run()
    assert stepper.plans[1] == "decode first[12..12], second[12..12]"
    assert stepper.tokens["first"] == expected_output(range(12), 4)
    assert stepper.tokens["second"] == expected_output([*range(12), 99], 4)


def test_prefix_caching_can_be_switched_off() -> None:
    stepper = Stepper(prefill_scheduler(prefix_caching=False))
    for name in ("first", "second"):
        stepper.scheduler.apply(Submit(request(name, range(12), max_tokens=1)))
        stepper.run()
    assert stepper.plans == ["prefill first[0..11]", "prefill second[0..11]"]
    assert stepper.scheduler.kv.pool.cached == 0


def test_a_stop_token_ends_a_request_and_is_part_of_its_output() -> None:
    stepper = Stepper(prefill_scheduler())
    expected = expected_output([5], 3)
    stop = frozenset({expected[2]})
    stepper.scheduler.apply(Submit(request("a", [5], max_tokens=9, stop_token_ids=stop)))
    last = stepper.run()[-1].outputs[0]
    assert stepper.tokens["a"] == expected
    assert last.finish is FinishReason.STOP


def test_a_stop_token_is_suppressed_before_min_tokens() -> None:
    stepper = Stepper(prefill_scheduler())
    first = expected_output([5], 1)[0]
    options = {"stop_token_ids": frozenset({first}), "min_tokens": 2}
    stepper.scheduler.apply(Submit(request("a", [5], max_tokens=4, **options)))
    suppressed = []
    while (plan := stepper.launch()) is not None:
        suppressed.append(plan.rows[0].draw.suppress if plan.rows[0].draw else None)
        stepper.settle(plan)
        stepper.boundary()
    assert suppressed == [frozenset({first})] * 2 + [frozenset()] * 2
    assert first not in stepper.tokens["a"][:2]


def test_a_row_says_how_its_token_is_drawn_and_after_what() -> None:
    stepper = Stepper(prefill_scheduler())
    penalized = SamplingParams(temperature=0.5, seed=3, repetition_penalty=1.2)
    stepper.scheduler.apply(Submit(request("a", [1, 2], sampling=penalized)))
    stepper.scheduler.apply(Submit(request("b", [3, 4])))
    stepper.step()
    plan = stepper.launch()
    assert plan is not None
    answers = [expected_output(prompt, 1) for prompt in ([1, 2], [3, 4])]
    assert [list(row.known[: row.end]) for row in plan.rows] == [[1, 2, *answers[0]], [3, 4, *answers[1]]]
    assert [row.draw.params for row in plan.rows if row.draw] == [penalized, SamplingParams()]


def test_nothing_but_settling_and_what_starts_or_cancels_is_allowed_while_a_step_runs() -> None:
    scheduler = prefill_scheduler()
    scheduler.apply(Submit(request("a", [1])))
    scheduler.prepare()
    assert scheduler.plan() is not None
    for forbidden in (scheduler.plan, scheduler.prepare, lambda: scheduler.boundary(1.0)):
        with pytest.raises(StepInFlight):
            forbidden()
    with pytest.raises(StepInFlight, match="CancelSource came while a step runs: apply it at the boundary"):
        scheduler.apply(CancelSource(handoff("h")))
    scheduler.apply(Submit(request("b", [2])))
    scheduler.settle(StepResult(Ticket(0), (1,)))
    with pytest.raises(InvariantBroken, match="no step is in flight"):
        scheduler.settle(StepResult(Ticket(0), (1,)))
    with pytest.raises(InvariantBroken, match="no step is in flight"):
        scheduler.fail()


def test_what_a_step_brought_must_be_released_before_the_next_one() -> None:
    scheduler = prefill_scheduler()
    scheduler.apply(Submit(request("a", [1])))
    scheduler.prepare()
    scheduler.plan()
    scheduler.settle(StepResult(Ticket(0), (1,)))
    with pytest.raises(StepInFlight, match="call boundary first"):
        scheduler.prepare()
    assert len(scheduler.boundary(0.0).outputs) == 1
    scheduler.prepare()


@pytest.mark.parametrize(
    ("tokens", "message"), [((1, 2), "1 rows were launched, 2 came back"), ((None,), "a decode row brought no token")]
)
def test_a_result_of_another_shape_is_a_broken_invariant(tokens: tuple[int | None, ...], message: str) -> None:
    scheduler = prefill_scheduler()
    scheduler.apply(Submit(request("a", [1])))
    scheduler.prepare()
    scheduler.plan()
    with pytest.raises(InvariantBroken, match=message):
        scheduler.settle(StepResult(Ticket(0), tokens))


def test_a_failed_step_ends_its_rows_and_spares_the_waiting() -> None:
    stepper = Stepper(prefill_scheduler(limits=BatchLimits(16, 2)), fail_at={1})
    for name in "abc":
        stepper.scheduler.apply(Submit(request(name, [ord(name)] * 4)))
    stepper.step()
    failed = stepper.step()
    assert failed is not None
    assert [(o.request_id, o.index, o.token, o.finish) for o in failed.outputs] == [
        ("a", 1, None, FinishReason.ERROR),
        ("b", 1, None, FinishReason.ERROR),
    ]
    assert failed.retired == ("a", "b")
    stepper.run()
    assert stepper.tokens["c"] == expected_output([ord("c")] * 4, 4)
    assert stepper.scheduler.is_drained


def test_kv_of_a_failed_step_is_not_found_again() -> None:
    stepper = Stepper(prefill_scheduler(limits=BatchLimits(14, 2)), fail_at={1})
    stepper.scheduler.apply(Submit(request("a", range(30), max_tokens=2)))
    stepper.step()
    stepper.step()
    stepper.scheduler.apply(Submit(request("again", range(30), max_tokens=2)))
    stepper.run()
    # Full blocks of the first, good step are reused; the block that the failed one wrote isn't.
    assert stepper.plans[2:4] == ["prefill again[12..25] no draw", "prefill again[26..29]"]
    assert stepper.tokens["again"] == expected_output(range(30), 2)


def test_an_unknown_command_is_rejected_by_name() -> None:
    with pytest.raises(CommandRejected, match="ReserveDestination is not a command for a PrefillScheduler"):
        prefill_scheduler().apply(ReserveDestination(handoff("h"), request("a", [1])))
    with pytest.raises(CommandRejected, match="SubmitHandoffPrefill is not a command for a DecodeScheduler"):
        decode_scheduler().apply(SubmitHandoffPrefill(handoff("h"), request("a", [1])))
