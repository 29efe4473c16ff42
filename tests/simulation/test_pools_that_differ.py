"""Whole handoffs between nodes whose blocks have different sizes: nothing but the layout changes."""

import asyncio
import random

import pytest
from kv_machine import expected_output
from local_cluster import Answer, ClusterShape, LocalCluster

from handoff.coordinator import Completion, Order
from scheduler.ids import RequestId
from scheduler.request import Request

SIZES = pytest.mark.parametrize("decode_block_size", [1, 2, 6, 16])


def requests_of(seed: int, count: int) -> list[Request]:
    rng = random.Random(seed)
    prefixes = [tuple(rng.randrange(1000) for _ in range(length)) for length in (8, 37, 64)]
    return [
        Request(
            RequestId(f"r{seed}-{number}"),
            rng.choice(prefixes) + tuple(rng.randrange(1000) for _ in range(rng.randint(1, 150))),
            rng.randint(2, 12),
        )
        for number in range(count)
    ]


async def serve_all(cluster: LocalCluster, requests: list[Request]) -> list[Answer]:
    answers = await asyncio.gather(*(cluster.serve(request) for request in requests))
    for request, answer in zip(requests, answers, strict=True):
        assert answer.error == ""
        assert answer.tokens == expected_output(request.prompt, request.max_tokens), request.request_id
    return list(answers)


def shape_of(decode_block_size: int, order: Order = Order.DESTINATION_FIRST) -> ClusterShape:
    return ClusterShape(2, 2, 160, 700 // decode_block_size, decode_block_size=decode_block_size, order=order)


@SIZES
@pytest.mark.parametrize("order", list(Order), ids=lambda order: order.value)
async def test_answers_are_those_of_pools_that_are_alike(decode_block_size: int, order: Order) -> None:
    async with LocalCluster(shape_of(decode_block_size, order)) as cluster:
        requests = requests_of(decode_block_size, 20)
        await serve_all(cluster, requests)
        # Once more: the prompts are cached on both sides, in blocks that end in different places.
        again = [Request(RequestId(f"again-{r.request_id}"), r.prompt, r.max_tokens) for r in requests]
        await serve_all(cluster, again)
        await cluster.require_drained()
        records = [record for record in cluster.records if record.completion is Completion.HANDED_OVER]
        assert len(records) == 40
        assert all(record.transfer is not None for record in records)


@SIZES
async def test_cancels_at_random_leave_nothing(decode_block_size: int) -> None:
    rng = random.Random(decode_block_size)
    async with LocalCluster(shape_of(decode_block_size)) as cluster:
        requests = requests_of(100 + decode_block_size, 24)
        tasks = [asyncio.create_task(cluster.serve(request)) for request in requests]
        for request in rng.sample(requests, 8):
            await asyncio.sleep(rng.random() * 0.02)
            cluster.cancel(request.request_id)
        for request, answer in zip(requests, await asyncio.gather(*tasks), strict=True):
            expected = expected_output(request.prompt, request.max_tokens)
            assert answer.tokens == expected or (answer.error and answer.tokens == expected[: len(answer.tokens)])
        await cluster.require_drained()
        await serve_all(cluster, requests_of(200, 4))
