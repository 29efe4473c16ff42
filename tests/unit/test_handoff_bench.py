"""The parts of `prelay bench handoff` that compute: figures, what a run is, the device that moves blocks."""

import asyncio

import numpy as np
import pytest
from typer.testing import CliRunner

from cluster.cli import app
from cluster.handoff_bench.device import BLOCK_SIZE, DAMAGED, FIRST_TOKEN, INTACT, UNCHECKED, BlockMover
from cluster.handoff_bench.figures import Moved, covered, figures, percentile
from cluster.handoff_bench.run import measure
from cluster.handoff_bench.spec import Spec
from scheduler.contract import Decode, DeviceError, Draw, Prefill, Row
from scheduler.effects import ReserveKv, Ticket
from scheduler.ids import BlockId, RequestId
from scheduler.request import SamplingParams

DRAW = Draw(SamplingParams())
R = RequestId("r")


def moved(start: float, seconds: float, exposed_s: float = 0.001) -> Moved:
    return Moved(10**9, "test", start - 0.5, start + seconds, seconds, exposed_s)


def test_seconds_in_which_bytes_were_on_their_way_count_once() -> None:
    assert covered([(4, 5), (0, 2), (1, 3), (1, 2)]) == 4
    assert covered([]) == 0


@pytest.mark.parametrize(("share", "expected"), [(0.5, 2), (0.51, 3), (0.99, 4), (1.0, 4), (0.01, 1)])
def test_a_percentile_is_one_of_the_values(share: float, expected: int) -> None:
    assert percentile([3, 1, 4, 2], share) == expected
    assert percentile([], share) == 0


def test_rates_are_of_moving_time_and_of_all_time() -> None:
    found = figures([moved(0, 1), moved(0.5, 1.5), moved(4, 2)], 8.0, failed=0, checked=1, damaged=0, lost_blocks=0)
    assert (found.handoffs, found.lane) == (3, "test")
    assert found.moving_gb_per_s == pytest.approx(3 / 4)
    assert found.wall_gb_per_s == pytest.approx(3 / 8)
    assert found.handed_p50_ms == pytest.approx(2000)
    assert found.is_sound


@pytest.mark.parametrize("wrong", ["failed", "damaged", "lost_blocks"])
def test_what_went_wrong_is_not_sound(wrong: str) -> None:
    counts = {"failed": 0, "checked": 1, "damaged": 0, "lost_blocks": 0, wrong: 1}
    assert not figures([moved(0, 1)], 1.0, **counts).is_sound


def test_a_run_without_handoffs_is_not_sound() -> None:
    found = figures([], 0.0, failed=0, checked=0, damaged=0, lost_blocks=0)
    assert (found.is_sound, found.moving_gb_per_s, found.wall_gb_per_s) == (False, 0.0, 0.0)


@pytest.mark.parametrize("name", ["blocks", "block_bytes", "handoffs", "parallel"])
def test_a_run_moves_something(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0"):
        Spec(**{name: 0})  # type: ignore[arg-type]


def test_a_prompt_fills_its_blocks_with_its_first_token() -> None:
    spec = Spec(blocks=3, parallel=2)
    assert -(-(spec.prompt_tokens + 1) // BLOCK_SIZE) == 3
    assert spec.total_blocks == 9
    assert spec.limits.max_tokens >= 2 * spec.prompt_tokens


def prompt_row(seed: int, blocks: list[int], tokens: int, start: int = 0) -> Row:
    return Row(R, [seed] * tokens, start, tokens, [BlockId(block) for block in blocks], DRAW, prompt_tokens=tokens)


def decode_row(seed: int, blocks: list[int], tokens: int) -> Row:
    known = [*[seed] * tokens, FIRST_TOKEN]
    table = [BlockId(block) for block in blocks]
    return Row(R, known, tokens, tokens + 1, table, DRAW, prompt_tokens=tokens)


def run(device: BlockMover, plan: Prefill | Decode) -> tuple[int | None, ...]:
    return device.await_result(device.launch(plan)).tokens


@pytest.mark.parametrize("place", [0, 63, 64, 2 * 64 - 1])
def test_the_destination_tells_whether_each_byte_came(place: int) -> None:
    source, destination = (BlockMover(4, 64, 100) for _ in range(2))
    tokens = 2 * BLOCK_SIZE - 1
    assert run(source, Prefill((prompt_row(7, [3, 1], tokens),))) == (FIRST_TOKEN,)
    for out, into in ((3, 0), (1, 2)):
        destination.pool[into * 64 : into * 64 + 64] = source.pool[out * 64 : out * 64 + 64]
    assert run(destination, Decode((decode_row(7, [0, 2], tokens),))) == (INTACT,)
    assert run(destination, Decode((decode_row(8, [0, 2], tokens),))) == (DAMAGED,)
    assert run(destination, Decode((decode_row(7, [2, 0], tokens),))) == (DAMAGED,)
    destination.pool[place if place < 64 else 64 + place] ^= 1
    assert run(destination, Decode((decode_row(7, [0, 2], tokens),))) == (DAMAGED,)


def test_a_chunk_that_is_not_the_last_draws_nothing() -> None:
    device = BlockMover(4, 64, 100)
    first = prompt_row(7, [0, 1], 20)
    first.end, first.draw = 16, None
    assert run(device, Prefill((first,))) == (None,)
    assert run(device, Prefill((prompt_row(7, [0, 1], 20, start=16),))) == (FIRST_TOKEN,)
    assert run(device, Decode((decode_row(7, [0, 1], 20),))) == (INTACT,)


def test_an_unchecked_prompt_writes_nothing() -> None:
    device = BlockMover(2, 64, 100)
    before = device.pool.copy()
    run(device, Prefill((prompt_row(UNCHECKED, [0], 10),)))
    assert np.array_equal(device.pool, before)
    assert run(device, Decode((decode_row(UNCHECKED, [0], 10),))) == (INTACT,)


def test_the_device_refuses_what_it_is_not() -> None:
    device = BlockMover(2, 64, 100)
    with pytest.raises(DeviceError, match="ticket 5 is not in flight"):
        device.await_result(Ticket(5))
    with pytest.raises(DeviceError, match="does not run ahead"):
        device.apply(ReserveKv(R, ()))
    with pytest.raises(ValueError, match="multiple of 8"):
        BlockMover(2, 60, 100)


@pytest.mark.parametrize("layout", ["contiguous", "scattered"])
def test_nodes_of_one_process_hand_over_and_give_all_blocks_back(layout: str) -> None:
    spec = Spec(blocks=4, block_bytes=1024, handoffs=5, layout=layout, parallel=2, transport="memory")  # type: ignore[arg-type]
    found = asyncio.run(measure(spec))
    assert found.is_sound, found
    assert (found.handoffs, found.checked, found.lane) == (5, 3, "memory")
    assert found.moving_gb_per_s >= found.wall_gb_per_s > 0


def test_the_command_says_what_is_wrong_with_an_option() -> None:
    result = CliRunner().invoke(app, ["bench", "handoff", "--layout", "round"])
    assert result.exit_code == 2
    assert "layout" in result.output
