"""Drawing the next tokens of a step from its logits.

The filters are cut-offs on probabilities and the draw runs in the order of token ids, so equal logits cannot be told
apart by the order in which a sort left them: a row's token depends on its own logits, past and Draw alone.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from device.draws import Drawn, has_penalty
from device.penalties import Penalties
from device.upload import upload
from scheduler.request import SamplingParams

HEAD = 1024
"""How many of the likeliest tokens are looked at before a row is sorted in full."""
NO_TOKEN = -1
"""Stands for the token of a row whose logits hold a NaN, or nothing but minus infinity."""
_KEY_MASK = (1 << 64) - 1


def draw_ids(logits: Tensor, drawn: Sequence[Drawn], penalties: Penalties, fed: Tensor | None = None) -> Tensor:
    """One token per row, int64 [rows] on the device of the logits, NO_TOKEN where none can be drawn.

    logits: [rows, vocabulary], any float dtype, not modified. fed: int64 [rows], the newest id of each row that is fed;
    others are not read. Raises DeviceError(READBACK), see `Penalties.apply`.
    """
    special = [i for i, row in enumerate(drawn) if not _is_plain(row)]
    ids = _likeliest(logits)
    if special:
        _redraw(ids, logits, drawn, special, penalties, fed)
    return ids


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that belongs to (seed, position), on any machine."""
    return float(np.random.Generator(np.random.Philox(key=seed & _KEY_MASK, counter=position)).random())


def _is_plain(row: Drawn) -> bool:
    """Whether the likeliest token is the answer."""
    params = row.draw.params
    return params.is_greedy and not row.draw.suppress and not has_penalty(params)


def _likeliest(logits: Tensor) -> Tensor:
    # `max` is several times as fast as `argmax` on a CPU; both answer the first of equals.
    best, ids = logits.max(dim=-1)
    return torch.where(best > float("-inf"), ids, NO_TOKEN)


def _redraw(
    ids: Tensor, logits: Tensor, drawn: Sequence[Drawn], rows: list[int], penalties: Penalties, fed: Tensor | None
) -> None:
    """Put right the rows for which the plain maximum is not the answer."""
    own = [drawn[i] for i in rows]
    (index,) = upload(logits.device, rows)
    scores = logits.index_select(0, index).float()
    _adjust(scores, own, penalties, None if fed is None else fed[index])
    ids[index] = _likeliest(scores)
    sampled = [i for i, row in enumerate(own) if not row.draw.params.is_greedy]
    if sampled:
        (chosen,) = upload(logits.device, sampled)
        ids[index[chosen]] = _sample(scores[chosen], [own[i] for i in sampled])


def _adjust(scores: Tensor, drawn: Sequence[Drawn], penalties: Penalties, fed: Tensor | None) -> None:
    """Penalties, then what is suppressed, in place. scores: float32 [rows, vocabulary]."""
    penalties.apply(scores, drawn, fed)
    suppressed = [(i, token) for i, row in enumerate(drawn) for token in row.draw.suppress]
    if suppressed:
        row, token = upload(scores.device, *zip(*suppressed, strict=True))
        scores.index_put_((row, token), scores.new_full((), float("-inf")))


def _sample(logits: Tensor, drawn: Sequence[Drawn]) -> Tensor:
    """logits: float32 [rows, vocabulary]. Returns int64 [rows]."""
    params = [row.draw.params for row in drawn]
    temperature = _column([own.temperature for own in params], logits.device)
    probs = (logits.double() / temperature).softmax(dim=-1)
    filtered = [i for i, own in enumerate(params) if _filters(own, probs.shape[-1])]
    if filtered:
        (index,) = upload(logits.device, filtered)
        kept = probs[index]
        cut = _cutoffs(kept, [params[i] for i in filtered])
        probs[index] = kept.where(kept >= cut, 0.0)
    numbers = [uniform(row.draw.params.seed, row.position) for row in drawn]
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
    return torch.where(total > 0, ids, NO_TOKEN)[:, 0]


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return upload(device, values, dtype=np.float64)[0].unsqueeze(1)
