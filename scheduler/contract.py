"""The device contract: what a scheduler may ask of a device, as data and one protocol.

A step is launched with a plan and settled once with its ticket. Effects are bookkeeping between steps, applied in the
order in which they were asked for. No concrete model or tensor type appears here (source: the DeviceIo / StepPlan /
Effect pages in the project's seeds; `Prefill` is an extension of ours).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NewType, Protocol, TypeAlias

from scheduler.ids import BlockId, RequestId
from scheduler.request import SamplingParams

Ticket = NewType("Ticket", int)


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
    """

    request_id: RequestId
    known: Sequence[int]
    start: int
    end: int
    blocks: Sequence[int]
    draw: Draw | None

    @property
    def tokens(self) -> Sequence[int]:
        """The ids that this step computes, at positions start, start + 1, ..."""
        return self.known[self.start : self.end]

    @property
    def count(self) -> int:
        return self.end - self.start

    @property
    def history(self) -> Sequence[int]:
        """What a repetition penalty looks at: every id before the drawn one."""
        return self.known[: self.end]


@dataclass(frozen=True, slots=True)
class Prefill:
    """Rows of one or more tokens each; one-token rows of running sequences may ride along (a mixed batch)."""

    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Decode:
    """Rows of exactly one token each."""

    rows: tuple[Row, ...]


StepPlan: TypeAlias = Prefill | Decode


@dataclass(frozen=True, slots=True)
class StepResult:
    """tokens[i] is the token drawn for plan.rows[i], None where that row had no draw."""

    ticket: Ticket
    tokens: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Quiesce:
    """Block until everything that was launched has finished on the device."""


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """Copy whole blocks in the KV pool, (source, target) in this order, before the next launch. An extension of ours.

    A block that is shared and must be written is copied first; the writer gets the copy.
    """

    pairs: tuple[tuple[BlockId, BlockId], ...]


@dataclass(frozen=True, slots=True)
class SaveSequenceState:
    """Spill: put the state of one sequence, `tokens` positions of KV in `blocks`, into the spill store.

    The blocks may be overwritten as soon as this is answered. Answers Saved, or Exhausted when the store has no
    room; a store that fails is a DeviceError(EFFECT). Nothing is stored unless the answer is Saved.
    """

    request_id: RequestId
    blocks: tuple[BlockId, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class RestoreSequenceState:
    """Bring a saved state back, all of it or nothing, into `blocks`, and drop it from the store.

    Raises DeviceError(EFFECT) when it is missing, damaged or of another size; it is dropped then as well.
    """

    request_id: RequestId
    blocks: tuple[BlockId, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class DropSequenceState:
    """Forget a saved state; nothing happens if there is none."""

    request_id: RequestId


Effect: TypeAlias = Quiesce | CopyBlocks | SaveSequenceState | RestoreSequenceState | DropSequenceState


@dataclass(frozen=True, slots=True)
class Done:
    """The effect was applied."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A sequence's state is in the spill store. size: in bytes."""

    size: int


@dataclass(frozen=True, slots=True)
class Exhausted:
    """There is no room for it. Not an error: the caller does without."""


EffectOutcome: TypeAlias = Done | Saved | Exhausted


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a device says of itself; shown by `prelay status` and compared before a handoff."""

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


class Fault(Enum):
    """When a device call failed."""

    FORWARD = "forward"
    READBACK = "readback"
    EFFECT = "effect"


class DeviceError(RuntimeError):
    """A device call failed; the rows of that step are lost, other sequences are not."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(f"{fault.value}: {message}")
        self.fault = fault


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

    def teardown(self) -> None:
        """Free the device memory. No call may follow."""
        ...
