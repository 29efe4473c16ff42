"""Faults that the state machines of tests/property have found, each as the shortest story that shows it."""

from scheduler_drive import Stepper, prefill_scheduler, request

from scheduler.commands import Submit
from scheduler.events import Output
from scheduler.ids import RequestId


def test_the_first_token_of_a_one_token_prompt_reports_what_was_cached() -> None:
    """Such a prompt is never a prefill: it begins among the decodes, whose hot loop reports tokens only."""
    stepper = Stepper(scheduler := prefill_scheduler())
    scheduler.apply(Submit(request("a", [7], max_tokens=2)))
    first = stepper.run()[0].outputs[0]
    assert first == Output(RequestId("a"), 0, stepper.tokens["a"][0], cached_tokens=0)
    assert scheduler.counters.prompt_tokens == 1


def test_the_first_token_of_a_prompt_that_is_cached_but_for_one_token_reports_it() -> None:
    stepper = Stepper(scheduler := prefill_scheduler())
    scheduler.apply(Submit(request("a", range(5), max_tokens=2)))
    stepper.run()
    scheduler.apply(Submit(request("b", range(5), max_tokens=2)))
    assert [output.cached_tokens for effects in stepper.run() for output in effects.outputs] == [4, None]
    assert scheduler.counters.cached_tokens == 4
