"""Vectors of 16 stored elements, bfloat16 as uint16 or float32, read and written as float32, in LLVM IR.

LLVM does vectorise such loops when numba writes them, but with integer arithmetic for rounding and checks for overlap
at every row, which cost more than the arithmetic of a row of some hundred elements.
"""

# llvmlite and numba ship no types.
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from pagemill.kernels.cpu.isa import LANES, to_bfloat

_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_F32 = ir.FloatType()
_VI32 = ir.VectorType(_I32, LANES)
_VF32 = ir.VectorType(_F32, LANES)


class StoredArray:
    """A numba array of stored elements, one after the other, seen from inside an intrinsic."""

    def __init__(self, context: Any, builder: Any, array_type: Any, value: Any) -> None:
        self._builder = builder
        self._packed = array_type.dtype == types.uint16
        self._element = _I16 if self._packed else _F32
        data = context.make_array(array_type)(context, builder, value).data
        self._data = builder.bitcast(data, self._element.as_pointer())

    def _place(self, index: Any) -> Any:
        place = self._builder.gep(self._data, [index])
        return self._builder.bitcast(place, ir.VectorType(self._element, LANES).as_pointer())

    def load(self, index: Any) -> Any:
        """Elements index to index + 15, <16 x float>."""
        builder = self._builder
        values = builder.load(self._place(index))
        values.align = 2 if self._packed else 4
        if self._packed:
            values = builder.bitcast(builder.shl(builder.zext(values, _VI32), ir.Constant(_VI32, [16] * LANES)), _VF32)
        return values

    def store(self, values: Any, index: Any) -> None:
        """The same way back; bfloat16 rounds to nearest even."""
        kept = to_bfloat(self._builder, values) if self._packed else values
        self._builder.store(kept, self._place(index)).align = 2 if self._packed else 4
