"""The pool: sizes, contiguity of a block, both orders, and what is refused."""

from __future__ import annotations

import psutil
import pytest
import torch

from pagemill.kernels.layout import KVForm, KVLayout
from pagemill.kernels.ops import select_ops

SHAPE = {"num_blocks": 5, "num_layers": 3, "block_size": 4, "num_kv_heads": 2, "head_dim": 6}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["k_major", "token_major"])
def test_layers_share_the_pool_without_overlap(dtype: torch.dtype, form: KVForm) -> None:
    layout = KVLayout(**SHAPE, dtype=dtype, form=form)
    pool = layout.allocate()
    assert pool.shape == (3, 5, layout.elements_per_piece)
    assert layout.bytes_per_block == 3 * 2 * 2 * 4 * 6 * dtype.itemsize
    assert pool.data_ptr() % 64 == 0
    slots = torch.arange(20)
    stored = {}
    for index in range(3):
        key, value = torch.randn(20, 2, 6).to(dtype), torch.randn(20, 2, 6).to(dtype)
        layout.layer(pool, index).scatter(slots, key, value)
        stored[index] = key, value
    for index, (key, value) in stored.items():
        k, v = layout.layer(pool, index).gather(torch.arange(5))
        assert torch.equal(k, key)
        assert torch.equal(v, value)


@pytest.mark.parametrize("form", ["k_major", "token_major"])
def test_a_block_is_one_piece_of_each_layer(form: KVForm) -> None:
    layout = KVLayout(**SHAPE, form=form)
    pool = layout.allocate()
    pool.zero_()
    for index in range(3):
        layout.layer(pool, index).scatter(torch.arange(8, 12), torch.ones(4, 2, 6), torch.ones(4, 2, 6))
    assert (pool[:, 2] == 1).all()
    assert (pool[:, [0, 1, 3, 4]] == 0).all()


@pytest.mark.parametrize("form", ["k_major", "token_major"])
def test_neighbouring_blocks_of_a_layer_lie_side_by_side(form: KVForm) -> None:
    layout = KVLayout(**SHAPE, dtype=torch.bfloat16, form=form)
    kv = layout.layer(layout.allocate(), 2)
    assert kv.k[3].data_ptr() - kv.k[2].data_ptr() == kv.v[3].data_ptr() - kv.v[2].data_ptr() == 2 * 2 * 4 * 6 * 2
    assert kv.v[2].data_ptr() - kv.k[2].data_ptr() == 2 * 4 * 6 * 2


def test_the_null_block_is_zero_and_the_rest_is_not_committed() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    layout = KVLayout(num_blocks=2**12, num_layers=8, block_size=16, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    pool = layout.allocate()
    assert (pool[:, 0] == 0).all()
    assert pool.numel() * 2 == 2**31
    assert process.memory_info().rss - before < 2**26


def test_what_no_kernel_serves_is_refused() -> None:
    for name in SHAPE:
        with pytest.raises(ValueError, match=name):
            KVLayout(**{**SHAPE, name: 0})
    with pytest.raises(ValueError, match="head_dim"):
        KVLayout(**{**SHAPE, "head_dim": 5}, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="dtype"):
        KVLayout(**SHAPE, dtype=torch.float64)
    with pytest.raises(IndexError):
        KVLayout(**SHAPE).layer(KVLayout(**SHAPE).allocate(), 3)


def test_selection_by_device_and_by_name() -> None:
    assert select_ops("cpu").name == "cpu"
    assert select_ops("cpu", override="reference").name == "reference"
    with pytest.raises(ValueError, match="choose one of"):
        select_ops("cpu", override="cuda")
