"""Products in tiles, where this processor has them, and what happens where the system does not give them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from pagemill.kernels.cpu import amx
from pagemill.kernels.cpu.isa import MULTIPLIES_TILES
from pagemill.kernels.cpu.ops import CpuOps
from pagemill.kernels.cpu.target import instructions
from tests.kernels.paged import REFERENCE, distance

TILE = 1024  # bytes
SMALLEST = np.float32(2.0**-126)

tiles = pytest.mark.skipif(not amx.allowed(), reason="this processor or system has no tiles")


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """A system that refuses; yields what it was asked."""
    asked: list[tuple[int, ...]] = []

    class System:
        def __init__(self, name: Any) -> None:
            pass

        def syscall(self, *call: int) -> int:
            asked.append(call)
            return -1

    monkeypatch.setattr(ctypes, "CDLL", System)
    amx.allowed.cache_clear()
    yield asked
    amx.allowed.cache_clear()


@tiles
@pytest.mark.parametrize(("features", "width"), [(48, 32), (100, 64), (576, 1536), (1, 32), (97, 96)])
@pytest.mark.parametrize("bias", [False, True])
def test_rows_of_any_number_are_right_and_have_the_same_bits(features: int, width: int, bias: bool) -> None:
    """17 to 32 rows are two groups of tiles with a row in common; more are several blocks."""
    ops = CpuOps(threads=2)
    x, weight = torch.randn(70, width).bfloat16(), torch.randn(features, width).bfloat16()
    added = torch.randn(features).bfloat16() if bias else None
    prepared = ops.prepare_linear(weight, added)
    together = ops.linear(x, prepared)
    assert distance(together, REFERENCE.linear(x, REFERENCE.prepare_linear(weight, added))) < 5e-3
    for rows in (*range(1, 36), 47, 48, 49, 63, 64, 65):
        assert torch.equal(ops.linear(x[:rows], prepared), together[:rows]), rows
        assert torch.equal(ops.linear(x[-rows:], prepared), together[-rows:]), rows


@tiles
def test_nothing_is_read_or_written_beside_the_rows() -> None:
    """Rows of NaN before and behind, and an output with a seam."""
    ops = CpuOps(threads=1)
    prepared = ops.prepare_linear(torch.randn(50, 64).bfloat16())
    x = torch.full((60, 64), float("nan")).bfloat16()
    for rows in (1, 15, 17, 31, 33):
        x[10 : 10 + rows] = torch.randn(rows, 64).bfloat16()
        assert not ops.linear(x[10 : 10 + rows], prepared).isnan().any()
        x[10 : 10 + rows] = float("nan")


@tiles
def test_widths_that_fill_no_tile_use_vectors() -> None:
    ops = CpuOps(threads=1)
    for width in (30, 48, 80):
        x, weight = torch.randn(33, width).bfloat16(), torch.randn(64, width).bfloat16()
        expected = REFERENCE.linear(x, REFERENCE.prepare_linear(weight))
        assert distance(ops.linear(x, ops.prepare_linear(weight)), expected) < 5e-3


def test_a_system_that_refuses_gets_vectors(refusing: list[tuple[int, ...]]) -> None:
    x, weight = torch.randn(33, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    ops = CpuOps(threads=1)
    expected = REFERENCE.linear(x, REFERENCE.prepare_linear(weight))
    assert distance(ops.linear(x, ops.prepare_linear(weight)), expected) < 5e-3
    assert not amx.allowed()
    assert "tiles" not in instructions()
    assert len(refusing) == MULTIPLIES_TILES


@tiles
def test_it_is_said_that_tiles_are_used() -> None:
    assert instructions() == "AVX-512, bfloat16 multiplied in tiles"


def flushed(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """As float32, numbers below the smallest normal one as 0."""
    rounded = values.astype(np.float32)
    return np.where(np.abs(rounded) < SMALLEST, np.copysign(np.float32(0), rounded), rounded)


def in_chains(left: npt.NDArray[Any], right: npt.NDArray[Any], before: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """before + left @ right of [tiles, 16, 32] and [tiles, 16 pairs, 16 columns, 2] as `quantised_few` makes it.

    A product of bfloat16 and its sum with a float32 are rounded once: float64 holds all that float32 can see of them.
    """
    chains = [np.zeros(before.shape, np.float32) for _ in range(2)]
    with np.errstate(all="ignore"):
        left, right = flushed(left).astype(np.float64), flushed(right).astype(np.float64)
        for pair in range(16):
            for half in range(2):
                product = left[:, :, 2 * pair + half, None] * right[:, pair, None, :, half]
                chains[half] = flushed(product + chains[half])
        return flushed(flushed(before) + flushed(chains[0] + chains[1]))


@intrinsic  # type: ignore[untyped-decorator]
def multiply_tile(typingctx: Any, left: Any, right: Any, sums: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        stride = ir.Constant(ir.IntType(64), 64)
        for tile, address in enumerate((args[2], args[0], args[1])):
            amx.load(builder, tile, address, stride)
        amx.multiply(builder, 0, 1, 2)
        amx.store(builder, 0, args[2], stride)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@njit  # type: ignore[untyped-decorator]
def multiply_tiles(count: int, left: int, right: int, sums: int) -> None:
    amx.configure(16, 255)
    for at in range(0, count * TILE, TILE):
        multiply_tile(left + at, right + at, sums + at)
    amx.release()


@tiles
@pytest.mark.parametrize("low", [0, 60, 120, 240])
@pytest.mark.parametrize("codes", [True, False])
def test_a_tile_adds_up_even_and_odd_products_in_chains(low: int, codes: bool) -> None:
    """What vectors for few rows rely on; low: the exponent from which on activations are, from denormal ones to NaN."""
    rng = np.random.default_rng(low)
    shape = (200, 512)

    def bfloats(lowest: int, highest: int) -> npt.NDArray[np.uint32]:
        sign, exponent = rng.integers(0, 2, shape), rng.integers(lowest, highest, shape)
        return (sign << 31 | exponent << 23 | rng.integers(0, 128, shape) << 16).astype(np.uint32)

    left = bfloats(low, low + 16)
    numbers = rng.integers(-128, 128, shape).astype(np.float32).view(np.uint32)
    right = numbers if codes else bfloats(max(0, 126 - low), 142 - low if low < 100 else 40)
    before = rng.standard_normal((200, 16, 16)).astype(np.float32) * np.float32(2.0 ** (low - 126) if low else 0)
    stored = [(values >> 16).astype(np.uint16) for values in (left, right)]
    actual = before.copy()
    multiply_tiles(200, stored[0].ctypes.data, stored[1].ctypes.data, actual.ctypes.data)
    left_values, right_values = left.view(np.float32), right.view(np.float32)
    expected = in_chains(left_values.reshape(200, 16, 32), right_values.reshape(200, 16, 16, 2), before)
    numbers_here = ~np.isnan(actual)
    assert np.array_equal(numbers_here, ~np.isnan(expected))
    assert np.array_equal(actual.view(np.uint32)[numbers_here], expected.view(np.uint32)[numbers_here])
    assert numbers_here.any()
