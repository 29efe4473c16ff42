"""A destination that fails before it runs: the source is kept, and another destination takes its KV."""

import asyncio

import pytest
from driver_bench import HELD, LANDED, RESERVED, Bench, D, H, P, settle

from handoff.coordinator import Completion, Order
from handoff.driver import DriverLimits
from handoff.transfer_ends import Broken, StillSending
from scheduler.commands import ActivateDestination, CommandEffects, Noop, ReserveDestination
from scheduler.errors import CommandRejected
from scheduler.ids import HandoffId, NodeId

OTHER = NodeId("decode-1")
ORDERS = pytest.mark.parametrize("order", list(Order), ids=lambda order: order.value)
SECOND_HALF = [
    "decode-1 ReserveDestination",
    "prefill-0 transfer to decode-1",
    "decode-1 ActivateDestination",
    "prefill-0 ReleaseSource",
]


async def until_held(bench: Bench) -> "asyncio.Task[object]":
    task = await bench.begin()
    for fact in bench.facts()[:2]:
        await bench.report(fact)
    return task


@ORDERS
async def test_a_lost_destination_costs_no_prefill(order: Order) -> None:
    bench = Bench(order, destinations=(D, OTHER))
    await until_held(bench)
    before = len(bench.nodes.done)
    bench.driver.on_node_lost(D)
    await settle()
    await bench.report(RESERVED, node=OTHER)
    await bench.report(LANDED, node=OTHER)
    assert bench.nodes.done[before:] == ["decode-0 CancelDestination", *SECOND_HALF]
    (record,) = bench.records
    assert (record.completion, record.destination, record.redirects) == (Completion.HANDED_OVER, OTHER, 1)


async def test_a_destination_that_is_lost_during_the_prefill() -> None:
    bench = Bench(destinations=(D, OTHER))
    await bench.begin()
    await bench.report(RESERVED)
    bench.driver.on_node_lost(D)
    await settle()
    before = len(bench.nodes.done)
    await bench.report(HELD, node=P)
    await bench.report(RESERVED, node=OTHER)
    await bench.report(LANDED, node=OTHER)
    assert bench.nodes.done[before:] == SECOND_HALF


async def test_a_broken_transfer_goes_elsewhere_and_what_the_first_destination_says_is_not_believed() -> None:
    bench = Bench(destinations=(D, OTHER))
    await until_held(bench)
    await bench.report(Broken(H, 1, "the lane broke"))
    before = len(bench.nodes.done)
    await bench.report(RESERVED)
    await bench.report(LANDED)
    assert len(bench.nodes.done) == before
    await bench.report(RESERVED, node=OTHER)
    await bench.report(LANDED, node=OTHER)
    assert bench.records[0].destination == OTHER


async def test_an_activation_that_did_nothing_goes_elsewhere() -> None:
    bench = Bench(destinations=(D, OTHER))
    bench.nodes.replies[ActivateDestination] = lambda: CommandEffects(Noop())
    await until_held(bench)
    await bench.report(LANDED)
    del bench.nodes.replies[ActivateDestination]
    await bench.report(RESERVED, node=OTHER)
    await bench.report(LANDED, node=OTHER)
    assert bench.records[0].completion is Completion.HANDED_OVER


async def test_redirects_are_counted() -> None:
    bench = Bench(limits=DriverLimits(redirects=1), destinations=(D, OTHER, NodeId("decode-2")))
    await until_held(bench)
    bench.driver.on_node_lost(D)
    await settle()
    bench.driver.on_node_lost(OTHER)
    await settle()
    (record,) = bench.records
    assert (record.completion, record.redirects, record.reason) == (Completion.FAILED, 1, "decode-1 was lost")
    assert bench.nodes.done[-2:] == ["prefill-0 CancelSource", "decode-1 CancelDestination"]
    assert bench.driver.active == 0


async def test_the_transfer_waits_until_the_source_is_rid_of_the_first_one() -> None:
    bench = Bench(destinations=(D, OTHER))
    await until_held(bench)
    start, asked = bench.nodes.start_transfer, 0

    async def busy_once(node: NodeId, handoff_id: HandoffId, attempt: int, destination: NodeId) -> bool:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise StillSending("to decode-0")
        return await start(node, handoff_id, attempt, destination)

    bench.nodes.start_transfer = busy_once  # type: ignore[method-assign]  # a source that is not rid of it yet
    bench.driver.on_node_lost(D)
    await settle()
    await bench.report(RESERVED, node=OTHER)
    await asyncio.sleep(0.1)
    await settle()
    assert asked == 2
    assert bench.nodes.done[-1] == "prefill-0 transfer to decode-1"


async def test_a_refusal_of_the_first_destination_is_forgotten() -> None:
    """Else its request would count as one that can't be served anywhere."""
    bench = Bench(Order.SOURCE_FIRST, destinations=(D, OTHER))

    def refuse() -> CommandEffects:
        del bench.nodes.replies[ReserveDestination]
        raise CommandRejected("draining")

    bench.nodes.replies[ReserveDestination] = refuse
    await bench.begin()
    await bench.report(HELD)
    await bench.report(RESERVED, node=OTHER)
    await bench.report(LANDED, node=OTHER)
    assert (bench.records[0].completion, bench.records[0].rejected) == (Completion.HANDED_OVER, False)
