"""Leases on real nodes: kept by a coordinator that lives, and enough to free everything without one."""

import asyncio

from kv_machine import expected_output
from local_cluster import Answer, ClusterShape, LocalCluster
from scheduler_drive import request

from handoff.coordinator import Completion, Order
from scheduler.commands import ActivateDestination, ReserveDestination, SubmitHandoffPrefill

LEASE_S = 0.3


def prompt(length: int) -> list[int]:
    """Prompts of different lengths share no prefix."""
    return [length] * length


def serving(cluster: LocalCluster, name: str, length: int, max_tokens: int = 8) -> "asyncio.Task[Answer]":
    return asyncio.create_task(cluster.serve(request(name, prompt(length), max_tokens)))


async def test_a_handoff_that_takes_longer_than_its_lease_is_kept_by_the_coordinator() -> None:
    async with LocalCluster(ClusterShape(lease_s=LEASE_S)) as cluster:
        cluster.fabric.hold()
        slow = serving(cluster, "slow", 50)
        assert await asyncio.to_thread(cluster.fabric.wait_held, 5)
        await asyncio.sleep(3 * LEASE_S)
        assert await cluster.blocks_are("prefill-0", held=13, draining=0)
        assert await cluster.blocks_are("decode-0", reserved=13, draining=0)
        cluster.fabric.release()
        assert (await slow).tokens == expected_output(prompt(50), 8)
        await cluster.require_drained()


async def test_a_hold_that_waits_for_blocks_elsewhere_is_kept_by_the_coordinator() -> None:
    shape = ClusterShape(decode_blocks=16, order=Order.SOURCE_FIRST, lease_s=LEASE_S)
    async with LocalCluster(shape) as cluster:
        cluster.fabric.hold()
        first = serving(cluster, "first", 40)
        assert await asyncio.to_thread(cluster.fabric.wait_held, 5)
        second = serving(cluster, "second", 44)
        await cluster.until_sent(ReserveDestination, "second")
        await asyncio.sleep(3 * LEASE_S)
        assert await cluster.blocks_are("prefill-0", held=10 + 11)
        assert await cluster.blocks_are("decode-0", reserved=11)
        cluster.fabric.release()
        for task, length in ((first, 40), (second, 44)):
            assert (await task).tokens == expected_output(prompt(length), 8)
        await cluster.require_drained()


async def test_a_node_that_hears_of_nobody_fails_its_handoffs_cleanly() -> None:
    """Renewals are lost, the coordinator lives: the handoff ends with a reason, and the other side is cancelled."""
    async with LocalCluster(ClusterShape(lease_s=LEASE_S)) as cluster:
        cluster.stop_renewals()
        cluster.fabric.hold()
        task = serving(cluster, "victim", 50)
        assert await asyncio.to_thread(cluster.fabric.wait_held, 5)
        await cluster.until(lambda: len(cluster.records) == 1)
        record = cluster.records[0]
        assert record.completion is Completion.FAILED
        assert record.reason.startswith("decode-0: the destination's lease expired")
        assert await cluster.blocks_are("prefill-0", held=0, draining=13)
        assert await cluster.blocks_are("decode-0", reserved=0, draining=13)
        cluster.fabric.release()
        assert "lease expired" in (await task).error
        await cluster.require_drained()


async def test_without_a_coordinator_the_nodes_free_everything_by_themselves() -> None:
    """One request decodes, one travels, one is prefilled, one waits for blocks: then nobody commands any more."""
    shape = ClusterShape(decode_blocks=48, lease_s=LEASE_S)
    async with LocalCluster(shape) as cluster:
        prefill, decode = cluster.gate("prefill-0"), cluster.gate("decode-0")
        decode.hold(after_steps=2)
        decoding = serving(cluster, "decoding", 40, 16)
        assert await asyncio.to_thread(decode.wait_held, 5)
        await cluster.until_sent(ActivateDestination, "decoding")
        decode.hold(after_steps=2)
        await cluster.until(lambda: len(cluster.records) == 1)
        cluster.fabric.hold()
        tasks = [serving(cluster, "travelling", 50)]
        await cluster.until_sent(ReserveDestination, "travelling")
        decode.hold(after_steps=2)
        assert await asyncio.to_thread(cluster.fabric.wait_held, 5)
        prefill.hold()
        tasks += [serving(cluster, "prefilling", 54), serving(cluster, "pending", 100)]
        await cluster.until_sent(ReserveDestination, "prefilling")
        await cluster.until_sent(ReserveDestination, "pending")
        decode.hold(after_steps=2)
        await cluster.until_sent(SubmitHandoffPrefill, "prefilling")
        assert await asyncio.to_thread(prefill.wait_held, 5)
        cluster.kill_coordinator()
        prefill.release()
        decode.release()
        assert (await decoding).tokens == expected_output(prompt(40), 16)
        await cluster.until(lambda: cluster.blocks_are("decode-0", reserved=0, active=0))
        assert not await cluster.blocks_are("decode-0", draining=0), "bytes may still come for what travels"
        cluster.fabric.release()
        await cluster.require_nodes_drained(timeout_s=4 * LEASE_S)
        for task in tasks:
            task.cancel()
