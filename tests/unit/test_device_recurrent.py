"""Rows of a step through a recurrent layer that is simple enough to be written out."""

import random
from typing import Any

import pytest
import torch
from rows import make_row
from torch import Tensor, nn

from device.batch import pack
from device.errors import ModelUnsupported
from device.recurrent import LayerCache, RecurrentStep, check_counts, convolution_name, recurrent_name, route_mixer
from device.state import UNKNOWN, SlotLayout, SlotState, SlotTensor
from scheduler.contract import DeviceError, Fault, Row

WIDTH, KERNEL, SLOTS, LAYER = 3, 2, 7, 5


class Decay(nn.Module):
    """state = 0.5 * state + x; out = state + 10 * the input before x. Notes the shapes that it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_idx = LAYER
        self.calls: list[tuple[int, int]] = []

    def forward(self, hidden_states: Tensor, cache: Any) -> Tensor:
        count = hidden_states.shape[1]
        self.calls.append(tuple(hidden_states.shape[:2]))
        inputs = cache.update_conv_state(hidden_states.transpose(1, 2), LAYER, conv_kernel_size=KERNEL)
        before = inputs[..., :-1][..., -count:].transpose(1, 2)
        state, states = cache.get_recurrent_state(LAYER, state_idx=0), []
        for step in range(count):
            state = 0.5 * state + hidden_states[:, step]
            states.append(state)
        cache.update_recurrent_state(state, LAYER)
        return torch.stack(states, dim=1) + 10 * before


def expected(inputs: Tensor) -> Tensor:
    """inputs: [tokens, WIDTH] of a whole sequence."""
    state, before, out = torch.zeros(WIDTH), torch.zeros(WIDTH), []
    for x in inputs:
        state = 0.5 * state + x
        out.append(state + 10 * before)
        before = x
    return torch.stack(out)


@pytest.fixture
def state() -> SlotState:
    layout = SlotLayout(
        [
            SlotTensor(convolution_name(LAYER), (WIDTH, KERNEL), torch.float32),
            SlotTensor(recurrent_name(LAYER), (WIDTH,), torch.float32),
        ]
    )
    return SlotState(layout, torch.zeros((SLOTS, layout.slot_bytes), dtype=torch.uint8), 0)


@pytest.fixture
def layer() -> Decay:
    made = Decay()
    route_mixer(made)
    return made


def row(start: int, count: int, slot: int) -> Row:
    made = make_row(f"r{slot}", [0] * count, start, range(20))
    made.slot = slot
    return made


def step(state: SlotState, rows: list[Row]) -> RecurrentStep:
    batch = pack(rows, 4, torch.device("cpu"))
    check_counts(rows, batch.spans, state)
    return RecurrentStep(state, batch.spans)


@pytest.mark.parametrize("seed", range(6))
def test_each_row_goes_on_from_its_own_state(state: SlotState, layer: Decay, seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    slots = rng.sample(range(SLOTS), 5)
    inputs = {slot: torch.randn(14, WIDTH, generator=generator) for slot in slots}
    outputs: dict[int, list[Tensor]] = {slot: [] for slot in slots}
    done = dict.fromkeys(slots, 0)
    state.tensor(recurrent_name(LAYER)).fill_(99)  # what others left in the slots
    while unfinished := [slot for slot in slots if done[slot] < 14]:
        company = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        counts = [rng.choice([1, 1, rng.randint(1, 14 - done[slot])]) for slot in company]
        rows = [row(done[slot], count, slot) for slot, count in zip(company, counts, strict=True)]
        running = step(state, rows)
        parts = [inputs[slot][done[slot] :][:count] for slot, count in zip(company, counts, strict=True)]
        out = layer(hidden_states=torch.cat(parts).unsqueeze(0), recurrent=running)
        running.finish()
        for slot, part in zip(company, out[0].split(counts), strict=True):
            outputs[slot].append(part)
            done[slot] += len(part)
            assert state.count(slot) == done[slot]
    for slot in slots:
        torch.testing.assert_close(torch.cat(outputs[slot]), expected(inputs[slot]))


def test_rows_of_one_token_share_a_call(state: SlotState, layer: Decay) -> None:
    rows = [row(0, 1, 3), row(0, 4, 0), row(0, 1, 6), row(0, 1, 1), row(0, 2, 5)]
    layer(hidden_states=torch.zeros(1, 9, WIDTH), recurrent=step(state, rows))
    assert layer.calls == [(3, 1), (1, 4), (1, 2)]


def test_a_layer_that_fails_leaves_its_slots_void(state: SlotState, layer: Decay) -> None:
    running = step(state, [row(0, 2, 4)])
    with pytest.raises(RuntimeError):
        layer(hidden_states=torch.zeros(1, 2, WIDTH + 1), recurrent=running)
    assert state.count(4) == UNKNOWN
    with pytest.raises(DeviceError, match="the state in slot 4 was in a step that failed") as caught:
        step(state, [row(2, 1, 4)])
    assert caught.value.fault is Fault.FORWARD
    step(state, [row(0, 1, 4)]).finish()
    assert state.count(4) == 1


@pytest.mark.parametrize("start", [1, 2, 4])
def test_a_row_must_begin_where_its_state_ends(state: SlotState, start: int) -> None:
    step(state, [row(0, 3, 2)]).finish()
    with pytest.raises(DeviceError, match=f"r2: its row begins at position {start}, .* slot 2 has seen 3 tokens"):
        step(state, [row(0, 1, 1), row(start, 1, 2)])
    assert (state.count(1), state.count(2)) == (0, 3)


def test_the_cache_keeps_the_newest_inputs() -> None:
    convolution, recurrent = torch.arange(6.0).view(1, 2, 3), torch.zeros(1, 4)
    cache = LayerCache(convolution, recurrent)
    assert cache.get_conv_state(0) is convolution
    seen = cache.update_conv_state(torch.tensor([[[7.0, 8.0], [9.0, 10.0]]]), 0, conv_kernel_size=3)
    assert seen.tolist() == [[[0, 1, 2, 7, 8], [3, 4, 5, 9, 10]]]
    assert convolution.tolist() == [[[2, 7, 8], [5, 9, 10]]]
    cache.update_recurrent_state(torch.ones(1, 4, dtype=torch.float64), 0)
    assert recurrent.tolist() == [[1, 1, 1, 1]]
    assert not cache.is_recording_past(0)


def test_a_layer_that_gets_no_arguments_cannot_be_run(layer: Decay) -> None:
    with pytest.raises(ModelUnsupported, match="around Decay 5 hands no arguments down"):
        layer(hidden_states=torch.zeros(1, 1, WIDTH))
