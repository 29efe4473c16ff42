"""The numbers of a scheduler: every field, in scenarios that are worked out by hand."""

from dataclasses import replace
from random import Random
from statistics import pvariance
from typing import Any

import numpy as np
import pytest
from scheduler_drive import Stepper, decode_scheduler, handoff, prefill_scheduler, request

from scheduler.base import SchedulerBase
from scheduler.commands import (
    ActivateDestination,
    CancelDestination,
    CancelRequest,
    ReleaseSource,
    ReserveDestination,
    Submit,
    SubmitHandoffPrefill,
)
from scheduler.decode_scheduler import DecodeScheduler
from scheduler.effects import RestoreSequenceState, SaveSequenceState
from scheduler.ids import RequestId
from scheduler.metrics import Counters, Moments, SchedulerMetrics
from scheduler.policies import Preemption, SchedulingPolicy

NONE = Moments(0, 0, 0.0)
EMPTY = SchedulerMetrics(
    total=16,
    free=16,
    cached=0,
    held=0,
    reserved=0,
    draining=0,
    active=0,
    usage=0.0,
    running=0,
    waiting=0,
    preempted=0,
    spilled=0,
    published=0,
    lookups=0,
    hits=0,
    prefills=NONE,
    decodes=NONE,
    queued_prefills=NONE,
    queued_decodes=NONE,
)


def submit(scheduler: SchedulerBase, name: str, first: int, count: int, max_tokens: int = 4) -> None:
    """A prompt of the tokens `first`, `first + 1`, ..."""
    scheduler.apply(Submit(request(name, range(first, first + count), max_tokens)))


def source(scheduler: SchedulerBase, name: str, first: int, count: int) -> None:
    scheduler.apply(SubmitHandoffPrefill(handoff(name), request(name, range(first, first + count))))


def reserve(scheduler: SchedulerBase, name: str, first: int, count: int, max_tokens: int = 10) -> None:
    scheduler.apply(ReserveDestination(handoff(name), request(name, range(first, first + count), max_tokens)))


def activate(scheduler: DecodeScheduler, name: str) -> None:
    assert scheduler.landed(handoff(name), 1, 7)
    scheduler.apply(ActivateDestination(handoff(name)))


@pytest.mark.parametrize("kind", [prefill_scheduler, decode_scheduler])
def test_an_empty_scheduler_has_nothing_but_free_blocks(kind: Any) -> None:
    scheduler: SchedulerBase = kind(16)
    assert scheduler.metrics() == EMPTY
    assert scheduler.counters == Counters(0, 0, 0, 0)


def test_a_prefill_node_at_work() -> None:
    scheduler = prefill_scheduler(24, max_handoffs=3)
    stepper = Stepper(scheduler)
    submit(scheduler, "done", 1, 5, max_tokens=1)
    stepper.run()
    submit(scheduler, "running", 100, 3, max_tokens=10)
    source(scheduler, "held", 200, 6)
    scheduler.apply(SubmitHandoffPrefill(handoff("sent"), request("sent", [1, 2, 3, 4, 60, 61, 62, 63, 64])))
    stepper.step()
    stepper.step()
    source(scheduler, "prefilling", 300, 30)
    source(scheduler, "queued", 400, 4)
    stepper.step()
    scheduler.transfer_started(handoff("sent"), 1)
    scheduler.apply(ReleaseSource(handoff("sent")))
    submit(scheduler, "waiting", 500, 20)
    assert stepper.plans[1:] == [
        "prefill running[0..2], held[0..5], sent[4..8]",
        "decode running[3..3]",
        "prefill running[4..4], prefilling[0..14] no draw",
    ]
    assert scheduler.metrics() == SchedulerMetrics(
        total=24,
        free=24 - 16,
        # The first block of the one that is done is shared now, its tail is cached.
        cached=1,
        held=2,
        reserved=0,
        draining=3,
        # running: 6 tokens; prefilling: 30.
        active=2 + 8,
        usage=15 / 24,
        running=2,
        waiting=2,
        preempted=0,
        spilled=0,
        # done's two, then running, held, sent's second and prefilling's three
        published=2 + 1 + 1 + 1 + 3,
        # of all but the last token: 4, 2, 5, 8 and 29
        lookups=1 + 0 + 1 + 2 + 7,
        hits=1,
        prefills=Moments(1, 15, 0.0),
        decodes=Moments(1, 6, 0.0),
        queued_prefills=Moments(2, 24, 64.0),
        queued_decodes=NONE,
    )
    assert scheduler.counters == Counters(prompt_tokens=5 + 3 + 6 + 9, cached_tokens=4)


def decode_node() -> tuple[DecodeScheduler, Stepper]:
    """A destination in each phase, and a local request."""
    scheduler = decode_scheduler(32, max_reservations=3)
    stepper = Stepper(scheduler)
    reserve(scheduler, "running", 100, 5)
    activate(scheduler, "running")
    submit(scheduler, "local", 200, 20)
    stepper.step()
    reserve(scheduler, "ready", 300, 7)
    activate(scheduler, "ready")
    reserve(scheduler, "reserved", 400, 6)
    reserve(scheduler, "landed", 500, 8)
    assert scheduler.landed(handoff("landed"), 1, 7)
    reserve(scheduler, "draining", 600, 4)
    scheduler.transfer_started(handoff("draining"), 1)
    scheduler.apply(CancelDestination(handoff("draining")))
    reserve(scheduler, "pending", 700, 12)
    assert stepper.plans == ["prefill running[5..5], local[0..14] no draw"]
    return scheduler, stepper


def test_a_decode_node_at_work() -> None:
    scheduler, _ = decode_node()
    assert scheduler.metrics() == SchedulerMetrics(
        total=32,
        free=32 - 16,
        cached=0,
        held=0,
        # 6 tokens and one more, 8 and one more
        reserved=2 + 3,
        draining=2,
        # running: 7 tokens; local: 20; ready: 8
        active=2 + 5 + 2,
        usage=0.5,
        running=2,
        waiting=4,
        preempted=0,
        spilled=0,
        published=1 + 3 + 1,
        # of whole prompts but for the local one; the pending one was not tried
        lookups=1 + 4 + 1 + 1 + 2 + 1,
        hits=0,
        prefills=Moments(1, 5, 0.0),
        decodes=Moments(1, 7, 0.0),
        queued_prefills=NONE,
        # ready 8, pending 12, reserved 6, landed 9
        queued_decodes=Moments(4, 35, 4.6875),
    )
    assert scheduler.counters == Counters(prompt_tokens=5 + 7, cached_tokens=0)


def test_a_destination_is_one_queued_decode_from_its_command_to_its_first_step() -> None:
    scheduler, stepper = decode_node()
    before = scheduler.metrics()
    scheduler.apply(ActivateDestination(handoff("landed")))
    after = scheduler.metrics()
    # The place of the landed one is taken by the pending one at once: 13 positions.
    assert after.queued_decodes == before.queued_decodes
    assert (after.running, after.waiting) == (before.running, before.waiting)
    assert (after.reserved, after.active) == (2 + 4, before.active + 3)
    stepper.step()
    assert stepper.plans[-1] == "prefill running[6..6], ready[7..7], landed[8..8], local[15..19]"
    stepped = scheduler.metrics()
    # Reserved 6 and pending 12 are left.
    assert (stepped.queued_decodes, stepped.waiting) == (Moments(2, 18, 9.0), 2)
    assert stepped.decodes == Moments(4, 8 + 9 + 10 + 21, 27.5)
    scheduler.apply(CancelDestination(handoff("reserved")))
    scheduler.apply(CancelDestination(handoff("pending")))
    assert (scheduler.metrics().queued_decodes, scheduler.metrics().waiting) == (NONE, 0)


def test_blocks_of_one_that_was_cancelled_under_its_step_are_draining() -> None:
    stepper = Stepper(prefill_scheduler())
    submit(stepper.scheduler, "a", 0, 6)
    plan = stepper.launch()
    assert plan is not None
    stepper.scheduler.apply(CancelRequest(RequestId("a")))
    doomed = replace(EMPTY, free=14, draining=2, usage=2 / 16, lookups=1)
    assert stepper.scheduler.metrics() == doomed
    stepper.settle(plan)
    assert stepper.scheduler.metrics() == replace(EMPTY, lookups=1)


def test_a_shared_block_counts_once_for_each_that_has_it() -> None:
    stepper = Stepper(prefill_scheduler())
    submit(stepper.scheduler, "a", 0, 8)
    stepper.step()
    submit(stepper.scheduler, "b", 0, 9)
    stepper.step()
    metrics = stepper.scheduler.metrics()
    # 10 and 10 tokens, of which two blocks are the same ones.
    assert (metrics.active, metrics.free, metrics.cached, metrics.usage) == (6, 12, 0, 4 / 16)


def under_pressure(preemption: Preemption) -> Stepper:
    """Two that need 5 blocks each on a pool of 6, at the moment when the second one has to give way."""
    stepper = Stepper(prefill_scheduler(6, policy=SchedulingPolicy(preemption=preemption)))
    submit(stepper.scheduler, "a", 0, 8, max_tokens=12)
    submit(stepper.scheduler, "b", 50, 8, max_tokens=12)
    for _ in range(5):
        stepper.step()
    assert stepper.scheduler.metrics().running == 2
    return stepper


def test_a_preempted_request_waits_with_all_of_its_prefill() -> None:
    stepper = under_pressure(Preemption.RECOMPUTE)
    stepper.launch()
    metrics = stepper.scheduler.metrics()
    assert (metrics.running, metrics.waiting, metrics.preempted, metrics.spilled) == (1, 1, 1, 0)
    assert (metrics.queued_prefills, metrics.queued_decodes) == (Moments(1, 13, 0.0), NONE)
    assert (metrics.active, metrics.cached, metrics.free) == (4, 2, 0)


def test_a_spilled_request_waits_as_a_decode_until_it_is_restored() -> None:
    stepper = under_pressure(Preemption.SPILL)
    scheduler = stepper.scheduler
    (save,) = scheduler.prepare()
    assert isinstance(save, SaveSequenceState)
    spilled = scheduler.metrics()
    assert (spilled.running, spilled.waiting, spilled.preempted, spilled.spilled) == (1, 1, 0, 1)
    assert (spilled.queued_prefills, spilled.queued_decodes) == (NONE, Moments(1, 13, 0.0))
    scheduler.effect_settled(save, stepper.device.apply(save))
    assert scheduler.metrics() == spilled
    plan = scheduler.plan()
    assert plan is not None
    stepper.settle(plan)
    effects: Any = ()
    while not effects:
        stepper.boundary()
        effects = scheduler.prepare()
        if not effects and (plan := scheduler.plan()):
            stepper.settle(plan)
    (restore,) = effects
    assert isinstance(restore, RestoreSequenceState)
    restoring = scheduler.metrics()
    # It owns its blocks again; the other one is done.
    assert (restoring.running, restoring.waiting, restoring.spilled, restoring.active) == (0, 1, 1, 4)
    scheduler.effect_settled(restore, stepper.device.apply(restore))
    restored = scheduler.metrics()
    assert (restored.running, restored.waiting, restored.spilled, restored.active) == (1, 0, 0, 4)
    assert (restored.decodes, restored.queued_decodes) == (Moments(1, 13, 0.0), NONE)


def test_suppressed_outputs_and_expired_leases_are_counted() -> None:
    scheduler = prefill_scheduler(lease_s=3.0)
    stepper = Stepper(scheduler)
    source(scheduler, "held", 0, 5)
    submit(scheduler, "cancelled", 50, 5)
    plan = stepper.launch()
    assert plan is not None
    stepper.settle(plan)
    assert scheduler.apply(CancelRequest(RequestId("cancelled"))).suppressed_pending_output
    stepper.boundary()
    assert scheduler.counters == Counters(prompt_tokens=10, cached_tokens=0, suppressed_outputs=1, expired_leases=0)
    stepper.now = 4.0
    stepper.boundary()
    assert scheduler.counters.expired_leases == 1


def test_moments_of_none_are_zero() -> None:
    assert Moments.of([]) == NONE


@pytest.mark.parametrize("seed", range(5))
def test_moments_equal_numpy_s_and_statistics_(seed: int) -> None:
    random = Random(seed)
    lengths = [random.randrange(1, 10 ** random.randrange(1, 6)) for _ in range(random.randrange(1, 500))]
    moments = Moments.of(iter(lengths))
    assert (moments.count, moments.sum) == (len(lengths), sum(lengths))
    assert moments.variance == pytest.approx(pvariance(lengths), rel=1e-12)
    assert moments.variance == pytest.approx(float(np.var(lengths)), rel=1e-9)


def test_the_variance_of_long_and_like_lengths_is_exact() -> None:
    lengths = [1_000_000] * 9_999 + [1_000_001]
    assert Moments.of(lengths).variance == pytest.approx(0.9999e-4, rel=1e-12)
    assert Moments.of([123_457] * 777).variance == 0.0
