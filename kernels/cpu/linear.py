"""Linear layers on the CPU: weights packed once into the order that the matrix product streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from pagemill.kernels.cpu import amx, matmul, matmul_amx
from pagemill.kernels.cpu.arena import Arena
from pagemill.kernels.cpu.gather import float_gatherer, pair_gatherer
from pagemill.kernels.cpu.matmul import PANEL, TASK_WORDS
from pagemill.kernels.cpu.pack import pack
from pagemill.kernels.cpu.reuse import ReusedMemory
from pagemill.kernels.cpu.team import Team


class TaskLinear(Protocol):
    """A prepared weight whose products are tasks (`matmul.TASK_*`) of a worker. bfloat16 or float32 activations."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations that it takes."""
        ...

    @property
    def record(self) -> npt.NDArray[np.int64]:
        """What the worker needs to know about the weight."""
        ...

    @property
    def gated(self) -> bool:
        """Whether it does tasks with the result `GATED`."""
        ...

    def worker(self) -> int:
        """The address of the compiled worker."""
        ...

    def gatherer(self) -> int:
        """That of the worker which takes rows out of the weight (see `gather`)."""
        ...


@dataclass(frozen=True, slots=True)
class CpuLinear:
    """A weight in panels (see `matmul`) and a bias; bfloat16 as uint16 pairs. `gated`: gate and up, one above the
    other."""

    panels: Any
    bias: npt.NDArray[np.float32]
    record: npt.NDArray[np.int64]
    in_features: int
    out_features: int
    dtype: torch.dtype
    gated: bool

    def worker(self) -> int:
        if self.dtype != torch.bfloat16:
            return matmul.float_worker()
        if self.panels.shape[1] % matmul_amx.TILE_DEPTH == 0 and amx.allowed():
            return matmul_amx.tile_worker()
        return matmul.pair_worker()

    def gatherer(self) -> int:
        return pair_gatherer() if self.dtype == torch.bfloat16 else float_gatherer()


def apply(
    linear: TaskLinear,
    x: torch.Tensor,
    team: Team,
    result: int = matmul.PLAIN,
    memory: ReusedMemory | None = None,
) -> torch.Tensor:
    """x [T, in_features] -> [T, out_features], for GATED half as wide; of the dtype of x, for FLOAT32 float32.

    memory: where the float32 result goes.
    """
    if x.shape[-1] != linear.in_features:
        raise ValueError(f"expected {linear.in_features} input features, got shape {tuple(x.shape)}")
    if x.dtype != linear.dtype:
        done = apply(linear, x.to(linear.dtype), team, result, memory)
        return done if result == matmul.FLOAT32 else done.to(x.dtype)
    features = linear.out_features // 2 if result == matmul.GATED else linear.out_features
    if result == matmul.FLOAT32 and memory is not None:
        out = memory.empty(x.shape[0], features)
    else:
        out = torch.empty((x.shape[0], features), dtype=torch.float32 if result == matmul.FLOAT32 else x.dtype)
    if not x.shape[0]:
        return out
    x = x.contiguous()
    task = np.array(
        [x.data_ptr(), linear.in_features, x.shape[0], out.data_ptr(), features, linear.record.ctypes.data, result]
        + [0] * (TASK_WORDS - 7),
        np.int64,
    )
    matmul.multiply(team.board(), linear.worker(), task.ctypes.data)
    return out


def prepare_linear(
    parts: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    arena: Arena,
    team: Team,
    *,
    gated: bool = False,
) -> CpuLinear:
    """Pack copies of weights [N_i, K] one under another, rounded to `dtype`, so that the originals may go. bfloat16 of
    odd K is kept as float32.

    gated: two, gate and up, each of which begins on a panel.
    """
    width = parts[0].shape[1]
    kept = torch.bfloat16 if dtype == torch.bfloat16 and width % 2 == 0 else torch.float32
    sections = [[part] for part in parts] if gated else [parts]
    section = sum(len(part) for part in sections[0])
    depth = width // 2 if kept == torch.bfloat16 else width
    panels = -(-section // PANEL)
    words = arena.empty((len(sections) * panels, depth, PANEL), np.uint32)
    added = np.zeros((len(sections) * panels if bias is not None else 1, PANEL), np.float32)
    for index, inside in enumerate(sections):
        stored = [_rounded(part, dtype, kept) for part in inside]
        pack(stored, words[index * panels : (index + 1) * panels], kept, team)
        if bias is not None:
            flat = added[index * panels : (index + 1) * panels].reshape(-1)
            flat[:section] = bias.detach()[index * section : (index + 1) * section].float().numpy()
    record = np.array(
        [
            words.ctypes.data,
            depth,
            section,
            len(sections),
            added.ctypes.data,
            0 if bias is None else added[0].nbytes,
        ],
        np.int64,
    )
    return CpuLinear(words, added, record, width, section * len(sections), kept, gated)


def _rounded(weight: torch.Tensor, dtype: torch.dtype, kept: torch.dtype) -> torch.Tensor:
    """A weight of any type as `pack` takes it, rounded to `dtype` where that is not done on the way."""
    if weight.dtype in (dtype, torch.float32) and kept == dtype:
        return weight
    return weight.to(dtype).to(kept)
