"""The synchronous router: each step is complete when `launch` returns. The reference for all other routers."""

from collections.abc import Sequence
from pathlib import Path

import structlog
import torch

import device.torch_attention  # noqa: F401 (registers the "torch" back end)
from device.attention import AttentionBackend, attention_backend
from device.copy_lane import open_copy_lane
from device.effects import EffectApplier
from device.errors import DeviceSetupError
from device.kv_pool import KvGeometry, KvPool
from device.layer_watch import watch_of
from device.loading import LoadedModel, dtype_name, load_model
from device.model_runner import ModelRunner
from device.plan_check import check_plan
from device.router_effects import RouterEffects, Stop
from device.spill import SpillStore, open_store
from device.state import SlotLayout, SlotState
from scheduler.adapters import AdapterFacts, LoraCommand
from scheduler.contract import DecodeFed, DeviceError, DeviceFacts, DeviceIo, Fault, StepPlan, StepResult
from scheduler.effects import Effect, EffectOutcome, Ticket

CPU_KV_BYTES = 1 << 30
"""The pool on a CPU when nothing was asked for."""
CUDA_KV_FRACTION = 0.85
"""The share of the memory left beside the weights that the pool takes on CUDA when nothing was asked for."""
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
    slots: int = 0,
    snapshots: int = 0,
    staging_bytes: int = 0,
    mirrors: Sequence[Stop] = (),
) -> "SyncRouter":
    """Load the model in `folder` and give it a KV pool.

    device: "cpu", "cuda", "cuda:0", ...; dtype: "auto" (bf16), "bf16", "fp32"; attention: "torch".
    total_blocks wins over kv_bytes; with neither, see CPU_KV_BYTES and CUDA_KV_FRACTION.
    max_model_len: positions per sequence; None: as many as the model has.
    spill_bytes, spill_path: see `open_store`. slots, snapshots: see DeviceFacts; a model without recurrent state has
    no use for snapshots, and one with it none for a device without slots. staging_bytes: see DeviceFacts.
    mirrors: see RouterEffects.

    Raises ModelUnsupported, DeviceSetupError.
    """
    if block_size < 1 or (total_blocks is not None and total_blocks < 1):
        raise DeviceSetupError(f"block size {block_size} and {total_blocks} blocks: both must be at least 1")
    backend = attention_backend(attention)
    model = load_model(folder, device, dtype)
    layout = _slot_layout(model, slots, snapshots)
    geometry = KvGeometry(model.layers, model.kv_heads, model.head_dim, block_size, model.dtype)
    records = (slots + snapshots) * layout.slot_bytes
    budget = kv_bytes if kv_bytes is not None else _kv_budget(model.device) - records - staging_bytes
    blocks = total_blocks or geometry.blocks_in(budget)
    pool, state = _allocate(geometry, blocks, model.device, layout, slots, snapshots, staging_bytes)
    facts = _facts(name, attention, model, pool, state, _positions(model, max_model_len))
    store = open_store(spill_bytes, spill_path, facts)
    _log.info("device ready", model=name, device=facts.device, dtype=facts.dtype, blocks=blocks)
    return SyncRouter(model, pool, state, backend, facts, store, mirrors)


class SyncRouter(DeviceIo):
    """See DeviceIo. Depth 1; holds at most one settled result that nobody has asked for yet."""

    def __init__(
        self,
        model: LoadedModel,
        pool: KvPool,
        state: SlotState,
        backend: AttentionBackend,
        facts: DeviceFacts,
        store: SpillStore,
        mirrors: Sequence[Stop] = (),
    ) -> None:
        self._runner: ModelRunner | None = ModelRunner(model, pool, state, backend, facts)
        self._pool: KvPool | None = pool
        self._effects: RouterEffects | None = RouterEffects(
            EffectApplier(pool, state, store), open_copy_lane(model.device), mirrors
        )
        self._facts = facts
        self._device = model.device
        self._launched = 0
        self._settled: StepResult | None = None

    @property
    def pool(self) -> KvPool:
        """The KV pool. Raises DeviceError(EFFECT) after `teardown`."""
        if self._pool is None:
            raise _torn_down()
        return self._pool

    @property
    def runner(self) -> ModelRunner:
        """What computes the steps. Raises DeviceError(EFFECT) after `teardown`."""
        if self._runner is None:
            raise _torn_down()
        return self._runner

    @property
    def effects(self) -> RouterEffects:
        """Raises DeviceError(EFFECT) after `teardown`."""
        if self._effects is None:
            raise _torn_down()
        return self._effects

    def facts(self) -> DeviceFacts:
        return self._facts

    def max_depth(self) -> int:
        return 1

    def launch(self, plan: StepPlan) -> Ticket:
        """See DeviceIo. An earlier result that was not awaited is dropped. A fed step is a DeviceError(FORWARD)."""
        runner, effects = self.runner, self.effects
        if isinstance(plan, DecodeFed):
            raise DeviceError(Fault.FORWARD, "a fed step: this router settles each step before the next")
        check_plan(plan, self._facts)
        self._settled = None
        effects.drop_logits()
        step = runner.pack(plan.rows, watch=watch_of(plan))
        effects.lane.before_step()
        logits = runner.forward(step)
        tokens = runner.read(step, runner.draw(step, logits).tolist())
        ticket = Ticket(self._launched)
        self._launched += 1
        effects.keep_logits(ticket, step, logits)
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
        return self.effects.apply(effect)

    def lora(self, command: LoraCommand) -> tuple[AdapterFacts, ...]:
        return self.runner.adapters.apply(command)

    def teardown(self) -> None:
        """See DeviceIo. The spill store goes with it, and all that it holds."""
        try:
            if self._runner is not None:
                self._runner.close()
            if self._effects is not None:
                self._effects.close()
        finally:
            self._runner = self._pool = self._effects = self._settled = None
            if self._device.type == "cuda":
                torch.cuda.empty_cache()


def _torn_down() -> DeviceError:
    return DeviceError(Fault.EFFECT, "the device was torn down")


def _kv_budget(device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_KV_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return int(free * CUDA_KV_FRACTION)


def _slot_layout(model: LoadedModel, slots: int, snapshots: int) -> SlotLayout:
    if slots < 0 or snapshots < 0:
        raise DeviceSetupError(f"{slots} slots and {snapshots} snapshots: give 0 for none, or how many")
    if model.recurrent and not slots:
        raise DeviceSetupError("the model has recurrent state, which needs slots: give one for each running sequence")
    return SlotLayout([tensor for layer in model.recurrent for tensor in (layer.convolution, layer.recurrent)])


def _allocate(
    geometry: KvGeometry,
    blocks: int,
    device: torch.device,
    layout: SlotLayout,
    slots: int,
    snapshots: int,
    staging_bytes: int,
) -> tuple[KvPool, SlotState]:
    try:
        pool = KvPool(geometry, blocks, device, slots, layout.slot_bytes, staging_bytes)
        return pool, SlotState(layout, pool.slot_memory, snapshots)
    except (RuntimeError, OSError) as error:
        raise DeviceSetupError(
            f"{blocks} KV blocks of {geometry.block_bytes} bytes, {slots} slots and {snapshots} snapshots of"
            f" {layout.slot_bytes} bytes do not fit on {device}; lower the budget or their number"
        ) from error


def _positions(model: LoadedModel, wanted: int | None) -> int:
    if wanted is None:
        return model.max_positions
    if not 1 <= wanted <= model.max_positions:
        raise DeviceSetupError(f"max_model_len {wanted}: the model has 1 to {model.max_positions} positions")
    return wanted


def _facts(
    name: str, attention: str, model: LoadedModel, pool: KvPool, state: SlotState, positions: int
) -> DeviceFacts:
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
        slots=state.slots,
        slot_bytes=state.slot_bytes,
        first_slot=pool.slot_offset(0) if state.slots and state.slot_bytes else 0,
        snapshots=state.snapshots,
        first_staging=pool.first_staging,
        staging_bytes=pool.staging_bytes,
    )
