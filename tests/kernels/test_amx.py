"""Products in tiles, where this processor has them, and what happens where the system does not give them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pagemill.kernels.cpu import amx
from pagemill.kernels.cpu.isa import MULTIPLIES_TILES
from pagemill.kernels.cpu.ops import CpuOps
from pagemill.kernels.cpu.target import instructions
from tests.kernels.paged import REFERENCE, distance

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
