"""The synchronous router: each step is complete when `launch` returns. The reference for all other routers."""

from collections.abc import Sequence
from pathlib import Path

import structlog
import torch
from torch import Tensor

import device.torch_attention  # noqa: F401 (registers the "torch" back end)
from device.attention import AttentionBackend, attention_backend
from device.batch import pack
from device.effects import EffectApplier
from device.errors import DeviceSetupError
from device.kv_pool import KvGeometry, KvPool
from device.loading import LoadedModel, dtype_name, load_model
from device.plan_check import check_plan
from device.sampler import NotFiniteError, draw_tokens
from device.spill import SpillStore, open_store
from scheduler.contract import (
    DeviceError,
    DeviceFacts,
    DeviceIo,
    Effect,
    EffectOutcome,
    Fault,
    Row,
    StepPlan,
    StepResult,
    Ticket,
)

CPU_KV_BYTES = 1 << 30
"""The pool on a CPU when nothing was asked for."""
CUDA_KV_FRACTION = 0.85
"""The share of the memory left beside the weights that the pool takes on CUDA when nothing was asked for."""
_TICKETS = 1 << 32
_log = structlog.get_logger()


def build_sync_router(
    folder: Path,
    name: str,
    device: str,
    dtype: str,
    attention: str,
    block_size: int,
    kv_bytes: int | None,
    total_blocks: int | None,
    max_model_len: int | None,
    spill_bytes: int = 0,
    spill_path: Path | None = None,
) -> "SyncRouter":
    """Load the model in `folder` and give it a KV pool.

    device: "cpu", "cuda", "cuda:0", ...; dtype: "auto" (bf16), "bf16", "fp32"; attention: "torch".
    total_blocks wins over kv_bytes; with neither, see CPU_KV_BYTES and CUDA_KV_FRACTION.
    max_model_len: positions per sequence; None: as many as the model has.
    spill_bytes, spill_path: see `open_store`.

    Raises ModelUnsupported, DeviceSetupError.
    """
    if block_size < 1 or (total_blocks is not None and total_blocks < 1):
        raise DeviceSetupError(f"block size {block_size} and {total_blocks} blocks: both must be at least 1")
    backend = attention_backend(attention)
    model = load_model(folder, device, dtype)
    geometry = KvGeometry(model.layers, model.kv_heads, model.head_dim, block_size, model.dtype)
    blocks = total_blocks or geometry.blocks_in(kv_bytes if kv_bytes is not None else _kv_budget(model.device))
    pool = _allocate(geometry, blocks, model.device)
    facts = _facts(name, attention, model, pool, _positions(model, max_model_len))
    store = open_store(spill_bytes, spill_path, facts)
    _log.info("device ready", model=name, device=facts.device, dtype=facts.dtype, blocks=blocks)
    return SyncRouter(model, pool, backend, facts, store)


class SyncRouter(DeviceIo):
    """See DeviceIo. Depth 1; holds at most one settled result that nobody has asked for yet."""

    def __init__(
        self, model: LoadedModel, pool: KvPool, backend: AttentionBackend, facts: DeviceFacts, store: SpillStore
    ) -> None:
        self._model: LoadedModel | None = model
        self._pool: KvPool | None = pool
        self._effects: EffectApplier | None = EffectApplier(pool, store)
        self._backend = backend
        self._facts = facts
        self._device = model.device
        self._next_ticket = 0
        self._settled: StepResult | None = None

    @property
    def pool(self) -> KvPool:
        """The KV pool. Raises DeviceError(EFFECT) after `teardown`."""
        if self._pool is None:
            raise _torn_down()
        return self._pool

    def facts(self) -> DeviceFacts:
        return self._facts

    def max_depth(self) -> int:
        return 1

    def launch(self, plan: StepPlan) -> Ticket:
        """See DeviceIo. An earlier result that was not awaited is dropped."""
        if self._model is None:
            raise _torn_down()
        check_plan(plan, self._facts)
        self._settled = None
        logits = self._forward(plan.rows)
        tokens = self._draw(plan.rows, logits)
        ticket = Ticket(self._next_ticket)
        self._next_ticket = (self._next_ticket + 1) % _TICKETS
        self._settled = StepResult(ticket, tokens)
        return ticket

    def await_result(self, ticket: Ticket) -> StepResult:
        settled, self._settled = self._settled, None
        if settled is None:
            raise DeviceError(Fault.EFFECT, f"no result is held for ticket {ticket}: it was awaited or replaced")
        if settled.ticket != ticket:
            raise DeviceError(Fault.EFFECT, f"the held result is of ticket {settled.ticket}, not of {ticket}")
        return settled

    def apply(self, effect: Effect) -> EffectOutcome:
        if self._effects is None:
            raise _torn_down()
        return self._effects.apply(effect)

    def teardown(self) -> None:
        """See DeviceIo. The spill store goes with it, and all that it holds."""
        if self._effects is not None:
            self._effects.close()
        self._model = self._pool = self._effects = self._settled = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def _forward(self, rows: Sequence[Row]) -> Tensor:
        """Compute the rows' KV; returns the logits of the rows with a draw, [rows with a draw, vocabulary]."""
        assert self._model is not None
        try:
            batch = pack(rows, self._facts.block_size, self._device)
            out = self._model.module(
                input_ids=batch.token_ids,
                position_ids=batch.positions,
                use_cache=False,
                logits_to_keep=batch.drawn,
                paged=self._backend.plan(self.pool, batch),
            )
        except Exception as error:
            raise DeviceError(Fault.FORWARD, f"{type(error).__name__}: {error}") from error
        logits: Tensor = out.logits[0]
        return logits

    @torch.inference_mode()
    def _draw(self, rows: Sequence[Row], logits: Tensor) -> tuple[int | None, ...]:
        drawn = [(row, row.draw) for row in rows if row.draw is not None]
        try:
            tokens = iter(draw_tokens(logits, drawn))
        except NotFiniteError as error:
            self._scrub(rows)
            raise DeviceError(
                Fault.READBACK, f"{drawn[error.row][0].request_id}: its logits are not finite; the model overflowed"
            ) from error
        except RuntimeError as error:
            raise DeviceError(Fault.READBACK, f"{type(error).__name__}: {error}") from error
        return tuple(None if row.draw is None else next(tokens) for row in rows)

    def _scrub(self, rows: Sequence[Row]) -> None:
        """A masked NaN still spoils a sum, so none may stay behind in blocks that others will own."""
        size = self._facts.block_size
        used = {block for row in rows for block in row.blocks[: -(-row.end // size)]}
        self.pool.scrub(sorted(used))


def _torn_down() -> DeviceError:
    return DeviceError(Fault.EFFECT, "the device was torn down")


def _kv_budget(device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_KV_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return int(free * CUDA_KV_FRACTION)


def _allocate(geometry: KvGeometry, blocks: int, device: torch.device) -> KvPool:
    try:
        return KvPool(geometry, blocks, device)
    except RuntimeError as error:
        raise DeviceSetupError(
            f"{blocks} KV blocks of {geometry.block_bytes} bytes do not fit on {device}; lower the budget"
        ) from error


def _positions(model: LoadedModel, wanted: int | None) -> int:
    if wanted is None:
        return model.max_positions
    if not 1 <= wanted <= model.max_positions:
        raise DeviceSetupError(f"max_model_len {wanted}: the model has 1 to {model.max_positions} positions")
    return wanted


def _facts(name: str, attention: str, model: LoadedModel, pool: KvPool, positions: int) -> DeviceFacts:
    return DeviceFacts(
        model=name,
        model_digest=model.digest,
        device=str(model.device),
        attention=attention,
        dtype=dtype_name(model.dtype),
        layers=model.layers,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size,
        block_size=pool.geometry.block_size,
        total_blocks=pool.total_blocks,
        block_bytes=pool.block_bytes,
        max_model_len=positions,
    )
