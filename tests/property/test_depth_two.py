"""Running ahead changes no answer, whatever is asked, when it comes, when it is cancelled, and what fails."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from device_scenarios import VOCABULARY, Scenario, play
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_drive import request

from scheduler.policies import Preemption
from scheduler.request import FinishReason, Request

NAMES = [f"r{i}" for i in range(6)]


@st.composite
def requests(draw: Callable[[Any], Any]) -> tuple[Request, ...]:
    """Prompts may share their beginnings, and stop tokens are frequent."""
    asked = []
    for name in NAMES[: draw(st.integers(1, len(NAMES)))]:
        limit = draw(st.integers(1, 15))
        asked.append(
            request(
                name,
                range(draw(st.integers(0, 2)), 2 + draw(st.integers(1, 10))),
                limit,
                min_tokens=draw(st.integers(0, limit)),
                stop_token_ids=frozenset(range(0, VOCABULARY, draw(st.sampled_from([5, 10, 99])))),
            )
        )
    return tuple(asked)


@st.composite
def scenarios(draw: Callable[[Any], Any]) -> Scenario:
    asked = draw(requests())
    names = st.sampled_from([own.request_id for own in asked])
    return Scenario(
        asked,
        arrives=draw(st.dictionaries(names, st.integers(1, 20))),
        cancelled=draw(st.dictionaries(names, st.integers(1, 12))),
        blocks=draw(st.integers(8, 24)),
        preemption=draw(st.sampled_from(Preemption)),
    )


@settings(max_examples=150, deadline=None)
@given(scenarios(), st.booleans(), st.sampled_from([{}, {"slots": 4}, {"slots": 7, "spill_blocks": 3}]))
def test_streams_at_depth_two_are_those_at_depth_one(
    scenario: Scenario, newest_first: bool, device: dict[str, int]
) -> None:
    ahead = play(scenario, depth=2, newest_first=newest_first, **device)
    assert ahead.streams == play(scenario, **device).streams
    assert ahead.stepper.scheduler.batcher.steps_in_flight == 0


@settings(max_examples=150, deadline=None)
@given(scenarios(), st.booleans(), st.sets(st.integers(0, 60), max_size=3), st.sets(st.integers(0, 60), max_size=3))
def test_a_fault_ends_its_rows_and_leaves_nothing_behind(
    scenario: Scenario, newest_first: bool, launches: set[int], awaits: set[int]
) -> None:
    """And nobody gets a token that is not the next one of the right answer."""
    right = play(replace(scenario, cancelled={})).tokens
    faulty = play(scenario, depth=2, newest_first=newest_first, fail_at=launches, fail_awaits=awaits, slots=5)
    for asked in scenario.requests:
        name = asked.request_id
        got = faulty.tokens.get(name, [])
        assert got == right[name][: len(got)]
        if faulty.finishes.get(name) in (FinishReason.STOP, FinishReason.LENGTH):
            assert got == right[name]
        else:
            assert faulty.finishes.get(name) is FinishReason.ERROR or name in scenario.cancelled
