"""One step of a model, in the stages that a router puts in order: pack, feed, forward, draw, read. No tickets here.

`pack` works on the host and may run while an earlier step computes: it notes of the rows what may change until the
device comes to them, and looks at nothing that a step changes. `feed`, `forward` and `draw` run on the device, in the
order of the launches, and wait for nothing but it. `read` takes the drawn ids as the host got them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from device.attention import AttentionBackend, AttentionStep, NumberedLayers
from device.batch import Batch, pack
from device.draws import Drawn
from device.kv_pool import KvPool
from device.layer_watch import LayerTeller
from device.loading import LoadedModel
from device.lora import AdapterTable
from device.lora_step import AdapterStep, layout_of
from device.penalties import Penalties
from device.recurrent import RecurrentStep, check_counts
from device.sampler import NO_TOKEN, draw_ids
from device.state import SlotState
from scheduler.contract import DeviceError, DeviceFacts, Fault, LayerWatch, Row


@dataclass(slots=True)
class StepInput:
    """A step's rows, ready for the device. drawn: the rows with a draw, in their order.

    fed: for a fed step, once it was fed, the id that each row computes, int64 [rows].
    """

    rows: Sequence[Row]
    batch: Batch
    attention: AttentionStep
    adapters: AdapterStep | None
    drawn: list[Drawn]
    fed: Tensor | None = None


class ModelRunner:
    """A model over its KV pool and its slots. Failures are DeviceError(FORWARD | READBACK).

    A failed step leaves the recurrent state in the slots of its rows void; the next row on such a slot fails too, until
    the slot is released.
    """

    def __init__(
        self, model: LoadedModel, pool: KvPool, state: SlotState, backend: AttentionBackend, facts: DeviceFacts
    ) -> None:
        self.device = model.device
        self.pool = pool
        self.adapters = AdapterTable(model.module, model.device, model.dtype)
        self._module = model.module
        self._attention_layers = model.attention_layers
        self._recurrent = bool(model.recurrent)
        self._state = state
        self._backend = backend
        self._facts = facts
        self._penalties = Penalties(facts.slots, facts.vocab_size, facts.max_model_len, model.device)
        state.follow(self._penalties)
        self._teller = LayerTeller(model.device)

    def close(self) -> None:
        self._teller.close()

    @torch.inference_mode()
    def pack(self, rows: Sequence[Row], drawn: list[Drawn] | None = None, watch: LayerWatch | None = None) -> StepInput:
        """The rows must have passed `check_plan`. drawn: their draws, unless these are their own."""
        if drawn is None:
            drawn = [Drawn.of(row, row.draw) for row in rows if row.draw is not None]
        try:
            batch = pack(rows, self._facts.block_size, self.device)
            attention = self._backend.plan(self.pool, batch)
        except Exception as error:
            raise _forward_failed(error) from error
        if watch is not None:
            attention = self._teller.watched(attention, watch)
        if self._recurrent:
            attention = NumberedLayers(attention, self._attention_layers)
        adapters = self.adapters.plan(layout_of(rows, [span.count for span in batch.spans]))
        return StepInput(rows, batch, attention, adapters, drawn)

    @torch.inference_mode()
    def feed(self, step: StepInput, ids: Tensor, places: Tensor) -> None:
        """Row i computes ids[places[i]]; both int64, on the device.

        An id that could not be drawn is replaced: the step that failed to draw it fails, and all of its rows with it.
        """
        step.fed = ids.index_select(0, places).clamp(min=0)
        step.batch.token_ids[0].copy_(step.fed)

    @torch.inference_mode()
    def forward(self, step: StepInput) -> Tensor:
        """Compute the rows' KV; returns the logits of the rows with a draw, [rows with a draw, vocabulary]."""
        batch = step.batch
        if self._recurrent:
            check_counts(step.rows, batch.spans, self._state)
        try:
            recurrent = RecurrentStep(self._state, batch.spans, step.adapters) if self._recurrent else None
            with self.adapters.applied(step.adapters):
                out = self._module(
                    input_ids=batch.token_ids,
                    position_ids=batch.positions,
                    use_cache=False,
                    logits_to_keep=batch.drawn,
                    paged=step.attention,
                    **({} if recurrent is None else {"recurrent": recurrent}),
                )
            if recurrent is not None:
                recurrent.finish()
        except Exception as error:
            raise _forward_failed(error) from error
        logits: Tensor = out.logits[0]
        return logits

    @torch.inference_mode()
    def draw(self, step: StepInput, logits: Tensor) -> Tensor:
        """The drawn ids, int64 [rows with a draw] on the device; NO_TOKEN where the logits are not finite."""
        try:
            return draw_ids(logits, step.drawn, self._penalties, step.fed)
        except DeviceError:
            raise
        except RuntimeError as error:
            raise DeviceError(Fault.READBACK, f"{type(error).__name__}: {error}") from error

    def read(self, step: StepInput, ids: Sequence[int]) -> tuple[int | None, ...]:
        """The step's tokens by row. ids: what `draw` answered. A row without a finite logit fails the step."""
        if NO_TOKEN in ids:
            self.scrub(step)
            request_id = step.drawn[ids.index(NO_TOKEN)].request_id
            raise DeviceError(Fault.READBACK, f"{request_id}: its logits are not finite; the model overflowed")
        if len(ids) == len(step.rows):
            return tuple(ids)
        tokens = iter(ids)
        return tuple(None if row.draw is None else next(tokens) for row in step.rows)

    @torch.inference_mode()
    def scrub(self, step: StepInput) -> None:
        """A masked NaN still spoils a sum, so none may stay behind in blocks that others will own.

        A slot may keep it: its record is void, and nobody reads it before it is zeroed.
        """
        if self._recurrent:
            self._state.void([span.slot for span in step.batch.spans])
        size = self._facts.block_size
        used = {block for span in step.batch.spans for block in span.blocks[: -(-span.length // size)]}
        self.pool.scrub(sorted(used))


def _forward_failed(error: Exception) -> DeviceError:
    return DeviceError(Fault.FORWARD, f"{type(error).__name__}: {error}")
