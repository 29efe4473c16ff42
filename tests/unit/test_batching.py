import pytest
from kv_machine import expected_output
from scheduler_drive import Stepper, decode_scheduler, handoff, prefill_scheduler, request

from scheduler.batching import BatchLimits
from scheduler.commands import CancelRequest, ReserveDestination, Submit, SubmitHandoffPrefill
from scheduler.contract import Decode, Prefill, StepResult, Ticket
from scheduler.errors import CommandRejected, InvariantBroken, StepInFlight
from scheduler.ids import RequestId
from scheduler.request import FinishReason, SamplingParams


def rows_of(stepper: Stepper, index: int) -> list[tuple[str, int, int]]:
    """(request, start, tokens) of each row of a plan."""
    return [(row.request_id, row.start, len(row.tokens)) for row in stepper.plans[index].rows]


def test_limits_must_be_able_to_serve() -> None:
    for tokens, sequences in ((0, 1), (1, 0), (3, 4)):
        with pytest.raises(ValueError, match=r"at least 1|must cover"):
            BatchLimits(tokens, sequences)


def test_a_prompt_is_prefilled_in_chunks_of_the_budget_and_drawn_once() -> None:
    stepper = Stepper(prefill_scheduler())
    stepper.scheduler.apply(Submit(request("a", range(35), max_tokens=1)))
    stepper.run()
    assert [rows_of(stepper, i) for i in range(3)] == [[("a", 0, 16)], [("a", 16, 16)], [("a", 32, 3)]]
    assert [plan.rows[0].draw is not None for plan in stepper.plans] == [False, False, True]
    assert stepper.tokens["a"] == expected_output(range(35), 1)


def test_a_step_of_single_tokens_is_a_decode() -> None:
    stepper = Stepper(prefill_scheduler())
    stepper.scheduler.apply(Submit(request("a", [1, 2], max_tokens=3)))
    stepper.run()
    assert [type(plan) for plan in stepper.plans] == [Prefill, Decode, Decode]


def test_decodes_come_before_prompt_chunks_and_share_the_budget() -> None:
    stepper = Stepper(prefill_scheduler(blocks=40))
    stepper.scheduler.apply(Submit(request("long", range(50))))
    stepper.step()
    stepper.scheduler.apply(Submit(request("short", [7], max_tokens=6)))
    stepper.step()
    stepper.step()
    stepper.run()
    # The short one came after: it gets what the chunk leaves over, and goes first once it decodes.
    assert rows_of(stepper, 1) == [("long", 16, 16)]
    assert rows_of(stepper, 3) == [("long", 48, 2), ("short", 0, 1)]
    assert stepper.tokens["long"] == expected_output(range(50), 4)
    assert stepper.tokens["short"] == expected_output([7], 6)


def test_a_decode_never_waits_for_a_prompt() -> None:
    stepper = Stepper(prefill_scheduler(blocks=60))
    stepper.scheduler.apply(Submit(request("short", [7], max_tokens=6)))
    stepper.step()
    stepper.scheduler.apply(Submit(request("long", range(100))))
    for _ in range(3):
        stepper.step()
    assert [rows_of(stepper, i)[0] for i in (1, 2, 3)] == [("short", 1, 1), ("short", 2, 1), ("short", 3, 1)]
    assert [rows_of(stepper, i)[1] for i in (1, 2, 3)] == [("long", 0, 15), ("long", 15, 15), ("long", 30, 15)]


def test_sequences_beyond_the_limit_wait_in_arrival_order() -> None:
    stepper = Stepper(prefill_scheduler())
    for name in "abcdef":
        stepper.scheduler.apply(Submit(request(name, [ord(name)], max_tokens=2)))
    stepper.run()
    assert [[name for name, _, _ in rows_of(stepper, i)] for i in range(4)] == [list("abcd")] * 2 + [list("ef")] * 2


def test_a_request_waits_until_its_whole_footprint_fits() -> None:
    stepper = Stepper(prefill_scheduler(blocks=6))
    # 13 prompt and 8 new tokens: 20 positions hold KV, 5 blocks. The second one finds one block left.
    stepper.scheduler.apply(Submit(request("a", range(13), max_tokens=8)))
    stepper.scheduler.apply(Submit(request("b", range(50, 57), max_tokens=2)))
    stepper.step()
    assert rows_of(stepper, 0) == [("a", 0, 13)]
    assert stepper.scheduler.occupancy().waiting_requests == 1
    stepper.run()
    assert stepper.tokens["a"] == expected_output(range(13), 8)
    assert stepper.tokens["b"] == expected_output(range(50, 57), 2)


def test_one_that_does_not_fit_blocks_those_behind_it() -> None:
    stepper = Stepper(prefill_scheduler(blocks=6))
    stepper.scheduler.apply(Submit(request("a", range(13), max_tokens=8)))
    stepper.step()
    stepper.scheduler.apply(Submit(request("large", range(8), max_tokens=8)))
    stepper.scheduler.apply(Submit(request("small", [1], max_tokens=1)))
    stepper.step()
    assert rows_of(stepper, 1) == [("a", 13, 1)]


def test_a_request_that_just_fits_the_pool_and_the_model_runs() -> None:
    stepper = Stepper(prefill_scheduler(blocks=4, max_model_len=16))
    stepper.scheduler.apply(Submit(request("a", range(13), max_tokens=4)))
    stepper.run()
    assert stepper.tokens["a"] == expected_output(range(13), 4)


def test_what_can_never_fit_is_rejected_with_advice_and_leaves_nothing() -> None:
    scheduler = prefill_scheduler(blocks=4, max_model_len=20)
    for length, advice in ((14, "give the node more KV memory"), (18, "lower max_tokens")):
        with pytest.raises(CommandRejected, match=advice):
            scheduler.apply(Submit(request("a", range(length), max_tokens=4)))
    assert scheduler.is_drained
    scheduler.apply(Submit(request("a", [1])))


def test_the_second_like_prompt_computes_only_its_last_block() -> None:
    stepper = Stepper(prefill_scheduler())
    for name in ("first", "second"):
        stepper.scheduler.apply(Submit(request(name, range(12), max_tokens=1)))
        stepper.run()
    assert rows_of(stepper, 1) == [("second", 8, 4)]
    assert stepper.tokens["second"] == expected_output(range(12), 1)
    assert (stepper.scheduler.prompt_tokens_total, stepper.scheduler.cached_tokens_total) == (24, 8)


def test_a_prefix_is_shared_while_its_first_owner_runs() -> None:
    stepper = Stepper(prefill_scheduler())
    stepper.scheduler.apply(Submit(request("first", range(12), max_tokens=4)))
    stepper.step()
    stepper.scheduler.apply(Submit(request("second", [*range(12), 99], max_tokens=4)))
    stepper.run()
    assert rows_of(stepper, 1) == [("first", 12, 1), ("second", 12, 1)]
    assert stepper.tokens["first"] == expected_output(range(12), 4)
    assert stepper.tokens["second"] == expected_output([*range(12), 99], 4)


def test_prefix_caching_can_be_switched_off() -> None:
    stepper = Stepper(prefill_scheduler(prefix_caching=False))
    for name in ("first", "second"):
        stepper.scheduler.apply(Submit(request(name, range(12), max_tokens=1)))
        stepper.run()
    assert rows_of(stepper, 1) == [("second", 0, 12)]
    assert stepper.scheduler.occupancy().cached == 0


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
    stepper.run()
    draws = [plan.rows[0].draw for plan in stepper.plans]
    assert [bool(draw and draw.suppress) for draw in draws] == [True, True, False, False]
    assert first not in stepper.tokens["a"][:2]


def test_the_penalty_gets_the_history_and_others_do_not() -> None:
    scheduler = prefill_scheduler()
    scheduler.apply(Submit(request("a", [1, 2], sampling=SamplingParams(repetition_penalty=1.2))))
    scheduler.apply(Submit(request("b", [3, 4])))
    plan = scheduler.plan()
    assert plan is not None
    first, second = (row.draw for row in plan.rows)
    assert first is not None
    assert second is not None
    assert list(first.history) == [1, 2]
    assert list(second.history) == []


def test_nothing_but_settling_is_allowed_while_a_step_runs() -> None:
    scheduler = prefill_scheduler()
    scheduler.apply(Submit(request("a", [1])))
    assert scheduler.plan() is not None
    with pytest.raises(StepInFlight):
        scheduler.plan()
    with pytest.raises(StepInFlight):
        scheduler.apply(CancelRequest(RequestId("a")))
    scheduler.complete(StepResult(Ticket(0), (1,)))
    with pytest.raises(InvariantBroken, match="no step"):
        scheduler.complete(StepResult(Ticket(0), (1,)))


def test_a_result_of_another_size_is_a_broken_invariant() -> None:
    scheduler = prefill_scheduler()
    scheduler.apply(Submit(request("a", [1])))
    scheduler.plan()
    with pytest.raises(InvariantBroken, match="1 rows"):
        scheduler.complete(StepResult(Ticket(0), (1, 2)))


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
    stepper = Stepper(prefill_scheduler(), fail_at={1})
    stepper.scheduler.apply(Submit(request("a", range(30), max_tokens=2)))
    stepper.step()
    stepper.step()
    stepper.scheduler.apply(Submit(request("again", range(30), max_tokens=2)))
    stepper.run()
    # What the first, good step computed is reused; what the failed one wrote isn't.
    assert rows_of(stepper, 2) == [("again", 16, 14)]
    assert stepper.tokens["again"] == expected_output(range(30), 2)


def test_an_unknown_command_is_rejected_by_name() -> None:
    with pytest.raises(CommandRejected, match="ReserveDestination is not a command for a PrefillScheduler"):
        prefill_scheduler().apply(ReserveDestination(handoff("h"), request("a", [1])))
    with pytest.raises(CommandRejected, match="SubmitHandoffPrefill is not a command for a DecodeScheduler"):
        decode_scheduler().apply(SubmitHandoffPrefill(handoff("h"), request("a", [1])))
