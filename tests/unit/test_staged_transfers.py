"""Transfers between nodes whose blocks differ: the staging area, its limits, what is refused, and by whom."""

import time
from dataclasses import replace

import numpy as np
import pytest
from exchange_pair import BLOCK_BYTES, COMPATIBILITY, TOKENS, D, H, P, Pair, Side, held, reasons, reserved

from handoff.compatibility import Compatibility, IncompatiblePeer
from handoff.pool_layout import PoolLayout
from handoff.relayout.staging import Staging
from handoff.transfer_ends import Landed, Sent
from handoff.wire import Segment
from scheduler.ids import NodeId, RequestId

SMALLER = replace(COMPATIBILITY, block_size=2)
KV_BYTES = 1024
STAGED = PoolLayout(BLOCK_BYTES // 2, KV_BYTES, first_staging=KV_BYTES, staging_bytes=4 * BLOCK_BYTES)
WAIT_S = 10.0


def pair_of(compatibility: Compatibility = SMALLER, layout: PoolLayout = STAGED) -> Pair:
    """The destination's blocks are different: half as long, if nothing else is said."""
    pair = Pair(Side(D, compatibility=compatibility, layout=layout))
    pool = pair.source.transport.pool
    pool[:] = np.arange(len(pool)) % 251
    return pair


def settle(pair: Pair) -> None:
    """Move and deliver until both sides have reported an end; re-layouts run on a thread of their own."""
    deadline = time.monotonic() + WAIT_S
    while not all(pair.ends):
        assert time.monotonic() < deadline, pair.ends
        pair.deliver()
        pair.move()


def test_blocks_of_another_size_land_where_they_belong() -> None:
    pair = pair_of()
    pair.destination.exchange.expect(H, 1, reserved(9, 8, 3, 2, 1))
    pair.source.send(7, 8, 9)
    pair.deliver()
    # Half of the area takes two blocks: the others come when it is free again.
    ((_, _, first, _), (_, _, second, _)) = pair.destination.transport.receives
    assert {first[0].offset, second[0].offset} == {KV_BYTES, KV_BYTES + 2 * BLOCK_BYTES}
    settle(pair)
    (landed,) = pair.destination.ends
    assert isinstance(landed, Landed)
    assert (landed.blocks, landed.bytes_moved) == (3, 3 * BLOCK_BYTES)
    assert pair.source.ends == [Sent(H, 1)]
    source = pair.source.transport.pool.view(np.uint32)[7 * 8 : 10 * 8].reshape(3, 2, 4)
    own = pair.destination.transport.pool[:KV_BYTES].view(np.uint32).reshape(-1, 2, 2)[[9, 8, 3, 2, 1]]
    assert (own.transpose(1, 0, 2).reshape(2, -1) == source.transpose(1, 0, 2).reshape(2, -1)[:, :TOKENS]).all()


def test_a_destination_that_has_everything_gets_the_record_alone() -> None:
    pair = pair_of()
    pair.destination.exchange.expect(H, 1, reserved(9, 8, 3, 2, 1, cached=5))
    pair.source.send(7, 8, 9)
    settle(pair)
    (landed,) = pair.destination.ends
    assert isinstance(landed, Landed)
    assert landed.bytes_moved == 0


def test_few_segments_of_a_long_prompt_are_under_way_at_a_time() -> None:
    pair = pair_of()
    tokens = 120
    pair.destination.exchange.expect(H, 1, reserved(*range(60), prompt_tokens=tokens))
    pair.source.exchange.offer(D, H, 1, RequestId("r"), tokens)
    pair.source.exchange.complete(H, 1, held(*range(30), prompt_tokens=tokens))
    assert sum(isinstance(message, Segment) for message in pair.deliver()) == 4
    assert len(pair.destination.transport.receives) == 2
    settle(pair)
    assert isinstance(pair.destination.ends[0], Landed)


def test_bytes_that_changed_on_their_way_are_not_re_laid_out() -> None:
    pair = pair_of()
    pair.destination.exchange.expect(H, 1, reserved(9, 8, 3, 2, 1))
    pair.source.send(7, 8, 9)
    pair.deliver()
    pair.source.transport.pool[7 * BLOCK_BYTES] += 1
    settle(pair)
    assert "checksums differ" in reasons(pair.destination.ends)[0]
    blocks = pair.destination.transport.pool[:KV_BYTES].reshape(-1, BLOCK_BYTES // 2)
    assert not blocks[[9, 8, 3, 2]].any()  # what the wrong segment was for


def test_a_lost_source_frees_the_area_for_others() -> None:
    pair = pair_of()
    pair.destination.exchange.expect(H, 1, reserved(9, 8, 3, 2, 1))
    pair.source.send(7, 8, 9)
    pair.deliver()
    pair.destination.exchange.disconnect(P)
    assert len(pair.destination.ends) == 1
    areas = [pair.destination.exchange._receiver._staged._staging._free]
    assert len(areas[0]) == 2


def test_without_a_staging_area_the_offer_is_refused_and_says_what_to_do() -> None:
    pair = pair_of(layout=replace(STAGED, staging_bytes=BLOCK_BYTES))
    pair.destination.exchange.expect(H, 1, reserved(9, 8, 3, 2, 1))
    pair.source.send(7, 8, 9)
    pair.deliver()
    for ends in pair.ends:
        assert "raise limits.staging_mib" in reasons(ends)[0]
        assert len(ends) == 1


def test_an_inexact_dtype_is_refused_and_the_node_goes_on_serving() -> None:
    """bf16 could not hold what an fp32 source sends; the other way round it could, so the pair may be connected."""
    pair = pair_of(replace(COMPATIBILITY, dtype="bf16"), replace(STAGED, block_bytes=BLOCK_BYTES // 2))
    pair.destination.exchange.expect(H, 1, reserved(9, 8, 3))
    pair.source.send(7, 8, 9)
    pair.deliver()
    assert "dtype is fp32 at the source and bf16 at the destination" in reasons(pair.source.ends)[0]
    other = Side(NodeId("prefill-1"), compatibility=pair.destination.exchange.info.compatibility)
    pair.destination.exchange.connect(other.exchange.info)
    strange = replace(other.exchange.info, node=NodeId("x"), compatibility=replace(COMPATIBILITY, head_dim=9))
    with pytest.raises(IncompatiblePeer, match="head_dim"):
        pair.destination.exchange.connect(strange)
    assert pair.destination.transport.connected == [P, "prefill-1"]


def test_halves_are_given_in_the_order_of_asking() -> None:
    staging = Staging(640, 300)
    given: list[tuple[str, int]] = []
    for name in "abcd":
        staging.acquire(lambda offset, name=name: given.append((name, offset)))  # type: ignore[misc]
    assert staging.half_bytes == 128
    assert sorted(given) == [("a", 768), ("b", 640)]
    staging.release(768)
    staging.release(640)
    assert given[2:] == [("c", 768), ("d", 640)]
