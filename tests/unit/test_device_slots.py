"""A router over a model with recurrent state: what it says of its slots, and what it refuses without touching them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driven import Driven, run, step
from tiny_hybrids import build_hybrid, save_hybrid
from tiny_model import build_tiny, save_tiny_model

from device.build import build_router
from device.cpu_linear import can_pack
from device.errors import DeviceSetupError
from device.kv_pool import KvPool
from device.router import SyncRouter
from device.state import SlotState
from scheduler.contract import DeviceError, Fault, Prefill
from scheduler.device_config import DeviceConfig
from scheduler.effects import (
    NO_SLOT,
    CompactSlot,
    DetachSlot,
    Done,
    DropSequenceState,
    Effect,
    Exhausted,
    MarconiCheckpoint,
    ReleaseSeq,
    RestoreSequenceState,
    Saved,
    SaveHiddenCatchup,
    SaveSequenceState,
    SsmSnapshotRestore,
    SsmSnapshotSave,
)
from scheduler.ids import BlockId, RequestId

A = RequestId("a")
PROMPT = [5, 17, 33, 50, 2, 41, 8]
BLOCKS = (BlockId(0), BlockId(1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bamba")
    save_hybrid("bamba", path)
    return path


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    save_tiny_model(path)
    return path


@pytest.fixture(scope="module")
def built(folder: Path) -> SyncRouter:
    return build_hybrid(folder, spill_bytes=1 << 20)


@pytest.fixture
def router(built: SyncRouter) -> SyncRouter:
    """As it is at first: no state, no KV, nothing saved."""
    built.apply(DropSequenceState(A))
    for snapshot in range(3):
        built.apply(MarconiCheckpoint(A, 0, -2, snapshot))  # a checkpoint that fails leaves its place empty
    for slot in range(6):
        built.apply(ReleaseSeq(A, slot, "reset"))
    built.pool.tensor.zero_()
    return built


def prefilled(router: SyncRouter, slot: int = 2) -> Driven:
    sequence = Driven("a", PROMPT, list(range(6)), slot)
    step(router, [(sequence, len(PROMPT))])
    return sequence


def refused(action: Callable[[], Any], fault: Fault = Fault.EFFECT) -> str:
    with pytest.raises(DeviceError) as caught:
        action()
    assert caught.value.fault is fault
    return str(caught.value)


def test_a_hybrid_says_what_a_slot_takes(router: SyncRouter) -> None:
    facts = router.facts()
    assert (facts.layers, facts.slots, facts.snapshots) == (2, 6, 3)
    # Three layers of 8 heads of 8 x 6, and 64 + 2 * 2 * 6 channels of 4 inputs, in fp32, each at a multiple of 64.
    assert facts.slot_bytes == 64 + 3 * (8 * 8 * 6 * 4 + 88 * 4 * 4)
    assert router.pool.bytes_view().size == facts.total_blocks * facts.block_bytes + 6 * facts.slot_bytes


def test_a_plain_model_has_slots_without_state(plain_folder: Path) -> None:
    router = build_tiny(plain_folder, slots=4, snapshots=2, spill_bytes=1 << 20)
    facts = router.facts()
    assert (facts.slots, facts.slot_bytes, facts.snapshots) == (4, 0, 0)
    assert router.pool.bytes_view().size == facts.total_blocks * facts.block_bytes
    sequence = Driven("a", PROMPT, list(range(6)), slot=3)
    wanted = run(router, sequence, 3)
    assert run(router, Driven("b", PROMPT, list(range(6))), 3) == wanted
    effects: list[Effect] = [
        ReleaseSeq(A, 3, "test"), CompactSlot(A, 3, 1), DetachSlot(A, 1), MarconiCheckpoint(A, 1, 4, 0),
    ]  # fmt: skip
    assert [router.apply(effect) for effect in effects] == [Done()] * 4
    assert router.apply(SaveSequenceState(A, BLOCKS, 8)) == Saved(2 * facts.block_bytes)
    assert router.apply(RestoreSequenceState(A, BLOCKS, 8, slot=2)) == Done()
    for effect in (SsmSnapshotSave(A, 1, 0), SsmSnapshotRestore(A, 1, 0)):
        assert "no recurrent state" in refused(lambda e=effect: router.apply(e), Fault.UNSUPPORTED)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ((NO_SLOT, 1), "r0: slot -1 is outside 0 to 5, and the model needs one"),
        ((3, 6), "r1: slot 6 is outside 0 to 5"),
        ((4, 4), "r1 and r0 have the same slot 4"),
    ],
)
def test_rows_need_slots_of_their_own(router: SyncRouter, slots: tuple[int, int], message: str) -> None:
    router.pool.slot_memory.fill_(7)
    rows = [Driven(f"r{i}", PROMPT, list(range(6 * i, 6 * i + 6)), slot).row(7) for i, slot in enumerate(slots)]
    assert message in refused(lambda: router.launch(Prefill(tuple(rows))), Fault.FORWARD)
    assert (router.pool.slot_memory == 7).all()
    assert not router.pool.tensor.any()


def test_a_row_must_begin_where_its_state_ends(router: SyncRouter) -> None:
    sequence = prefilled(router)
    before = router.pool.bytes_view().copy()
    sequence.computed -= 1
    message = refused(lambda: step(router, [(sequence, 2)]), Fault.FORWARD)
    assert "a: its row begins at position 6, the state in slot 2 has seen 7 tokens" in message
    assert (router.pool.bytes_view() == before).all()


def test_a_failed_step_voids_the_slots_of_its_rows(router: SyncRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("the device is ill")

    wanted = run(router, Driven("w", PROMPT, list(range(20, 26)), slot=0), 4)
    sequence, bystander = prefilled(router), Driven("b", PROMPT, list(range(10, 16)), slot=3)
    step(router, [(bystander, 7)])
    with monkeypatch.context() as patch:
        patch.setattr(KvPool, "write", fail)
        refused(lambda: step(router, [(sequence, 1)]), Fault.FORWARD)
    for effect in (SaveSequenceState(A, BLOCKS, 7, 2), SsmSnapshotSave(A, 2, 0)):
        assert "slot 2 was in a step that failed" in refused(lambda e=effect: router.apply(e))
    assert "slot 2 was in a step" in refused(lambda: step(router, [(sequence, 1)]), Fault.FORWARD)
    assert run(router, bystander, 4) == wanted
    router.apply(ReleaseSeq(A, 2, "failed"))
    assert not router.pool.slot_memory[2].any()
    assert run(router, Driven("a", PROMPT, list(range(6)), slot=2), 4) == wanted


def test_an_overflow_does_not_spoil_the_next_owner_of_the_slot(router: SyncRouter) -> None:
    wanted = run(router, prefilled(router), 4)
    router.pool.slot_memory[2, 64:] = 255  # NaN in any float
    assert run(router, Driven("b", PROMPT, list(range(6)), slot=2), 4) == wanted


def test_a_step_that_overflows_voids_the_slots_of_its_rows(router: SyncRouter) -> None:
    sequence = prefilled(router)
    router.pool.slot_memory[2, 64:] = 255
    assert "not finite" in refused(lambda: step(router, [(sequence, 1)]), Fault.READBACK)
    for tokens in (7, 8):
        assert "slot 2 was in a step that failed" in refused(
            lambda t=tokens: router.apply(SaveSequenceState(A, BLOCKS, t, 2))
        )


def test_releasing_never_fails(router: SyncRouter) -> None:
    sequence = prefilled(router)
    for slot in (NO_SLOT, 6, -2):
        assert router.apply(ReleaseSeq(sequence.request_id, slot, "test")) == Done()
    assert router.pool.slot_memory[2].any()
    assert router.apply(ReleaseSeq(sequence.request_id, 2, "test")) == Done()
    assert not router.pool.slot_memory.any()


def test_detaching_leaves_the_content(router: SyncRouter) -> None:
    prefilled(router)
    before = router.pool.slot_memory.clone()
    assert router.apply(DetachSlot(A, 2)) == Done()
    assert torch.equal(router.pool.slot_memory, before)


def test_a_checkpoint_never_fails_and_a_lost_one_is_noticed(router: SyncRouter) -> None:
    prefilled(router)
    assert router.apply(MarconiCheckpoint(A, 2, 7, 1)) == Done()
    assert router.apply(SsmSnapshotRestore(A, 4, 1)) == Done()
    assert torch.equal(router.pool.slot_memory[4], router.pool.slot_memory[2])
    for lost in (MarconiCheckpoint(A, 2, 6, 1), MarconiCheckpoint(A, 6, 7, 2), MarconiCheckpoint(A, 2, 7, 3)):
        assert router.apply(lost) == Done()
    for snapshot in (1, 2):
        assert "holds nothing" in refused(lambda s=snapshot: router.apply(SsmSnapshotRestore(A, 4, s)))


@pytest.mark.parametrize(
    ("effect", "message"),
    [
        (CompactSlot(A, 2, 6), "slot 6: this device has 6 slots"),
        (CompactSlot(A, -1, 2), "slot -1"),
        (SsmSnapshotSave(A, 9, 0), "slot 9"),
        (SsmSnapshotSave(A, 2, 3), "snapshot 3: this device has 3 places"),
        (SsmSnapshotRestore(A, 2, 3), "snapshot 3"),
        (SsmSnapshotRestore(A, 2, 0), "snapshot 0 holds nothing"),
        (SaveSequenceState(A, BLOCKS, 7), "slot -1"),
        (SaveSequenceState(A, BLOCKS, 8, 2), "slot 2 holds the state after 7 tokens, not 8"),
    ],
)
def test_what_is_refused_changes_nothing(router: SyncRouter, effect: Effect, message: str) -> None:
    prefilled(router)
    before = router.pool.bytes_view().copy()
    assert message in refused(lambda: router.apply(effect))
    assert (router.pool.bytes_view() == before).all()


@pytest.mark.parametrize("slot", [NO_SLOT, 6])
def test_a_restore_into_no_slot_changes_nothing(router: SyncRouter, slot: int) -> None:
    prefilled(router)
    assert isinstance(router.apply(SaveSequenceState(A, BLOCKS, 7, 2)), Saved)
    before = router.pool.bytes_view().copy()
    other = (BlockId(8), BlockId(9))
    assert f"slot {slot}" in refused(lambda: router.apply(RestoreSequenceState(A, other, 7, slot)))
    assert (router.pool.bytes_view() == before).all()


def test_a_damaged_record_is_not_restored(folder: Path, tmp_path: Path) -> None:
    router = build_hybrid(folder, spill_bytes=1 << 20, spill_path=tmp_path)
    prefilled(router)
    router.apply(SaveSequenceState(A, BLOCKS, 7, 2))
    (path,) = tmp_path.rglob("*.kv")
    data = bytearray(path.read_bytes())
    data[-router.facts().slot_bytes] ^= 1
    path.write_bytes(data)
    before = router.pool.bytes_view().copy()
    assert "checksum" in refused(lambda: router.apply(RestoreSequenceState(A, BLOCKS, 7, 3)))
    assert (router.pool.bytes_view() == before).all()


def test_room_for_the_record_is_counted(folder: Path) -> None:
    facts = build_hybrid(folder).facts()
    router = build_hybrid(folder, spill_bytes=2 * facts.block_bytes + facts.slot_bytes - 1)
    prefilled(router)
    assert router.apply(SaveSequenceState(A, BLOCKS, 7, 2)) == Exhausted()
    router = build_hybrid(folder, spill_bytes=2 * facts.block_bytes + facts.slot_bytes)
    prefilled(router)
    assert router.apply(SaveSequenceState(A, BLOCKS, 7, 2)) == Saved(2 * facts.block_bytes + facts.slot_bytes)


def test_a_failing_device_is_an_effect_fault(router: SyncRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("the device is ill")

    prefilled(router)
    monkeypatch.setattr(SlotState, "move", fail)
    assert "the device is ill" in refused(lambda: router.apply(CompactSlot(A, 2, 0)))
    monkeypatch.setattr(SlotState, "zero", fail)
    assert router.apply(ReleaseSeq(A, 2, "test")) == Done()


def test_there_is_no_multi_token_prediction(router: SyncRouter) -> None:
    message = refused(lambda: router.apply(SaveHiddenCatchup(0, 7)), Fault.UNSUPPORTED)
    assert "no multi-token-prediction head" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": 0}, "needs slots: give one for each running sequence"),
        ({"slots": -1}, "-1 slots and 3 snapshots"),
        ({"snapshots": -2}, "6 slots and -2 snapshots"),
        ({"slots": 1 << 46}, "do not fit"),
        ({"snapshots": 1 << 46}, "do not fit"),
    ],
)
def test_settings_that_cannot_be_met(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DeviceSetupError, match=message):
        build_hybrid(folder, **changes)


def test_the_configuration_says_how_many(folder: Path) -> None:
    before = torch.get_num_threads()
    config = DeviceConfig(str(folder), "tiny", "cpu", "fp32", "torch", 4, 1 << 16, None, before, slots=5, snapshots=2)
    facts = build_router(config).facts()
    assert (facts.slots, facts.snapshots) == (5, 2)


@pytest.mark.skipif(not can_pack(torch.device("cpu"), torch.bfloat16), reason="this CPU does not multiply bf16")
def test_bf16_goes_on_as_well(folder: Path) -> None:
    """The recurrent state stays in fp32, as transformers keeps it."""
    router = build_hybrid(folder, dtype="bf16")
    assert router.facts().slot_bytes == 64 + 3 * (8 * 8 * 6 * 4 + 88 * 4 * 2)
    whole = run(router, Driven("a", PROMPT, list(range(6)), slot=0), 2)
    assert run(router, Driven("b", PROMPT, list(range(6, 12)), slot=1), 2, chunk=3) == whole
