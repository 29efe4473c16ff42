"""The last chunk layer by layer: what goes out, when blocks count as sent, and what lands."""

import numpy as np
import pytest
from exchange_pair import BLOCK_BYTES, LAYERS, TOKENS, D, H, Pair, held, reasons, reserved

from handoff.checksum import LINE_BYTES, SAMPLE_BYTES, ContentHash
from handoff.transfer_ends import Ceased, Landed, Sent
from handoff.transfer_out import Outgoing, Progress
from handoff.transports.base import Piece
from handoff.wire import Accept, Layers, Segment
from scheduler.ids import RequestId

BLOCKS = (7, 8, 9)
INTO = (0, 1, 5)
LAYER_BYTES = BLOCK_BYTES // LAYERS


@pytest.fixture
def pair() -> Pair:
    """An open transfer of three blocks, of which the first is final."""
    pair = Pair()
    pair.destination.exchange.expect(H, 1, reserved(*INTO))
    pair.source.exchange.offer(D, H, 1, RequestId("r"), TOKENS)
    pair.deliver()
    pool = pair.source.transport.pool
    pool[:] = np.arange(len(pool)) % 251
    pair.source.exchange.advance(H, 1, Progress(BLOCKS, 1))
    return pair


def sent(pair: Pair) -> list[tuple[int, tuple[int, ...], Layers | None, bool]]:
    segments = [message for message in pair.deliver() if isinstance(message, Segment)]
    return [(s.first_block, s.blocks, s.layers, s.record is not None) for s in segments]


def layers_final(pair: Pair, layers: int, generation: int = 0) -> None:
    pair.source.exchange.layers_final(H, 1, layers, generation)


def test_layers_follow_the_whole_blocks_and_the_last_ones_come_with_the_record(pair: Pair) -> None:
    layers_final(pair, 1)
    assert sent(pair) == [(0, (7,), None, False), (1, (8, 9), (0, 1), False)]
    layers_final(pair, 3)
    assert sent(pair) == [(1, (8, 9), (1, 3), False)]
    last = pair.destination.transport.receives[-1]
    assert last[2] == [Piece(block * BLOCK_BYTES + LAYER_BYTES, 2 * LAYER_BYTES) for block in INTO[1:]]
    pair.source.exchange.complete(H, 1, held(*BLOCKS))
    assert sent(pair) == [(1, (8, 9), (3, 4), True)]
    pair.move()
    (landed,) = pair.destination.ends
    assert isinstance(landed, Landed)
    assert (landed.blocks, landed.bytes_moved, landed.exposed_bytes) == (3, 3 * BLOCK_BYTES, 2 * LAYER_BYTES)
    assert pair.source.ends == [Sent(H, 1)]
    source, into = (side.transport.pool.reshape(-1, BLOCK_BYTES) for side in (pair.source, pair.destination))
    assert (source[list(BLOCKS)] == into[list(INTO)]).all()


def test_the_last_layer_waits_for_the_record(pair: Pair) -> None:
    layers_final(pair, LAYERS)
    assert sent(pair)[1:] == [(1, (8, 9), (0, LAYERS - 1), False)]


def test_layers_that_are_final_before_the_answer_go_out_with_it() -> None:
    out = Outgoing(D, TOKENS, 4, 4, LAYERS)
    out.advance(Progress(BLOCKS, 0))
    out.layers_final(2, 0)
    assert out.next() is None
    out.accept(Accept("h", 1, 1, 0, 4, (1, 5)))
    cut = out.next()
    assert cut is not None
    assert (cut.first, cut.blocks, cut.into, cut.layers) == (1, (8, 9), (1, 5), (0, 2))
    assert out.next() is None


@pytest.mark.parametrize(
    "accept",
    [Accept("h", 1, 1, 0, 12, ()), Accept("h", 1, 1, 0, 0, INTO, segment_blocks=2)],
    ids=["nothing is missing", "re-laid out"],
)
def test_no_layer_goes_out(accept: Accept) -> None:
    out = Outgoing(D, TOKENS, 4, 4, LAYERS)
    out.accept(accept)
    out.advance(Progress(BLOCKS, 0))
    out.layers_final(2, 0)
    assert out.next() is None


def test_layers_of_lost_blocks_are_sent_again_and_late_news_of_them_is_ignored(pair: Pair) -> None:
    layers_final(pair, 2)
    sent(pair)
    pair.source.exchange.advance(H, 1, Progress((20, 21, 22), 1, generation=1))
    layers_final(pair, 3, generation=0)
    layers_final(pair, 1, generation=1)
    assert sent(pair) == []  # the old ones are still under way
    pair.move()
    assert sent(pair) == [(0, (20,), None, False), (1, (21, 22), (0, 1), False)]
    pair.move()
    layers_final(pair, 3, generation=0)
    assert sent(pair) == []
    pair.source.exchange.complete(H, 1, held(20, 21, 22, generation=1))
    assert sent(pair) == [(1, (21, 22), (1, 4), True)]
    pair.move()
    (landed,) = pair.destination.ends
    assert isinstance(landed, Landed)


def test_blocks_of_which_only_layers_were_sent_do_not_count_as_sent(pair: Pair) -> None:
    """However quiet it is: after a loss they go out whole."""
    layers_final(pair, 3)
    sent(pair)
    pair.move()
    pair.source.exchange.advance(H, 1, Progress(BLOCKS, 1))
    pair.source.exchange.advance(H, 1, Progress((20, 21, 22), 3, generation=1))
    assert sent(pair) == [(1, (21, 22), None, False)]


def test_a_step_that_fails_after_some_layers_ends_both_sides(pair: Pair) -> None:
    layers_final(pair, 2)
    pair.source.exchange.cease(H, 1, "the request ended at its source")
    layers_final(pair, 3)
    assert len(sent(pair)) == 2
    assert pair.ends == ([], [])
    pair.move()
    assert pair.ends == ([Ceased(H, 1)], [Ceased(H, 1)])


def test_a_destination_that_withdraws_between_two_groups_gets_no_more(pair: Pair) -> None:
    layers_final(pair, 1)
    pair.deliver()
    pair.destination.exchange.withdraw(H, 1)
    pair.deliver()
    layers_final(pair, 2)
    assert sent(pair) == []
    pair.move()
    assert pair.ends == ([Ceased(H, 1)], [Ceased(H, 1)])


def test_other_bytes_in_a_layer_never_land(pair: Pair) -> None:
    layers_final(pair, 2)
    pair.source.transport.pool[9 * BLOCK_BYTES + LAYER_BYTES] += 1
    pair.deliver()
    pair.move()
    pair.deliver()
    assert "segment 1 " in reasons(pair.destination.ends)[0]


@pytest.mark.parametrize("layer_bytes", [48, 4 * SAMPLE_BYTES])
def test_a_checksum_covers_a_part_of_each_block_and_nothing_else(layer_bytes: int) -> None:
    rng = np.random.default_rng(1)
    pool = rng.integers(0, 256, 3 * 4 * layer_bytes, dtype=np.uint8)
    part = (layer_bytes, 2 * layer_bytes)

    def checksum() -> int:
        return ContentHash(pool).of("sampled", 4 * layer_bytes, (2, 0), part=part)

    before = checksum()
    inside = pool.reshape(3, 4, layer_bytes)[:, 1:3]
    kept = inside.copy()
    pool[:] = rng.integers(0, 256, len(pool), dtype=np.uint8)
    assert checksum() != before
    inside[[0, 2]] = kept[[0, 2]]
    assert checksum() == before
    lines = inside[2].reshape(-1)[: LINE_BYTES if layer_bytes > LINE_BYTES else None]
    lines[-1] += 1
    assert checksum() != before
