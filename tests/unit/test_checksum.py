"""What a checksum over blocks notices, in each mode."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from handoff.checksum import LINE_BYTES, SAMPLE_BYTES, SMALL_BYTES, Checksums, ContentHash

BLOCK_BYTES = 2 * SAMPLE_BYTES
BLOCKS = 6


def hasher(content: Any, block_bytes: int, mode: Checksums) -> Callable[..., int]:
    return partial(ContentHash(content).of, mode, block_bytes)


def pool(block_bytes: int = BLOCK_BYTES, blocks: int = BLOCKS) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    return np.random.default_rng(1).integers(0, 256, blocks * block_bytes, np.uint8)


def seen(block_bytes: int, count: int) -> list[int]:
    """Lines of each of `count` blocks whose change is noticed."""
    content = pool(block_bytes, count)
    hashed = hasher(content, block_bytes, "sampled")
    table = list(range(count))
    before, noticed = hashed(table), []
    for block in table:
        noticed.append(0)
        for start in range(block * block_bytes, (block + 1) * block_bytes, LINE_BYTES):
            content[start] ^= 1
            noticed[-1] += hashed(table) != before
            content[start] ^= 1
    return noticed


@pytest.mark.parametrize("mode", ["sampled", "full"])
@pytest.mark.parametrize("block_bytes", [96, SMALL_BYTES, BLOCK_BYTES, BLOCK_BYTES + 8])
def test_equal_content_in_other_blocks_is_equal(mode: Checksums, block_bytes: int) -> None:
    source, destination = pool(block_bytes), pool(block_bytes)
    out, into = [4, 0, 3], [1, 5, 2]
    for a, b in zip(out, into, strict=True):
        moved = source[a * block_bytes : (a + 1) * block_bytes]
        destination[b * block_bytes : (b + 1) * block_bytes] = moved
    sent = hasher(source, block_bytes, mode)
    landed = hasher(destination, block_bytes, mode)
    assert sent(out) == landed(into)
    assert sent(out) != landed(into[::-1])
    assert sent(out) != landed([*into[:2], 0])


def test_off_looks_at_nothing() -> None:
    assert hasher(pool(), BLOCK_BYTES, "off")([0, 1]) == 0


def test_full_sees_every_byte() -> None:
    content = pool()
    hashed = hasher(content, BLOCK_BYTES, "full")
    before = hashed([2])
    for place in random.Random(1).sample(range(BLOCK_BYTES), 20):
        content[2 * BLOCK_BYTES + place] ^= 1
        assert hashed([2]) != before
        content[2 * BLOCK_BYTES + place] ^= 1


def test_a_sample_has_one_line_in_so_many_bytes_and_one_of_a_block_at_least() -> None:
    assert seen(SMALL_BYTES, 3) == [1] * 3
    assert seen(4 * SAMPLE_BYTES, 1) == [4]


def test_over_many_blocks_every_place_is_looked_at() -> None:
    """As many as there are lines between two samples."""
    count = SMALL_BYTES // LINE_BYTES
    content = np.zeros(count * SMALL_BYTES, np.uint8)
    hashed = hasher(content, SMALL_BYTES, "sampled")
    before = hashed(range(count))
    for line in range(SMALL_BYTES // LINE_BYTES):
        places = np.arange(count) * SMALL_BYTES + line * LINE_BYTES
        content[places] = 1
        assert hashed(range(count)) != before, line
        content[places] = 0


def test_small_and_odd_blocks_are_seen_in_full() -> None:
    small = 1024
    assert seen(small, 2) == [small // LINE_BYTES] * 2
    odd = SMALL_BYTES + 8
    content = pool(odd, 1)
    hashed = hasher(content, odd, "sampled")
    before = hashed([0])
    content[odd - 1] ^= 1
    assert hashed([0]) != before


def test_stretches_are_seen_in_full() -> None:
    content = pool()
    hashed = hasher(content, BLOCK_BYTES, "sampled")
    before = hashed([0], [(BLOCK_BYTES, 100)])
    content[BLOCK_BYTES + 99] ^= 1
    assert hashed([0], [(BLOCK_BYTES, 100)]) != before


def test_blocks_may_begin_anywhere() -> None:
    content = pool()
    moved = np.concatenate([np.zeros(LINE_BYTES, np.uint8), content])
    own = hasher(content, BLOCK_BYTES, "sampled")([3, 1])
    assert ContentHash(moved).of("sampled", BLOCK_BYTES, [3, 1], origin=LINE_BYTES) == own
