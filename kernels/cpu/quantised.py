"""Linear layers and embeddings with quantised weights, packed once into the order that the matrix product streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagemill.kernels.cpu.quantised_matmul import look_up, multiply
from pagemill.kernels.cpu.quantised_tile import MOST_FLOAT_ROWS, MOST_PAIR_ROWS, PANEL, STEP
from pagemill.kernels.cpu.simd import LANES
from pagemill.kernels.cpu.team import Team
from pagemill.kernels.quantised_weight import QuantisedWeight

# Bytes of a packed weight that one thread takes at a time: enough to make the taking cheap, little enough to share out.
_BYTES_AT_ONCE = 32768
_LIKE = {torch.float32: np.float32(0), torch.bfloat16: np.uint16(0)}
_SCALES = {np.dtype(np.float16): np.uint16(0), np.dtype(np.float32): np.float32(0)}


@dataclass(frozen=True, slots=True)
class QuantisedLinear:
    """A weight [out_features, in_features] in panels of blocks (see `quantised_tile`) and a bias, empty for none.

    data uint8 [panels, groups, block bytes]. form: values of the types of codes, scales and minima.
    """

    data: npt.NDArray[np.uint8]
    bias: npt.NDArray[Any]
    form: tuple[Any, Any, Any]
    in_features: int
    out_features: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Memory that the weight takes."""
        return self.data.nbytes

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
        panels, groups, block = self.data.shape
        at_once = max(1, min(_BYTES_AT_ONCE // (groups * block), panels // (2 * team.threads)))
        multiply(
            team.board(),
            at_once,
            MOST_PAIR_ROWS if self.dtype == torch.bfloat16 else MOST_FLOAT_ROWS,
            x.data_ptr(),
            x.shape[0],
            self.in_features,
            self.data.reshape(-1),
            groups,
            block,
            *self.form,
            self.bias,
            out.data_ptr(),
            self.out_features,
        )
        return out

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows ids int64 [T], dequantised: [T, in_features] of the linear's dtype. Raises IndexError on others."""
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.out_features:
            raise IndexError(f"rows must lie in 0 .. {self.out_features - 1}, got {int(ids.min())} .. {int(ids.max())}")
        ids = ids.contiguous()
        out = torch.empty((len(ids), self.in_features), dtype=self.dtype)
        _, groups, block = self.data.shape
        code, scale, minimum = self.form
        look_up(
            ids.data_ptr(),
            len(ids),
            self.data.reshape(-1),
            groups,
            block,
            4 if isinstance(code, np.uint8) else 8,
            scale,
            scale.itemsize,
            not isinstance(minimum, np.bool_),
            self.in_features,
            out.data_ptr(),
            _LIKE[self.dtype],
        )
        return out


def prepare_quantised(weight: QuantisedWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> QuantisedLinear:
    """Pack a weight for activations of `dtype`, float32 or bfloat16. Its groups must be a multiple of 8 long."""
    if dtype not in _LIKE:
        raise ValueError(f"the CPU kernels take float32 and bfloat16, got {dtype}")
    features, width = weight.shape
    if weight.group % STEP:
        raise ValueError(f"groups must be a multiple of {STEP} long, got {weight.group}")
    panels = -(-features // PANEL)
    parts = [_packed_codes(weight, panels), _packed_scales(weight.scale, panels)]
    if weight.minimum is not None:
        parts.append(_packed_scales(weight.minimum, panels))
    data = np.concatenate(parts, axis=2)
    scale = _SCALES[weight.scale.dtype]
    form = (
        np.uint8(0) if weight.bits == 4 else np.int8(0),
        scale,
        np.bool_(False) if weight.minimum is None else scale,
    )
    added = torch.zeros(0) if bias is None else bias.detach()
    added = added.to(dtype, copy=True)
    stored = (added.view(torch.uint16) if dtype == torch.bfloat16 else added).numpy()
    return QuantisedLinear(data, stored, form, width, features, dtype)


def _padded(values: npt.NDArray[Any], panels: int) -> npt.NDArray[Any]:
    missing = panels * PANEL - values.shape[0]
    return np.pad(values, ((0, missing), (0, 0))) if missing else values


def _packed_codes(weight: QuantisedWeight, panels: int) -> npt.NDArray[np.uint8]:
    """uint8 [panels, groups, bytes]."""
    steps = weight.group // STEP
    codes = _padded(weight.codes, panels).reshape(panels, PANEL, -1, steps, STEP // 2, 2)
    if weight.bits == 8:
        lanes = codes.reshape(panels, PANEL // LANES, LANES, -1, steps, STEP // 2, 2)
        ordered = lanes.transpose(0, 3, 4, 5, 1, 6, 2)
        return np.ascontiguousarray(ordered).view(np.uint8).reshape(panels, codes.shape[2], -1)
    shifted = codes if weight.minimum is not None else codes + np.int8(8)
    words = np.zeros((panels, codes.shape[2], steps, PANEL), np.uint32)
    for pair in range(STEP // 2):
        for half in range(2):
            nibbles = shifted[..., pair, half].transpose(0, 2, 3, 1)
            words |= nibbles.astype(np.uint32) << np.uint32(4 * pair + 16 * half)
    return words.view(np.uint8).reshape(panels, codes.shape[2], -1)


def _packed_scales(scale: npt.NDArray[np.floating], panels: int) -> npt.NDArray[np.uint8]:
    """uint8 [panels, groups, bytes]."""
    ordered = _padded(scale, panels).reshape(panels, PANEL, -1).transpose(0, 2, 1)
    return np.ascontiguousarray(ordered).view(np.uint8)
