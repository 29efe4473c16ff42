"""Faults of the data plane that need no node. `fault_NN` is a number of the table in docs/architecture.md."""

import time

import numpy as np
import pytest
from exchange_pair import BLOCK_BYTES, D, H, P, Pair, held, reasons, reserved

from handoff.pieces import MAX_PIECE_BYTES, coalesce
from handoff.pool_layout import PoolLayout
from handoff.transfer_ends import Landed, Sent
from handoff.transfer_out import Progress
from handoff.transports.base import TransferError
from scheduler.ids import RequestId

BLOCKS = 100_000
SMALL = 4096
WITHIN_S = 2.0
"""It takes some 10 ms; this is for a machine that is busy."""
STATE = PoolLayout(BLOCK_BYTES, 48 * BLOCK_BYTES, first_slot=48 * BLOCK_BYTES, slot_bytes=64)


@pytest.mark.parametrize("group", ["first blocks", "last blocks and state"])
def test_fault_04_one_failed_group_of_a_hybrid_handoff_never_lands(group: str) -> None:
    pair = Pair()
    for side in (pair.source, pair.destination):
        side.exchange._wiring.layout = STATE
    pair.destination.exchange.expect(H, 1, reserved(0, 1, 5))
    pair.source.exchange.offer(D, H, 1, RequestId("r"), 10)
    pair.deliver()
    pair.source.exchange.advance(H, 1, Progress((7, 8, 9), 1))
    pair.deliver()
    pair.move(TransferError("the card is full") if group == "first blocks" else None)
    pair.source.exchange.complete(H, 1, held(7, 8, 9))
    pair.deliver()
    pair.move(TransferError("the card is full"))
    for ends in pair.ends:
        assert reasons(ends) == ["the card is full"]
        assert len(ends) == 1
    assert not pair.source.transport.sends
    assert not pair.destination.transport.receives


def test_fault_19_many_small_blocks_are_few_pieces_if_they_are_neighbours() -> None:
    order = np.random.default_rng(1).permutation(BLOCKS)
    began = time.perf_counter()
    contiguous = coalesce(range(BLOCKS), range(7, BLOCKS + 7), SMALL)
    alike = coalesce(order.tolist(), (order + 7).tolist(), SMALL)
    shuffled = coalesce(order.tolist(), range(BLOCKS), SMALL)
    assert time.perf_counter() - began < WITHIN_S
    fewest = -(-BLOCKS * SMALL // MAX_PIECE_BYTES)
    # Tables in any order are as good as sorted ones; blocks without neighbours have a piece each.
    assert len(contiguous.sends) == len(alike.sends) == fewest
    assert BLOCKS * 0.99 < len(shuffled.sends) <= BLOCKS
    for runs in (contiguous, alike, shuffled):
        assert sum(runs.lengths) == BLOCKS * SMALL
        assert max(runs.lengths) <= MAX_PIECE_BYTES


def test_fault_26_a_notice_before_the_bytes_is_no_landing() -> None:
    pair = Pair()
    pair.source.transport.pool[:] = np.arange(len(pair.source.transport.pool)) % 251
    pair.destination.exchange.expect(H, 1, reserved(0, 1, 5))
    pair.source.send(7, 8, 9)
    pair.deliver()
    ((_, _, _, done),) = pair.destination.transport.receives
    pair.destination.transport.receives.clear()
    done(None)
    ((_, _, _, sent),) = pair.source.transport.sends
    pair.source.transport.sends.clear()
    sent(None)
    assert "checksums differ" in reasons(pair.destination.ends)[0]
    assert not any(isinstance(end, Landed) for end in pair.destination.ends)
    assert pair.source.ends == [Sent(H, 1)]
    assert P in pair.destination.transport.connected
