"""Linear layers on the CPU: bfloat16 by our own kernel on repacked weights, float32 by torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn import functional

from pagemill.kernels.cpu.matmul import PANEL, multiply
from pagemill.kernels.cpu.team import Team

# Words of a packed weight that one thread takes at a time: enough to make the taking cheap, little enough to share out.
_WORDS_AT_ONCE = 16384


class CpuLinear(Protocol):
    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    def apply(self, x: torch.Tensor, team: Team) -> torch.Tensor:
        """x [T, in_features] -> [T, out_features]."""
        ...


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A bfloat16 weight in panels; see `matmul`. bias is uint16 [N], empty for none."""

    panels: Any
    bias: Any
    in_features: int
    out_features: int

    def apply(self, x: torch.Tensor, team: Team) -> torch.Tensor:
        out = torch.empty((x.shape[0], self.out_features), dtype=torch.bfloat16)
        if x.shape[0]:
            at_once = max(
                1, min(_WORDS_AT_ONCE // (self.in_features * PANEL // 2), len(self.panels) // (2 * team.threads))
            )
            rows = x.contiguous().view(torch.uint16).numpy()
            multiply(team.board(), at_once, rows, self.panels, self.bias, out.view(torch.uint16).numpy())
        return out


@dataclass(frozen=True, slots=True)
class TorchLinear:
    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def apply(self, x: torch.Tensor, team: Team) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


def prepare_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> CpuLinear:
    """The fastest form of a weight [N, K]; the packed one holds a copy, so that the original may go."""
    if weight.dtype != torch.bfloat16 or weight.shape[1] % 2:
        return TorchLinear(weight.contiguous(), bias)
    features, depth = weight.shape
    panels = -(-features // PANEL)
    words = np.zeros((panels, depth // 2, PANEL), np.uint32)
    packed = torch.from_numpy(words).view(torch.bfloat16).view(panels, depth // 2, PANEL, 2)
    whole = features // PANEL
    packed[:whole] = weight[: whole * PANEL].view(whole, PANEL, depth // 2, 2).transpose(1, 2)
    if whole < panels:
        rest = weight[whole * PANEL :]
        packed[whole, :, : len(rest)] = rest.view(len(rest), depth // 2, 2).transpose(0, 1)
    stored = np.zeros(0, np.uint16) if bias is None else bias.to(torch.bfloat16).view(torch.uint16).numpy().copy()
    return PackedLinear(words, stored, depth, features)
