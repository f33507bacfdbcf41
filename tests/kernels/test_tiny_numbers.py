"""Numbers below 2^-126: in products they are zeros, for everybody else they stay what they are."""

from __future__ import annotations

import pytest
import torch

from pagemill.kernels.cpu.isa import SLOW_WHEN_TINY
from pagemill.kernels.cpu.ops import CpuOps
from tests.kernels.paged import make_case

TINY = 1e-39


@pytest.fixture(scope="module", params=[1, 2])
def cpu(request: pytest.FixtureRequest) -> CpuOps:
    return CpuOps(threads=request.param)


@pytest.mark.skipif(not SLOW_WHEN_TINY, reason="this processor is as quick with them, and calculates with them")
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_products_take_them_for_zeros(cpu: CpuOps, rows: int) -> None:
    """Also where another thread computes them: 2,000 features are many parts."""
    generator = torch.Generator().manual_seed(rows)
    weight, x = torch.randn(2000, 64, generator=generator), torch.randn(rows, 64, generator=generator)
    weight[::3] *= TINY
    x[:, ::5] *= TINY
    tiny = cpu.prepare_linear(weight)
    weight[::3] = 0
    expected = cpu.linear(x * (x.abs() > 1e-30), cpu.prepare_linear(weight))
    for _ in range(20):
        assert torch.equal(cpu.linear(x, tiny), expected)


@pytest.mark.skipif(not SLOW_WHEN_TINY, reason="this processor is as quick with them, and calculates with them")
def test_attention_takes_them_for_zeros(cpu: CpuOps) -> None:
    case = make_case([70, 3, 130], [1, 3, 30])
    case.kv.v.mul_(TINY)
    for _ in range(20):
        assert not cpu.paged_attention(case.query, case.kv, case.meta, scale=0.2).any()


def test_the_caller_calculates_as_before(cpu: CpuOps) -> None:
    """torch and numpy run on the same thread."""
    cpu.linear(torch.ones(3, 64), cpu.prepare_linear(torch.ones(100, 64)))
    case = make_case([70, 3], [1, 3])
    cpu.paged_attention(case.query, case.kv, case.meta, scale=0.2)
    assert (torch.full((3,), TINY) * 0.5).ne(0).all()
