"""KV accounting as the reference's schedulers are tested for it (its section 5 and what section 7 says of it)."""

import pytest
from handoff_drive import DestinationNode, SourceNode, phase_of, snapshot, wind_down
from kv_machine import expected_output
from scheduler_drive import handoff, request

from scheduler.batching import BatchLimits
from scheduler.commands import (
    ActivateDestination,
    CancelDestination,
    CancelSource,
    Noop,
    ReleaseSource,
    ReserveDestination,
    Submit,
)
from scheduler.events import BlocksRemoved, BlocksStored, DestinationReserved, SourceHeld
from scheduler.ids import RequestId
from scheduler.policies import Preemption, SchedulingPolicy

H = handoff("h")
PROMPT = tuple(range(10))
OTHER = tuple(range(50, 60))


# Source


@pytest.mark.parametrize(("tokens", "blocks"), [(8, 2), (9, 3), (12, 3), (13, 4)])
def test_a_hold_is_the_blocks_of_the_prompt(tokens: int, blocks: int) -> None:
    """The first token's KV is computed at the destination."""
    node = SourceNode()
    node.hold("h", range(tokens))
    assert node.scheduler.metrics().held == blocks


def test_the_running_slot_is_free_while_kv_is_held() -> None:
    node = SourceNode(limits=BatchLimits(16, 1))
    node.hold("h", PROMPT)
    node.scheduler.apply(Submit(request("local", OTHER, 2)))
    node.run()
    assert node.tokens["local"] == expected_output(OTHER, 2)
    assert phase_of(node.scheduler, "h") == "held"


def test_held_blocks_are_neither_evicted_nor_preempted() -> None:
    node = SourceNode(8)
    node.hold("h", PROMPT)
    held = node.scheduler.held(H, 1)
    for index in range(6):
        node.scheduler.apply(Submit(request(f"r{index}", [100 + index] * 9, 6)))
    node.run()
    assert node.scheduler.held(H, 1) == held
    assert node.scheduler.metrics().held == 3
    assert all(node.tokens[f"r{index}"] == expected_output([100 + index] * 9, 6) for index in range(6))


@pytest.mark.parametrize("command", [ReleaseSource(H), CancelSource(H)])
def test_source_cleanup_preserves_prefill_prefix_reuse(command: ReleaseSource | CancelSource) -> None:
    node = SourceNode()
    node.hold("h", range(12))
    node.scheduler.apply(command)
    node.submit("again", [*range(12), 99])
    (boundary,) = node.run()
    assert boundary.events == (SourceHeld(handoff("again"), 1, RequestId("again"), 13, cached_tokens=12),)


def test_cancel_of_an_unfinished_prefill_keeps_its_finished_blocks() -> None:
    """Like the reference's vLLM flavour; its SGLang flavour frees what is beyond the published prefix."""
    node = SourceNode()
    node.submit("h", range(40))
    node.step()
    node.scheduler.apply(CancelSource(H))
    node.hold("again", range(18))
    assert node.device.computed["again"] == 2


def test_chunked_prefill_handoff_waits_for_full_materialization() -> None:
    node = SourceNode()
    node.submit("h", range(33))
    phases = []
    while phase_of(node.scheduler, "h") == "pending":
        node.step()
        phases.append(phase_of(node.scheduler, "h"))
    assert phases == ["pending", "pending", "held"]
    assert node.device.computed["h"] == 33


def test_other_requests_share_the_prompt_while_it_is_held() -> None:
    node = SourceNode()
    node.hold("h", range(12))
    node.hold("sharing", [*range(12), 99])
    metrics = node.scheduler.metrics()
    # Counted for each, taken once.
    assert (metrics.held, metrics.total - metrics.free - metrics.cached) == (3 + 4, 4)


# Reservation


@pytest.mark.parametrize("max_tokens", [2, 128])
def test_destination_transfer_footprint_excludes_decode_headroom(max_tokens: int) -> None:
    """What travels is the prompt's blocks; what is reserved covers one token more, ours and not the reference's."""
    node = DestinationNode(40)
    asked = request("h", PROMPT, max_tokens)
    effects = node.scheduler.apply(ReserveDestination(H, asked))
    assert effects.events == (DestinationReserved(H, 1, RequestId("h"), prompt_blocks=3, missing_blocks=3),)
    assert node.scheduler.metrics().reserved == 3


@pytest.mark.parametrize(("tokens", "reserved"), [(11, 3), (12, 4), (13, 4)])
def test_the_first_decode_step_never_needs_a_block(tokens: int, reserved: int) -> None:
    node = DestinationNode(reserved, policy=SchedulingPolicy(preemption=Preemption.RECOMPUTE))
    node.serve("h", range(tokens), 2)
    assert node.scheduler.kv.pool.available == 0
    node.run()
    assert node.tokens["h"] == expected_output(range(tokens), 2)[1:]
    assert node.scheduler.batcher.pressure.counters.preemptions == 0


def test_a_failed_reservation_takes_nothing() -> None:
    """All or nothing: also no pin on the part of the prompt that is cached."""
    node = DestinationNode(6)
    node.serve("first", range(8), 2)
    node.run()
    node.reserve("other", [7] * 14)
    before = node.scheduler.metrics()
    assert node.reserve("h", [*range(8), *OTHER]) == []
    after = node.scheduler.metrics()
    assert (after.free, after.cached, after.reserved) == (before.free, before.cached, before.reserved)


def test_resident_prefix_is_reused() -> None:
    node = DestinationNode()
    node.serve("first", range(9), 2)
    node.run()
    effects = node.scheduler.apply(ReserveDestination(H, request("h", [*range(8), 99, 98, 97], 3)))
    assert effects.events == (DestinationReserved(H, 1, RequestId("h"), prompt_blocks=3, missing_blocks=1),)
    node.land("h", [*range(8), 99, 98, 97])
    node.scheduler.apply(ActivateDestination(H))
    node.run()
    assert node.tokens["h"] == expected_output([*range(8), 99, 98, 97], 3)[1:]


def test_a_cancelled_reservation_unpins_what_it_shared() -> None:
    node = DestinationNode()
    node.serve("first", range(8), 2)
    node.run()
    before = node.scheduler.metrics()
    node.reserve("h", [*range(8), 99])
    assert node.scheduler.metrics().cached < before.cached
    node.scheduler.apply(CancelDestination(H))
    after = node.scheduler.metrics()
    assert (after.free, after.cached) == (before.free, before.cached)


def test_commitment_needs_the_full_footprint_and_protects_completion() -> None:
    """Like the reference's TRT-LLM flavour, but that hits of the prefix cache are used, beside a promise of all."""
    node = DestinationNode(7, policy=SchedulingPolicy(preemption=Preemption.NONE))
    node.serve("first", PROMPT, 7)
    # 4 blocks are promised to it, of which it has 3; another of 4 would fit now, and not when both have grown.
    assert node.scheduler.kv.pool.available == 4
    assert node.reserve("h", PROMPT, 7) == []
    assert node.reserve("small", [1] * 3, 2) == []
    node.run()
    assert node.tokens["first"] == expected_output(PROMPT, 7)[1:]
    assert (phase_of(node.scheduler, "h"), phase_of(node.scheduler, "small")) == ("reserved", "reserved")
    assert node.scheduler.batcher.pressure.counters.preemptions == 0
    wind_down(node)


# KV events


def test_reserved_kv_is_stored_at_activation_and_once() -> None:
    node = DestinationNode(kv_events=True)
    node.reserve("h", PROMPT)
    assert node.boundary().kv_events == ()
    node.land("h", PROMPT)
    assert node.boundary().kv_events == ()
    node.scheduler.apply(ActivateDestination(H))
    (stored,) = node.boundary().kv_events
    assert isinstance(stored, BlocksStored)
    assert (stored.number, stored.parent, len(stored.hashes)) == (1, None, 2)
    # Three more tokens fill its third block, which is new; the first two are not told again.
    (third,) = [event for boundary in node.run() for event in boundary.kv_events]
    assert isinstance(third, BlocksStored)
    assert (third.number, third.parent, len(third.hashes)) == (2, stored.hashes[-1], 1)


def test_evictions_of_a_reservation_are_told_as_removed() -> None:
    node = DestinationNode(4, kv_events=True)
    node.serve("first", range(8), 2)
    stored = [event for boundary in node.run() for event in boundary.kv_events]
    (first,) = stored
    assert isinstance(first, BlocksStored)
    node.reserve("h", OTHER)
    (removed,) = node.boundary().kv_events
    # The end of the chain goes first; its beginning still serves.
    assert removed == BlocksRemoved(2, first.hashes[1:])


def test_a_cancelled_reservation_stores_nothing() -> None:
    node = DestinationNode(kv_events=True)
    node.reserve("h", PROMPT)
    node.land("h", PROMPT)
    node.scheduler.apply(CancelDestination(H))
    assert node.boundary().kv_events == ()
    assert node.scheduler.metrics().published == 0


def test_a_step_tells_its_blocks_at_the_boundary_of_its_outputs() -> None:
    node = SourceNode(kv_events=True)
    node.submit("h", range(24))
    told = [[len(event.hashes) for event in b.kv_events if isinstance(event, BlocksStored)] for b in node.run()]
    assert told == [[4], [2]]


# What the destination computes


def test_the_destination_decodes_at_once_and_prefills_nothing() -> None:
    node = DestinationNode()
    node.serve("h", PROMPT)
    done = node.step()
    assert done is not None
    assert node.plans == ["decode h[10..10]"]
    (output,) = done.outputs
    # The source's first token is index 0, told there, with its cached tokens.
    assert (output.index, output.token, output.cached_tokens) == (1, expected_output(PROMPT, 2)[1], None)
    metrics = node.scheduler.metrics()
    assert (metrics.prefills.count, metrics.decodes.count, metrics.decodes.sum) == (0, 1, 12)


def test_one_source_token_and_the_others_at_the_destination() -> None:
    """The reference lets both sides produce the first token; here it travels, and each token is drawn once."""
    source, destination = SourceNode(), DestinationNode()
    source.hold("h", PROMPT, 3)
    destination.serve("h", PROMPT, 3)
    destination.run()
    assert source.tokens["h"] + destination.tokens["h"] == expected_output(PROMPT, 3)


def test_the_partial_tail_stays_private_while_it_is_written() -> None:
    node = DestinationNode()
    node.serve("h", PROMPT)
    node.reserve("sharing", PROMPT)
    reserved = node.scheduler.reserved(handoff("sharing"), 1)
    assert reserved is not None
    assert (reserved.cached_blocks, len(reserved.blocks)) == (2, 3)
    mine = next(iter(node.scheduler.batcher.waiting_sequences())).blocks
    assert [mine[index] == reserved.blocks[index] for index in range(3)] == [True, True, False]


# Preemption


def test_a_preempted_destination_loses_its_kv_and_not_its_handoff() -> None:
    node = DestinationNode(6)
    node.serve("other", OTHER, 8)
    node.serve("h", PROMPT, 8)
    for _ in range(3):
        node.step()
    before = snapshot(node.scheduler)
    assert node.scheduler.apply(ActivateDestination(H)).result == Noop()
    assert snapshot(node.scheduler) == before
    assert node.scheduler.apply(CancelDestination(H)).retired == ("h",)
    assert node.scheduler.apply(CancelDestination(H)).result == Noop()
    wind_down(node)


def test_the_last_to_come_gives_way_first() -> None:
    """The reference's default: last in, first out."""
    node = DestinationNode(9)
    for name, prompt in (("x", [1] * 10), ("y", [2] * 10), ("z", [3] * 10)):
        node.serve(name, prompt, 8)
    for _ in range(3):
        node.step()
    assert node.plans[-1] == "decode x[12..12], y[12..12]"


def test_a_request_of_no_output_does_not_exist() -> None:
    """The reference has token-less handoffs; here a request asks for one token at least."""
    with pytest.raises(ValueError, match="max_tokens is 0, must be at least 1"):
        request("a", PROMPT, 0)
