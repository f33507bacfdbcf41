"""What the processor that numba compiles for can do: the one place where code asks for instructions by name."""

# llvmlite and numba ship no types.
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils
from numba.core.registry import cpu_target

LANES = 16


def _has(feature: str) -> bool:
    features: str = cpu_target.target_context.codegen().magic_tuple()[2]
    return f"+{feature}" in features.split(",")


WIDE_REGISTERS = _has("avx512f")
"""Whether 32 registers hold 16 float32 each; else take it that 16 hold 8 each."""

MULTIPLIES_PAIRS = WIDE_REGISTERS and _has("avx512bf16") and llvmlite.binding.llvm_version_info[0] >= 18
"""Whether one instruction multiplies pairs of bfloat16 and adds both products to a float32 (AVX512_BF16)."""

MULTIPLIES_TILES = MULTIPLIES_PAIRS and _has("amx-tile") and _has("amx-bf16")
"""Whether one instruction multiplies tiles of bfloat16 (AMX). Whether a process may use it: `amx.allowed`."""

SLOW_WHEN_TINY = _has("avx")
"""Whether numbers below 2^-126 cost a hundred times as much, and a register says whether they count as zero (x86)."""

_COUNT_AS_ZERO = 0x8040  # of MXCSR: results that are so small (FTZ), and operands (DAZ)

_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_BYTES = ir.IntType(8).as_pointer()
_VF32 = ir.VectorType(_F32, LANES)
_VI32 = ir.VectorType(_I32, LANES)


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"


_PAIRS = ir.VectorType(_BFloat(), 2 * LANES)
_HALF = ir.VectorType(_BFloat(), LANES)
_HALF_BITS = ir.VectorType(ir.IntType(16), LANES)


def call(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """Call an LLVM intrinsic by name."""
    signature = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), arguments)


def mode(builder: Any) -> Any:
    """How this thread calculates, an i32 for `set_mode`."""
    place = cgutils.alloca_once_value(builder, ir.Constant(_I32, 0))
    if SLOW_WHEN_TINY:
        _mode_call(builder, "stmxcsr", place)
    return builder.load(place)


def set_mode(builder: Any, value: Any) -> None:
    """How this thread calculates from here on."""
    if SLOW_WHEN_TINY:
        _mode_call(builder, "ldmxcsr", cgutils.alloca_once_value(builder, value))


def with_tiny_as_zero(builder: Any, value: Any) -> Any:
    """The mode in which numbers below 2^-126 count as zero, and everything else is as before."""
    return builder.or_(value, ir.Constant(_I32, _COUNT_AS_ZERO))


def _mode_call(builder: Any, name: str, place: Any) -> None:
    signature = ir.FunctionType(ir.VoidType(), [_BYTES])
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.x86.sse.{name}")
    builder.call(function, [builder.bitcast(place, _BYTES)])


def dot_pairs(builder: Any, left: Any, right: Any, total: Any) -> Any:
    """total + the two products of the bfloat16 pairs in each of 16 words; only where MULTIPLIES_PAIRS."""
    pairs = [builder.bitcast(words, _PAIRS) for words in (left, right)]
    return call(builder, f"llvm.x86.avx512bf16.dpbf16ps.{32 * LANES}", _VF32, [total, *pairs])


def to_bfloat(builder: Any, values: Any) -> Any:
    """<16 x float> as bfloat16 in <16 x i16>, rounded to nearest even; NaN stays NaN.

    Rounded with integers where there is no instruction: LLVM would call a library routine that is not there and abort.
    """
    if MULTIPLIES_PAIRS:
        name = f"llvm.x86.avx512bf16.cvtneps2bf16.{32 * LANES}"
        return builder.bitcast(call(builder, name, _HALF, [values]), _HALF_BITS)

    def constant(value: int) -> Any:
        return ir.Constant(_VI32, [value] * LANES)

    bits = builder.bitcast(values, _VI32)
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    rounded = builder.add(bits, builder.add(odd, constant(0x7FFF)))
    quiet = builder.or_(bits, constant(0x400000))
    kept = builder.select(builder.fcmp_unordered("uno", values, values), quiet, rounded)
    return builder.trunc(builder.lshr(kept, constant(16)), _HALF_BITS)


def scale_by_power(builder: Any, values: Any, exponents: Any) -> Any:
    """values * 2^exponents of <16 x float>, 0 where that is too small, NaN where either is; only with
    WIDE_REGISTERS. The exponents are whole numbers."""
    mask, nearest = ir.Constant(ir.IntType(LANES), 2**LANES - 1), ir.Constant(_I32, 4)
    operands = [values, exponents, values, mask, nearest]
    return call(builder, f"llvm.x86.avx512.mask.scalef.ps.{32 * LANES}", _VF32, operands)
