"""What must be true of a scheduler beside its model; each function compares one thing that the outside can see."""

from collections import Counter
from collections.abc import Sequence

from scheduler_model import SchedulerModel, Telling, told

from scheduler.base import SchedulerBase
from scheduler.batching import BatchLimits
from scheduler.contract import StepPlan
from scheduler.events import BlocksStored, DestinationReserved, KvEvent, LifecycleEvent, Output
from scheduler.ids import BlockHash, HandoffId, RequestId
from scheduler.metrics import SchedulerMetrics


def require_told(events: Sequence[LifecycleEvent], retired: Sequence[RequestId], expected: Telling) -> None:
    """All events but reservations, which the model can't foretell, in the right order for each request by itself."""
    actual: dict[object, list[object]] = {}
    for event in events:
        if not isinstance(event, DestinationReserved):
            actual.setdefault(event.request_id, []).append(told(event))
    right: dict[object, list[object]] = {}
    for item in expected.events:
        right.setdefault(item[3], []).append(item)
    assert actual == right
    assert len(events) - sum(map(len, actual.values())) <= 1, "one occasion reserves one at the most"
    assert Counter(retired) == Counter(expected.retired), f"{retired} retired instead of {expected.retired}"


def require_right_outputs(outputs: Sequence[Output], expected: Sequence[Output]) -> None:
    """A step brings one output of each request at the most. The model doesn't know how much of a prompt was cached."""
    actual = {o.request_id: (o.index, o.token, o.finish) for o in outputs}
    assert actual == {o.request_id: (o.index, o.token, o.finish) for o in expected}
    assert len(actual) == len(outputs)
    for output in outputs:
        assert (output.cached_tokens is not None) == (output.index == 0 and output.token is not None)


def freeze(plan: StepPlan) -> object:
    """What must not change while the step runs."""
    return [(r.request_id, list(r.known), r.start, r.end, list(r.blocks), r.draw) for r in plan.rows]


def require_right_plan(plan: StepPlan, limits: BatchLimits, model: SchedulerModel) -> None:
    """Within the limits, and each row goes on where its request is. The device checks the block tables."""
    assert 0 < len(plan.rows) <= limits.max_sequences
    assert sum(row.count for row in plan.rows) <= limits.max_tokens
    assert len({row.request_id for row in plan.rows}) == len(plan.rows)
    for row in plan.rows:
        owned = model.owned[row.request_id]
        assert owned.phase in model.scheduled, f"{row.request_id} is {owned.phase} and runs"
        assert list(row.known) == owned.known
        assert (row.draw is not None) == (row.end == len(row.known))
        if row.draw is not None:
            early = owned.outputs < owned.request.min_tokens
            assert row.draw.suppress == (owned.request.stop_token_ids if early else frozenset())


def require_arrival_order(plan: StepPlan, model: SchedulerModel) -> None:
    """Submitted requests begin in the order in which they came."""
    names = {row.request_id for row in plan.rows}
    fresh = [owned.name for owned in model.owned.values() if owned.submitted and not owned.has_run]
    begins = [name in names for name in fresh]
    assert begins == sorted(begins, reverse=True), f"{fresh} begin: {begins}"


def require_as_the_model(scheduler: SchedulerBase, model: SchedulerModel) -> None:
    """What is owned, in which phase, since when and for how long; and the scheduler's own proof."""
    scheduler.check()
    doomed = any(row.doomed for row in model.step or ())
    assert scheduler.is_drained == (not model.owned and not doomed)
    assert scheduler.counters.suppressed_outputs == model.suppressions
    assert scheduler.counters.expired_leases == model.expiries
    assert scheduler.next_deadline <= min(model.deadlines.values(), default=float("inf"))
    assert all(scheduler.story(name) for name in model.owned)
    _require_right_metrics(scheduler.metrics(), model, doomed)
    _require_right_inventory(scheduler, model)


def _require_right_metrics(metrics: SchedulerMetrics, model: SchedulerModel, doomed: bool) -> None:
    parked = [owned for owned in model.owned.values() if owned.phase not in model.scheduled]
    blocks = Counter[str]()
    for owned in parked:
        blocks[owned.phase] += model.parked_blocks(owned)
    assert (metrics.held, metrics.reserved) == (blocks["held"], blocks["reserved"] + blocks["landed"])
    assert metrics.draining >= blocks["draining"] if doomed else metrics.draining == blocks["draining"]
    gone = sum(owned.phase in ("held", "draining") for owned in parked)
    assert metrics.running + metrics.waiting == len(model.owned) - gone
    assert metrics.total == model.total_blocks


def _require_right_inventory(scheduler: SchedulerBase, model: SchedulerModel) -> None:
    inventory = scheduler.inventory()
    assert inventory.local == tuple(owned.name for owned in model.owned.values() if owned.handoff is None)
    holdings = [
        (h.handoff_id, h.attempt, h.request_id, h.phase, h.outputs, h.age_s, h.phase_age_s, h.lease_left_s)
        for h in inventory.holdings
    ]
    right = [
        (
            handoff,
            o.attempt,
            o.name,
            o.phase,
            o.outputs,
            model.now - o.since,
            model.now - o.entered,
            left(model, handoff),
        )
        for handoff, o in model.by_handoff.items()
    ]
    assert holdings == right, f"{holdings} should be {right}"


def left(model: SchedulerModel, handoff: HandoffId) -> float | None:
    """Seconds to the end of its lease."""
    deadline = model.deadlines.get(handoff)
    return None if deadline is None else deadline - model.now


class KvListener:
    """Hears KV events as a router does. stored: what can be found now. heard: what ever could."""

    def __init__(self) -> None:
        self.number = 0
        self.stored: set[BlockHash] = set()
        self.heard: set[BlockHash] = set()

    def hear(self, events: Sequence[KvEvent]) -> None:
        for event in events:
            self.number += 1
            assert event.number == self.number
            changed = set(event.hashes)
            if isinstance(event, BlocksStored):
                # A parent may be gone again: two equal blocks have one name, and the named one may go first.
                assert event.parent is None or event.parent in self.heard
                assert not self.stored & changed
                self.stored |= changed
                self.heard |= changed
            else:
                assert self.stored >= changed
                self.stored -= changed
