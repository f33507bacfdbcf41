"""A weight in few bits: small integers that share a scale, and perhaps a minimum, group by group along in_features.

This is the form that all quantised weights have on their way from a file to a back end, whatever packs them: GGUF's
blocks, or `quantise`, which makes them of floating-point weights (round to nearest, as in "LLM.int8()", Dettmers et al.
2022, but with a scale for each group instead of each row). No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

GROUP = 32
"""Weights that share a scale where we quantise ourselves: as many as in GGUF's blocks."""


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """The weight [N, K] with value[n, k] = scale[n, k // group] * codes[n, k] + minimum[n, k // group].

    codes int8 [N, K]: of 8 bits, or of 4: then -8 .. 7, with a minimum 0 .. 15. scale and minimum (None: 0) are
    float16 or float32 [N, K / group], both alike.
    """

    bits: int
    codes: npt.NDArray[np.int8]
    scale: npt.NDArray[np.floating]
    minimum: npt.NDArray[np.floating] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def group(self) -> int:
        return self.shape[1] // int(self.scale.shape[1])

    @property
    def num_bytes(self) -> int:
        """Memory that it takes when it is packed."""
        minimum = 0 if self.minimum is None else self.minimum.nbytes
        return self.codes.size * self.bits // 8 + self.scale.nbytes + minimum

    def dequantise(self) -> npt.NDArray[np.float32]:
        """The values, float32 [N, K]: the product and the sum are rounded once each, as `gguf` does."""
        grouped = self.codes.reshape(*self.scale.shape, self.group)
        values = grouped * self.scale.astype(np.float32)[..., None]
        if self.minimum is not None:
            values += self.minimum.astype(np.float32)[..., None]
        return values.reshape(self.codes.shape)

    def take(self, rows: npt.NDArray[np.int64] | slice) -> QuantisedWeight:
        """These rows in this order."""
        minimum = None if self.minimum is None else self.minimum[rows]
        return replace(self, codes=self.codes[rows], scale=self.scale[rows], minimum=minimum)


def stack(parts: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """Weights of the same in_features one under another, with exactly their values, in the narrowest form that holds
    all of them."""
    if len(parts) == 1:
        return parts[0]
    bits, group = max(part.bits for part in parts), min(part.group for part in parts)
    has_minimum = any(part.minimum is not None for part in parts)
    parts = [_widened(part, bits, group, has_minimum) for part in parts]
    dtype = np.result_type(*(part.scale.dtype for part in parts))
    minima = [part.minimum for part in parts if part.minimum is not None]
    return QuantisedWeight(
        bits,
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.scale for part in parts], dtype=dtype),
        np.concatenate(minima, dtype=dtype) if has_minimum else None,
    )


def _widened(part: QuantisedWeight, bits: int, group: int, has_minimum: bool) -> QuantisedWeight:
    times = part.group // group
    scale, minimum, codes = part.scale, part.minimum, part.codes
    if has_minimum and minimum is None:
        minimum = np.zeros_like(scale)
        if bits == 4:  # codes with a minimum start at 0
            scale = scale.astype(np.float32)
            codes, minimum = codes + np.int8(8), -8 * scale
    scale = scale.repeat(times, axis=1)
    return QuantisedWeight(bits, codes, scale, None if minimum is None else minimum.repeat(times, axis=1))


def can_quantise(in_features: int) -> bool:
    """Whether rows of this length consist of whole groups."""
    return in_features % GROUP == 0


def quantise(weight: npt.NDArray[np.float32], bits: int) -> QuantisedWeight:
    """Round finite float32 [N, K] to 8 bits symmetrically, or to 4 bits between the smallest and largest of each group.

    K must be a multiple of `GROUP`. An 8-bit value is off by at most 1/254 of its group's largest magnitude, a 4-bit
    value by 1/30 of its group's range, and half an ulp of float16 in scale and minimum; or by all of that where the
    scale is no normal float32, which is less than 1e-35.
    """
    if bits not in (4, 8):
        raise ValueError(f"bits must be 4 or 8, got {bits}")
    if not can_quantise(weight.shape[1]):
        raise ValueError(f"in_features must be a multiple of {GROUP}, got {weight.shape[1]}")
    pieces = [_quantise(weight[at : at + _ROWS_AT_ONCE], bits) for at in range(0, len(weight), _ROWS_AT_ONCE)]
    return stack(pieces)


_ROWS_AT_ONCE = 1024  # so that what is made meanwhile stays small beside the weight


def _quantise(weight: npt.NDArray[np.float32], bits: int) -> QuantisedWeight:
    grouped = weight.reshape(weight.shape[0], -1, GROUP)
    low, high = grouped.min(axis=2), grouped.max(axis=2)
    if bits == 8:
        scale, codes = _rounded(np.maximum(high, -low) / np.float32(127)), grouped
        minimum, lowest, highest = None, -127, 127
    else:
        minimum = _rounded(low)
        rest = np.maximum(high - minimum.astype(np.float32), 0)
        scale, codes = _rounded(rest / np.float32(15)), grouped - minimum.astype(np.float32)[..., None]
        if minimum.dtype != scale.dtype:
            minimum, scale = minimum.astype(np.float32), scale.astype(np.float32)
        lowest, highest = 0, 15
    inverse = scale.astype(np.float32)
    # The inverse of a smaller one may overflow; such a group is rounded to its smallest value, or to 0.
    np.divide(1, inverse, out=inverse, where=inverse >= np.finfo(np.float32).smallest_normal)
    rounded = np.rint(codes * inverse[..., None]).clip(lowest, highest).astype(np.int8)
    return QuantisedWeight(bits, rounded.reshape(weight.shape), scale, minimum)


_LEAST, _MOST = np.float32(2.0**-14), np.float32(65504)  # the normal numbers of float16


def _rounded(values: npt.NDArray[np.float32]) -> npt.NDArray[np.floating]:
    """As float16 where none of them loses more than its last bits by that, else as they are."""
    magnitude = np.abs(values)
    if bool(((magnitude <= _MOST) & ((magnitude >= _LEAST) | (magnitude == 0))).all()):
        return values.astype(np.float16)
    return values
