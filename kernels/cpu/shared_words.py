"""Words in memory that several threads use at once, and what threads wait with: for compiled code that runs without
the interpreter's lock.

A board is the address of int64 words. Every operation on one is atomic, and all threads see all of them in one order,
as C's seq_cst has it. Semaphores are POSIX's, of one process; they lie in four words.
"""

# llvmlite and numba ship no types, and `intrinsic` returns what numba makes of a function.
# mypy: disable-error-code="untyped-decorator, import-untyped, no-any-return"

from __future__ import annotations

import time
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_MONOTONIC = int(time.CLOCK_MONOTONIC)
_I64 = ir.IntType(64)
_POINTER = ir.IntType(8).as_pointer()


def _word(builder: Any, board: Any, index: Any) -> Any:
    return builder.gep(builder.inttoptr(board, _I64.as_pointer()), [index])


@intrinsic
def load(typingctx: Any, board: Any, index: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load_atomic(_word(builder, *args), "seq_cst", 8)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def store(typingctx: Any, board: Any, index: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store_atomic(args[2], _word(builder, args[0], args[1]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def add(typingctx: Any, board: Any, index: Any, value: Any) -> Any:
    """Add to a word; returns what it was before."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _word(builder, args[0], args[1]), args[2], "seq_cst")

    return types.int64(types.int64, types.int64, types.int64), codegen


@intrinsic
def swap_if(typingctx: Any, board: Any, index: Any, expected: Any, value: Any) -> Any:
    """Set a word if it is what was expected; returns whether it was."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        result = builder.cmpxchg(_word(builder, args[0], args[1]), args[2], args[3], "seq_cst", "seq_cst")
        return builder.extract_value(result, 1)

    return types.boolean(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def yield_core(typingctx: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.IntType(32), []), "sched_yield")
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), codegen


def _semaphore_call(name: str, *constants: int) -> Any:
    """A function of the system that takes the address of a semaphore: returns 0, or else something failed."""

    @intrinsic
    def caller(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            i32 = ir.IntType(32)
            kind = ir.FunctionType(i32, [_POINTER, *(i32 for _ in constants)])
            function = cgutils.get_or_insert_function(builder.module, kind, name)
            operands = [builder.inttoptr(args[0], _POINTER), *(ir.Constant(i32, value) for value in constants)]
            return builder.call(function, operands)

        return types.int32(types.int64), codegen

    return caller


make_semaphore = _semaphore_call("sem_init", 0, 0)  # of this process, with nothing posted
post = _semaphore_call("sem_post")
wait = _semaphore_call("sem_wait")


@intrinsic
def now(typingctx: Any) -> Any:
    """Nanoseconds of a clock that only goes on."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        time_type = ir.LiteralStructType([_I64, _I64])
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(32), time_type.as_pointer()])
        function = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        found = cgutils.alloca_once(builder, time_type)
        builder.call(function, [ir.Constant(ir.IntType(32), _MONOTONIC), found])
        time = builder.load(found)
        seconds = builder.mul(builder.extract_value(time, 0), ir.Constant(_I64, 1_000_000_000))
        return builder.add(seconds, builder.extract_value(time, 1))

    return types.int64(), codegen
