import numpy as np
import pytest
import torch

from device.errors import DeviceSetupError
from device.kv_pool import KvGeometry, KvPool
from scheduler.contract import DeviceError, Fault

GEOMETRY = KvGeometry(layers=3, kv_heads=2, head_dim=4, block_size=8, dtype=torch.float32)
CPU = torch.device("cpu")


def test_block_bytes_counts_k_and_v_of_all_layers() -> None:
    assert GEOMETRY.block_bytes == 3 * 2 * 2 * 8 * 4 * 4
    assert KvGeometry(30, 3, 64, 16, torch.bfloat16).block_bytes == 16 * 23_040


def test_blocks_in_a_budget() -> None:
    assert GEOMETRY.blocks_in(10 * GEOMETRY.block_bytes + 1) == 10
    with pytest.raises(DeviceSetupError, match="holds no block"):
        GEOMETRY.blocks_in(GEOMETRY.block_bytes - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_is_one_piece_of_the_bytes_view(dtype: torch.dtype) -> None:
    pool = KvPool(KvGeometry(3, 2, 4, 8, dtype), 5, CPU)
    memory, size = pool.bytes_view(), pool.block_bytes
    assert isinstance(memory, np.ndarray)
    assert memory.dtype == np.uint8
    assert memory.shape == (5 * size,)
    pool.tensor[3] = 1.0
    used = np.flatnonzero(memory)
    assert 3 * size <= used[0] <= used[-1] < 4 * size
    memory[3 * size : 4 * size] = 0
    assert not pool.tensor.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_lie_behind_the_blocks_in_the_same_piece(dtype: torch.dtype) -> None:
    geometry = KvGeometry(1, 1, 3, 5, dtype)
    assert geometry.block_bytes % 64
    pool = KvPool(geometry, 7, CPU, slots=3, slot_bytes=128)
    memory, first = pool.bytes_view(), pool.slot_offset(0)
    assert memory.size == first + 3 * 128
    assert 7 * pool.block_bytes <= first < 7 * pool.block_bytes + 64
    assert (memory.ctypes.data + first) % 64 == 0
    pool.slot_memory[1] = 9
    pool.tensor[6] = 1.0
    assert pool.slot_offset(1) == first + 128
    assert np.flatnonzero(memory == 9).tolist() == list(range(first + 128, first + 256))
    memory[first + 128 :] = 0
    assert not pool.slot_memory.any()
    assert (pool.tensor[6] == 1.0).all()


@pytest.mark.parametrize("slot", [-1, 3])
def test_a_slot_that_is_not_there_has_no_offset(slot: int) -> None:
    with pytest.raises(DeviceError, match=f"slot {slot}: this device has 3 slots") as caught:
        KvPool(GEOMETRY, 1, CPU, slots=3, slot_bytes=64).slot_offset(slot)
    assert caught.value.fault is Fault.EFFECT


def test_slots_without_records_take_no_memory() -> None:
    pool = KvPool(GEOMETRY, 5, CPU, slots=1000)
    assert pool.bytes_view().size == 5 * pool.block_bytes
    assert pool.slot_memory.shape == (1000, 0)


def test_what_is_written_to_a_place_is_gathered_from_its_block() -> None:
    pool = KvPool(GEOMETRY, 6, CPU)
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(3, 2, 4, generator=generator) for _ in range(2))
    places = torch.tensor([4 * 8 + 7, 1 * 8 + 0, 1 * 8 + 1])
    pool.write(2, pool.place_index(places), key, value)
    k, v = pool.gather(2, pool.page_index(torch.tensor([[4, 1], [1, 0]])), 2)
    assert k.shape == v.shape == (2, 2, 16, 4)
    for gathered, written in ((k, key), (v, value)):
        assert torch.equal(gathered[0, :, [7, 8, 9]].transpose(0, 1), written)
        assert torch.equal(gathered[1, :, [0, 1]].transpose(0, 1), written[1:])
    assert pool.tensor.count_nonzero() == 2 * 3 * 2 * 4
    assert not pool.tensor[:, :2].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_blocks_leave_and_come_back(dtype: torch.dtype) -> None:
    pool = KvPool(KvGeometry(3, 2, 4, 8, dtype), 6, CPU)
    pool.tensor.normal_(generator=torch.Generator().manual_seed(0))
    before, memory, size = pool.tensor.clone(), pool.bytes_view(), pool.block_bytes
    content = np.empty(2 * size, np.uint8)
    pool.read_blocks([4, 1], content)
    assert content.tobytes() == memory[4 * size : 5 * size].tobytes() + memory[size : 2 * size].tobytes()
    pool.tensor[4] = 7.0
    pool.write_blocks([0, 5], content)
    content[:] = 0
    assert torch.equal(pool.tensor[[0, 5]], before[[4, 1]])
    assert (pool.tensor[4] == 7.0).all()
    assert torch.equal(pool.tensor[1:4], before[1:4])


def test_blocks_are_copied_one_after_the_other() -> None:
    pool = KvPool(GEOMETRY, 5, CPU)
    pool.tensor[:] = torch.arange(5.0).view(5, 1, 1, 1, 1, 1)
    pool.copy_blocks([(3, 0), (0, 1), (4, 3)])
    assert pool.tensor[:, 2, 1, 1, 7, 3].tolist() == [3, 3, 2, 4, 4]
    assert torch.equal(pool.tensor[0], pool.tensor[1])


def test_scrub_keeps_what_is_finite() -> None:
    pool = KvPool(GEOMETRY, 2, CPU)
    pool.tensor[:] = 2.0
    pool.tensor[1, 0, 0, 0, 0, 0] = float("nan")
    pool.tensor[1, 0, 1, 0, 0, 1] = float("inf")
    pool.scrub([1])
    assert pool.tensor[1].count_nonzero() == pool.tensor[1].numel() - 2
    assert pool.tensor.isfinite().all()
    assert (pool.tensor[0] == 2.0).all()
