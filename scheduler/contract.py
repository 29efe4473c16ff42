"""The device contract: what a scheduler may ask of a device, as data and one protocol.

A step is launched with a plan and settled once with its ticket. Effects are bookkeeping between steps, applied in the
order in which they were asked for. No concrete model or tensor type appears here (source: the DeviceIo / StepPlan /
Effect pages in the project's seeds; `Prefill` is an extension of ours).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeAlias

from scheduler.adapters import AdapterFacts, LoraCommand
from scheduler.effects import NO_SLOT, Effect, EffectOutcome, Ticket
from scheduler.ids import RequestId
from scheduler.request import SamplingParams


@dataclass(frozen=True, slots=True)
class Draw:
    """How the token after a row's last token is drawn; with the seed, the row's `end` keys the generator.

    suppress: token ids that must not be drawn.
    """

    params: SamplingParams
    suppress: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False)
class Row:
    """One sequence's share of a step: the KV of known[start:end] is computed.

    A row lives as long as its sequence runs, and the scheduler moves it on when the step is settled. Nothing of it
    changes between launch and settlement; a device that needs it for longer copies it.

    known: all token ids of the sequence so far, from position 0.
    blocks: the block table; covers at least `end` positions.
    draw: how the token at position `end` is drawn; None when this step does not reach the end of what is known (a
    prompt chunk that is not the last).
    slot: the sequence's row in slot-addressed state (penalty counts, recurrent state, feed cell); NO_SLOT while it owns
    none. adapter: name of the LoRA adapter that it runs under, None for the base model. prompt_tokens: how many of
    `known` are the prompt; the others were sampled.
    """

    request_id: RequestId
    known: Sequence[int]
    start: int
    end: int
    blocks: Sequence[int]
    draw: Draw | None
    slot: int = NO_SLOT
    adapter: str | None = None
    prompt_tokens: int = 0

    @property
    def tokens(self) -> Sequence[int]:
        """The ids that this step computes, at positions start, start + 1, ..."""
        return self.known[self.start : self.end]

    @property
    def count(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class LayerWatch:
    """Who wants to know, while a step runs, how far it is.

    tell: called with each of the growing numbers `at` once the KV of so many first layers is written for all rows. On
    any thread, maybe after the step was awaited; returns at once and never raises. A step that fails tells no more, and
    a device that can't tell never does.
    """

    at: tuple[int, ...]
    tell: Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Prefill:
    """Rows of one or more tokens each; one-token rows of running sequences may ride along (a mixed batch)."""

    rows: tuple[Row, ...]
    watch: LayerWatch | None = None


@dataclass(frozen=True, slots=True)
class Decode:
    """Rows of exactly one token each."""

    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class DecodeFed:
    """The decode after the one in flight, launched before that one is read: depth 2.

    rows: those of the step in flight, in its order or a part of them. Each computes the token that the step in flight
    draws, at the position that is the row's `end` now, and draws the one after it.
    draws: how, by row; the row's own `draw` is still that of the step in flight.
    """

    rows: tuple[Row, ...]
    draws: tuple[Draw, ...]


StepPlan: TypeAlias = Prefill | Decode | DecodeFed


@dataclass(frozen=True, slots=True)
class StepResult:
    """tokens[i] is the token drawn for plan.rows[i], None where that row had no draw."""

    ticket: Ticket
    tokens: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a device says of itself; shown by `prelay status` and compared before a handoff.

    slots: sequences that may own slot-addressed state at a time. slot_bytes: what one slot's state takes when it is
    handed over, 0 for a model whose whole state is KV; first_slot: where slot 0's begins in the pool's bytes.
    snapshots: places for copies of it, for the prefix cache. first_staging, staging_bytes: where in the pool's bytes KV
    from nodes with other blocks is put down before it is re-laid out.
    """

    model: str
    model_digest: str
    device: str
    attention: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    total_blocks: int
    block_bytes: int
    max_model_len: int
    slots: int = 0
    slot_bytes: int = 0
    first_slot: int = 0
    snapshots: int = 0
    first_staging: int = 0
    staging_bytes: int = 0


class Fault(Enum):
    """When a device call failed."""

    FORWARD = "forward"
    READBACK = "readback"
    EFFECT = "effect"
    UNSUPPORTED = "unsupported"
    """This model or router has no such thing; nothing was touched."""


class DeviceError(RuntimeError):
    """A device call failed; the rows of that step are lost, other sequences are not."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(f"{fault.value}: {message}")
        self.fault = fault


class KvExhausted(DeviceError):
    """A step found no block for a row: preempt one and launch again."""

    def __init__(self, message: str) -> None:
        super().__init__(Fault.FORWARD, message)


class DeviceIo(Protocol):
    """The router between a scheduler's loop and a device. Used by one thread."""

    def facts(self) -> DeviceFacts: ...

    def max_depth(self) -> int:
        """How many steps may be in flight: 1 means that each step settles before the next launch."""
        ...

    def launch(self, plan: StepPlan) -> Ticket:
        """Start a step. Raises DeviceError(FORWARD | READBACK); nothing of the step is then visible."""
        ...

    def await_result(self, ticket: Ticket) -> StepResult:
        """Settle a step, exactly once. A wrong or repeated ticket is DeviceError(EFFECT)."""
        ...

    def apply(self, effect: Effect) -> EffectOutcome:
        """Bookkeeping between steps. Raises DeviceError(EFFECT); the effect has then changed no block."""
        ...

    def lora(self, command: LoraCommand) -> tuple[AdapterFacts, ...]:
        """Change or read the adapter table, only while no sequence is anywhere on the device. Returns the table.

        Raises AdapterRefused.
        """
        ...

    def teardown(self) -> None:
        """Free the device memory, also where something on the way to that fails, which is raised then. No call may
        follow."""
        ...
