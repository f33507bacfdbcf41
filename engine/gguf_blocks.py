"""GGUF's blocks of quantised weights as `QuantisedWeight`, without changing a value.

The layouts are those of ggml's `ggml-quants.h` and `ggml-quants.c`; the values are `gguf.dequantize`'s, bit for bit.
What ggml calls K-quants has scales of scales, which are multiplied out: a product of float16 and 6 bits, exact in
float32.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pagemill.kernels.quantised_weight import QuantisedWeight

_Bytes = npt.NDArray[np.uint8]
_SUPER = 256  # weights of a block of the K-quants
_LOW, _HIGH = np.uint8(0x0F), np.uint8(4)


def read_blocks(kind: str, data: _Bytes) -> QuantisedWeight | None:
    """A tensor's bytes [rows, bytes of a row] of a type of ggml; None for types that are not kept quantised.

    Raises ValueError where a scale is no finite number.
    """
    if kind not in _READERS:
        return None
    size, read = _READERS[kind]
    rows = data.shape[0]
    with np.errstate(invalid="ignore"):  # told of below
        bits, codes, scale, minimum = read(data.reshape(-1, size))
    if not np.isfinite(scale).all() or (minimum is not None and not np.isfinite(minimum).all()):
        raise ValueError("a scale is not finite")
    return QuantisedWeight(
        bits,
        np.ascontiguousarray(codes, np.int8).reshape(rows, -1),
        np.ascontiguousarray(scale).reshape(rows, -1),
        None if minimum is None else np.ascontiguousarray(minimum).reshape(rows, -1),
    )


_Parts = tuple[int, npt.NDArray[np.int8], npt.NDArray[np.floating], npt.NDArray[np.floating] | None]


def _half(data: _Bytes, at: int) -> npt.NDArray[np.float16]:
    return np.ascontiguousarray(data[:, at : at + 2]).view(np.float16)


def _nibbles(data: _Bytes, run: int) -> npt.NDArray[np.int8]:
    """Codes of which the low nibbles of `run` bytes come before the high ones."""
    packed = data.reshape(len(data), -1, run)
    return np.stack((packed & _LOW, packed >> _HIGH), axis=2).reshape(len(data), -1).view(np.int8)


def _fifth_bits(data: _Bytes) -> npt.NDArray[np.int8]:
    """Bit i of 32, as 16 or 0."""
    return (np.unpackbits(data, axis=1, bitorder="little") << np.uint8(4)).view(np.int8)


def _q4_0(data: _Bytes) -> _Parts:
    return 4, _nibbles(data[:, 2:], 16) - np.int8(8), _half(data, 0), None


def _q4_1(data: _Bytes) -> _Parts:
    return 4, _nibbles(data[:, 4:], 16), _half(data, 0), _half(data, 2)


def _q5_0(data: _Bytes) -> _Parts:
    codes = (_nibbles(data[:, 6:], 16) | _fifth_bits(data[:, 2:6])) - np.int8(16)
    return 8, codes, _half(data, 0), None


def _q5_1(data: _Bytes) -> _Parts:
    return 8, _nibbles(data[:, 8:], 16) | _fifth_bits(data[:, 4:8]), _half(data, 0), _half(data, 2)


def _q8_0(data: _Bytes) -> _Parts:
    return 8, data[:, 2:].view(np.int8), _half(data, 0), None


def _six_bits(data: _Bytes) -> tuple[_Bytes, _Bytes]:
    """8 scales and 8 minima of 6 bits from 12 bytes."""
    first, second, rest = data[:, :4], data[:, 4:8], data[:, 8:]
    scales = np.concatenate((first & 0x3F, (rest & _LOW) | (first >> 2 & 0x30)), axis=1)
    minima = np.concatenate((second & 0x3F, (rest >> _HIGH) | (second >> 2 & 0x30)), axis=1)
    return scales, minima


def _k_scales(data: _Bytes) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    scales, minima = _six_bits(data[:, 4:16])
    return _half(data, 0).astype(np.float32) * scales, -(_half(data, 2).astype(np.float32) * minima)


def _q4_k(data: _Bytes) -> _Parts:
    return 4, _nibbles(data[:, 16:], 32), *_k_scales(data)


def _q5_k(data: _Bytes) -> _Parts:
    high = data[:, 16:48].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    codes = _nibbles(data[:, 48:], 32) | ((high & 1) << np.uint8(4)).reshape(len(data), -1).view(np.int8)
    return 8, codes, *_k_scales(data)


def _q6_k(data: _Bytes) -> _Parts:
    low = _nibbles(data[:, :128], 64).view(np.uint8)
    high = data[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    codes = (low | ((high & 3) << np.uint8(4)).reshape(len(data), -1)).view(np.int8) - np.int8(32)
    return 8, codes, _half(data, 208).astype(np.float32) * data[:, 192:208].view(np.int8), None


_READERS: dict[str, tuple[int, Callable[[_Bytes], _Parts]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
KEPT_KINDS = tuple(_READERS)
"""Types that stay quantised in memory: those of 4 bits in 4, the others in 8."""
