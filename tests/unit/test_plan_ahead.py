"""When the scheduler gives a step before the last one is read, what is in it, and what becomes of an over-run."""

from collections.abc import Iterable
from typing import Any

import pytest
from kv_machine import expected_output
from scheduler_drive import Stepper, decode_scheduler, handoff, prefill_scheduler, request

from scheduler.batching import BatchLimits
from scheduler.commands import Applied, CancelRequest, CancelSource, Submit, Submitted
from scheduler.contract import Decode, DecodeFed, Prefill, StepResult
from scheduler.effects import ReserveKv, Rollback
from scheduler.errors import InvariantBroken, StepInFlight
from scheduler.ids import RequestId
from scheduler.slots import SlotLimits

PROMPT = range(5)


def decoding(lengths: Iterable[int] = (9, 9), blocks: int = 40, **options: Any) -> Stepper:
    """Prompts are computed; the next step is one of decodes."""
    stepper = Stepper(decode_scheduler(blocks, **options), depth=2)
    for number, length in enumerate(lengths):
        stepper.scheduler.apply(Submit(request(f"r{number}", range(number, number + 5), length)))
    stepper.step()
    return stepper


def launch(stepper: Stepper) -> None:
    """Launch the next step; nothing is read."""
    stepper.boundary()
    plan = stepper.launch()
    assert isinstance(plan, Decode)
    stepper._start(plan)


def rows(ahead: Any) -> list[str]:
    plan, _ = ahead
    assert isinstance(plan, DecodeFed)
    return [row.request_id for row in plan.rows]


def test_all_who_decode_are_in_it_in_their_order() -> None:
    stepper = decoding()
    launch(stepper)
    ahead = stepper.scheduler.plan_ahead()
    assert rows(ahead) == ["r0", "r1"]
    assert stepper.scheduler.plan_ahead() is None, "two steps are in flight"


def test_who_ends_with_the_step_in_flight_is_not_in_it() -> None:
    stepper = decoding((2, 3, 4))
    launch(stepper)
    assert rows(stepper.scheduler.plan_ahead()) == ["r1", "r2"]
    short = decoding((2, 2))
    launch(short)
    assert short.scheduler.plan_ahead() is None


def test_blocks_are_reserved_for_rows_that_need_one() -> None:
    """Of two sequences, one is at the end of its block when the step in flight is done."""
    stepper = Stepper(decode_scheduler(40), depth=2)
    for name, length in (("edge", 7), ("inside", 5)):
        stepper.scheduler.apply(Submit(request(name, range(length), 9)))
    stepper.step()
    launch(stepper)
    free = stepper.scheduler.kv.pool.free
    ahead = stepper.scheduler.plan_ahead()
    assert ahead is not None
    plan, effects = ahead
    assert [(type(effect), effect.request_id) for effect in effects] == [(ReserveKv, "edge")]  # type: ignore[union-attr]
    assert isinstance(effects[0], ReserveKv)
    assert tuple(plan.rows[0].blocks[-1:]) == effects[0].blocks
    assert stepper.scheduler.kv.pool.free == free - 1


def test_draws_are_those_of_the_token_after_the_next() -> None:
    stop = frozenset({3})
    stepper = Stepper(decode_scheduler(40), depth=2)
    stepper.scheduler.apply(Submit(request("a", PROMPT, 9, min_tokens=3, stop_token_ids=stop)))
    stepper.step()
    for suppressed in (stop, frozenset[int]()):
        launch(stepper)
        ahead = stepper.scheduler.plan_ahead()
        assert ahead is not None
        assert ahead[0].draws[0].suppress == suppressed
        stepper._start(ahead[0])
        stepper._finish()
        stepper.boundary()
        stepper._finish()


def test_who_finds_no_blocks_is_not_waited_for() -> None:
    stepper = decoding(blocks=60)
    taken = stepper.scheduler.kv.pool.allocate(30)
    assert taken is not None
    stepper.scheduler.apply(Submit(request("huge", range(150), 9)))
    assert stepper.scheduler.prepare() == ()
    plan = stepper.scheduler.plan()
    assert isinstance(plan, Decode)
    assert rows(stepper.scheduler.plan_ahead()) == ["r0", "r1"]


def test_who_finds_blocks_since_the_step_was_launched_is_waited_for() -> None:
    stepper = decoding(blocks=60)
    taken = stepper.scheduler.kv.pool.allocate(30)
    assert taken is not None
    stepper.scheduler.apply(Submit(request("huge", range(150), 9)))
    stepper.scheduler.prepare()
    stepper.scheduler.plan()
    stepper.scheduler.kv.pool.release(taken)
    assert stepper.scheduler.plan_ahead() is None


def test_who_came_since_the_step_was_launched_is_admitted_before_anything_else() -> None:
    stepper = decoding()
    launch(stepper)
    stepper.scheduler.apply(Submit(request("new", PROMPT, 4)))
    assert stepper.scheduler.plan_ahead() is None


def test_a_full_batch_runs_ahead_of_those_who_wait() -> None:
    stepper = decoding((9, 9, 9), limits=BatchLimits(16, 2))
    launch(stepper)
    assert rows(stepper.scheduler.plan_ahead()) == ["r0", "r1"]


def test_prompts_and_recurrent_state_do_not_run_ahead() -> None:
    stepper = Stepper(decode_scheduler(40), depth=2)
    stepper.scheduler.apply(Submit(request("a", range(30), 9)))
    stepper.boundary()
    assert isinstance(stepper.launch(), Prefill)
    assert stepper.scheduler.plan_ahead() is None
    hybrid = decode_scheduler(40, state=SlotLimits(slots=4, snapshots=2, recurrent=True))
    other = Stepper(hybrid, depth=2, slots=4, snapshots=2, recurrent=True)
    other.scheduler.apply(Submit(request("a", PROMPT, 9)))
    for _ in range(3):
        other.step()
    launch(other)
    assert hybrid.plan_ahead() is None


def test_the_circle_is_kept() -> None:
    stepper = decoding()
    launch(stepper)
    ahead = stepper.scheduler.plan_ahead()
    assert ahead is not None
    for call in (stepper.scheduler.prepare, stepper.scheduler.plan, lambda: stepper.scheduler.boundary(1.0)):
        with pytest.raises(StepInFlight):
            call()
    stepper._start(ahead[0])
    stepper._finish()
    with pytest.raises(StepInFlight, match="not released"):
        stepper.scheduler.plan_ahead()
    stepper.boundary()
    with pytest.raises(StepInFlight, match="not settled"):
        stepper.scheduler.prepare()
    stepper._finish()
    stepper.boundary()
    with pytest.raises(InvariantBroken, match="no step is in flight"):
        stepper.scheduler.settle(StepResult(0, ()))  # type: ignore[arg-type]


def test_commands_apply_as_they_do_around_a_single_step() -> None:
    """Between a launch and the settlement after it only those that start something or cancel a request."""
    source = Stepper(prefill_scheduler(40), depth=2)
    source.scheduler.apply(Submit(request("a", PROMPT, 9)))
    source.step()
    launch(source)
    ahead = source.scheduler.plan_ahead()
    assert ahead is not None
    source._start(ahead[0])
    with pytest.raises(StepInFlight):
        source.scheduler.apply(CancelSource(handoff("h")))
    assert source.scheduler.apply(Submit(request("b", PROMPT, 4))).result == Submitted(RequestId("b"))
    source._finish()
    source.boundary()
    source.scheduler.apply(CancelSource(handoff("h")))
    source.run()
    assert source.tokens == {"a": expected_output(PROMPT, 9), "b": expected_output(PROMPT, 4)}


@pytest.mark.parametrize("settled_first", [False, True])
def test_a_cancelled_sequence_keeps_its_blocks_until_nothing_of_it_runs(settled_first: bool) -> None:
    """Whether it is cancelled before the first of two steps is settled or between them."""
    stepper = decoding()
    scheduler = stepper.scheduler
    launch(stepper)
    ahead = scheduler.plan_ahead()
    assert ahead is not None
    for effect in ahead[1]:
        stepper._apply(effect)
    stepper._start(ahead[0])
    if settled_first:
        stepper._finish()
        stepper.boundary()
    owned = scheduler.kv.pool.used
    effects = scheduler.apply(CancelRequest(RequestId("r0")))
    assert (effects.result, effects.retired) == (Applied(), ("r0",))
    if not settled_first:
        stepper._finish()
        stepper.boundary()
    assert scheduler.kv.pool.used == owned
    assert not scheduler.is_drained
    stepper._finish()
    assert scheduler.kv.pool.used < owned
    stepper.run()
    assert "r0" not in stepper.finishes
    assert stepper.tokens["r0"] == expected_output(range(5), 9)[: 1 + settled_first]
    assert stepper.tokens["r1"] == expected_output(range(1, 6), 9)
    reserved = {effect.request_id for effect in ahead[1] if isinstance(effect, ReserveKv)}
    told = [effect for effect in stepper.effects if isinstance(effect, Rollback)]
    assert told == [Rollback(RequestId("r0"))] * ("r0" in reserved)
