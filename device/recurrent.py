"""Recurrent layers over the slots: Mamba-2, gated delta nets, and what else speaks transformers' cache interface.

A recurrent layer of transformers takes `cache=`, asks it for the layer's convolution and recurrent state, and puts the
new ones there. It keeps its weights and its code; we replace what stands around it. The model is called with
`recurrent=<RecurrentStep>`, which, like `paged=`, is handed down to every layer, and the layer's `forward` cuts our
pack of rows into calls that the layer understands: one call [sequences, 1] for all rows of one token, and a call
[1, tokens] for each longer row. What a call sees as its cache are the states in the slots of its rows, which it changes
in place; a row that goes on from a state and one that begins from zeros are the same to it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from device.batch import Span
from device.errors import ModelUnsupported
from device.lora_step import AdapterStep, only
from device.state import UNKNOWN, SlotState, SlotTensor
from device.upload import upload
from scheduler.contract import DeviceError, Fault, Row

Mixer: TypeAlias = Callable[..., Tensor]
"""A recurrent layer's own forward: hidden states [sequences, tokens, hidden] and a cache in, the same shape out."""


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """What one recurrent layer keeps per sequence.

    layer: its index in the model. convolution: [channels, kernel size], the inputs of its newest tokens.
    recurrent: its recurrent state, in whatever shape the layer uses.
    """

    layer: int
    convolution: SlotTensor
    recurrent: SlotTensor


class LayerCache:
    """The cache of one call of one recurrent layer (source: `transformers.Cache` 5.24, as such layers use it).

    convolution, recurrent: the states of the call's sequences, [sequences, ...]. They are changed in place, by the
    layer's kernels as well as here.
    """

    def __init__(self, convolution: Tensor, recurrent: Tensor) -> None:
        self._convolution = convolution
        self._recurrent = recurrent

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self._convolution

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self._recurrent

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Take in inputs [sequences, channels, tokens]; returns them behind those that were there."""
        inputs = torch.cat([self._convolution, conv_states], dim=-1)
        self._convolution.copy_(inputs[..., -self._convolution.shape[-1] :])
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        return self._recurrent.copy_(recurrent_states)


class RecurrentRun(Protocol):
    """How the recurrent layers of one call of a model are run."""

    def run(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
        """hidden: [1, tokens, hidden], a pack of rows. Returns the same shape."""
        ...


def route_mixer(mixer: Any) -> None:
    """Replace the forward of a recurrent layer, in place, by one that runs through `recurrent=<RecurrentRun>`."""
    own: Mixer = mixer.forward
    layer: int = mixer.layer_idx

    def forward(hidden_states: Tensor, *, recurrent: RecurrentRun | None = None, **_: Any) -> Tensor:
        if recurrent is None:
            raise ModelUnsupported(f"the decoder layer around {type(mixer).__name__} {layer} hands no arguments down")
        return recurrent.run(layer, own, hidden_states)

    mixer.forward = forward


def check_counts(rows: Sequence[Row], spans: Sequence[Span], state: SlotState) -> None:
    """Raise DeviceError(FORWARD) for a row that does not go on where the state in its slot ends.

    A recurrent state takes in each token once and cannot be rewound, so anything else gives wrong answers.
    """
    for row, span in zip(rows, spans, strict=True):
        if span.start and (count := state.count(span.slot, span.start)) != span.start:
            held = "was in a step that failed" if count == UNKNOWN else f"has seen {count} tokens"
            raise DeviceError(
                Fault.FORWARD,
                f"{row.request_id}: its row begins at position {span.start}, the state in slot {span.slot} {held}",
            )


class RecurrentStep:
    """See RecurrentRun; for the rows of one step, whose slots must be distinct.

    From here to `finish` the slots' records are void, as they stay if the step fails. adapters: the step's.
    """

    def __init__(self, state: SlotState, spans: Sequence[Span], adapters: AdapterStep | None = None) -> None:
        self._state = state
        self._adapters = adapters
        self._slots = [span.slot for span in spans]
        self._counts = [span.length for span in spans]
        self._chunks = [span for span in spans if span.count > 1]
        # By slot: often that makes them neighbours in memory.
        singles = sorted((span for span in spans if span.count == 1), key=lambda span: span.slot)
        self._singles = _Singles(singles, state.device, adapters) if singles else None
        state.begin_step(self._slots, [span.slot for span in spans if span.start == 0])

    def run(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
        convolution = self._state.tensor(convolution_name(layer))
        recurrent = self._state.tensor(recurrent_name(layer))
        out = torch.empty_like(hidden)
        if self._singles is not None:
            self._singles.run(mixer, convolution, recurrent, hidden[0], out[0])
        for span in self._chunks:
            part, slot = slice(span.offset, span.offset + span.count), slice(span.slot, span.slot + 1)
            cache = LayerCache(convolution[slot], recurrent[slot])
            with only(self._adapters, [span]):
                out[:, part] = mixer(hidden_states=hidden[:, part], cache=cache)
        return out

    def finish(self) -> None:
        """The step is through: its slots hold the states after its rows."""
        self._state.end_step(self._slots, self._counts)


class _Singles:
    """The rows of one token, in the order of their slots."""

    def __init__(self, spans: Sequence[Span], device: torch.device, adapters: AdapterStep | None) -> None:
        self._spans = spans
        self._adapters = adapters
        slots = [span.slot for span in spans]
        self._slots, self._offsets = upload(device, slots, [span.offset for span in spans])
        self._neighbours = slice(slots[0], slots[-1] + 1) if slots[-1] - slots[0] == len(slots) - 1 else None

    def run(self, mixer: Mixer, convolution: Tensor, recurrent: Tensor, hidden: Tensor, out: Tensor) -> None:
        """convolution, recurrent: [slots, ...]; hidden: [tokens of all rows, hidden]; our part of `out` is written."""
        if self._neighbours is not None:
            states = [convolution[self._neighbours], recurrent[self._neighbours]]
        else:
            states = [tensor.index_select(0, self._slots) for tensor in (convolution, recurrent)]
        with only(self._adapters, self._spans):
            mine = mixer(hidden_states=hidden.index_select(0, self._offsets).unsqueeze(1), cache=LayerCache(*states))
        out.index_copy_(0, self._offsets, mine[:, 0])
        if self._neighbours is None:
            for tensor, changed in zip((convolution, recurrent), states, strict=True):
                tensor.index_copy_(0, self._slots, changed)


def convolution_name(layer: int) -> str:
    return f"convolution.{layer}"


def recurrent_name(layer: int) -> str:
    return f"recurrent.{layer}"
