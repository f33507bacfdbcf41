"""Numbers below 2^-126 (subnormal ones), which an x86 processor takes ten to two hundred times as long to multiply.

Files of weights have them, and so have the tails of a softmax; what they add to a sum is below the last bit of anything
else in it. So products and attention count them as zero, as the instructions that multiply bfloat16 in pairs and tiles
do anyway. Only there: a sampler tells 1e-45 from 0, and scales of float16 are widened by way of such numbers. torch
runs on the same thread, so a worker leaves it as it was.
"""

# llvmlite and numba ship no types, and `intrinsic` returns what numba makes of a function.
# mypy: disable-error-code="untyped-decorator, import-untyped, no-any-return"

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from pagemill.kernels.cpu import isa


@intrinsic
def count_as_zero(typingctx: Any) -> Any:
    """From here on they are zeros in this thread. Returns what `count_as_before` takes."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        before = isa.mode(builder)
        isa.set_mode(builder, isa.with_tiny_as_zero(builder, before))
        return before

    return types.int32(), codegen


@intrinsic
def count_as_before(typingctx: Any, before: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        isa.set_mode(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int32), codegen
