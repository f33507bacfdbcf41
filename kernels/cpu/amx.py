"""Tiles of AMX: registers of 16 rows of 64 bytes, and an instruction that multiplies two of them.

It does 16 times the work of an AVX-512 instruction. A tile of activations holds 16 rows of 32 bfloat16, a tile of
weights 16 rows of 16 pairs, which is how panels (see `matmul`) and blocks of keys (see `layout`) lie in memory anyway.

Two conditions beside the processor's: Linux saves the tiles of a process that has asked for it only (`allowed`), and
a thread says how large its tiles are before it uses them (`configure`) and that it has done (`release`), after which
switching to another thread costs as little as before.

Of the sum of a pair's products the even and the odd ones are added up apart and joined at the end of a tile, unlike
those of AVX512_BF16. So whatever must have the same bits in a batch of any size uses tiles for all of them, or vectors
that do just the same (`quantised_few`).
"""

# llvmlite and numba ship no types, and `intrinsic` returns what numba makes of a function.
# mypy: disable-error-code="untyped-decorator, import-untyped, no-any-return"

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagemill.kernels.cpu.isa import MULTIPLIES_TILES

TILE = 16
"""Rows of a tile, and its columns of 32 bits."""

_ROW_BYTES = 4 * TILE
_TILES = 8

_ARCH_PRCTL = 158
_ASK_FOR_STATE = 0x1023
_TILE_DATA = 18

_I8 = ir.IntType(8)
_I16 = ir.IntType(16)
_I64 = ir.IntType(64)


@functools.cache
def allowed() -> bool:
    """Whether this process may use tiles: kernels are compiled for them, and the system has agreed to keep them.

    To ask is to be granted it for all threads of the process, those to come and forked children included.
    """
    if not (MULTIPLIES_TILES and sys.platform == "linux"):
        return False
    # Refused by systems older than 5.16, and where a thread handles signals on a stack too small to save tiles.
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ASK_FOR_STATE, _TILE_DATA) == 0


def _emit(builder: Any, name: str, arguments: list[Any]) -> None:
    """An instruction on tiles; none where they are not there, since code that never runs is compiled there too, and
    LLVM ends the process over an instruction that it cannot express."""
    if not MULTIPLIES_TILES:
        return
    signature = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, signature, f"llvm.x86.{name}"), arguments)


def _number(tile: int) -> Any:
    return ir.Constant(_I8, tile)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _I8.as_pointer())


def zero(builder: Any, tile: int) -> None:
    _emit(builder, "tilezero", [_number(tile)])


def load(builder: Any, tile: int, address: Any, stride: Any) -> None:
    """Rows of 64 bytes, `stride` bytes apart."""
    _emit(builder, "tileloadd64", [_number(tile), _pointer(builder, address), stride])


def store(builder: Any, tile: int, address: Any, stride: Any) -> None:
    _emit(builder, "tilestored64", [_number(tile), _pointer(builder, address), stride])


def multiply(builder: Any, sums: int, left: int, right: int) -> None:
    """sums += left @ right, of rows of pairs of bfloat16 and of 16 columns of such pairs, in float32."""
    _emit(builder, "tdpbf16ps", [_number(sums), _number(left), _number(right)])


@intrinsic
def configure(typingctx: Any, rows: Any, full: Any) -> Any:
    """Give the tiles `rows` rows each (1 to 16) but those of the bit mask `full`, which get 16; all become zero."""
    mask = full.literal_value if isinstance(full, types.IntegerLiteral) else None
    if mask is None:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        words = cgutils.alloca_once(builder, ir.ArrayType(_I8, 64))
        start = builder.bitcast(words, _I8.as_pointer())
        cgutils.memset(builder, start, ir.Constant(_I64, 64), 0)

        def place(offset: int, kind: Any) -> Any:
            return builder.bitcast(builder.gep(start, [ir.Constant(_I64, offset)]), kind.as_pointer())

        builder.store(ir.Constant(_I8, 1), place(0, _I8))  # the palette
        for tile in range(_TILES):
            builder.store(ir.Constant(_I16, _ROW_BYTES), place(16 + 2 * tile, _I16)).align = 1
            number = ir.Constant(_I8, TILE) if mask >> tile & 1 else builder.trunc(args[0], _I8)
            builder.store(number, place(48 + tile, _I8))
        _emit(builder, "ldtilecfg", [start])
        return context.get_dummy_value()

    return types.void(types.int64, full), codegen


@intrinsic
def release(typingctx: Any) -> Any:
    """Forget the tiles."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _emit(builder, "tilerelease", [])
        return context.get_dummy_value()

    return types.void(), codegen
