"""How a golden trace words what schedulers and devices do. Blocks of KV are named by request and index: a/0, a/1."""

from collections.abc import Iterator
from math import inf

from kv_machine import expected_output

from scheduler.commands import Applied, CommandEffects, DestinationAccepted, Submitted
from scheduler.effects import (
    CopyBlocks,
    Done,
    DropSequenceState,
    Effect,
    EffectOutcome,
    Exhausted,
    RestoreSequenceState,
    Saved,
    SaveSequenceState,
)
from scheduler.events import (
    BlocksStored,
    BoundaryEffects,
    DestinationFinished,
    DestinationReserved,
    KvEvent,
    LeaseExpired,
    LifecycleEvent,
    SourceFinished,
    SourceHeld,
)
from scheduler.ids import BlockHash
from scheduler.inventory import Holding
from scheduler.metrics import SchedulerMetrics
from scheduler.prefix import extend_chain, root
from scheduler.request import Request


class BlockNames:
    """Names for the hashes of all blocks that a request can fill; of equal blocks the first request names them."""

    def __init__(self) -> None:
        self._names: dict[BlockHash, str] = {}

    def learn(self, request: Request, block_size: int) -> None:
        chain: list[BlockHash] = []
        tokens = [*request.prompt, *expected_output(request.prompt, request.max_tokens)]
        extend_chain(chain, tokens, block_size, root(request.adapter, request.cache_salt))
        for index, block_hash in enumerate(chain):
            self._names.setdefault(block_hash, f"{request.request_id}/{index}")

    def event(self, event: KvEvent) -> str:
        names = ", ".join(self._names[block_hash] for block_hash in event.hashes)
        if not isinstance(event, BlocksStored):
            return f"kv {event.number}: removed {names}"
        parent = f" after {self._names[event.parent]}" if event.parent else ""
        return f"kv {event.number}: stored {names}{parent}"


def result(effects: CommandEffects) -> str:
    """The coordinator's word for a result."""
    match effects.result:
        case Submitted():
            return "submitted"
        case DestinationAccepted():
            return "accepted"
        case Applied():
            return "applied"
        case _:
            return "noop"


def effect(effect: Effect, outcome: EffectOutcome | None) -> str:
    endings: dict[type[EffectOutcome] | None, str] = {
        Done: "",
        Saved: "",
        Exhausted: ", but the store is full",
        None: ", but that failed",
    }
    ending = endings[type(outcome) if outcome else None]
    match effect:
        case SaveSequenceState():
            return f"saves {effect.request_id}: {effect.tokens} tokens{ending}"
        case RestoreSequenceState():
            return f"restores {effect.request_id}: {effect.tokens} tokens{ending}"
        case DropSequenceState():
            return f"drops what is saved of {effect.request_id}{ending}"
        case CopyBlocks():
            return f"copies block {', '.join(f'{source} to {target}' for source, target in effect.pairs)}{ending}"
        case _:
            return "quiesces"


def boundary(node: str, effects: BoundaryEffects, names: BlockNames) -> Iterator[str]:
    """Everything that became visible, in the order in which it is to be handled."""
    yield from (f"  {node} {names.event(event)}" for event in effects.kv_events)
    for output in effects.outputs:
        ending = f" {output.finish.value}" if output.finish else ""
        yield f"  {output.request_id}[{output.index}] = {output.token}{ending}"
    yield from (f"  {node} {lifecycle(event)}" for event in effects.events)
    if effects.retired:
        yield f"  {node} retires {', '.join(effects.retired)}"


def lifecycle(event: LifecycleEvent) -> str:
    match event:
        case SourceHeld():
            return f"holds {event.handoff_id}: {event.prompt_tokens} tokens, {event.cached_tokens} cached"
        case SourceFinished() | DestinationFinished():
            return f"finished {event.handoff_id}: {event.finish.value}"
        case DestinationReserved():
            return f"reserves {event.handoff_id}: {event.missing_blocks} of {event.prompt_blocks} blocks missing"
        case LeaseExpired():
            return f"ends {event.handoff_id}: its lease as a {event.side.value} has expired"


def blocks(node: str, m: SchedulerMetrics) -> str:
    """Where the blocks are, and who waits."""
    counts = {"held": m.held, "reserved": m.reserved, "draining": m.draining, "active": m.active}
    parts = [f"{name} {count}" for name, count in counts.items() if count]
    line = f"{node} " + ", ".join([*parts, f"cached {m.cached}", f"free {m.free} of {m.total}"])
    if not m.waiting:
        return line
    paused = [f"{count} {name}" for name, count in (("preempted", m.preempted), ("spilled", m.spilled)) if count]
    return f"{line}; {m.running} running, {m.waiting} waiting" + (f" ({', '.join(paused)})" if paused else "")


def holding(node: str, h: Holding) -> str:
    lease = "no lease"
    if h.lease_left_s is not None:
        lease = "a lease without end" if h.lease_left_s == inf else f"its lease ends in {h.lease_left_s:g} s"
    return f"{node} {h.phase} {h.handoff_id} for {h.phase_age_s:g} s: blocks {h.blocks}, outputs {h.outputs}, {lease}"
