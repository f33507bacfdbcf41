"""Layer norm in float32, with or without weights; shared by the models of the GPT-2 generation."""

from __future__ import annotations

import torch
from torch.nn import functional

from pagemill.engine.models.base import Loading


class LayerNorm:
    """Norm over the last axis, [T, size] float32 to the same. Weights are `name`.weight and `name`.bias."""

    def __init__(self, loading: Loading, name: str, size: int, *, affine: bool = True, eps: float = 1e-5) -> None:
        self._shape = (size,)
        self._eps = eps
        self._weight = loading.vector(f"{name}.weight", size, torch.float32) if affine else None
        self._bias = loading.vector(f"{name}.bias", size, torch.float32) if affine else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self._shape, self._weight, self._bias, self._eps)
