"""Linear layers and embeddings with quantised weights, packed once into the order that the matrix product streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagemill.kernels.cpu import amx, quantised_amx, quantised_few, quantised_matmul
from pagemill.kernels.cpu.arena import Arena
from pagemill.kernels.cpu.matmul import PANEL
from pagemill.kernels.cpu.quantised_form import STEP, Form
from pagemill.kernels.cpu.quantised_gather import GATHERERS
from pagemill.kernels.cpu.simd import LANES
from pagemill.kernels.quantised_weight import QuantisedWeight

_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class QuantisedLinear:
    """A weight [out_features, in_features] in panels of blocks (see `quantised_form`) and a bias: a `TaskLinear`.

    data uint8 [panels, groups, block bytes]. `gated`: gate and up, one above the other.
    """

    data: npt.NDArray[np.uint8]
    bias: npt.NDArray[np.float32]
    record: npt.NDArray[np.int64]
    form: Form
    in_features: int
    out_features: int
    dtype: torch.dtype
    gated: bool

    @property
    def num_bytes(self) -> int:
        """Memory that the weight takes."""
        return self.data.nbytes

    def worker(self) -> int:
        group = self.in_features // int(self.data.shape[1])
        if self.form.stored_pairs and group % quantised_few.TILE_GROUP == 0 and amx.allowed():
            return quantised_amx.WORKERS[self.form]()
        return quantised_matmul.WORKERS[self.form]()

    def gatherer(self) -> int:
        return GATHERERS[self.form]()


def prepare_quantised(
    weight: QuantisedWeight, bias: torch.Tensor | None, dtype: torch.dtype, arena: Arena, *, gated: bool = False
) -> QuantisedLinear:
    """Pack a weight for activations of `dtype`, float32 or bfloat16. Its groups must be a multiple of 8 long.

    gated: its halves are gate and up, each of which begins on a panel.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"the CPU kernels take float32 and bfloat16, got {dtype}")
    if weight.group % STEP:
        raise ValueError(f"groups must be a multiple of {STEP} long, got {weight.group}")
    features, width = weight.shape
    form = Form(
        nibbles=weight.bits == 4,
        half=weight.scale.dtype == np.float16,
        has_minimum=weight.minimum is not None,
        stored_pairs=dtype == torch.bfloat16,
    )
    sections = 2 if gated else 1
    section, groups = features // sections, width // weight.group
    panels = -(-section // PANEL)
    codes = weight.group // STEP * form.step_bytes
    block = codes + PANEL * form.scale_bytes * (1 + form.has_minimum)
    data = arena.empty((sections * panels, groups, block), np.uint8)
    added = np.zeros((sections * panels if bias is not None else 1, PANEL), np.float32)
    for index in range(sections):
        part = weight.take(slice(index * section, (index + 1) * section))
        _pack(part, data[index * panels : (index + 1) * panels], codes)
        if bias is not None:
            flat = added[index * panels : (index + 1) * panels].reshape(-1)
            flat[:section] = bias.detach()[index * section : (index + 1) * section].float().numpy()
    record = np.array(
        [
            data.ctypes.data,
            width,
            groups,
            block,
            section,
            sections,
            added.ctypes.data,
            0 if bias is None else added[0].nbytes,
        ],
        np.int64,
    )
    return QuantisedLinear(data, added, record, form, width, features, dtype, gated)


def _pack(weight: QuantisedWeight, data: npt.NDArray[np.uint8], codes: int) -> None:
    """Rows of a weight into the panels of a section, zeros behind them."""
    panels = len(data)
    data[:, :, :codes] = _packed_codes(weight, panels)
    scales = _packed_scales(weight.scale, panels)
    data[:, :, codes : codes + scales.shape[2]] = scales
    if weight.minimum is not None:
        data[:, :, codes + scales.shape[2] :] = _packed_scales(weight.minimum, panels)


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
