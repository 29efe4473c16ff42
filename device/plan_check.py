"""Whether a plan can run, asked before the device is touched: a bad plan must not write into another's blocks."""

from collections.abc import Sequence
from math import inf

from scheduler.contract import Decode, DeviceError, DeviceFacts, Draw, Fault, KvExhausted, Row, StepPlan
from scheduler.effects import NO_SLOT
from scheduler.request import SamplingParams

REPETITION_PENALTY = (0.01, 100.0)
"""The least and the most that is allowed: far from where a penalised logit would overflow and fail its whole step."""
LARGEST_PENALTY = 2.0
"""Of presence and frequency, either way, as in OpenAI's API."""


def check_plan(plan: StepPlan, facts: DeviceFacts) -> None:
    """Raise DeviceError(FORWARD), KvExhausted for a table that is too short, with the first thing that is wrong."""
    if not plan.rows:
        raise _wrong("the plan has no rows")
    size, decodes = facts.block_size, isinstance(plan, Decode)
    blocks: list[int] = []
    tokens: list[int] = []
    written: dict[int, str] = {}
    for row in plan.rows:
        if decodes and row.count != 1:
            raise _wrong(f"{row.request_id}: a decode row has one token, this one has {row.count}")
        used = _check_row(row, facts)
        if row.draw is not None:
            _check_draw(row, row.draw, facts.vocab_size)
        table = row.blocks[:used]
        for block in table[row.start // size :]:
            if block in written:
                raise _wrong(f"{row.request_id} and {written[block]} would both write block {block}")
            written[block] = row.request_id
        blocks += table
        tokens += row.tokens
    # All at once: a check of each row's ids would cost more than the rest.
    if not _in_range(blocks, facts.total_blocks) or not _in_range(tokens, facts.vocab_size):
        for row in plan.rows:
            _check_ids(row, "block", row.blocks[: -(-row.end // size)], facts.total_blocks)
            _check_ids(row, "token", row.tokens, facts.vocab_size)
    _check_slots(plan.rows, facts)


def _check_row(row: Row, facts: DeviceFacts) -> int:
    """How many blocks the row uses."""
    if row.count < 1:
        raise _wrong(f"{row.request_id}: the row has no tokens")
    end = row.end
    if row.start < 0 or end > facts.max_model_len:
        raise _wrong(f"{row.request_id}: positions {row.start} to {end - 1} leave 0 to {facts.max_model_len - 1}")
    if end > len(row.known):
        raise _wrong(f"{row.request_id}: the row ends at position {end}, {len(row.known)} tokens are known")
    used = -(-end // facts.block_size)
    if used > len(row.blocks):
        raise KvExhausted(f"{row.request_id}: {end} positions need {used} blocks, the table has {len(row.blocks)}")
    return used


def _check_slots(rows: Sequence[Row], facts: DeviceFacts) -> None:
    """A step changes the slot of each row, which may do without one unless the model has recurrent state."""
    owners: dict[int, str] = {}
    for row in rows:
        if row.slot == NO_SLOT and not facts.slot_bytes:
            continue
        if not 0 <= row.slot < facts.slots:
            needed = ", and the model needs one" if row.slot == NO_SLOT else ""
            raise _wrong(f"{row.request_id}: slot {row.slot} is outside 0 to {facts.slots - 1}{needed}")
        if row.slot in owners:
            raise _wrong(f"{row.request_id} and {owners[row.slot]} have the same slot {row.slot}")
        owners[row.slot] = row.request_id


def _check_draw(row: Row, draw: Draw, vocab_size: int) -> None:
    params = draw.params
    if row.end != len(row.known):
        raise _wrong(f"{row.request_id}: the token at position {row.end} is drawn, but it is known")
    in_range = 0 <= params.temperature < inf and 0 < params.top_p <= 1 and params.top_k >= 0
    if not in_range or not _penalties_in_range(params):
        raise _wrong(f"{row.request_id}: sampling parameters out of range: {params}")
    if draw.suppress:
        _check_ids(row, "suppressed token", tuple(draw.suppress), vocab_size)


def _penalties_in_range(params: SamplingParams) -> bool:
    lowest, highest = REPETITION_PENALTY
    largest = LARGEST_PENALTY
    return (
        lowest <= params.repetition_penalty <= highest
        and -largest <= params.presence_penalty <= largest
        and -largest <= params.frequency_penalty <= largest
    )


def _check_ids(row: Row, what: str, ids: Sequence[int], limit: int) -> None:
    if not _in_range(ids, limit):
        bad = next(i for i in ids if not 0 <= i < limit)
        raise _wrong(f"{row.request_id}: {what} id {bad} is outside 0 to {limit - 1}")


def _in_range(ids: Sequence[int], limit: int) -> bool:
    return min(ids) >= 0 and max(ids) < limit


def _wrong(message: str) -> DeviceError:
    return DeviceError(Fault.FORWARD, message)
