"""Rotary frequencies: the plain ones, linear scaling and Llama 3's, as a table of cosines and sines by position."""

from __future__ import annotations

import math
from typing import Any

import torch

from pagemill.engine.models.spec import ConfigReader


def inverse_frequencies(config: ConfigReader, head_dim: int, longest: int) -> torch.Tensor:
    """float32 [head_dim / 2], from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    `longest` stands in for Llama 3's original_max_position_embeddings. Raises `UnfollowedError` on any other scaling.
    """
    rope = config.table("rope_parameters") or config.table("rope_scaling") or {}
    theta = config.number_in(rope, "rope_theta", config.number("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type")) or "default"
    if config.number_in(rope, "partial_rotary_factor", config.number("partial_rotary_factor", 1.0)) != 1.0:
        raise config.unfollowed("rotary embedding of a part of the head (partial_rotary_factor) is not supported")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / (theta**exponents)
    # Dynamic scaling sets in behind max_position_embeddings, which no sequence here exceeds.
    if kind in ("default", "dynamic"):
        return frequencies
    if kind == "linear":
        return frequencies / config.number_in(rope, "factor")
    if kind == "llama3":
        return _llama3(config, rope, frequencies, longest)
    raise config.unfollowed(
        f"rope scaling {kind!r} is not supported; supported are default, dynamic, linear and llama3"
    )


def _llama3(config: ConfigReader, rope: dict[str, Any], frequencies: torch.Tensor, longest: int) -> torch.Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended (Llama 3.1)."""
    factor = config.number_in(rope, "factor")
    low, high = config.number_in(rope, "low_freq_factor"), config.number_in(rope, "high_freq_factor")
    original = config.number_in(rope, "original_max_position_embeddings", float(longest))
    if high <= low:
        raise config.error("high_freq_factor must be greater than low_freq_factor")
    wavelength = 2 * math.pi / frequencies
    scaled = torch.where(wavelength > original / low, frequencies / factor, frequencies)
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * scaled / factor + smooth * scaled
    between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(between, blended, scaled)


def cos_sin_table(frequencies: torch.Tensor, positions: int, device: str) -> torch.Tensor:
    """float32 [positions, head_dim]: cosines of every frequency, then sines."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)
