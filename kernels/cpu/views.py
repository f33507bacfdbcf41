"""Arrays over the memory of tensors, made inside a kernel.

Turning a tensor into a NumPy array costs a microsecond and a half, several times for each of the three hundred calls of
a step; passing its address costs a tenth of that. The Python side checks dtype and order before it gives an address.
"""

# numba ships no types, and `intrinsic` returns what numba makes of a function.
# mypy: disable-error-code="untyped-decorator, import-untyped, no-any-return"

from __future__ import annotations

from typing import Any

import numba
from numba import types
from numba.extending import intrinsic

from pagemill.kernels.cpu.jit import helper


@intrinsic
def _pointer(typingctx: Any, address: Any, like: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(sig.return_type))

    return types.CPointer(like)(types.int64, like), codegen


@helper
def vector(address: int, size: int, like: Any) -> Any:
    """The elements at an address as an array [size] of the type of `like`."""
    return numba.carray(_pointer(address, like), (size,))


@helper
def matrix(address: int, rows: int, columns: int, like: Any) -> Any:
    """The elements at an address as an array [rows, columns] of the type of `like`, row after row."""
    return numba.carray(_pointer(address, like), (rows, columns))
