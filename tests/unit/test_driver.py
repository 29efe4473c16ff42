import asyncio

import pytest
from driver_bench import (
    FINISHED,
    HELD,
    LANDED,
    RESERVED,
    Bench,
    D,
    H,
    P,
    R,
    settle,
)
from scheduler_drive import request

from handoff.coordinator import Completion, Order
from handoff.driver import DriverLimits
from handoff.report import NodeReport
from handoff.transfer_ends import Broken
from scheduler.commands import (
    ActivateDestination,
    Applied,
    CancelDestination,
    CancelSource,
    Command,
    CommandEffects,
    DestinationAccepted,
    Noop,
    ReleaseSource,
    ReserveDestination,
)
from scheduler.errors import CommandRejected
from scheduler.events import DestinationReserved, SourceFinished
from scheduler.ids import HandoffId, NodeId
from scheduler.request import FinishReason

ORDERS = pytest.mark.parametrize("order", list(Order), ids=lambda order: order.value)


@ORDERS
async def test_a_handoff_runs_and_its_decode_is_watched_to_its_end(order: Order) -> None:
    bench = Bench(order)
    task = await bench.hand_over()
    reserve, submit = "decode-0 ReserveDestination", "prefill-0 SubmitHandoffPrefill"
    armed, commanded = "prefill-0 sends to decode-0", "prefill-0 transfer to decode-0"
    assert bench.nodes.done == [
        *([reserve, submit, armed] if order is Order.DESTINATION_FIRST else [submit, reserve, commanded]),
        "decode-0 ActivateDestination",
        "prefill-0 ReleaseSource",
    ]
    record = await task
    assert record == bench.records[0]
    assert (record.completion, record.cached_tokens, record.transfer) == (Completion.HANDED_OVER, 4, LANDED)
    assert (bench.driver.active, bench.driver.phases()) == (1, {"done": 1})
    await bench.report(FINISHED)
    assert (bench.driver.active, bench.driver.phases()) == (0, {})
    assert not bench.driver.cancel(R)


async def test_a_decode_whose_end_overtakes_its_landing_still_releases_the_source() -> None:
    bench = Bench()
    task = await bench.begin()
    await bench.report(RESERVED)
    await bench.report(FINISHED)
    assert (await task).completion is Completion.HANDED_OVER
    assert bench.nodes.done[-2:] == ["decode-0 ActivateDestination", "prefill-0 ReleaseSource"]
    assert bench.driver.active == 0


async def test_an_event_in_a_commands_effects_counts() -> None:
    bench = Bench()
    bench.nodes.replies[ReserveDestination] = lambda: CommandEffects(DestinationAccepted(R), (RESERVED,))
    await bench.begin()
    assert "prefill-0 SubmitHandoffPrefill" in bench.nodes.done


async def test_a_fact_that_overtakes_its_acknowledgement_waits_for_it() -> None:
    bench = Bench()
    answer = asyncio.Event()
    apply = bench.nodes.apply

    async def slow(node: NodeId, command: Command) -> CommandEffects:
        if isinstance(command, ReserveDestination):
            await answer.wait()
        return await apply(node, command)

    bench.nodes.apply = slow  # type: ignore[method-assign]  # a slower node
    await bench.begin()
    await bench.report(RESERVED)
    answer.set()
    await settle()
    assert bench.nodes.done[:2] == ["decode-0 ReserveDestination", "prefill-0 SubmitHandoffPrefill"]


async def test_facts_that_come_twice_or_of_other_attempts_change_nothing() -> None:
    bench = Bench()
    await bench.begin()
    await bench.report(DestinationReserved(H, 2, R, 3, 3))
    assert len(bench.nodes.done) == 1
    for fact in bench.facts():
        await bench.report(fact, fact)
    await bench.report(*bench.facts())
    assert len(bench.nodes.done) == 5
    assert bench.records[0].completion is Completion.HANDED_OVER


@ORDERS
async def test_a_request_that_ends_at_the_source_needs_no_destination(order: Order) -> None:
    bench = Bench(order)
    task = await bench.begin()
    if order is Order.DESTINATION_FIRST:
        await bench.report(RESERVED)
    await bench.report(SourceFinished(H, 1, R, FinishReason.STOP))
    assert (await task).completion is Completion.FINISHED_AT_SOURCE
    assert ("decode-0 CancelDestination" in bench.nodes.done) == (order is Order.DESTINATION_FIRST)
    assert "prefill-0 CancelSource" not in bench.nodes.done
    assert bench.driver.active == 0


async def test_a_failed_prefill_fails_the_handoff() -> None:
    bench = Bench()
    task = await bench.begin()
    await bench.report(RESERVED)
    await bench.report(SourceFinished(H, 1, R, FinishReason.ERROR))
    record = await task
    assert (record.completion, record.reason) == (Completion.FAILED, "the prefill step failed")


async def test_a_rejected_command_is_told_as_such() -> None:
    bench = Bench()

    def reject() -> CommandEffects:
        raise CommandRejected("shorten the prompt")

    bench.nodes.replies[ReserveDestination] = reject
    record = await (await bench.begin())
    assert (record.completion, record.rejected) == (Completion.FAILED, True)
    assert record.reason == "reserve_destination: shorten the prompt"
    assert bench.nodes.done[1:] == ["decode-0 CancelDestination"]


async def test_a_transfer_of_nothing_fails() -> None:
    bench = Bench(Order.SOURCE_FIRST)
    bench.nodes.holds = False
    record = await (await bench.hand_over())
    assert record.reason == "start_transfer: nothing is held"


async def test_a_broken_transfer_cleans_both_sides() -> None:
    bench = Bench()
    task = await bench.begin()
    await bench.report(RESERVED)
    await bench.report(HELD)
    await bench.report(Broken(H, 1, "the lane broke"))
    assert (await task).reason == "transfer: the lane broke"
    assert bench.nodes.done[-2:] == ["prefill-0 CancelSource", "decode-0 CancelDestination"]


async def test_a_source_that_breaks_after_the_bytes_have_landed_does_not_end_the_decode() -> None:
    bench = Bench()
    await bench.hand_over()
    await bench.report(Broken(H, 1, "the last acknowledgement was lost"))
    assert bench.orphans == []
    assert bench.driver.active == 1
    await bench.report(FINISHED)
    assert bench.driver.active == 0


async def test_an_action_that_is_not_acknowledged_in_time_fails_and_is_cleaned_up() -> None:
    bench = Bench(limits=DriverLimits(action_s=0.02, handoff_s=100.0))
    bench.nodes.stuck = {ActivateDestination, CancelDestination}
    record = await asyncio.wait_for(await bench.hand_over(), 5.0)
    assert record.completion is Completion.FAILED
    assert record.reason == (
        "activate_destination: not acknowledged within 0.02 s; cancel_destination: not acknowledged within 0.02 s"
    )
    assert bench.driver.active == 0


async def test_a_handoff_that_takes_too_long_fails() -> None:
    bench = Bench(limits=DriverLimits(action_s=5.0, handoff_s=0.03))
    record = await asyncio.wait_for(await bench.begin(), 5.0)
    assert record.reason == "not handed over within 0.03 s"
    assert bench.nodes.done == ["decode-0 ReserveDestination", "decode-0 CancelDestination"]


async def test_a_decode_has_no_deadline_of_the_handoff() -> None:
    bench = Bench(limits=DriverLimits(action_s=5.0, handoff_s=100.0))
    await bench.hand_over()
    bench.now = 1e6
    await settle()
    assert bench.driver.active == 1


@pytest.mark.parametrize("facts", range(3))
async def test_a_cancel_cleans_what_was_issued(facts: int) -> None:
    bench = Bench()
    task = await bench.begin()
    for fact in bench.facts()[:facts]:
        await bench.report(fact)
    assert bench.driver.cancel(R)
    await settle()
    assert (await task).completion is Completion.CANCELLED
    cleaned = [done for done in bench.nodes.done if "Cancel" in done]
    assert cleaned == ["prefill-0 CancelSource"] * (facts > 0) + ["decode-0 CancelDestination"]
    assert bench.driver.active == 0


async def test_a_cancel_of_a_decode_stops_it() -> None:
    bench = Bench()
    await bench.hand_over()
    assert bench.driver.cancel(R)
    await settle()
    assert bench.nodes.done[5:] == ["decode-0 CancelDestination"]
    assert bench.driver.active == 0
    assert len(bench.records) == 1


@pytest.mark.parametrize("node", [P, D])
async def test_a_lost_node_fails_the_handoff_that_needs_it(node: NodeId) -> None:
    bench = Bench()
    task = await bench.begin()
    bench.driver.on_node_lost(node)
    await settle()
    assert (await task).reason == f"{node} was lost"
    assert bench.orphans == []


async def test_a_lost_decode_node_orphans_its_requests() -> None:
    bench = Bench()
    await bench.hand_over()
    bench.driver.on_node_lost(D)
    await settle()
    assert bench.orphans == [(R, "decode-0 was lost")]
    assert bench.driver.active == 0


async def test_a_decode_does_not_need_its_source() -> None:
    bench = Bench()
    await bench.hand_over()
    bench.driver.on_node_lost(P)
    bench.driver.on_node_lost(NodeId("other"))
    await settle()
    assert (bench.orphans, bench.driver.active) == ([], 1)


async def test_a_source_that_is_lost_while_it_is_released_does_not_end_the_decode() -> None:
    bench = Bench()

    def lose_source() -> CommandEffects:
        bench.driver.on_node_lost(P)
        return CommandEffects(Applied())

    bench.nodes.replies[ReleaseSource] = lose_source
    await bench.hand_over()
    assert (bench.orphans, bench.driver.active) == ([], 1)
    assert bench.records[0].completion is Completion.HANDED_OVER


async def test_a_decode_that_ends_before_its_source_is_released_is_over() -> None:
    bench = Bench()

    def finish() -> CommandEffects:
        bench.driver.on_report(NodeReport(D, 1, (), (FINISHED,)))
        return CommandEffects(Noop())

    bench.nodes.replies[ReleaseSource] = finish
    await bench.hand_over()
    assert bench.driver.active == 0
    assert bench.records[0].completion is Completion.HANDED_OVER


async def test_an_impossible_fact_ends_the_handoff_and_cleans_up() -> None:
    bench = Bench()
    task = await bench.begin()
    await bench.report(HELD)
    record = await task
    assert (record.completion, bench.driver.active) == (Completion.FAILED, 0)
    assert "while reserving" in record.reason
    assert bench.nodes.done[1:] == ["decode-0 CancelDestination"]


async def test_live_ids_are_rejected() -> None:
    bench = Bench()
    await bench.begin()
    for handoff_id, name in ((H, "other"), (HandoffId("other"), "r")):
        with pytest.raises(CommandRejected, match="already active"):
            await bench.driver.hand_over(handoff_id, request(name, [1]), P, D, Order.SOURCE_FIRST)
    assert len(bench.nodes.done) == 1


async def test_the_load_of_a_node_is_what_it_still_works_for() -> None:
    bench = Bench()
    await bench.begin()
    assert (bench.driver.load(P), bench.driver.load(D), bench.driver.load(NodeId("other"))) == (1, 1, 0)
    for fact in bench.facts():
        await bench.report(fact)
    assert (bench.driver.load(P), bench.driver.load(D)) == (0, 1)
    await bench.report(FINISHED)
    assert (bench.driver.load(P), bench.driver.load(D)) == (0, 0)


async def test_a_caller_that_leaves_does_not_end_the_handoff() -> None:
    bench = Bench()
    task = await bench.begin()
    task.cancel()
    await settle()
    for fact in bench.facts():
        await bench.report(fact)
    assert bench.records[0].completion is Completion.HANDED_OVER


async def test_cleanup_commands_carry_the_handoff_and_the_attempt() -> None:
    bench = Bench()
    sent: list[Command] = []
    apply = bench.nodes.apply

    async def note(node: NodeId, command: Command) -> CommandEffects:
        sent.append(command)
        return await apply(node, command)

    bench.nodes.apply = note  # type: ignore[method-assign]  # a node that is watched
    await bench.begin()
    await bench.report(RESERVED)
    bench.driver.cancel(R)
    await settle()
    assert sent[-2:] == [CancelSource(H, 1), CancelDestination(H, 1)]
