"""Whether a plan can run, asked before the device is touched: a bad plan must not write into another's blocks."""

from collections.abc import Sequence

from scheduler.contract import Decode, DeviceError, DeviceFacts, Draw, Fault, Row, StepPlan


def check_plan(plan: StepPlan, facts: DeviceFacts) -> None:
    """Raise DeviceError(FORWARD) with the first thing that is wrong."""
    if not plan.rows:
        raise _wrong("the plan has no rows")
    written: dict[int, str] = {}
    for row in plan.rows:
        if isinstance(plan, Decode) and row.count != 1:
            raise _wrong(f"{row.request_id}: a decode row has one token, this one has {row.count}")
        _check_row(row, facts)
        if row.draw is not None:
            _check_draw(row, row.draw, facts.vocab_size)
        for block in row.blocks[row.start // facts.block_size : _blocks_used(row, facts)]:
            if block in written:
                raise _wrong(f"{row.request_id} and {written[block]} would both write block {block}")
            written[block] = row.request_id


def _check_row(row: Row, facts: DeviceFacts) -> None:
    if row.count < 1:
        raise _wrong(f"{row.request_id}: the row has no tokens")
    end = row.end
    if row.start < 0 or end > facts.max_model_len:
        raise _wrong(f"{row.request_id}: positions {row.start} to {end - 1} leave 0 to {facts.max_model_len - 1}")
    if end > len(row.known):
        raise _wrong(f"{row.request_id}: the row ends at position {end}, {len(row.known)} tokens are known")
    used = _blocks_used(row, facts)
    if used > len(row.blocks):
        raise _wrong(f"{row.request_id}: {end} positions need {used} blocks, the table has {len(row.blocks)}")
    _check_ids(row, "block", row.blocks[:used], facts.total_blocks)
    _check_ids(row, "token", row.tokens, facts.vocab_size)


def _blocks_used(row: Row, facts: DeviceFacts) -> int:
    return -(-row.end // facts.block_size)


def _check_draw(row: Row, draw: Draw, vocab_size: int) -> None:
    params = draw.params
    if row.end != len(row.known):
        raise _wrong(f"{row.request_id}: the token at position {row.end} is drawn, but it is known")
    in_range = params.temperature >= 0 and 0 < params.top_p <= 1 and params.top_k >= 0
    if not in_range or not params.repetition_penalty > 0:
        raise _wrong(f"{row.request_id}: sampling parameters out of range: {params}")
    if draw.suppress:
        _check_ids(row, "suppressed token", tuple(draw.suppress), vocab_size)
    if params.repetition_penalty != 1:
        _check_ids(row, "history token", row.history, vocab_size)


def _check_ids(row: Row, what: str, ids: Sequence[int], limit: int) -> None:
    if min(ids) < 0 or max(ids) >= limit:
        bad = next(i for i in ids if not 0 <= i < limit)
        raise _wrong(f"{row.request_id}: {what} id {bad} is outside 0 to {limit - 1}")


def _wrong(message: str) -> DeviceError:
    return DeviceError(Fault.FORWARD, message)
