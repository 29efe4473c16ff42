"""Faults of the data plane on real nodes, each in its smallest form. `fault_NN` is a number of the table in
docs/architecture.md.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from faulty_transport import Faults
from kv_machine import KvMachine, expected_output
from local_cluster import BLOCK_SIZE, Answer, ClusterShape, LocalCluster
from scheduler_drive import request

from handoff.compatibility import IncompatiblePeer
from handoff.coordinator import Completion, Order
from handoff.transports.memory import MemoryFabric
from scheduler.batching import BatchLimits
from scheduler.commands import ActivateDestination
from scheduler.ids import NodeId

CHUNK = 32
LIMITS = BatchLimits(max_tokens=CHUNK, max_sequences=8)
ORDERS = pytest.mark.parametrize("order", list(Order), ids=lambda order: order.value)


def prompt(length: int) -> list[int]:
    """Prompts of different lengths share no prefix."""
    return [length] * length


def serving(cluster: LocalCluster, name: str, length: int, max_tokens: int = 8) -> "asyncio.Task[Answer]":
    return asyncio.create_task(cluster.serve(request(name, prompt(length), max_tokens)))


def require_right(answer: Answer, length: int, max_tokens: int = 8) -> None:
    assert answer.error == ""
    assert answer.tokens == expected_output(prompt(length), max_tokens)


@asynccontextmanager
async def faulty(faults: Faults, **sizes: Any) -> AsyncIterator[LocalCluster]:
    fabric = MemoryFabric()
    shape = ClusterShape(limits=LIMITS, make_transport=lambda: faults.transport(fabric), **sizes)
    cluster = LocalCluster(shape)
    cluster.fabric = fabric
    async with cluster:
        yield cluster


@ORDERS
async def test_fault_03_pages_of_a_stalled_writer_are_nobody_elses(
    order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handoff.pieces.MAX_PIECE_BYTES", 2 * BLOCK_SIZE * 8)
    async with LocalCluster(ClusterShape(prefill_blocks=16, decode_blocks=16, order=order)) as cluster:
        cluster.fabric.hold(after_pieces=3)
        victim = serving(cluster, "victim", 40)
        assert await asyncio.to_thread(cluster.fabric.wait_held, 5)
        await cluster.until(lambda: cluster.blocks_are("prefill-0", held=10))
        cluster.cancel("victim")
        await cluster.until(lambda: cluster.blocks_are("decode-0", draining=11))
        # 11 of the 16 blocks of either node: it can't have them without those of the victim.
        other = serving(cluster, "other", 43)
        await asyncio.sleep(0.1)
        assert not other.done()
        assert await cluster.blocks_are("decode-0", draining=11, reserved=0)
        assert await cluster.blocks_are("prefill-0", draining=10)
        cluster.fabric.release()
        require_right(await other, 43)
        assert (await victim).error == "cancelled by the client"
        await cluster.require_drained()


@pytest.mark.parametrize("failing", [0, 1, 2])
async def test_fault_05_a_failed_segment_leaves_no_valid_prefix(failing: int) -> None:
    """An error for the client, and the same prompt again is all moved and rightly answered."""
    faults = Faults([failing])
    async with faulty(faults, depth=1) as cluster:
        gate = cluster.gate("prefill-0")
        gate.hold(after_steps=1)
        broken = serving(cluster, "broken", 90)
        for chunk in range(failing):
            await cluster.until(lambda chunk=chunk: faults.sends > chunk)  # type: ignore[misc]
            gate.hold(after_steps=1)
        await cluster.until(lambda: faults.sends > failing)
        gate.release()
        error = (await broken).error
        assert "posted other pieces" in error
        await cluster.require_drained()
        again = await serving(cluster, "again", 90)
        require_right(again, 90)
        assert again.record is not None
        assert again.record.transfer is not None
        assert again.record.transfer.blocks == -(-90 // BLOCK_SIZE)
        await cluster.require_drained()


@pytest.mark.parametrize(
    "change", [{"dtype": "int8"}, {"head_dim": 2}, {"layers": 2}, {"model_digest": "other"}, {"ranks": 3}], ids=str
)
@pytest.mark.parametrize("role", ["prefill-0", "decode-0"])
async def test_fault_09_a_peer_that_does_not_fit_is_refused_and_the_node_goes_on(
    role: str, change: dict[str, Any]
) -> None:
    async with LocalCluster(ClusterShape()) as cluster:
        running = serving(cluster, "running", 60, 30)
        mine = cluster.node(role)._exchange.info
        strange = replace(mine, node=NodeId("x"), compatibility=replace(mine.compatibility, **change))
        with pytest.raises(IncompatiblePeer, match=next(iter(change))):
            cluster.node(role).connect(strange)
        require_right(await serving(cluster, "next", 50), 50)
        require_right(await running, 60, 30)
        await cluster.require_drained()


class OddCluster(LocalCluster):
    """Its second decode node has longer blocks and no staging area to re-lay them out."""

    def _oracle(self, name: NodeId, blocks: int) -> KvMachine:
        return KvMachine(blocks, 16) if name == "decode-1" else super()._oracle(name, blocks)


@ORDERS
async def test_fault_09_a_transfer_that_can_not_be_is_refused_and_both_nodes_go_on(order: Order) -> None:
    async with OddCluster(ClusterShape(decodes=2, order=order)) as cluster:
        answers = [await serving(cluster, f"r{length}", length) for length in range(40, 46)]
        refused = [answer.error for answer in answers if answer.error]
        assert len(refused) == 3
        assert all("raise limits.staging_mib" in error for error in refused)
        for length, answer in enumerate(answers, 40):
            if not answer.error:
                require_right(answer, length)
        await cluster.require_drained()


async def test_fault_18_pools_are_registered_whole_once_and_before_any_request() -> None:
    faults = Faults()
    async with faulty(faults) as cluster:
        pools = [device.pool for device in cluster.devices.values()]
        assert [id(pool) for pool in faults.pools] == [id(pool) for pool in pools]
        await asyncio.gather(*(serving(cluster, f"r{length}", length) for length in range(30, 50)))
        assert faults.sends >= 20
        assert len(faults.pools) == len(pools)


@ORDERS
async def test_fault_20_the_other_side_hears_of_a_failed_post_at_once(order: Order) -> None:
    """Long before any lease, and nothing stays owned on either side."""
    async with faulty(Faults([0]), order=order, lease_s=60.0) as cluster:
        began = time.monotonic()
        answer = await serving(cluster, "broken", 30)
        await cluster.require_drained()
        assert time.monotonic() - began < 1.0
        assert answer.error
        assert [record.completion for record in cluster.records] == [Completion.FAILED]


async def test_fault_26_a_notice_before_the_bytes_activates_nothing() -> None:
    faults = Faults()
    faults.early = True
    async with faulty(faults) as cluster:
        cluster.fabric.hold()
        answer = await serving(cluster, "early", 90)
        assert "checksums differ" in answer.error
        assert not [command for command in cluster.ports.sent if isinstance(command, ActivateDestination)]
        assert "early" not in cluster.devices[NodeId("decode-0")].computed
        faults.early = False
        cluster.fabric.release()
        require_right(await serving(cluster, "next", 50), 50)
        await cluster.require_drained()


@ORDERS
async def test_fault_29_no_more_is_posted_at_a_time_than_a_source_may_hold(order: Order) -> None:
    """So the limit on holds bounds what a card's queue must take, and many short prompts overflow it no more than few
    long ones."""
    depth, count, length = 16, 200, CHUNK // 4
    faults = Faults(depth=depth)
    async with faulty(faults, order=order, prefill_blocks=1024, decode_blocks=1024, max_holds=depth) as cluster:
        asked = [request(f"r{i}", [i] * length, 2) for i in range(count)]
        answers = await asyncio.gather(*(cluster.serve(each) for each in asked))
        for each, answer in zip(asked, answers, strict=True):
            assert answer.error == ""
            assert answer.tokens == expected_output(each.prompt, 2)
        await cluster.require_drained()
        assert faults.sends == count
        assert 1 < faults.most <= depth
