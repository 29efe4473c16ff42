import torch
from rows import make_row

from device.batch import pack
from scheduler.contract import Draw, Row
from scheduler.request import SamplingParams

CPU = torch.device("cpu")


def row(tokens: list[int], start: int, blocks: list[int], draws: bool) -> Row:
    return make_row("r", tokens, start, blocks, Draw(SamplingParams()) if draws else None)


def test_rows_become_one_row_of_tokens() -> None:
    rows = [row([5, 6, 7], 3, [9, 2], True), row([8], 4, [1, 3], True), row([4, 4], 0, [7], False)]
    batch = pack(rows, 4, CPU)
    assert batch.token_ids.tolist() == [[5, 6, 7, 8, 4, 4]]
    assert batch.positions.tolist() == [[3, 4, 5, 4, 0, 1]]
    assert batch.places.tolist() == [9 * 4 + 3, 2 * 4, 2 * 4 + 1, 3 * 4, 7 * 4, 7 * 4 + 1]
    assert batch.drawn.tolist() == [2, 3]
    assert [(s.offset, s.count, s.start, s.length) for s in batch.spans] == [
        (0, 3, 3, 6),
        (3, 1, 4, 5),
        (4, 2, 0, 2),
    ]


def test_a_block_table_may_be_longer_than_needed() -> None:
    batch = pack([row([1], 8, [5, 6, 7, 8, 9], True)], 4, CPU)
    assert batch.places.tolist() == [7 * 4]


def test_a_step_without_draws() -> None:
    batch = pack([row([1, 2], 0, [0], False)], 4, CPU)
    assert batch.drawn.shape == (0,)
    assert batch.drawn.dtype == torch.int64
