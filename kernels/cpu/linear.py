"""Linear layers on the CPU: torch's (oneDNN)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class CpuLinear:
    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def apply(self, x: torch.Tensor, threads: int) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


def prepare_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> CpuLinear:
    return CpuLinear(weight.contiguous(), bias)
