"""Any pair of pools: what lands is what left, number by number, and no other byte changes."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from kv_pattern import RankPools, pattern, widened
from relayout_drive import ranks_with_other_bytes

from handoff.relayout import copies
from handoff.relayout.convert import EXACT, convert
from handoff.relayout.copies import pack, unpack
from handoff.relayout.routes import routes
from handoff.relayout.shape import KvShape
from handoff.relayout.windows import windows

BLOCK_SIZES = (4, 8, 16, 24)
DTYPES = (("fp32", "fp32"), ("fp16", "fp16"), ("bf16", "bf16"), *EXACT)
DEGREES = {1: (1, 2, 4, 8), 2: (1, 2, 4, 8), 3: (1, 3, 6), 4: (1, 2, 4, 8), 8: (1, 2, 4, 8)}
RANKS = [(heads, *pair) for heads, degrees in DEGREES.items() for pair in product(degrees, repeat=2)]
ONE = KvShape(layers=2, kv_heads=2, head_dim=3, block_size=16, dtype="bf16")


@pytest.mark.parametrize(("kv_heads", "sources", "destinations"), RANKS)
def test_all_block_sizes_and_dtypes_between_all_ranks(kv_heads: int, sources: int, destinations: int) -> None:
    for number, (block, other, dtypes) in enumerate(product(BLOCK_SIZES, BLOCK_SIZES, DTYPES)):
        source = replace(ONE, kv_heads=kv_heads, ranks=sources, block_size=block, dtype=dtypes[0])
        destination = replace(ONE, kv_heads=kv_heads, ranks=destinations, block_size=other, dtype=dtypes[1])
        tokens = range(other if number % 2 else 0, 50 + number % 3)
        assert ranks_with_other_bytes(source, destination, tokens, 1 + number % 7, number) == [], (block, other, dtypes)


@pytest.mark.parametrize("dtypes", DTYPES, ids="->".join)
@pytest.mark.parametrize("block", BLOCK_SIZES)
@pytest.mark.parametrize("other", BLOCK_SIZES)
def test_all_dtypes_prefixes_and_tails_between_all_block_sizes(dtypes: tuple[str, str], block: int, other: int) -> None:
    source = replace(ONE, ranks=1, block_size=block, dtype=dtypes[0])
    destination = replace(ONE, ranks=2, block_size=other, dtype=dtypes[1])
    for cached, end, staged in product((0, 1, 2), (1, 2, other - 1, other, block + 1, 48, 53), (1, 2, 100)):
        tokens = range(cached * other, cached * other + end)
        assert ranks_with_other_bytes(source, destination, tokens, staged) == [], (tokens, staged)


@pytest.mark.parametrize("parts_of_bytes", [1, 2 * 2 * 2 * 3 * 4 * 8 * 3])
def test_a_conversion_in_parts_gives_the_same(parts_of_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "CONVERTED_BYTES", parts_of_bytes)
    source, destination = replace(ONE, block_size=8), replace(ONE, block_size=24, dtype="fp32")
    assert ranks_with_other_bytes(source, destination, range(24, 24 * 9 + 5), staged_blocks=100) == []


@pytest.mark.parametrize(("source", "destination"), EXACT, ids="->".join)
def test_every_number_is_converted_exactly(source: str, destination: str) -> None:
    bits: Any = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    found, wanted = (
        convert(np, bits, source, destination).view(np.float32),
        widened(bits, source, destination).view(np.float32),
    )
    numbers = ~np.isnan(wanted)
    assert np.isnan(found[~numbers]).all()
    assert np.array_equal(found[numbers].view(np.uint32), wanted[numbers].view(np.uint32))


@pytest.mark.parametrize("pair", [("fp32", "bf16"), ("fp32", "fp16"), ("bf16", "fp16"), ("fp16", "bf16")], ids=str)
def test_a_conversion_that_loses_something_is_refused(pair: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=f"{pair[0]} has numbers that {pair[1]} has not"):
        convert(np, np.zeros(1, np.uint32), *pair)


def test_equal_dtypes_keep_every_bit_of_what_is_not_a_number() -> None:
    shape = replace(ONE, kv_heads=1, layers=1, head_dim=1, block_size=4, dtype="fp16")
    (route,) = routes(shape, replace(shape, block_size=8)).values()
    staging = np.array([0x7D01, 0xFE07, 0x7C00, 0x8000] * 2, np.uint16)
    pool = np.zeros(route.destination.block_bytes, np.uint8)
    (window,) = windows(4, 8, range(4), 1)
    unpack(staging.view(np.uint8), route, window, [0], pool)
    assert pool.view(np.uint16).tolist() == [0x7D01, 0xFE07, 0x7C00, 0x8000, 0, 0, 0, 0] * 2


class TestWrongSizes:
    route = routes(ONE, replace(ONE, ranks=2, block_size=8))[0, 0]
    window = windows(16, 8, range(32), 2)[0]
    pool = np.zeros(8 * route.destination.block_bytes, np.uint8)
    staging = np.zeros(2 * route.staged_block_bytes, np.uint8)

    def refused(self, match: str, **change: Any) -> None:
        arguments = {"staging": self.staging, "blocks": [0, 1, 2, 3], "pool": self.pool, **change}
        with pytest.raises(ValueError, match=match):
            unpack(arguments["staging"], self.route, self.window, arguments["blocks"], arguments["pool"])
        assert not self.pool.any()

    @pytest.mark.parametrize("block", [-1, 8])
    def test_a_block_outside_the_pool(self, block: int) -> None:
        self.staging[:] = 1
        self.refused(rf"blocks \[{block}\] are outside the pool of 8 blocks", blocks=[0, 1, 2, block])

    def test_a_table_that_is_too_short(self) -> None:
        self.refused("into block 3 of a table of 3 blocks", blocks=[0, 1, 2])

    def test_a_staging_area_of_another_size(self) -> None:
        self.refused("bytes of staging for 2 blocks", staging=self.staging[:-2])

    def test_a_pool_with_something_behind_its_blocks(self) -> None:
        self.refused("not a whole number of blocks", pool=np.zeros(self.pool.size + 64, np.uint8))

    def test_packing_a_block_outside_the_pool(self) -> None:
        pool = np.zeros(4 * self.route.source.block_bytes, np.uint8)
        with pytest.raises(ValueError, match="outside the pool of 4 blocks"):
            pack(pool, self.route, [0, 4], self.staging)


class Device(np.ndarray):  # type: ignore[type-arg]
    """Like an array of CuPy: it takes no index or content from the host."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_of_device(index))

    def __setitem__(self, index: Any, content: Any) -> None:
        super().__setitem__(_of_device(index), _of_device(content))


def _of_device(value: Any) -> Any:
    for item in value if isinstance(value, tuple) else (value,):
        if not isinstance(item, (Device, slice, int, type(...))):
            raise TypeError(f"a {type(item).__name__} of the host met an array of the device")
    return value


class DeviceModule:
    """What the copies use of CuPy, and nothing else."""

    uint16, uint32, float16, float32 = np.uint16, np.uint32, np.float16, np.float32

    @staticmethod
    def asarray(values: list[int]) -> Any:
        return np.asarray(values).view(Device)


@pytest.mark.parametrize("dtypes", DTYPES, ids="->".join)
def test_the_same_copies_run_on_arrays_of_a_device(dtypes: tuple[str, str]) -> None:
    source, destination = replace(ONE, dtype=dtypes[0]), replace(ONE, ranks=2, block_size=24, dtype=dtypes[1])
    sender, wanted, found = RankPools(source, 40, 1), RankPools(destination, 40, 2), RankPools(destination, 40, 2)
    truth = pattern(3, 2, 2, 40, 3, dtypes[0])
    sender.put(truth, range(40))
    wanted.put(widened(truth, *dtypes), range(40))
    (window,) = windows(16, 24, range(40), 3)
    for (_, rank), route in routes(source, destination).items():
        area = np.zeros(3 * route.staged_block_bytes, np.uint8).view(Device)
        pack(sender.pools[0].view(Device), route, sender.blocks[:3], area, xp=DeviceModule)
        unpack(area, route, window, found.blocks, found.pools[rank].view(Device), xp=DeviceModule)
        assert np.array_equal(found.pools[rank], wanted.pools[rank])


def test_a_host_index_would_be_noticed() -> None:
    with pytest.raises(TypeError, match="of the host"):
        np.zeros(3).view(Device)[np.zeros(1, int)]
