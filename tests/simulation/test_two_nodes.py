"""Real nodes, threads and driver over the memory transport, on devices that turn every misplaced byte into a wrong
token. Outputs must equal those of a single correct run, and nothing may stay owned.
"""

import asyncio
import random
from collections.abc import Sequence
from typing import TypeAlias

import pytest
from determinism import seeds
from kv_machine import VALUE_BYTES, expected_output
from local_cluster import BLOCK_SIZE, Answer, ClusterShape, LocalCluster

from handoff.coordinator import Completion, Order
from scheduler.batching import BatchLimits
from scheduler.commands import (
    ActivateDestination,
    CancelDestination,
    CancelSource,
    ReserveDestination,
    SubmitHandoffPrefill,
)
from scheduler.ids import NodeId, RequestId
from scheduler.policies import QUEUE_POLICIES, VICTIM_POLICIES, Preemption, SchedulingPolicy
from scheduler.request import Request

BLOCK_BYTES = BLOCK_SIZE * VALUE_BYTES
Serving: TypeAlias = "asyncio.Task[Answer]"
ORDERS = pytest.mark.parametrize("order", list(Order), ids=lambda order: order.value)


def a_request(name: str, prompt: Sequence[int], max_tokens: int = 8) -> Request:
    return Request(RequestId(name), tuple(prompt), max_tokens)


def prompts_of(seed: int, count: int, longest: int = 300) -> list[tuple[int, ...]]:
    """Random prompts; about half of them begin with one of three shared prefixes."""
    rng = random.Random(seed)
    prefixes = [tuple(rng.randrange(1000) for _ in range(length)) for length in (8, 37, 64)]
    prompts = []
    for _ in range(count):
        own = tuple(rng.randrange(1000) for _ in range(rng.randint(1, longest)))
        prompts.append(((rng.choice(prefixes) if rng.random() < 0.5 else ()) + own)[:longest])
    return prompts


def require_right(answer: Answer, request: Request) -> None:
    assert answer.error == ""
    assert answer.tokens == expected_output(request.prompt, request.max_tokens), request.request_id


async def serve_all(cluster: LocalCluster, requests: Sequence[Request]) -> list[Answer]:
    return await asyncio.gather(*(cluster.serve(request) for request in requests))


@ORDERS
@pytest.mark.parametrize("nodes", [1, 2])
async def test_many_requests_at_once_answer_as_one_would(order: Order, nodes: int) -> None:
    shape = ClusterShape(nodes, nodes, prefill_blocks=120, decode_blocks=130, order=order, max_reservations=4)
    rng = random.Random(nodes)
    requests = [a_request(f"r{i}", p, rng.randint(1, 24)) for i, p in enumerate(prompts_of(7, 40))]
    async with LocalCluster(shape) as cluster:
        for request, answer in zip(requests, await serve_all(cluster, requests), strict=True):
            require_right(answer, request)
        await cluster.require_drained()
        handed_over = [r for r in cluster.records if r.completion is Completion.HANDED_OVER]
        assert len(handed_over) == sum(1 for r in requests if r.max_tokens > 1)


@ORDERS
async def test_requests_longer_than_half_a_pool_go_one_after_another(order: Order) -> None:
    shape = ClusterShape(prefill_blocks=30, decode_blocks=30, order=order)
    requests = [a_request(f"r{i}", [i] * 80, 16) for i in range(8)]
    async with LocalCluster(shape) as cluster:
        for request, answer in zip(requests, await serve_all(cluster, requests), strict=True):
            require_right(answer, request)
        await cluster.require_drained()


@ORDERS
async def test_the_same_prompts_again_hit_both_caches_and_move_what_is_missing(order: Order) -> None:
    requests = [a_request(f"a{i}", p) for i, p in enumerate(prompts_of(3, 6, longest=60))]
    again = [a_request(f"b{i}", r.prompt) for i, r in enumerate(requests)]
    async with LocalCluster(ClusterShape(order=order)) as cluster:
        await serve_all(cluster, requests)
        await cluster.require_drained()
        for request in again:
            answer = await cluster.serve(request)
            require_right(answer, request)
            assert answer.cached_tokens == len(request.prompt) - 1
            assert answer.record is not None
            assert answer.record.transfer is not None
            partial_tail = len(request.prompt) % BLOCK_SIZE > 0
            assert answer.record.transfer.bytes_moved == partial_tail * BLOCK_BYTES
        await cluster.require_drained()


async def test_a_longer_prompt_moves_only_what_the_destination_lacks() -> None:
    short, long = list(range(40)), list(range(61))
    async with LocalCluster(ClusterShape()) as cluster:
        first = await cluster.serve(a_request("short", short))
        second = await cluster.serve(a_request("long", long))
        require_right(second, a_request("long", long))
        assert first.record is not None
        assert first.record.transfer is not None
        assert first.record.transfer.blocks == 10
        assert second.record is not None
        assert second.record.transfer is not None
        assert second.record.transfer.blocks == 16 - 10


@ORDERS
async def test_a_request_that_ends_with_its_first_token_is_not_handed_over(order: Order) -> None:
    prompt = list(range(30))
    by_length = a_request("length", prompt, 1)
    stop = expected_output(prompt, 1)[0]
    by_stop = Request(RequestId("stop"), tuple(prompt), 8, stop_token_ids=frozenset({stop}))
    async with LocalCluster(ClusterShape(order=order)) as cluster:
        for request in (by_length, by_stop):
            answer = await cluster.serve(request)
            assert answer.tokens == [stop]
            assert answer.record is not None
            assert answer.record.completion is Completion.FINISHED_AT_SOURCE
            assert answer.record.transfer is None
        await cluster.require_drained()


async def test_a_one_token_request_that_fills_the_decode_pool_is_served() -> None:
    request = a_request("full", range(16), 1)
    async with LocalCluster(ClusterShape(prefill_blocks=4, decode_blocks=4)) as cluster:
        require_right(await cluster.serve(request), request)
        await cluster.require_drained()


async def with_bystanders(cluster: LocalCluster) -> tuple[list[Request], list[Serving]]:
    requests = [a_request(f"bystander{i}", p) for i, p in enumerate(prompts_of(11, 4, longest=40))]
    return requests, [asyncio.create_task(cluster.serve(request)) for request in requests]


async def require_cancelled(
    cluster: LocalCluster, victim: Serving, requests: Sequence[Request], tasks: Sequence[Serving]
) -> None:
    assert (await victim).error == "cancelled by the client"
    for request, answer in zip(requests, await asyncio.gather(*tasks), strict=True):
        require_right(answer, request)
    await cluster.require_drained()


async def cancel(cluster: LocalCluster) -> None:
    assert cluster.cancel("victim")
    await cluster.until_sent(CancelSource, "victim")


@ORDERS
async def test_cancel_while_queued(order: Order) -> None:
    async with LocalCluster(ClusterShape(prefill_blocks=16, order=order)) as cluster:
        gate = cluster.gate("prefill-0")
        gate.hold()
        first = a_request("first", [1] * 40)
        other = asyncio.create_task(cluster.serve(first))
        await asyncio.to_thread(gate.wait_held, 5)
        # The first prompt leaves no room for this one in the pool, so it waits without blocks.
        victim = asyncio.create_task(cluster.serve(a_request("victim", [2] * 60)))
        await cluster.until_sent(SubmitHandoffPrefill, "victim")
        gate.hold(after_steps=1)
        await cancel(cluster)
        gate.release()
        await require_cancelled(cluster, victim, [first], [other])
        assert "victim" not in cluster.devices[NodeId("prefill-0")].computed


@ORDERS
async def test_cancel_between_the_chunks_of_a_prompt(order: Order) -> None:
    async with LocalCluster(ClusterShape(order=order)) as cluster:
        gate = cluster.gate("prefill-0")
        gate.hold(after_steps=2)
        victim = asyncio.create_task(cluster.serve(a_request("victim", range(200))))
        assert await asyncio.to_thread(gate.wait_held, 5)
        await cancel(cluster)
        requests, tasks = await with_bystanders(cluster)
        gate.release()
        await require_cancelled(cluster, victim, requests, tasks)
        # Two chunks were through, and the one that was held when the cancel came.
        assert cluster.devices[NodeId("prefill-0")].computed["victim"] == 3 * 32


async def test_cancel_while_held_for_a_full_decode_pool() -> None:
    shape = ClusterShape(decode_blocks=16, order=Order.SOURCE_FIRST)
    async with LocalCluster(shape) as cluster:
        gate = cluster.gate("decode-0")
        gate.hold(after_steps=1)
        first = a_request("first", [1] * 40)
        other = asyncio.create_task(cluster.serve(first))
        assert await asyncio.to_thread(gate.wait_held, 5)
        await cluster.until_sent(ActivateDestination, "first")
        gate.hold(after_steps=2)
        await cluster.until(lambda: len(cluster.records) == 1)
        victim = asyncio.create_task(cluster.serve(a_request("victim", [2] * 40)))
        await cluster.until_sent(ReserveDestination, "victim")
        gate.hold(after_steps=1)
        assert await cluster.blocks_are("prefill-0", held=10)
        await cancel(cluster)
        gate.release()
        await require_cancelled(cluster, victim, [first], [other])
        assert "victim" not in cluster.devices[NodeId("decode-0")].computed


@ORDERS
async def test_cancel_while_the_bytes_travel(order: Order) -> None:
    async with LocalCluster(ClusterShape(order=order)) as cluster:
        cluster.fabric.hold()
        victim = asyncio.create_task(cluster.serve(a_request("victim", range(100))))
        assert await asyncio.to_thread(cluster.fabric.wait_held, 5)
        await cluster.until(lambda: cluster.blocks_are("prefill-0", held=25))
        await cancel(cluster)
        # Bytes may still come: both sides keep the blocks out of the pool until they have.
        await cluster.until(lambda: cluster.blocks_are("prefill-0", held=0, draining=25))
        await cluster.until(lambda: cluster.blocks_are("decode-0", reserved=0, draining=26))
        requests, tasks = await with_bystanders(cluster)
        cluster.fabric.release()
        await require_cancelled(cluster, victim, requests, tasks)
        assert "victim" not in cluster.devices[NodeId("decode-0")].computed


async def test_cancel_while_first_blocks_travel_and_the_prefill_goes_on() -> None:
    async with LocalCluster(ClusterShape()) as cluster:
        gate = cluster.gate("prefill-0")
        gate.hold(after_steps=2)
        cluster.fabric.hold()
        victim = asyncio.create_task(cluster.serve(a_request("victim", range(100))))
        assert await asyncio.to_thread(cluster.fabric.wait_held, 5)
        assert await asyncio.to_thread(gate.wait_held, 5)
        cluster.cancel("victim")
        await cluster.until_sent(CancelSource, "victim")
        gate.release()
        # Its bytes may still come, and what is left of the prompt never will.
        await cluster.until(lambda: cluster.blocks_are("decode-0", reserved=0, draining=26))
        await cluster.until(lambda: cluster.blocks_are("prefill-0", held=0, draining=0))
        requests, tasks = await with_bystanders(cluster)
        cluster.fabric.release()
        await require_cancelled(cluster, victim, requests, tasks)


@ORDERS
async def test_cancel_while_it_decodes(order: Order) -> None:
    async with LocalCluster(ClusterShape(order=order)) as cluster:
        gate = cluster.gate("decode-0")
        gate.hold(after_steps=3)
        victim = asyncio.create_task(cluster.serve(a_request("victim", range(50), 500)))
        assert await asyncio.to_thread(gate.wait_held, 5)
        await cluster.until_sent(ActivateDestination, "victim")
        gate.hold(after_steps=2)
        await cluster.until(lambda: len(cluster.records) == 1)
        cluster.cancel("victim")
        await cluster.until_sent(CancelDestination, "victim")
        requests, tasks = await with_bystanders(cluster)
        gate.release()
        await require_cancelled(cluster, victim, requests, tasks)
        assert cluster.devices[NodeId("decode-0")].computed["victim"] < 20


@ORDERS
@pytest.mark.parametrize("side", ["prefill-0", "decode-0"])
async def test_a_failed_step_ends_its_rows_and_no_others(order: Order, side: str) -> None:
    async with LocalCluster(ClusterShape(order=order)) as cluster:
        device = cluster.devices[NodeId(side)]
        await cluster.serve(a_request("warm", range(20)))
        device.fail_at.add(device.steps + 1)
        victim = a_request("victim", [5] * 50)
        answer = await cluster.serve(victim)
        assert "failed" in answer.error
        assert answer.tokens == expected_output(victim.prompt, 8)[: len(answer.tokens)]
        await cluster.require_drained()
        requests, tasks = await with_bystanders(cluster)
        again = a_request("again", victim.prompt)
        require_right(await cluster.serve(again), again)
        for request, task in zip(requests, tasks, strict=True):
            require_right(await task, request)
        await cluster.require_drained()


@ORDERS
async def test_a_request_that_can_never_fit_is_rejected_and_leaves_nothing(order: Order) -> None:
    shape = ClusterShape(decode_blocks=8, order=order, max_model_len=64)
    async with LocalCluster(shape) as cluster:
        for name, request in (
            ("model", a_request("over-model", range(60), 30)),
            ("pool", a_request("over-pool", range(30), 10)),
        ):
            answer = await cluster.serve(request)
            assert answer.record is not None, name
            assert answer.record.rejected
            assert "shorten" in answer.error
        await cluster.require_drained()
        fits = a_request("fits", range(20))
        require_right(await cluster.serve(fits), fits)


async def test_a_lost_prefill_node_leaves_nothing_on_the_decode_nodes() -> None:
    async with LocalCluster(ClusterShape(prefills=2)) as cluster:
        cluster.fabric.hold(after_pieces=1)
        tasks = [asyncio.create_task(cluster.serve(a_request(f"r{i}", [i] * 60))) for i in range(4)]
        assert await asyncio.to_thread(cluster.fabric.wait_held, 5)
        await cluster.until(lambda: cluster.driver.phases().get("transferring", 0) >= 3)
        cluster.lose("prefill-0")
        cluster.fabric.release()
        answers = await asyncio.gather(*tasks)
        for i, answer in enumerate(answers):
            assert answer.tokens == expected_output([i] * 60, 8)[: len(answer.tokens)]
            assert answer.error or len(answer.tokens) == 8
        assert sum(1 for answer in answers if not answer.error) >= 2
        await cluster.require_drained()
        fits = a_request("after", range(20))
        require_right(await cluster.serve(fits), fits)


async def test_a_lost_decode_node_leaves_nothing_on_the_prefill_nodes() -> None:
    async with LocalCluster(ClusterShape(decodes=2)) as cluster:
        cluster.gate("decode-0").hold()
        tasks = [asyncio.create_task(cluster.serve(a_request(f"r{i}", [i] * 60, 20))) for i in range(6)]
        assert await asyncio.to_thread(cluster.gate("decode-0").wait_held, 5)
        cluster.fabric.hold()
        tasks.append(asyncio.create_task(cluster.serve(a_request("late", [9] * 60, 20))))
        tasks.append(asyncio.create_task(cluster.serve(a_request("later", [10] * 60, 20))))
        assert await asyncio.to_thread(cluster.fabric.wait_held, 5)
        cluster.lose("decode-0")
        cluster.fabric.release()
        answers = await asyncio.gather(*tasks)
        for answer in answers:
            assert answer.record is not None
            assert ("decode-0" in answer.error) == (answer.record.destination == "decode-0")
        assert sum(1 for answer in answers if answer.error) >= 3
        await cluster.require_drained()


async def test_a_lost_prefill_node_does_not_disturb_what_was_handed_over() -> None:
    request = a_request("r", range(50), 30)
    async with LocalCluster(ClusterShape()) as cluster:
        cluster.gate("decode-0").hold(after_steps=2)
        task = asyncio.create_task(cluster.serve(request))
        assert await asyncio.to_thread(cluster.gate("decode-0").wait_held, 5)
        await cluster.until_sent(ActivateDestination, "r")
        cluster.gate("decode-0").hold(after_steps=2)
        await cluster.until(lambda: len(cluster.records) == 1)
        cluster.lose("prefill-0")
        cluster.gate("decode-0").release()
        require_right(await task, request)
        await cluster.require_drained()


PREEMPTIONS = pytest.mark.parametrize("preemption", list(Preemption), ids=lambda preemption: preemption.value)


@ORDERS
@PREEMPTIONS
async def test_many_requests_share_pools_of_one_and_a_half(order: Order, preemption: Preemption) -> None:
    """32 at once; prompts of 9 tokens in 3 blocks grow to 9 blocks, and each pool has 14."""
    policy = SchedulingPolicy(preemption=preemption, immunity_tokens=4)
    shape = ClusterShape(prefill_blocks=14, decode_blocks=14, order=order, policy=policy, spill_blocks=14)
    requests = [a_request(f"r{i}", [i] * 9, 27) for i in range(32)]
    async with LocalCluster(shape) as cluster:
        for request, answer in zip(requests, await serve_all(cluster, requests), strict=True):
            require_right(answer, request)
        await cluster.require_drained()
        counters = (await cluster.status("decode-0"))["counters"]
        assert (counters["preemptions"] > 0) == (preemption is not Preemption.NONE)
        assert (counters["restores"] > 0) == (preemption is Preemption.SPILL)
        assert not cluster.devices[NodeId("decode-0")].saved


@pytest.mark.parametrize("seed", seeds(8))
async def test_random_rounds_with_random_cancels(seed: int) -> None:
    """12 rounds each on one cluster: whoever isn't cancelled gets the right answer, and nothing stays owned."""
    rng = random.Random(seed)
    shape = ClusterShape(
        prefills=rng.choice([1, 2]),
        decodes=rng.choice([1, 2]),
        prefill_blocks=rng.choice([30, 60]),
        decode_blocks=rng.choice([40, 60]),
        order=rng.choice(list(Order)),
        limits=BatchLimits(max_tokens=rng.choice([8, 32]), max_sequences=rng.choice([2, 8])),
        policy=SchedulingPolicy(
            queue=rng.choice(QUEUE_POLICIES),
            preemption=rng.choice([Preemption.RECOMPUTE, Preemption.SPILL, Preemption.NONE]),
            victim=rng.choice(list(VICTIM_POLICIES)),
            immunity_tokens=rng.choice([0, 4, 16]),
            headroom_blocks=rng.choice([0, 2]),
        ),
        spill_blocks=rng.choice([0, 12, 100]),
        max_holds=rng.choice([2, 64]),
        max_reservations=rng.choice([1, 3, 8]),
        jitter_seed=seed if seed % 2 else None,
    )
    async with LocalCluster(shape) as cluster:
        for turn in range(12):
            prompts = prompts_of(seed * 100 + turn % 3, 10, longest=80)
            requests = [a_request(f"t{turn}-{i}", p, rng.randint(1, 20)) for i, p in enumerate(prompts)]
            if rng.random() < 0.5:
                cluster.fabric.hold(after_pieces=rng.randrange(12))
            tasks = [asyncio.create_task(cluster.serve(request)) for request in requests]
            for request in rng.sample(requests, 4):
                await asyncio.sleep(rng.random() * 0.006)
                cluster.cancel(request.request_id)
            cluster.fabric.release()
            for request, task in zip(requests, tasks, strict=True):
                answer = await task
                assert answer.error in ("", "cancelled by the client")
                if answer.error:
                    expected = expected_output(request.prompt, request.max_tokens)
                    assert answer.tokens == expected[: len(answer.tokens)]
                else:
                    require_right(answer, request)
            await cluster.require_drained()
