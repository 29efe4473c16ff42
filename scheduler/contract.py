"""The device contract: what a scheduler may ask of a device, as data and one protocol.

A step is launched with a plan and settled once with its ticket. Effects are bookkeeping between steps. No concrete
model or tensor type appears here (source: the DeviceIo / StepPlan / Effect pages in the project's seeds; `Prefill`
is an extension of ours).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NewType, Protocol, TypeAlias

from scheduler.ids import RequestId
from scheduler.request import SamplingParams

Ticket = NewType("Ticket", int)


@dataclass(frozen=True, slots=True)
class Draw:
    """How the token after a row's last token is drawn.

    position: index of the new token in the sequence (prompt included); with the seed it keys the generator.
    suppress: token ids that must not be drawn.
    history: ids that the repetition penalty applies to; empty when the penalty is 1.
    """

    params: SamplingParams
    position: int
    suppress: frozenset[int] = frozenset()
    history: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's share of a step.

    tokens: ids whose KV this step computes, at positions start, start + 1, ...
    blocks: the block table; covers at least start + len(tokens) positions. Borrowed until the step is settled.
    draw: None when this step does not reach the end of what is known (a prompt chunk that is not the last).
    """

    request_id: RequestId
    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    draw: Draw | None


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


Effect: TypeAlias = Quiesce


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

    def apply(self, effect: Effect) -> None: ...

    def teardown(self) -> None:
        """Free the device memory. No call may follow."""
        ...
