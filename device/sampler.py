"""Drawing the next tokens of a step from its logits.

The filters are cut-offs on probabilities and the draw runs in the order of token ids, so equal logits cannot be told
apart by the order in which a sort left them: a row's token depends on its own logits, past and Draw alone.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from scheduler.contract import Draw, Row
from scheduler.request import SamplingParams

Drawn: TypeAlias = tuple[Row, Draw]
"""A row and its draw."""

HEAD = 1024
"""How many of the likeliest tokens are looked at before a row is sorted in full."""
_NO_TOKEN = -1
_KEY_MASK = (1 << 64) - 1


class NotFiniteError(ArithmeticError):
    """No token can be drawn: the logits of row `row` hold a NaN, or nothing but minus infinity."""

    def __init__(self, row: int) -> None:
        super().__init__(f"row {row} of the logits is not finite")
        self.row = row


def draw_tokens(logits: Tensor, drawn: Sequence[Drawn]) -> list[int]:
    """One token per row. logits: [rows, vocabulary], any float dtype, not modified. Raises NotFiniteError."""
    if not drawn:
        return []
    changed = [i for i, (_, draw) in enumerate(drawn) if _changes_logits(draw)]
    sampled = [i for i, (_, draw) in enumerate(drawn) if not draw.params.is_greedy]
    tokens = _likeliest(logits)
    if changed or sampled:
        _redraw(tokens, logits, drawn, sorted({*changed, *sampled}))
    ids: list[int] = tokens.tolist()
    if _NO_TOKEN in ids:
        raise NotFiniteError(ids.index(_NO_TOKEN))
    return ids


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that belongs to (seed, position), on any machine."""
    return float(np.random.Generator(np.random.Philox(key=seed & _KEY_MASK, counter=position)).random())


def _changes_logits(draw: Draw) -> bool:
    return bool(draw.suppress) or draw.params.repetition_penalty != 1.0


def _likeliest(logits: Tensor) -> Tensor:
    # `max` is several times as fast as `argmax` on a CPU; both answer the first of equals.
    best, ids = logits.max(dim=-1)
    return torch.where(best > float("-inf"), ids, _NO_TOKEN)


def _redraw(tokens: Tensor, logits: Tensor, drawn: Sequence[Drawn], rows: list[int]) -> None:
    """Put right the rows for which the plain maximum is not the answer."""
    own = [drawn[i] for i in rows]
    index = torch.tensor(rows, device=logits.device)
    adjusted = logits[index].float()
    for scores, (row, draw) in zip(adjusted, own, strict=True):
        _penalise(scores, row, draw)
    tokens[index] = _likeliest(adjusted)
    sampled = [i for i, (_, draw) in enumerate(own) if not draw.params.is_greedy]
    if sampled:
        chosen = torch.tensor(sampled, device=logits.device)
        tokens[index[chosen]] = _sample(adjusted[chosen], [own[i] for i in sampled])


def _penalise(scores: Tensor, row: Row, draw: Draw) -> None:
    """In place. scores: [vocabulary]. A penalty divides a positive one and multiplies a negative one, once per id."""
    penalty = draw.params.repetition_penalty
    if penalty != 1.0:
        seen = torch.tensor(sorted(set(row.history)), device=scores.device)
        before = scores[seen]
        scores[seen] = torch.where(before > 0, before / penalty, before * penalty)
    if draw.suppress:
        scores[torch.tensor(sorted(draw.suppress), device=scores.device)] = float("-inf")


def _sample(logits: Tensor, drawn: Sequence[Drawn]) -> Tensor:
    """logits: float32 [rows, vocabulary]. Returns int64 [rows]."""
    params = [draw.params for _, draw in drawn]
    temperature = _column([own.temperature for own in params], logits.device)
    probs = (logits.double() / temperature).softmax(dim=-1)
    filtered = [i for i, own in enumerate(params) if _filters(own, probs.shape[-1])]
    if filtered:
        index = torch.tensor(filtered, device=logits.device)
        kept = probs[index]
        cut = _cutoffs(kept, [params[i] for i in filtered])
        probs[index] = kept.where(kept >= cut, 0.0)
    numbers = [uniform(draw.params.seed, row.end) for row, draw in drawn]
    return _invert(probs, _column(numbers, logits.device))


def _filters(params: SamplingParams, vocabulary: int) -> bool:
    return 0 < params.top_k < vocabulary or params.top_p < 1.0


def _cutoffs(probs: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The smallest probability that top-k, then top-p of what top-k kept, let pass. Returns [rows, 1]."""
    vocabulary = probs.shape[-1]
    top_k = _column([own.top_k or vocabulary for own in params], probs.device).long().clamp(max=vocabulary)
    top_p = _column([own.top_p for own in params], probs.device)
    cut, settled = _cutoffs_in_head(probs, top_k, top_p, min(HEAD, vocabulary))
    rest = (~settled).nonzero()[:, 0]
    if len(rest):
        cut[rest], _ = _cutoffs_in_head(probs[rest], top_k[rest], top_p[rest], vocabulary)
    return cut


def _cutoffs_in_head(probs: Tensor, top_k: Tensor, top_p: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Cut-offs [rows, 1] from the `width` likeliest tokens, and for which rows these are enough, bool [rows]."""
    head = probs.topk(width, dim=-1).values
    mass = head.cumsum(dim=-1)
    last_k = top_k.clamp(max=width) - 1
    k_is_off = top_k == probs.shape[-1]
    wanted = top_p * torch.where(k_is_off, 1.0, mass.gather(1, last_k))
    # The token that brings the mass to `wanted` is kept too: the last one with less than that before it.
    last_p = (mass - head < wanted).sum(dim=-1, keepdim=True) - 1
    last = torch.where(top_p < 1.0, torch.minimum(last_k, last_p), last_k).clamp(min=0)
    settled = (top_k <= width) | (k_is_off & (mass[:, -1:] >= wanted))
    return head.gather(1, last), settled[:, 0]


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The token under which each uniform number falls. weights: [rows, vocabulary], need not sum to one.

    A number below 1 times the total rounds to less than the total, so a token is always found.
    """
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, uniforms * total, right=True)
    return torch.where(total > 0, ids, _NO_TOKEN)[:, 0]


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device).unsqueeze(1)
