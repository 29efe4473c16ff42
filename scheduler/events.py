"""What a scheduler tells the outside: outputs, lifecycle events and KV events, as frozen data.

All of it becomes visible at a boundary, in this order: KV events, outputs, lifecycle events (source: the visibility
rules of the project's handoff reference).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias, overload

from scheduler.ids import BlockHash, HandoffId, RequestId
from scheduler.request import FinishReason


class Side(Enum):
    SOURCE = "source"
    DESTINATION = "destination"


@dataclass(frozen=True, slots=True)
class SourceHeld:
    """The prompt is prefilled, the first token sampled, the KV held.

    cached_tokens: prompt tokens whose KV was found in this node's prefix cache.
    """

    handoff_id: HandoffId
    attempt: int
    request_id: RequestId
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class SourceFinished:
    """The first token ended the request: nothing is held and nothing needs to be handed over."""

    handoff_id: HandoffId
    attempt: int
    request_id: RequestId
    finish: FinishReason


@dataclass(frozen=True, slots=True)
class DestinationReserved:
    """Blocks are reserved; `missing_blocks` of the `prompt_blocks` must travel, the others are cached here."""

    handoff_id: HandoffId
    attempt: int
    request_id: RequestId
    prompt_blocks: int
    missing_blocks: int


@dataclass(frozen=True, slots=True)
class DestinationFinished:
    """An activated destination wrote its last token; its blocks are free or prefix cache."""

    handoff_id: HandoffId
    attempt: int
    request_id: RequestId
    finish: FinishReason


@dataclass(frozen=True, slots=True)
class LeaseExpired:
    """Nothing was heard of a handoff for as long as its lease runs: what it owned here was cancelled."""

    handoff_id: HandoffId
    attempt: int
    request_id: RequestId
    side: Side


LifecycleEvent: TypeAlias = SourceHeld | SourceFinished | DestinationReserved | DestinationFinished | LeaseExpired


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Full blocks became findable: `hashes` follow each other, and the first follows `parent` (None: the start).

    number: grows by one with each KV event of a node, so that a listener notices a gap.
    """

    number: int
    parent: BlockHash | None
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """The last copy of these blocks is gone."""

    number: int
    hashes: tuple[BlockHash, ...]


KvEvent: TypeAlias = BlocksStored | BlocksRemoved


@dataclass(frozen=True, slots=True)
class Output:
    """One sampled token: the `index`-th of its request, from 0; None where the request failed before it.

    cached_tokens: prompt tokens found in the prefix cache, set on index 0.
    """

    request_id: RequestId
    index: int
    token: int | None
    finish: FinishReason | None = None
    cached_tokens: int | None = None


@dataclass(slots=True, eq=False)
class Outputs(Sequence[Output]):
    """The outputs of one boundary, by columns: a step of ten thousand sequences makes no ten thousand objects.

    finishes, cached: by row, for the few rows that have one.
    """

    request_ids: list[RequestId] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    tokens: list[int | None] = field(default_factory=list)
    finishes: dict[int, FinishReason] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, outputs: Iterable[Output]) -> "Outputs":
        columns = cls()
        for output in outputs:
            columns.add(output)
        return columns

    def add(self, output: Output) -> None:
        row = len(self.request_ids)
        self.request_ids.append(output.request_id)
        self.indices.append(output.index)
        self.tokens.append(output.token)
        if output.finish is not None:
            self.finishes[row] = output.finish
        if output.cached_tokens is not None:
            self.cached[row] = output.cached_tokens

    def without(self, rows: Iterable[int]) -> "Outputs":
        """The others, in the same order."""
        gone = frozenset(rows)
        return Outputs.of(output for row, output in enumerate(self) if row not in gone) if gone else self

    def __len__(self) -> int:
        return len(self.request_ids)

    def __iter__(self) -> Iterator[Output]:
        return (self[row] for row in range(len(self.request_ids)))

    @overload
    def __getitem__(self, row: int) -> Output: ...
    @overload
    def __getitem__(self, row: slice) -> "Outputs": ...
    def __getitem__(self, row: int | slice) -> "Output | Outputs":
        if isinstance(row, slice):
            return Outputs.of(self[i] for i in range(*row.indices(len(self))))
        row = range(len(self.request_ids))[row]
        return Output(
            self.request_ids[row], self.indices[row], self.tokens[row], self.finishes.get(row), self.cached.get(row)
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Outputs | tuple | list) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class BoundaryEffects:
    """What becomes visible at a boundary, all of it for one incarnation. Consumers handle the fields in this order."""

    kv_events: tuple[KvEvent, ...] = ()
    outputs: Sequence[Output] = ()
    events: tuple[LifecycleEvent, ...] = ()
    retired: tuple[RequestId, ...] = ()
    incarnation: int = 1

    @property
    def is_empty(self) -> bool:
        return not (self.kv_events or self.outputs or self.events or self.retired)
