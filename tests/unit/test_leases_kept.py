"""Leases of handoffs: renewed as long as the driver follows them, and what their end means to it."""

import asyncio

import pytest
import structlog
from driver_bench import FINISHED, HELD, LANDED, RESERVED, Bench, D, H, P, R, settle

from handoff.coordinator import Completion
from handoff.leases import RENEWALS_PER_LEASE, LeaseKeeper
from scheduler.commands import CommandEffects, ReleaseSource
from scheduler.events import LeaseExpired, Side
from scheduler.ids import NodeId

KEY = (H, 1)
LEASE_S = 30.0


class Sleeper:
    """asyncio.sleep on a clock that the test moves. asked: the seconds of each call."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self._wake = asyncio.Event()

    async def __call__(self, seconds: float) -> None:
        self.asked.append(seconds)
        await self._wake.wait()

    async def tick(self) -> None:
        wake, self._wake = self._wake, asyncio.Event()
        wake.set()
        await settle()


def keeper(bench: Bench, sleep: Sleeper, lease_s: float = LEASE_S) -> LeaseKeeper:
    return LeaseKeeper(bench.nodes, bench.driver.live_handoffs, lease_s, sleep)


async def test_each_node_gets_one_call_a_round_with_all_its_handoffs() -> None:
    bench, sleep = Bench(), Sleeper()
    await bench.begin()
    running = asyncio.create_task(keeper(bench, sleep).run())
    await settle()
    assert bench.nodes.renewed == [(P, [KEY]), (D, [KEY])]
    await sleep.tick()
    assert bench.nodes.renewed[2:] == [(P, [KEY]), (D, [KEY])]
    assert sleep.asked == [LEASE_S / RENEWALS_PER_LEASE] * 2
    running.cancel()


async def test_every_phase_before_the_end_is_renewed_and_none_after_it() -> None:
    bench = Bench()
    task = await bench.begin()
    once = keeper(bench, Sleeper())
    for fact in (RESERVED, HELD):
        await once.renew()
        await bench.report(fact)
    await once.renew()
    assert bench.nodes.renewed == [(P, [KEY]), (D, [KEY])] * 3
    await bench.report(LANDED)
    assert (await task).completion is Completion.HANDED_OVER
    await once.renew()
    assert len(bench.nodes.renewed) == 6, "a decode has no lease, and what is done needs none"
    await bench.report(FINISHED)


async def test_a_node_that_does_not_answer_delays_no_other() -> None:
    bench, sleep = Bench(), Sleeper()
    await bench.begin()
    bench.nodes.silent.add(P)
    with structlog.testing.capture_logs() as logs:
        running = asyncio.create_task(keeper(bench, sleep, lease_s=0.03).run())
        await asyncio.sleep(0.03)
        await sleep.tick()
    assert [node for node, _ in bench.nodes.renewed] == [P, D, P, D]
    assert [(line["event"], line["node"], line["reason"]) for line in logs] == [
        ("leases not renewed", P, "TimeoutError")
    ]
    running.cancel()


@pytest.mark.parametrize(("side", "node"), [(Side.SOURCE, P), (Side.DESTINATION, D)])
async def test_an_expired_lease_fails_the_handoff_and_both_sides_are_cancelled(side: Side, node: NodeId) -> None:
    bench = Bench()
    task = await bench.begin()
    await bench.report(RESERVED)
    await bench.report(HELD)
    await bench.report(LeaseExpired(H, 1, R, side), node=node)
    record = await task
    assert record.completion is Completion.FAILED
    assert record.reason == f"{node}: the {side.value}'s lease expired, nobody had renewed it"
    assert bench.nodes.done[-2:] == ["prefill-0 CancelSource", "decode-0 CancelDestination"]
    assert bench.driver.active == 0


async def test_an_expired_lease_of_another_attempt_or_handoff_changes_nothing() -> None:
    bench = Bench()
    await bench.begin()
    await bench.report(LeaseExpired(H, 2, R, Side.DESTINATION))
    assert bench.nodes.done == ["decode-0 ReserveDestination"]


async def test_a_source_that_expires_after_the_activation_does_not_end_the_decode() -> None:
    bench = Bench()

    def lose_release() -> CommandEffects:
        raise ConnectionError("lost")

    bench.nodes.replies[ReleaseSource] = lose_release
    task = await bench.hand_over()
    assert (await task).completion is Completion.HANDED_OVER
    await bench.report(LeaseExpired(H, 1, R, Side.SOURCE))
    assert (bench.driver.active, bench.orphans) == (1, [])
    await bench.report(FINISHED)
    assert bench.driver.active == 0
