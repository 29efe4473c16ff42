"""Repetition, presence and frequency penalties, from what a device keeps of each slot's sequence.

    history  int32 [slots, positions]            the ids, as far as they are counted
    counts   int16 or int32 [slots, vocabulary]  how often each id was sampled; the prompt is not in it

Both follow from what a row knows, so they are neither handed over nor spilled. A row that continues what its slot has
counted adds its new ids; any other is counted anew, whatever happened to the slot or the sequence in between. A step
touches the ids in its rows' histories, not whole vocabularies.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from device.draws import Drawn, has_penalty
from device.upload import upload
from scheduler.contract import DeviceError, Fault
from scheduler.effects import NO_SLOT

Numbers: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"


@dataclass(frozen=True, slots=True)
class _Counted:
    """The first `length` ids of `known` are counted; the last may not be in there yet, if it was fed."""

    known: Sequence[int]
    prompt_tokens: int
    length: int

    def precedes(self, drawn: Drawn) -> bool:
        same = self.known is drawn.known and self.prompt_tokens == drawn.prompt_tokens
        return same and self.length <= drawn.end


class _Share(NamedTuple):
    """A row of the scores, its slot in the tables, and the first position of it that is not counted."""

    row: int
    slot: int
    start: int
    drawn: Drawn


class Penalties:
    """Penalties of one device. Memory is taken when the first row needs it.

    slots: how many sequences may have one; a row without is counted anew at each step. positions: the longest that a
    sequence can be.
    """

    def __init__(self, slots: int, vocabulary: int, positions: int, device: torch.device) -> None:
        self._slots = slots
        self._vocabulary = vocabulary
        self._positions = positions
        self._device = device
        self._tables: _Tables | None = None
        self._counted: dict[int, _Counted] = {}

    @torch.inference_mode()
    def apply(self, scores: Tensor, drawn: Sequence[Drawn], fed: Tensor | None = None) -> None:
        """Penalise the rows of `scores` whose draws ask for it, in place; the others are not touched.

        scores: float32 [rows, vocabulary]. Slots must be distinct. fed: int64 [rows], the newest id of each row that is
        fed; others are not read. Raises DeviceError(READBACK) for an id that is not in the vocabulary.
        """
        rows = [i for i, row in enumerate(drawn) if has_penalty(row.draw.params)]
        with_slot = [i for i in rows if drawn[i].slot != NO_SLOT]
        without = [i for i in rows if drawn[i].slot == NO_SLOT]
        if with_slot:
            self._apply_by_slot(scores, with_slot, drawn, fed)
        if without:
            shares = [_Share(row, slot, 0, drawn[row]) for slot, row in enumerate(without)]
            self._new_tables(len(without), max(drawn[row].position for row in without)).apply(scores, shares, fed)

    @torch.inference_mode()
    def zero(self, slot: int) -> None:
        """The sequence in `slot` is over, or leaves it. Nothing happens if it has no counts."""
        if self._counted.pop(slot, None) is not None and self._tables is not None:
            self._tables.zero(slot)

    @torch.inference_mode()
    def move(self, slot: int, target: int) -> None:
        """The sequence in `slot` goes on in `target`."""
        counted = self._counted.pop(slot, None)
        if counted is not None and self._tables is not None:
            self._tables.move(slot, target)
            self._counted[target] = counted

    def _apply_by_slot(self, scores: Tensor, rows: list[int], drawn: Sequence[Drawn], fed: Tensor | None) -> None:
        if self._tables is None:
            self._tables = self._new_tables(self._slots, self._positions)
        # Taken out until they are counted: what fails midway is counted anew.
        shares = [self._share(row, drawn[row], self._counted.pop(drawn[row].slot, None)) for row in rows]
        self._tables.apply(scores, shares, fed)
        for share in shares:
            own = share.drawn
            self._counted[own.slot] = _Counted(own.known, own.prompt_tokens, own.position)

    @staticmethod
    def _share(row: int, drawn: Drawn, counted: _Counted | None) -> _Share:
        start = counted.length if counted is not None and counted.precedes(drawn) else 0
        return _Share(row, drawn.slot, start, drawn)

    def _new_tables(self, slots: int, positions: int) -> "_Tables":
        return _Tables(slots, self._vocabulary, positions, self._device)


class _Tables:
    """The tensors, see the top of this file."""

    def __init__(self, slots: int, vocabulary: int, positions: int, device: torch.device) -> None:
        count_dtype = torch.int16 if positions <= torch.iinfo(torch.int16).max else torch.int32
        self.history = torch.zeros((slots, positions), dtype=torch.int32, device=device)
        self.counts = torch.zeros((slots, vocabulary), dtype=count_dtype, device=device)

    def zero(self, slot: int) -> None:
        for table in (self.history, self.counts):
            table[slot].zero_()

    def move(self, slot: int, target: int) -> None:
        for table in (self.history, self.counts):
            table[target].copy_(table[slot])

    def apply(self, scores: Tensor, shares: Sequence[_Share], fed: Tensor | None) -> None:
        """Count what is new, then penalise."""
        self._count_known(shares)
        self._count_fed(shares, fed)
        self._penalise(scores, shares)

    def _count_known(self, shares: Sequence[_Share]) -> None:
        new = [np.asarray(share.drawn.known[share.start : share.drawn.end], dtype=np.int64) for share in shares]
        self._check(shares, new)
        slots, positions, prompts = _spread(shares, [len(ids) for ids in new])
        ids, sampled = np.concatenate(new), positions >= prompts
        fresh = [share.slot for share in shares if share.start == 0]
        zeroed, slot, position, what, sampled_slot, sampled_id = upload(
            self.counts.device, fresh, slots, positions, ids, slots[sampled], ids[sampled]
        )
        self.counts.index_fill_(0, zeroed, 0)
        self._append(slot, position, what)
        self._add(sampled_slot, sampled_id)

    def _count_fed(self, shares: Sequence[_Share], fed: Tensor | None) -> None:
        fed_shares = [share for share in shares if share.drawn.fed]
        if not fed_shares:
            return
        if fed is None:
            raise ValueError(f"{fed_shares[0].drawn.request_id} is fed, and no fed ids are given")
        row, slot, position = upload(
            fed.device,
            [share.row for share in fed_shares],
            [share.slot for share in fed_shares],
            [share.drawn.end for share in fed_shares],
        )
        # An id that could not be drawn is negative: the step that failed to draw it fails, and this one with it.
        ids = fed.index_select(0, row).clamp(min=0)
        self._append(slot, position, ids)
        self._add(slot, ids)

    def _append(self, slots: Tensor, positions: Tensor, ids: Tensor) -> None:
        self.history.index_put_((slots, positions), ids.int())

    def _add(self, slots: Tensor, ids: Tensor) -> None:
        ones = torch.ones_like(ids, dtype=self.counts.dtype)
        self.counts.index_put_((slots, ids), ones, accumulate=True)

    def _check(self, shares: Sequence[_Share], ids: Sequence[Numbers]) -> None:
        """On CUDA an index that is out of range ends the process."""
        limit = self.counts.shape[1]
        for share, own in zip(shares, ids, strict=True):
            wrong = own[(own < 0) | (own >= limit)]
            if len(wrong):
                name = share.drawn.request_id
                raise DeviceError(Fault.READBACK, f"{name}: history token id {wrong[0]} is outside 0 to {limit - 1}")

    def _penalise(self, scores: Tensor, shares: Sequence[_Share]) -> None:
        """As vLLM does it (source: `apply_penalties` in vllm/model_executor/layers/utils.py)."""
        lengths = [share.drawn.position for share in shares]
        row, slot, length = upload(
            scores.device, [share.row for share in shares], [share.slot for share in shares], lengths
        )
        repetition, frequency, presence = _columns(shares, scores.device)
        ids = self._seen(slot, length, max(lengths))
        count = _at(self.counts, slot, ids)[0].float()
        values, places = _at(scores, row, ids)
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= frequency * count
        values -= presence * (count > 0)
        # An id that a row has seen several times is written several times, with one and the same value.
        scores.view(-1).index_copy_(0, places, values.view(-1))

    def _seen(self, slots: Tensor, lengths: Tensor, width: int) -> Tensor:
        """The ids in the histories, int64 [rows, width]; a shorter one is filled up with its first id."""
        ids = self.history[:, :width].index_select(0, slots).long()
        inside = torch.arange(width, device=ids.device) < lengths.unsqueeze(1)
        return ids.where(inside, ids[:, :1])


def _spread(shares: Sequence[_Share], counts: Sequence[int]) -> tuple[Numbers, Numbers, Numbers]:
    """Slot, position and number of prompt tokens for each of counts[i] new ids of shares[i], one after another."""
    slots = np.repeat([share.slot for share in shares], counts)
    prompts = np.repeat([share.drawn.prompt_tokens for share in shares], counts)
    positions = np.concatenate([np.arange(share.start, share.drawn.end) for share in shares])
    return slots, positions, prompts


def _at(table: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """table[rows[i], columns[i, j]], [rows, columns], and where these are in the table when it is flat.

    table: contiguous. A flat index is several times as fast as two on a CPU.
    """
    places = (columns + rows.unsqueeze(1) * table.shape[1]).view(-1)
    return table.view(-1).index_select(0, places).view(columns.shape), places


def _columns(shares: Sequence[_Share], device: torch.device) -> tuple[Tensor, ...]:
    """Repetition, frequency and presence penalties, each float32 [rows, 1]."""
    params = [share.drawn.draw.params for share in shares]
    lists = (
        [own.repetition_penalty for own in params],
        [own.frequency_penalty for own in params],
        [own.presence_penalty for own in params],
    )
    return tuple(column.unsqueeze(1) for column in upload(device, *lists, dtype=np.float32))
