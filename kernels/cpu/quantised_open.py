"""Quantised weights opened into factors, a few groups at a time, for many rows to be multiplied by.

Unpacking costs about as much as multiplying by three rows. With one row or few it is done in registers, as part of the
product (`quantised_tile`). With many, each thread opens groups of a panel into memory of its own that stays in its
first level cache, and takes all rows past them before the next groups. What is opened are the codes as they are and not
the values, which bfloat16 would round: so a row's sum is made of the same numbers in the same order either way.

An opened group holds its factors along in_features, 48 features each, as in `matmul`: words of bfloat16 pairs, or
float32. Then come 48 scales and 48 minima, where there are any, in float32.
"""

# llvmlite and numba ship no types, and `intrinsic` returns what numba makes of a function.
# mypy: disable-error-code="untyped-decorator, import-untyped, no-any-return"

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagemill.kernels.cpu.isa import call
from pagemill.kernels.cpu.jit import helper
from pagemill.kernels.cpu.matmul import PANEL, fetch
from pagemill.kernels.cpu.quantised_form import PAIRS, STEP, Form, factors, ints, load, plus, read_scales
from pagemill.kernels.cpu.simd import LANES

VECTOR_BYTES = 4 * LANES
LINE_BYTES = 4 * PANEL
"""Bytes of 48 opened factors, scales or minima."""

ROOM = 24 << 10
"""Bytes of opened groups that go well with a first level cache."""

_I16 = ir.IntType(16)
_I64 = ir.IntType(64)
_VI32 = ir.VectorType(ir.IntType(32), LANES)
_VF32 = ir.VectorType(ir.FloatType(), LANES)
_VH = ir.VectorType(ir.HalfType(), LANES)
_WORDS16 = ir.VectorType(_I16, 2 * LANES)
_CACHE_LINE = 64


def fetch_share(builder: Any, block: Any, size: Any) -> None:
    """Ask for so many bytes of the groups that are opened next, while rows are multiplied: an opening that waits for
    memory holds up all of them."""
    lines = builder.lshr(plus(builder, size, _CACHE_LINE - 1), ir.Constant(_I64, 6))
    with cgutils.for_range(builder, lines) as line:
        fetch(builder, builder.add(block, builder.mul(line.index, ir.Constant(_I64, _CACHE_LINE))))


def store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = 4


def make_sizes(form: Form) -> tuple[Any, Any]:
    """Two functions: bytes of an opened group of so many steps, and how many such groups are opened at a time."""
    each, more = (PAIRS if form.pairs else STEP) * LINE_BYTES, (1 + form.has_minimum) * LINE_BYTES

    @helper
    def opened_bytes(steps: int) -> int:
        return steps * each + more

    @helper
    def groups_at_once(steps: int) -> int:
        return max(1, ROOM // (steps * each + more))

    return opened_bytes, groups_at_once


def make_open(form: Form, exact: bool) -> Callable[..., Any]:
    """Open groups of a panel.

    The intrinsic's arguments, int64: address of the first group's block; groups, steps of a group, bytes of a block;
    where the opened groups go, one behind the other, and bytes of one.

    exact: nibbles become the codes by a table, for processors with AVX-512 and pairs of bfloat16; else 16 + q, which is
    what tiles make in registers.
    """
    tables = exact and form.nibbles

    @intrinsic
    def open_groups(typingctx: Any, w: Any, groups: Any, steps: Any, block: Any, out: Any, size: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            w_at, n, per_group, block_size, out_at, out_size = args

            def times(value: Any, constant: int) -> Any:
                return builder.mul(value, ir.Constant(_I64, constant))

            with cgutils.for_range(builder, n) as group:
                start = builder.add(w_at, builder.mul(group.index, block_size))
                target = builder.add(out_at, builder.mul(group.index, out_size))
                with cgutils.for_range(builder, per_group) as step:
                    base = builder.add(start, times(step.index, form.step_bytes))
                    line_at = builder.add(target, times(step.index, (PAIRS if form.pairs else STEP) * LINE_BYTES))
                    for vector in range(PANEL // LANES):
                        words = (
                            load(builder, plus(builder, base, vector * VECTOR_BYTES), _VI32) if form.nibbles else None
                        )
                        place = plus(builder, line_at, vector * VECTOR_BYTES)
                        for pair in range(PAIRS):
                            if tables:
                                store(
                                    builder,
                                    _looked_up(builder, words, pair, form),
                                    plus(builder, place, pair * LINE_BYTES),
                                )
                                continue
                            made = factors(builder, form, base, words, pair, vector)
                            if form.pairs:
                                store(builder, made, plus(builder, place, pair * LINE_BYTES))
                                continue
                            for half, value in enumerate(made):
                                store(builder, value, plus(builder, place, (2 * pair + half) * LINE_BYTES))
                scales = builder.add(start, times(per_group, form.step_bytes))
                opened = builder.add(target, times(per_group, (PAIRS if form.pairs else STEP) * LINE_BYTES))
                for vector in range(PANEL // LANES * (1 + form.has_minimum)):
                    place = plus(builder, scales, vector * LANES * form.scale_bytes)
                    value = (
                        convert_scales(builder, place, form.half) if exact else read_scales(builder, place, form.half)
                    )
                    store(builder, value, plus(builder, opened, vector * VECTOR_BYTES))
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 6), codegen

    return open_groups


def _looked_up(builder: Any, words: Any, pair: int, form: Form) -> Any:
    """The codes of a pair as bfloat16: the instruction looks at the lowest five bits of each half, of which the fifth
    belongs to another code, so the table holds each value twice."""
    lowest = 0 if form.has_minimum else -8
    table = ir.Constant(_WORDS16, [_bfloat_bits(code % 16 + lowest) for code in range(2 * LANES)])
    moved = builder.lshr(words, ints(4 * pair)) if pair else words
    operands = [table, builder.bitcast(moved, _WORDS16)]
    return call(builder, f"llvm.x86.avx512.permvar.hi.{32 * LANES}", _WORDS16, operands)


def _bfloat_bits(value: int) -> int:
    """Of a small integer."""
    return struct.unpack("<I", struct.pack("<f", value))[0] >> 16


def convert_scales(builder: Any, address: Any, half: bool) -> Any:
    """16 scales as float32, by the instruction for it: as `read_scales`, for processors with AVX-512."""
    if half:
        return builder.fpext(load(builder, address, _VH), _VF32)
    return read_scales(builder, address, half)
