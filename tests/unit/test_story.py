"""A request's story: what happened to it, in few lines, wherever somebody must find out why."""

import pytest
from scheduler_drive import Stepper, decode_scheduler, handoff, prefill_scheduler, request

from scheduler.batching import BatchLimits
from scheduler.commands import (
    ActivateDestination,
    CancelDestination,
    CancelRequest,
    ReleaseSource,
    ReserveDestination,
    Submit,
    SubmitHandoffPrefill,
)
from scheduler.contract import StepResult
from scheduler.effects import Ticket
from scheduler.errors import InvariantBroken
from scheduler.ids import RequestId
from scheduler.story import MAX_LINES, StoryBook, StoryLine

A, B = RequestId("a"), RequestId("b")
H = handoff("h")


def whats(stepper: Stepper, name: str = "a") -> list[str]:
    return [line.what for line in stepper.scheduler.story(RequestId(name))]


def test_a_line_says_when_and_how_far_it_was() -> None:
    assert str(StoryLine(1.25, 3, 17, "held")) == "1.250 step 3 tokens 17: held"


def test_lines_come_oldest_first() -> None:
    book = StoryBook()
    book.note(A, 1.0, 2, 3, "came")
    book.note(B, 1.5, 2, 3, "other")
    book.note(A, 2.0, 4, 5, "went")
    assert book.of(A) == (StoryLine(1.0, 2, 3, "came"), StoryLine(2.0, 4, 5, "went"))
    assert book.of(RequestId("unknown")) == ()


def test_the_oldest_lines_of_a_long_story_go() -> None:
    book = StoryBook(max_lines=3)
    for number in range(5):
        book.note(A, float(number), number, 0, str(number))
    assert [line.what for line in book.of(A)] == ["2", "3", "4"]
    book.end(A)
    assert [line.what for line in book.of(A)] == ["2", "3", "4"]


def test_the_last_stories_that_ended_are_kept_and_live_ones_always() -> None:
    book = StoryBook(max_ended=2)
    for name in "abcd":
        book.note(RequestId(name), 0.0, 0, 0, name)
    for name in "bcd":
        book.end(RequestId(name))
    assert [[line.what for line in book.of(RequestId(name))] for name in "abcd"] == [["a"], [], ["c"], ["d"]]
    book.end(RequestId("b"))
    assert len(book.of(RequestId("c"))) == 1


def test_an_id_that_comes_again_goes_on_with_its_story() -> None:
    book = StoryBook(max_lines=3, max_ended=1)
    book.note(A, 0.0, 0, 0, "first life")
    book.end(A)
    book.note(A, 1.0, 0, 0, "second life")
    assert [line.what for line in book.of(A)] == ["first life", "second life"]
    # It is live again: another end does not push it out.
    book.note(B, 2.0, 0, 0, "b")
    book.end(B)
    book.note(RequestId("c"), 2.0, 0, 0, "c")
    book.end(RequestId("c"))
    assert (len(book.of(A)), book.of(B)) == (2, ())


def test_the_story_of_a_request_that_runs_in_peace_does_not_grow_with_its_answer() -> None:
    for count in (2, 40):
        stepper = Stepper(prefill_scheduler())
        stepper.scheduler.apply(Submit(request("a", range(5), max_tokens=count)))
        stepper.run()
        assert stepper.scheduler.story(A) == (
            StoryLine(0.0, 0, 5, "submitted"),
            StoryLine(0.0, 0, 5, "admitted, 0 tokens cached"),
            StoryLine(float(count), count, 5 + count, "ended: length"),
        )


def test_a_cancelled_request_tells_whether_a_step_of_it_ran() -> None:
    stepper = Stepper(prefill_scheduler())
    for name in "ab":
        stepper.scheduler.apply(Submit(request(name, range(5))))
    stepper.scheduler.apply(CancelRequest(A))
    plan = stepper.launch()
    assert plan is not None
    stepper.scheduler.apply(CancelRequest(B))
    stepper.settle(plan)
    assert whats(stepper, "a") == ["submitted", "cancelled"]
    assert whats(stepper, "b") == ["submitted", "admitted, 0 tokens cached", "cancelled while a step of it runs"]


def test_a_source_tells_of_its_handoff() -> None:
    scheduler = prefill_scheduler()
    stepper = Stepper(scheduler)
    scheduler.apply(SubmitHandoffPrefill(H, request("a", range(5)), attempt=3))
    stepper.run()
    scheduler.transfer_started(H, 3)
    scheduler.apply(ReleaseSource(H, 3))
    scheduler.transfer_quiet(H, 3)
    assert whats(stepper) == [
        "submitted as the source of handoff h, attempt 3",
        "admitted, 0 tokens cached",
        "held",
        "transfer started",
        "released",
        "draining until the transport is quiet",
        "transfer quiet",
    ]


def test_a_destination_tells_of_its_handoff() -> None:
    scheduler = decode_scheduler()
    stepper = Stepper(scheduler)
    scheduler.apply(ReserveDestination(H, request("a", range(5), max_tokens=2)))
    scheduler.transfer_started(H, 1)
    assert scheduler.landed(H, 1, 7)
    scheduler.apply(ActivateDestination(H))
    stepper.run()
    told = [
        "accepted as the destination of handoff h, attempt 1",
        "reserved, 2 of 2 blocks missing",
        "transfer started",
        "landed",
        "activated",
        "ended: length",
    ]
    assert whats(stepper) == told
    scheduler.apply(ReserveDestination(H, request("a", range(5), max_tokens=2), attempt=2))
    scheduler.apply(CancelDestination(H, 2))
    assert whats(stepper) == [
        *told,
        "accepted as the destination of handoff h, attempt 2",
        "reserved, 1 of 2 blocks missing",
        "cancelled while reserved",
    ]


def test_a_lease_that_expired_is_told_on_either_side() -> None:
    source, destination = prefill_scheduler(lease_s=5.0), decode_scheduler(lease_s=5.0)
    source.apply(SubmitHandoffPrefill(H, request("a", range(5))))
    destination.apply(ReserveDestination(H, request("a", range(5))))
    steppers = [Stepper(source), Stepper(destination)]
    for stepper in steppers:
        stepper.run()
        stepper.now = 20.0
        stepper.boundary()
    assert whats(steppers[0])[-1] == "lease of 5 s expired while held"
    assert whats(steppers[1])[-1] == "lease of 5 s expired while reserved"


def test_an_internal_error_is_told_with_the_story_of_its_request() -> None:
    scheduler = prefill_scheduler(limits=BatchLimits(4, 1))
    scheduler.apply(Submit(request("a", range(9))))
    scheduler.boundary(2.5)
    assert scheduler.prepare() == ()
    assert scheduler.plan() is not None
    with pytest.raises(InvariantBroken) as raised:
        # The prompt's first chunk draws nothing.
        scheduler.settle(StepResult(Ticket(0), (7,)))
    error = raised.value
    assert error.request_id == "a"
    assert error.story == scheduler.story(A)
    assert str(error).splitlines() == [
        "a: a token without a draw, or a draw without a token",
        "  0.000 step 0 tokens 9: submitted",
        "  2.500 step 0 tokens 9: admitted, 0 tokens cached",
    ]


def test_an_error_of_a_command_is_told_with_the_story_too() -> None:
    stepper = Stepper(prefill_scheduler())
    stepper.scheduler.apply(Submit(request("a", range(5), max_tokens=9)))
    stepper.step()
    (running,) = stepper.scheduler.batcher.running_sequences()
    stepper.scheduler.kv.pool.release(running.blocks)
    with pytest.raises(InvariantBroken) as raised:
        stepper.scheduler.apply(CancelRequest(A))
    assert str(raised.value).splitlines()[0] == "a: block 1 is published by no owner"
    assert [line.what for line in raised.value.story][-1] == "cancelled"


def test_a_failed_check_is_told_with_the_last_lines_of_all_stories() -> None:
    stepper = Stepper(prefill_scheduler())
    for name in "ab":
        stepper.scheduler.apply(Submit(request(name, range(5))))
    stepper.step()
    running = next(stepper.scheduler.batcher.running_sequences())
    running.blocks.append(running.blocks[0])
    with pytest.raises(InvariantBroken) as raised:
        stepper.scheduler.check()
    lines = str(raised.value).splitlines()
    assert lines[0] == f"references differ from ownership at blocks [{running.blocks[0]}]"
    assert "  b: 0.000 step 0 tokens 5: submitted" in lines
    assert len(lines) == 5


def test_an_error_keeps_the_story_that_it_has_and_needs_a_request_for_one() -> None:
    line = StoryLine(0.0, 0, 1, "came")
    told = InvariantBroken("wrong", A, (line,))
    assert told.with_story(lambda _: ()) is told
    nobodys = InvariantBroken("wrong")
    assert nobodys.with_story(lambda _: (line,)) is nobodys
    assert str(nobodys) == "wrong"
    again = InvariantBroken("wrong", A).with_story(lambda name: (line,) if name == A else ())
    assert str(again) == "a: wrong\n  0.000 step 0 tokens 1: came"


def test_a_story_has_a_bound() -> None:
    scheduler = prefill_scheduler()
    for _ in range(MAX_LINES):
        scheduler.apply(Submit(request("a", range(5))))
        scheduler.apply(CancelRequest(A))
    assert len(scheduler.story(A)) == MAX_LINES
