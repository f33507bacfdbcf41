"""Norms, rotary embedding, activation, linear layers and block copies against the reference."""

from __future__ import annotations

import pytest
import torch

from pagemill.kernels.cpu.ops import CpuOps
from tests.kernels.paged import REFERENCE, distance

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 5e-3}
DTYPES = [torch.float32, torch.bfloat16]
ROWS = [0, 1, 3, 200]  # the last is enough work for several threads


@pytest.fixture(scope="module")
def cpu() -> CpuOps:
    return CpuOps()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_rms_norm(cpu: CpuOps, dtype: torch.dtype, rows: int) -> None:
    x, weight = torch.randn(rows, 576).to(dtype) * 3, torch.randn(576).to(dtype)
    kept = x.clone()
    assert distance(cpu.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5)) < TOLERANCE[dtype]
    assert torch.equal(x, kept)


@pytest.mark.parametrize(
    ("dtype", "residual_dtype"), [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)]
)
@pytest.mark.parametrize("rows", ROWS)
def test_add_rms_norm(cpu: CpuOps, dtype: torch.dtype, residual_dtype: torch.dtype, rows: int) -> None:
    x, residual = torch.randn(rows, 200).to(dtype), torch.randn(rows, 200).to(residual_dtype)
    weight = torch.randn(200).to(dtype)
    kept = residual.clone()
    norm, total = cpu.add_rms_norm(x, residual, weight, 1e-5)
    expected_norm, expected_total = REFERENCE.add_rms_norm(x, residual, weight, 1e-5)
    assert norm.dtype == dtype
    assert total.dtype == residual_dtype
    assert torch.equal(total, expected_total)
    assert distance(norm, expected_norm) < TOLERANCE[dtype]
    assert torch.equal(residual, kept)
    if residual_dtype == dtype:
        # Of the sum as it was rounded. Two kernels, each free to add in an order of its own: a last bit may differ,
        # which is a tenth of what the unrounded sum would differ by.
        again = cpu.rms_norm(total, weight, 1e-5)
        assert distance(norm, again) < (1e-6 if dtype == torch.float32 else 3e-4)


def test_norm_of_zeros_and_of_nan(cpu: CpuOps) -> None:
    x = torch.zeros(3, 64)
    x[1, 5] = float("nan")
    norm = cpu.rms_norm(x, torch.ones(64), 1e-6)
    assert (norm[[0, 2]] == 0).all()
    assert norm[1].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("head_dim", [2, 20, 64])
def test_rotary_embedding_of_parts_of_a_projection(cpu: CpuOps, dtype: torch.dtype, rows: int, head_dim: int) -> None:
    projection = torch.randn(rows, 8 * head_dim).to(dtype)
    angles = torch.rand(50, head_dim // 2) * 6.3
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
    positions = torch.randint(0, 50, (rows,))
    expected = projection.clone()

    def parts(rows_of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, _ = rows_of.split([4 * head_dim, 2 * head_dim, 2 * head_dim], dim=-1)
        return query.unflatten(-1, (4, head_dim)), key.unflatten(-1, (2, head_dim))

    cpu.rotary_embedding(*parts(projection), positions, cos_sin)
    REFERENCE.rotary_embedding(*parts(expected), positions, cos_sin)
    assert distance(projection, expected) < TOLERANCE[dtype]
    assert torch.equal(projection[:, 6 * head_dim :], expected[:, 6 * head_dim :])  # the values are not rotated


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_silu_and_mul(cpu: CpuOps, dtype: torch.dtype, rows: int) -> None:
    gate_up = torch.randn(rows, 2 * 150).to(dtype) * 4
    assert distance(cpu.silu_and_mul(gate_up), REFERENCE.silu_and_mul(gate_up)) < TOLERANCE[dtype]


def test_rows_may_be_parts_of_longer_ones(cpu: CpuOps) -> None:
    """As one head of a projection is."""
    wide, residual, weight = torch.randn(5, 3 * 40), torch.randn(5, 2 * 40), torch.randn(40)
    x, beside = wide[:, 40:80], residual[:, :40]
    norm, total = cpu.add_rms_norm(x, beside, weight, 1e-5)
    assert torch.equal(cpu.rms_norm(x, weight, 1e-5), cpu.rms_norm(x.contiguous(), weight, 1e-5))
    assert torch.equal(total, x + beside)
    assert torch.equal(norm, cpu.add_rms_norm(x.contiguous(), beside.contiguous(), weight, 1e-5)[0])
    assert torch.equal(cpu.silu_and_mul(wide[:, :80]), cpu.silu_and_mul(wide[:, :80].contiguous()))


def test_silu_at_the_ends_of_the_range(cpu: CpuOps) -> None:
    gate = torch.tensor([[-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30, float("inf"), float("nan")]])
    actual = cpu.silu_and_mul(torch.cat([gate, torch.ones_like(gate)], dim=-1))[0]
    expected = torch.nn.functional.silu(gate)[0]
    assert torch.allclose(actual, expected, rtol=1e-6, atol=1e-30, equal_nan=True)


def test_bfloat16_rounds_to_nearest_even(cpu: CpuOps) -> None:
    """Sums whose exact value lies between two bfloat16, on both sides of the middle and on it."""
    residual = torch.arange(1, 257, dtype=torch.float32).to(torch.bfloat16).reshape(1, -1)
    x = (residual.float() * torch.tensor([2.0**-8, 2.0**-9, 3 * 2.0**-9, 2.0**-8 * 1.01]).repeat(64)).to(torch.bfloat16)
    _, total = cpu.add_rms_norm(x, residual, torch.ones(256, dtype=torch.bfloat16), 1e-5)
    assert torch.equal(total, (x.float() + residual.float()).to(torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 7, 8, 9, 17, 96, 130])
@pytest.mark.parametrize(("out_features", "in_features"), [(96, 64), (100, 40), (5, 3), (576, 1536), (1, 1)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(cpu: CpuOps, dtype: torch.dtype, rows: int, out_features: int, in_features: int, bias: bool) -> None:
    x = torch.randn(rows, in_features).to(dtype)
    weight = torch.randn(out_features, in_features).to(dtype)
    added = torch.randn(out_features).to(dtype) if bias else None
    prepared = cpu.prepare_linear(weight, added)
    assert (prepared.in_features, prepared.out_features) == (in_features, out_features)
    actual = cpu.linear(x, prepared)
    expected = REFERENCE.linear(x, REFERENCE.prepare_linear(weight, added))
    assert actual.shape == (rows, out_features)
    assert actual.dtype == dtype
    assert distance(actual, expected) < {torch.float32: 2e-6, torch.bfloat16: 5e-3}[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 6, 9, 130])
@pytest.mark.parametrize(("inner", "in_features"), [(96, 64), (100, 40), (5, 3), (300, 1024)])
@pytest.mark.parametrize("bias", [False, True])
def test_gated_linear(cpu: CpuOps, dtype: torch.dtype, rows: int, inner: int, in_features: int, bias: bool) -> None:
    x = torch.randn(rows, in_features).to(dtype)
    weight = torch.randn(2 * inner, in_features).to(dtype)
    added = torch.randn(2 * inner).to(dtype) if bias else None
    prepared = cpu.prepare_gated_linear(weight, added)
    expected = REFERENCE.gated_linear(x, REFERENCE.prepare_gated_linear(weight, added))
    assert expected.shape == (rows, inner)
    actual = cpu.gated_linear(x, prepared)
    assert actual.dtype == dtype
    assert distance(actual, expected) < {torch.float32: 3e-6, torch.bfloat16: 3e-3}[dtype]
    both = REFERENCE.linear(x, REFERENCE.prepare_linear(weight, added))
    assert distance(cpu.linear(x, prepared), both) < {torch.float32: 2e-6, torch.bfloat16: 5e-3}[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_logits_are_not_rounded(cpu: CpuOps, dtype: torch.dtype, rows: int) -> None:
    hidden, weight = torch.randn(rows, 64).to(dtype), torch.randn(1000, 64).to(dtype)
    logits = cpu.logits(hidden, cpu.prepare_linear(weight))
    assert logits.dtype == torch.float32
    assert distance(logits, REFERENCE.logits(hidden, REFERENCE.prepare_linear(weight))) < 2e-6


def test_the_memory_of_logits_is_used_again_only_when_nobody_holds_them() -> None:
    ops = CpuOps(threads=1)
    prepared = ops.prepare_linear(torch.randn(40, 8))
    hidden = torch.randn(4, 8)
    first = ops.logits(hidden, prepared)
    kept, place = first.clone(), first.data_ptr()
    assert ops.logits(-hidden, prepared).data_ptr() != place
    assert torch.equal(first, kept)
    row = ops.logits(hidden, prepared)[1]
    del first
    other = ops.logits(-hidden, prepared)
    assert torch.equal(row, kept[1])
    place = other.data_ptr()
    del other
    assert ops.logits(hidden[:2], prepared).data_ptr() == place


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("features", "width"), [(100, 64), (48, 3), (5, 2)])
def test_an_embedding_is_read_from_the_packed_head(cpu: CpuOps, dtype: torch.dtype, features: int, width: int) -> None:
    weight = torch.randn(features, width).to(dtype)
    prepared = cpu.prepare_linear(weight)
    for ids in (torch.arange(features), torch.tensor([features - 1, 0]), torch.empty(0, dtype=torch.int64)):
        assert torch.equal(cpu.embedding(ids, prepared).to(dtype), weight[ids])
    for wrong in (-1, features):
        with pytest.raises(IndexError, match=str(features - 1)):
            cpu.embedding(torch.tensor([0, wrong]), prepared)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_product_has_the_same_bits_whatever_is_beside_it(cpu: CpuOps, dtype: torch.dtype) -> None:
    prepared = cpu.prepare_linear(torch.randn(200, 576).to(dtype))
    x = torch.randn(75, 576).to(dtype)
    together = cpu.linear(x, prepared)
    for begin, end in [(0, 1), (3, 5), (10, 14), (20, 31), (74, 75)]:
        assert torch.equal(cpu.linear(x[begin:end], prepared), together[begin:end])


@pytest.mark.parametrize("stored", [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.float16, torch.float32)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("features", "width"), [(70, 64), (48, 35), (3, 94), (130, 2)])
def test_weights_are_packed_and_rounded_from_where_they_are_stored(
    cpu: CpuOps, stored: tuple[torch.dtype, ...], dtype: torch.dtype, gated: bool, features: int, width: int
) -> None:
    parts = [torch.randn(features, width).to(each) for each in stored]
    parts[0][0, 0] = float("inf")
    together = torch.cat([part.to(dtype) for part in parts])
    prepared = cpu.prepare_stored(iter(parts), None, dtype, gated=gated)
    expected = (cpu.prepare_gated_linear if gated else cpu.prepare_linear)(together)
    assert (prepared.in_features, prepared.out_features, prepared.gated) == (width, 2 * features, gated)
    assert prepared.panels.tobytes() == expected.panels.tobytes()
    parts[0][0, 0] = float("nan")
    x = torch.randn(2, width).to(dtype)
    out = cpu.linear(x, cpu.prepare_stored(iter(parts), None, dtype, gated=gated))
    assert out[:, 0].isnan().all()
    assert distance(out[:, 1:], x.double() @ together[1:].double().t()) < TOLERANCE[dtype]


def test_a_product_of_the_wrong_width_is_refused(cpu: CpuOps) -> None:
    with pytest.raises(ValueError, match="input features"):
        cpu.linear(torch.ones(2, 6), cpu.prepare_linear(torch.ones(4, 8)))


def test_copy_blocks_reads_before_it_writes(cpu: CpuOps) -> None:
    pool = torch.arange(10.0).view(2, 5, 1).repeat(1, 1, 6)
    cpu.copy_blocks(pool, torch.tensor([[1, 2], [2, 3], [4, 1]]))
    assert pool[..., 0].tolist() == [[0.0, 4.0, 1.0, 2.0, 4.0], [5.0, 9.0, 6.0, 7.0, 9.0]]


def test_other_types_are_refused_by_name(cpu: CpuOps) -> None:
    with pytest.raises(ValueError, match="float16"):
        cpu.rms_norm(torch.ones(2, 4, dtype=torch.float16), torch.ones(4, dtype=torch.float16), 1e-5)
