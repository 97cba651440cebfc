"""PagedKVStore: rows go where their slots say, copies take what they should, and sizes are checked."""

import pytest
import torch

from phloem.kernels.kv_store import PagedKVStore


def make_store(block_size: int = 4, dtype: torch.dtype = torch.float32) -> PagedKVStore:
    store = PagedKVStore(
        num_layers=2, num_blocks=5, block_size=block_size, num_kv_heads=2, head_dim=8, dtype=dtype
    )
    store.data.fill_(torch.nan)
    return store


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16, 32, 64])
def test_append_writes_each_token_to_its_slot_and_nothing_else(block_size: int, dtype: torch.dtype) -> None:
    store = make_store(block_size, dtype)
    slots = torch.randperm(5 * block_size)[:3]
    k, v = torch.randn(2, 3, 2, 8).to(dtype)
    store.append(1, k, v, slots)
    for token, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, block_size)
        assert torch.equal(store.layer(1)[block, 0, offset], k[token])
        assert torch.equal(store.layer(1)[block, 1, offset], v[token])
    assert int((~store.data.isnan()).sum()) == 2 * 3 * 2 * 8


def test_append_refuses_a_slot_outside_of_the_store() -> None:
    with pytest.raises((IndexError, RuntimeError)):
        make_store().append(0, torch.zeros(1, 2, 8), torch.zeros(1, 2, 8), torch.tensor([20]))


@pytest.mark.parametrize("num_rows", [0, 1, 3, 4])
def test_copy_rows_takes_the_first_rows_of_keys_and_values_in_all_layers(num_rows: int) -> None:
    store = make_store()
    store.data.normal_()
    before = store.data.clone()
    store.copy_rows(3, 1, num_rows)
    assert torch.equal(store.data[:, 1, :, :num_rows], before[:, 3, :, :num_rows])
    assert torch.equal(store.data[:, 1, :, num_rows:], before[:, 1, :, num_rows:])
    others = [0, 2, 3, 4]
    assert torch.equal(store.data[:, others], before[:, others])


def test_copy_rows_to_the_same_block_changes_nothing() -> None:
    store = make_store()
    store.data.normal_()
    before = store.data.clone()
    store.copy_rows(2, 2, 4)
    assert torch.equal(store.data, before)


@pytest.mark.parametrize(("source", "target", "num_rows"), [(5, 0, 1), (0, -1, 1), (0, 1, 5), (0, 1, -1)])
def test_copy_rows_refuses_what_is_not_there(source: int, target: int, num_rows: int) -> None:
    with pytest.raises(ValueError, match=r"outside of the store|can't copy"):
        make_store().copy_rows(source, target, num_rows)


@pytest.mark.parametrize("block_size", [0, -1, 3, 12, 65, 128])
def test_a_block_size_that_is_no_power_of_two_up_to_64_is_refused(block_size: int) -> None:
    with pytest.raises(ValueError, match=f"block_size is {block_size}"):
        make_store(block_size)


def test_integer_memory_is_refused() -> None:
    with pytest.raises(TypeError, match="floating-point"):
        make_store(dtype=torch.int32)


def test_the_bytes_of_a_block_are_known_before_and_after() -> None:
    known = PagedKVStore.bytes_for_block(
        num_layers=30, block_size=16, num_kv_heads=3, head_dim=64, dtype=torch.bfloat16
    )
    assert known == 23_040 * 16
    store = make_store(dtype=torch.bfloat16)
    assert store.bytes_per_block == store.data.nbytes // 5
    assert store.bytes_per_block == PagedKVStore.bytes_for_block(
        num_layers=2, block_size=4, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16
    )


def test_memory_is_not_touched_before_it_is_used() -> None:
    def resident_bytes() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident_bytes()
    store = PagedKVStore(
        num_layers=8, num_blocks=4096, block_size=16, num_kv_heads=4, head_dim=64, dtype=torch.bfloat16
    )
    assert store.data.nbytes == 512 << 20
    assert resident_bytes() - before < 64 << 20
