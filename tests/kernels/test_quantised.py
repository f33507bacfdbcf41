"""Quantised weights: what is packed is what is meant, and products with it are products with the dequantised weight."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagemill.kernels.cpu.ops import CpuOps
from pagemill.kernels.quantised_weight import GROUP, QuantisedWeight, can_quantise, quantise, stack
from tests.kernels.paged import distance

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 5e-3}
# bits, has a minimum, type of the scales, group, type of the activations: every value of each, not every pair.
FORMS = [
    (4, True, np.float16, 32, torch.bfloat16),
    (4, False, np.float16, 32, torch.bfloat16),
    (8, False, np.float16, 32, torch.bfloat16),
    (8, True, np.float32, 16, torch.bfloat16),
    (4, True, np.float32, 32, torch.float32),
    (8, False, np.float16, 32, torch.float32),
]


@pytest.fixture(scope="module")
def cpu() -> CpuOps:
    return CpuOps(threads=2)


def invented(
    bits: int, has_minimum: bool, dtype: type[np.floating], group: int, features: int, width: int
) -> QuantisedWeight:
    """Every code occurs, and scales of both signs, zeros and subnormal numbers among them."""
    rng = np.random.default_rng(7)
    low, high = (-128, 127) if bits == 8 else (0, 15) if has_minimum else (-8, 7)
    codes = rng.integers(low, high + 1, (features, width)).astype(np.int8)
    # As in GGUF's kinds, whose float32 scales are float16 times a small integer: codes times scales are exact.
    scale = (rng.standard_normal((features, width // group)) * 0.01).astype(np.float16).astype(dtype) * dtype(5)
    scale[0, 0], scale[-1, -1], scale[1:3, 0] = 0, np.float16(6e-8), 3e-6
    minimum = rng.standard_normal(scale.shape).astype(dtype) if has_minimum else None
    return QuantisedWeight(bits, codes, scale, minimum)


@pytest.mark.parametrize(("bits", "has_minimum", "dtype", "group", "activations"), FORMS)
def test_products_and_rows_are_those_of_the_dequantised_weight(
    cpu: CpuOps, bits: int, has_minimum: bool, dtype: type[np.floating], group: int, activations: torch.dtype
) -> None:
    for features, width, rows in [(144, 64, 3), (100, 192, 13), (5, 32, 1), (1000, 96, 16), (100, 64, 45)]:
        weight = invented(bits, has_minimum, dtype, group, features, width)
        values = torch.from_numpy(weight.dequantise())
        bias = torch.randn(features).to(activations) if rows != 3 else None
        prepared = cpu.prepare_quantised(weight, bias, activations)
        assert (prepared.in_features, prepared.out_features) == (width, features)
        x = torch.randn(rows, width).to(activations)
        actual = cpu.linear(x, prepared)
        assert actual.dtype == activations
        expected = x.double() @ values.double().T + (0 if bias is None else bias.double())
        assert distance(actual, expected) < TOLERANCE[activations]
        for row in range(rows):
            assert torch.equal(cpu.linear(x[row : row + 1], prepared), actual[row : row + 1]), (
                "bits depend on the batch"
            )
        ids = torch.tensor([features - 1, 0, features // 2, 0])
        assert torch.equal(cpu.embedding(ids, prepared), values[ids].to(activations))


@pytest.mark.parametrize(("bits", "has_minimum"), [(4, True), (8, False)])
def test_gated_products_of_many_rows_have_the_bits_of_single_ones(cpu: CpuOps, bits: int, has_minimum: bool) -> None:
    weight = invented(bits, has_minimum, np.float16, 32, 192, 64)
    prepared = cpu.prepare_quantised(weight, None, torch.bfloat16, gated=True)
    x = torch.randn(61, 64).bfloat16()
    actual = cpu.gated_linear(x, prepared)
    both = x.double() @ torch.from_numpy(weight.dequantise()).double().T
    assert distance(actual, torch.nn.functional.silu(both[:, :96]) * both[:, 96:]) < TOLERANCE[torch.bfloat16]
    for row in range(61):
        assert torch.equal(cpu.gated_linear(x[row : row + 1], prepared), actual[row : row + 1])


@pytest.mark.parametrize(("bits", "has_minimum", "group"), [(4, True, 32), (4, False, 64), (8, False, 160)])
def test_rows_of_any_number_have_the_same_bits_with_more_groups_than_are_opened_at_once(
    cpu: CpuOps, bits: int, has_minimum: bool, group: int
) -> None:
    weight = invented(bits, has_minimum, np.float16, group, 80, 640)
    bias = torch.randn(80).bfloat16()
    prepared = cpu.prepare_quantised(weight, bias, torch.bfloat16)
    x = torch.full((150, 640), float("nan")).bfloat16()
    x[5:145] = torch.randn(140, 640)
    together = cpu.linear(x[5:145], prepared)
    expected = x[5:145].double() @ torch.from_numpy(weight.dequantise()).double().T + bias.double()
    assert distance(together, expected) < TOLERANCE[torch.bfloat16]
    for rows in (*range(1, 36), 47, 48, 49, 127, 128, 129):
        assert torch.equal(cpu.linear(x[5 : 5 + rows], prepared), together[:rows]), rows
        assert torch.equal(cpu.linear(x[145 - rows : 145], prepared), together[-rows:]), rows


def nasty_rows(width: int) -> torch.Tensor:
    """Rows of every kind that arithmetic treats in a way of its own, bfloat16 [24, width]."""
    normal = torch.randn(24, width).bfloat16()
    # Next to the smallest normal number, so that some are below it, and sums that cancel are.
    for row, exponent in enumerate((-133, -130, -128, -126, -125, -124, -122, -119)):
        normal[row] = (torch.randn(width).double() * 2.0**exponent).bfloat16()
    normal[8, ::2] = -normal[8, 1::2]
    normal[9] = torch.where(torch.rand(width) < 0.5, 2.0**-126, -(2.0**-126))
    normal[10] *= 2.0**120  # whose products overflow
    normal[11] = (torch.randn(width).double() * 2.0 ** torch.randint(-126, 120, (width,)).double()).bfloat16()
    normal[12], normal[13], normal[14] = 0, -0.0, 2.0**-133
    normal[15, 3], normal[16, 3], normal[17, 5] = float("inf"), -float("inf"), float("nan")
    normal[18, 0], normal[18, 1] = float("inf"), -float("inf")
    normal[19, 0::2], normal[20, 1::2] = 0, 0
    return normal


@pytest.mark.parametrize(
    ("bits", "has_minimum", "dtype", "group"),
    [
        (8, False, np.float16, 32),
        (4, True, np.float16, 32),
        (4, False, np.float16, 64),
        (8, True, np.float32, 128),
        (8, False, np.float16, 16),
    ],
)
def test_a_row_has_the_same_bits_alone_and_beside_others_whatever_it_holds(
    cpu: CpuOps, bits: int, has_minimum: bool, dtype: type[np.floating], group: int
) -> None:
    """Scales are large, too, so that sums that are next to nothing can be told apart."""
    weight = invented(bits, has_minimum, dtype, group, 100, 256)
    weight.scale[50:] = 30000
    prepared = cpu.prepare_quantised(weight, None, torch.bfloat16)
    x = nasty_rows(256)
    together = cpu.logits(x, prepared).clone()
    assert together[:8].count_nonzero() > 400
    numbers = ~together.isnan()
    assert numbers[:10].all()
    assert not numbers[17].any()
    bits_of = together.nan_to_num(7.0).view(torch.int32)
    for rows in range(1, 18):
        for first in range(0, 25 - rows, 1 if rows <= 4 else 7):
            some = cpu.logits(x[first : first + rows], prepared).nan_to_num(7.0).view(torch.int32)
            assert torch.equal(some, bits_of[first : first + rows]), (rows, first)


def test_products_of_other_shapes_and_rows_that_are_not_there(cpu: CpuOps) -> None:
    prepared = cpu.prepare_quantised(quantise(np.ones((40, 64), np.float32), 8), None, torch.bfloat16)
    assert cpu.linear(torch.zeros(0, 64, dtype=torch.bfloat16), prepared).shape == (0, 40)
    assert cpu.linear(torch.ones(2, 64), prepared).dtype == torch.float32
    with pytest.raises(ValueError, match="expected 64 input features"):
        cpu.linear(torch.ones(2, 32), prepared)
    for ids in ([40], [-1], [0, 2**40]):
        with pytest.raises(IndexError, match=r"ids must lie in 0 \.\. 39"):
            cpu.embedding(torch.tensor(ids), prepared)
    assert cpu.embedding(torch.zeros(0, dtype=torch.int64), prepared).shape == (0, 64)
    with pytest.raises(ValueError, match="float32 and bfloat16"):
        cpu.prepare_quantised(quantise(np.ones((40, 64), np.float32), 8), None, torch.float16)


def test_activations_that_are_no_numbers_stay_so_in_their_row_alone(cpu: CpuOps) -> None:
    prepared = cpu.prepare_quantised(invented(4, True, np.float16, 32, 96, 64), None, torch.bfloat16)
    x = torch.randn(9, 64).bfloat16()
    clean = cpu.linear(x, prepared)
    x[4, 40] = float("nan")
    actual = cpu.linear(x, prepared)
    assert actual[4].isnan().all()
    kept = [row for row in range(9) if row != 4]
    assert torch.equal(actual[kept], clean[kept])


@pytest.mark.parametrize("size", [1.0, 1e-9, 1e9])
@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_stays_within_half_a_step(bits: int, size: float) -> None:
    weight = (np.random.default_rng(1).standard_normal((20, 4 * GROUP)) * size).astype(np.float32)
    weight[3, :GROUP] = 0
    weight[4, :GROUP] = size
    weight[5, :GROUP] = -size
    weight[6, 5] = 40 * size
    made = quantise(weight, bits)
    assert made.bits == bits
    assert made.codes.min() >= (-127 if bits == 8 else 0)
    assert made.codes.max() <= (127 if bits == 8 else 15)
    grouped = weight.reshape(20, 4, GROUP)
    reach = np.abs(grouped).max(2) / 254 if bits == 8 else (grouped.max(2) - grouped.min(2)) / 30
    # Scale and minimum are float16 where their size allows, and the codes make the best of it.
    slack = np.abs(grouped).max(2) * 2.0**-10
    error = np.abs(made.dequantise() - weight).reshape(grouped.shape).max(2)
    assert (error <= reach + slack).all()
    assert (made.dequantise()[3, :GROUP] == 0).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bits", [4, 8])
def test_weights_next_to_nothing_are_rounded_without_a_word(bits: int) -> None:
    """As of features that training has switched off."""
    weight = np.random.default_rng(1).standard_normal((6, 2 * GROUP)).astype(np.float32)
    weight[0] *= np.float32(1e-38)
    weight[1] *= np.float32(1e-42)
    weight[2, GROUP:] = 1e-45
    made = quantise(weight, bits).dequantise()
    assert np.abs(made - weight)[:2].max() < 1e-35
    assert np.abs(made - weight)[2, GROUP:].max() < 1e-35
    assert np.abs(made - weight).max() < (0.2 if bits == 4 else 0.02)


def test_rows_of_broken_groups_are_refused() -> None:
    assert can_quantise(64)
    assert not can_quantise(48)
    with pytest.raises(ValueError, match="multiple of 32, got 48"):
        quantise(np.ones((2, 48), np.float32), 8)
    with pytest.raises(ValueError, match="bits must be 4 or 8, got 3"):
        quantise(np.ones((2, 32), np.float32), 3)


def test_weights_of_different_forms_are_stacked_without_changing_a_value() -> None:
    forms = [
        (4, False, np.float16, 32),
        (4, True, np.float16, 32),
        (8, False, np.float32, 16),
        (8, True, np.float16, 32),
    ]
    for first in forms:
        for second in forms:
            parts = [invented(*first, 5, 64), invented(*second, 3, 64)]
            stacked = stack(parts)
            assert np.array_equal(stacked.dequantise(), np.concatenate([part.dequantise() for part in parts]))
    same = stack([invented(4, False, np.float16, 32, 5, 64)] * 2)
    assert (same.bits, same.scale.dtype, same.minimum) == (4, np.float16, None)
    order = np.array([4, 0, 4])
    assert np.array_equal(same.take(order).dequantise(), same.dequantise()[order])
