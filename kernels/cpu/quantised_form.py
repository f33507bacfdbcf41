"""How quantised weights lie in memory, and how vectors of 16 features are read from there.

A panel holds 48 output features, group after group of in_features. A group is one block of bytes: the codes, then 48
scales, then 48 minima where the form has them. Codes come in steps of 8 in_features, that is 4 pairs:

* 4 bits: a step is 48 words of 32 bits, one for each feature. Bits 4 s of its halves hold the two codes of pair s.
* 8 bits: a step is 4 pairs x 3 vectors of 32 bytes: the first codes of 16 features, then their second ones.
"""

# llvmlite and numba ship no types, and `intrinsic` returns what numba makes of a function.
# mypy: disable-error-code="untyped-decorator, import-untyped, no-any-return"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pagemill.kernels.cpu.isa import MULTIPLIES_PAIRS
from pagemill.kernels.cpu.matmul import PANEL
from pagemill.kernels.cpu.simd import LANES, pair_halves

STEP = 8
"""in_features of a step of codes."""
PAIRS = STEP // 2

_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_F32 = ir.FloatType()
_VI8 = ir.VectorType(ir.IntType(8), LANES)
_VI16 = ir.VectorType(_I16, LANES)
_VI32 = ir.VectorType(_I32, LANES)
_VF32 = ir.VectorType(_F32, LANES)

OFFSET = 16.0  # the mantissa of bfloat16 16.0 has the nibble's four bits at 3 .. 6, its ulp being 1/8
_MANTISSA, _SIXTEENS = 0x00780078, 0x41804180


@dataclass(frozen=True, slots=True)
class Form:
    """What a kernel is compiled for. nibbles: codes of 4 bits, else 8. half: scales and minima are float16, else
    float32. stored_pairs: activations are bfloat16, else float32."""

    nibbles: bool
    half: bool
    has_minimum: bool
    stored_pairs: bool

    @property
    def scale_bytes(self) -> int:
        return 2 if self.half else 4

    @property
    def step_bytes(self) -> int:
        """Of the codes of one step of a panel."""
        return PANEL * STEP // 2 if self.nibbles else PANEL * STEP

    @property
    def needs_sums(self) -> bool:
        """Whether the tile takes the sums of activations."""
        return self.nibbles or self.has_minimum

    @property
    def pairs(self) -> bool:
        """Whether factors are pairs of bfloat16, else single float32."""
        return self.stored_pairs and MULTIPLIES_PAIRS

    def named(self, what: str) -> str:
        """Names tell compiled code apart where it is kept."""
        parts = ("4" if self.nibbles else "8", "half" if self.half else "float")
        ends = ("minimum" if self.has_minimum else "symmetric", "pairs" if self.stored_pairs else "floats")
        return "_".join((what, *parts, *ends))


def ints(value: int) -> Any:
    return ir.Constant(_VI32, [value] * LANES)


def floats(value: float) -> Any:
    return ir.Constant(_VF32, [value] * LANES)


def load(builder: Any, address: Any, kind: Any) -> Any:
    loaded = builder.load(builder.inttoptr(address, kind.as_pointer()))
    loaded.align = 1
    return loaded


def plus(builder: Any, value: Any, constant: int) -> Any:
    return builder.add(value, ir.Constant(_I64, constant))


def nibble_pair(builder: Any, words: Any, pair: int) -> Any:
    """The bfloat16 pairs 16 + q of pair `pair` of a step: a shift and a logical operation for 32 weights."""
    shift = 4 * pair - 3
    moved = builder.lshr(words, ints(shift)) if shift > 0 else builder.shl(words, ints(-shift))
    return builder.or_(builder.and_(moved, ints(_MANTISSA)), ints(_SIXTEENS))


def byte_halves(builder: Any, address: Any) -> list[Any]:
    """The first and second codes of 16 features as float32."""
    found = []
    for half in range(2):
        codes = load(builder, plus(builder, address, half * LANES), _VI8)
        found.append(builder.sitofp(builder.sext(codes, _VI32), _VF32))
    return found


def as_pair(builder: Any, low: Any, high: Any) -> Any:
    """Small integers in float32 as bfloat16 pairs, which hold them exactly: their lower half is all zeros."""
    return builder.or_(
        builder.bitcast(high, _VI32), builder.lshr(builder.bitcast(low, _VI32), ir.Constant(_VI32, [16] * LANES))
    )


def factors(builder: Any, form: Form, base: Any, words: Any, pair: int, vector: int) -> Any:
    """Of a step at `base` the factors of 16 features' pair: 16 + q or the codes; pairs, or low and high float32.

    words: those of the features where codes are nibbles.
    """
    if form.nibbles:
        word = nibble_pair(builder, words, pair)
        return word if form.pairs else pair_halves(builder, word)
    low, high = byte_halves(builder, plus(builder, base, (pair * 3 + vector) * 2 * LANES))
    return as_pair(builder, low, high) if form.pairs else (low, high)


def read_scales(builder: Any, address: Any, half: bool) -> Any:
    """16 scales as float32. float16 is widened with integers, subnormal numbers too: where the processor does not
    convert it LLVM would call a library routine that is not there and abort."""
    if not half:
        return load(builder, address, _VF32)
    bits = builder.zext(load(builder, address, _VI16), _VI32)
    sign = builder.shl(builder.and_(bits, ints(0x8000)), ints(16))
    magnitude = builder.bitcast(builder.shl(builder.and_(bits, ints(0x7FFF)), ints(13)), _VF32)
    value = builder.bitcast(builder.fmul(magnitude, floats(2.0**112)), _VI32)
    return builder.bitcast(builder.or_(value, sign), _VF32)


def make_scale_at(half: bool) -> Callable[..., Any]:
    """The scale at an address, as float32."""

    @intrinsic
    def scale_at(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            if not half:
                return load(builder, args[0], _F32)
            bits = builder.zext(load(builder, args[0], _I16), _I32)
            sign = builder.shl(builder.and_(bits, ir.Constant(_I32, 0x8000)), ir.Constant(_I32, 16))
            magnitude = builder.shl(builder.and_(bits, ir.Constant(_I32, 0x7FFF)), ir.Constant(_I32, 13))
            value = builder.fmul(builder.bitcast(magnitude, _F32), ir.Constant(_F32, 2.0**112))
            return builder.bitcast(builder.or_(builder.bitcast(value, _I32), sign), _F32)

        return types.float32(types.int64), codegen

    return scale_at
