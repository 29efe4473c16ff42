"""The adapters of one forward call: which of its tokens run under which, and what that adds to a layer's output."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor
from torch.nn.functional import linear

from device.batch import Span
from device.lora_folder import Adapter
from device.upload import upload
from scheduler.contract import Row


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """Which adapter each token of one forward call runs under, None for the base model.

    tokens: (adapter, how many tokens) for each row, in the order in which the tokens lie in the call's input when its
    [batch, positions] are flattened. drawn: the adapter of each token whose logits are computed, in their order.
    """

    tokens: tuple[tuple[str | None, int], ...]
    drawn: tuple[str | None, ...]

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.tokens if name is not None}


def layout_of(rows: Sequence[Row], counts: Sequence[int]) -> AdapterLayout:
    """Of a call with counts[i] tokens of rows[i], one row after the other, and the logits of the rows with a draw."""
    return AdapterLayout(
        tokens=tuple((row.adapter, count) for row, count in zip(rows, counts, strict=True)),
        drawn=tuple(row.adapter for row in rows if row.draw is not None),
    )


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the tokens of each adapter are among those that a layer is given.

    total: tokens given. order: int64 [tokens with an adapter] on the device, which to take, adapter by adapter; None
    when each adapter's tokens are neighbours as they are given. of: the part of each adapter in what was taken.
    """

    total: int
    order: Tensor | None
    of: Mapping[str, slice]


class AdapterStep:
    """One forward call of the model with adapters. unseen: adapted layers that the model has not called yet.

    head: the name of the output layer, which is given the tokens whose logits are computed.
    """

    def __init__(
        self, layout: AdapterLayout, adapters: Mapping[str, Adapter], head: str | None, device: torch.device
    ) -> None:
        self._changed = frozenset(name for adapter in adapters.values() for name in adapter.layers)
        self.unseen = set(self._changed)
        self._adapters, self._head, self._device = adapters, head, device
        self._given = _places(layout.tokens, device)
        self._drawn = _places([(name, 1) for name in layout.drawn] if head in self._changed else [], device)
        starts = accumulate((count for _, count in layout.tokens), initial=0)
        self._run_at = dict(zip(starts, layout.tokens, strict=False))
        self._parts: dict[tuple[int, ...], _Places] = {}

    @contextmanager
    def only(self, spans: Sequence[Span]) -> Iterator[None]:
        """Layers that are called inside are given the tokens of these rows of the layout alone, in this order."""
        whole, offsets = self._given, tuple(span.offset for span in spans)
        if offsets not in self._parts:
            self._parts[offsets] = _places([self._run_at[offset] for offset in offsets], self._device)
        self._given = self._parts[offsets]
        try:
            yield
        finally:
            self._given = whole

    def add(self, name: str, given: Tensor, out: Tensor) -> None:
        """Add to `out` [..., outputs] what the adapters make of `given` [..., inputs] in layer `name`, if anything."""
        if name not in self._changed:
            return
        places = self._drawn if name == self._head else self._given
        x, y = given.reshape(-1, given.shape[-1]), out.view(-1, out.shape[-1])
        if len(x) != places.total:
            raise ValueError(f"{name} is given {len(x)} of {places.total} tokens, so its adapter cannot be applied")
        taken, sums = (t if places.order is None else t.index_select(0, places.order) for t in (x, y))
        for adapter, part in places.of.items():
            layer = self._adapters[adapter].layers.get(name)
            if layer is not None:
                sums[part].addmm_(linear(taken[part], layer.down), layer.up, alpha=layer.scaling)
        if places.order is not None:
            y.index_copy_(0, places.order, sums)
        self.unseen.discard(name)


def only(step: AdapterStep | None, spans: Sequence[Span]) -> AbstractContextManager[None]:
    """See AdapterStep.only; without adapters nothing happens."""
    return nullcontext() if step is None else step.only(spans)


def _places(runs: Sequence[tuple[str | None, int]], device: torch.device) -> _Places:
    spans: dict[str, list[range]] = {}
    offset = 0
    for name, count in runs:
        if name is not None and count:
            own = spans.setdefault(name, [])
            start = own.pop().start if own and own[-1].stop == offset else offset
            own.append(range(start, offset + count))
        offset += count
    if all(len(own) == 1 for own in spans.values()):
        return _Places(offset, None, {name: slice(own.start, own.stop) for name, (own,) in spans.items()})
    taken = {name: list(chain.from_iterable(own)) for name, own in spans.items()}
    (order,) = upload(device, list(chain.from_iterable(taken.values())))
    ends = accumulate(len(own) for own in taken.values())
    return _Places(
        offset, order, {name: slice(end - len(taken[name]), end) for name, end in zip(taken, ends, strict=True)}
    )
