"""Linear layers on the CPU: weights packed once into the order that the matrix product streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pagemill.kernels.cpu.matmul import MOST_ROWS, PANEL, multiply
from pagemill.kernels.cpu.team import Team

# Words of a packed weight that one thread takes at a time: enough to make the taking cheap, little enough to share out.
_WORDS_AT_ONCE = 16384


@dataclass(frozen=True, slots=True)
class CpuLinear:
    """A weight in panels (see `matmul`) and a bias, empty for none; bfloat16 as uint16 pairs and uint16."""

    panels: Any
    bias: Any
    in_features: int
    out_features: int
    dtype: torch.dtype

    def apply(self, x: torch.Tensor, team: Team) -> torch.Tensor:
        """x [T, in_features] -> [T, out_features] of the same dtype."""
        if x.shape[-1] != self.in_features:
            raise ValueError(f"expected {self.in_features} input features, got shape {tuple(x.shape)}")
        if x.dtype != self.dtype:
            return self.apply(x.to(self.dtype), team).to(x.dtype)
        out = torch.empty((x.shape[0], self.out_features), dtype=x.dtype)
        if not x.shape[0]:
            return out
        x = x.contiguous()
        at_once = max(1, min(_WORDS_AT_ONCE // self.panels[0].size, len(self.panels) // (2 * team.threads)))
        most_rows = MOST_ROWS[self.panels.dtype.type]
        multiply(
            team.board(),
            at_once,
            most_rows,
            x.data_ptr(),
            x.shape[0],
            self.in_features,
            self.panels,
            self.bias,
            out.data_ptr(),
            self.out_features,
        )
        return out


def prepare_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> CpuLinear:
    """Pack a copy of a weight [N, K], so that the original may go. bfloat16 of odd K is kept as float32."""
    features, width = weight.shape
    dtype = torch.bfloat16 if weight.dtype == torch.bfloat16 and width % 2 == 0 else torch.float32
    pack = 2 if dtype == torch.bfloat16 else 1
    panels, whole = -(-features // PANEL), features // PANEL
    words = np.zeros((panels, width // pack, PANEL), np.uint32 if pack == 2 else np.float32)
    packed = torch.from_numpy(words).view(dtype).view(panels, width // pack, PANEL, pack)
    packed[:whole] = weight[: whole * PANEL].reshape(whole, PANEL, width // pack, pack).transpose(1, 2)
    if whole < panels:
        rest = weight[whole * PANEL :]
        packed[whole, :, : len(rest)] = rest.reshape(len(rest), width // pack, pack).transpose(0, 1)
    added = torch.zeros(0) if bias is None else bias.detach()
    added = added.to(dtype, copy=True)
    stored = (added.view(torch.uint16) if pack == 2 else added).numpy()
    return CpuLinear(words, stored, width, features, dtype)
