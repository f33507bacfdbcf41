"""Deterministic inputs, and how far a result is from the reference's."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

ELEMENTWISE_TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 2e-3}


@dataclass(frozen=True, slots=True)
class Outcome:
    """`error` must not exceed `tolerance` (relative; 0 for exact results). `result` is compared between repetitions."""

    error: float
    tolerance: float
    result: torch.Tensor

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance


def seeded(name: str) -> tuple[np.random.Generator, torch.Generator]:
    seed = zlib.crc32(name.encode())
    return np.random.default_rng(seed), torch.Generator().manual_seed(seed)


def normal(name: str, device: str, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    _, generator = seeded(name)
    return [torch.randn(shape, generator=generator).to(device=device, dtype=dtype) for shape in shapes]


def exact(got: torch.Tensor, want: torch.Tensor) -> Outcome:
    return Outcome(float((got != want).sum()), 0.0, got)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    if got.shape != want.shape or got.dtype != want.dtype:
        return torch.inf
    size = float(want.double().norm())
    error = float((got.double() - want.double()).norm())
    return error / size if size > 0 else error


def worst(errors: Sequence[float]) -> float:
    """The largest, NaN counting as larger than all."""
    return float(np.max(np.nan_to_num(np.array(errors), nan=np.inf)))
