"""Running a kernel on a team of threads without compiling it over and over.

numba's own way, the body of a `prange` loop, compiles and optimises the body for itself, again in a wrapper and again
in the caller, and adds half a second of analysis to each. Here the one parallel loop calls its worker by address, so
that a worker is compiled once and the loop once for all.
"""

# numba ships no types, and `intrinsic` returns what numba makes of a function.
# mypy: disable-error-code="untyped-decorator, import-untyped, no-any-return"

from __future__ import annotations

import threading
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagemill.kernels.cpu.jit import OPTIONS

_I64 = ir.IntType(64)
_POINTER = ir.IntType(8).as_pointer()
_WORKER = ir.FunctionType(ir.VoidType(), [_I64, _I64, _POINTER])

_masked = threading.local()


@intrinsic
def _bind(typingctx: Any, worker: Any, arguments: Any) -> Any:
    """Two addresses: a function (thread, threads, frame) that calls worker(thread, threads, *arguments); its frame."""
    worker_signature = worker.get_call_type(typingctx, (types.int64, types.int64, *arguments.types), {})

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        compiled = worker.dispatcher.get_compile_result(worker_signature)
        context.active_code_library.add_linking_library(compiled.library)
        callee = context.declare_function(builder.module, compiled.fndesc)
        frame = cgutils.alloca_once_value(builder, args[1])

        shell = ir.Function(builder.module, _WORKER, builder.module.get_unique_name("pagemill_worker"))
        shell.linkage = "internal"
        inner = ir.IRBuilder(shell.append_basic_block("entry"))
        packed = inner.load(inner.bitcast(shell.args[2], frame.type))
        unpacked = [inner.extract_value(packed, i) for i in range(len(arguments.types))]
        # The status is dropped: a worker has nowhere to raise to, and none does.
        context.call_conv.call_function(
            inner, callee, types.none, worker_signature.args, [shell.args[0], shell.args[1], *unpacked]
        )
        inner.ret_void()

        addresses = [builder.ptrtoint(shell, _I64), builder.ptrtoint(frame, _I64)]
        return context.make_tuple(builder, sig.return_type, addresses)

    return types.UniTuple(types.int64, 2)(worker, arguments), codegen


@intrinsic
def _call(typingctx: Any, address: Any, thread: Any, threads: Any, pointer: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        function = builder.inttoptr(args[0], _WORKER.as_pointer())
        builder.call(function, [args[1], args[2], builder.inttoptr(args[3], _POINTER)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def _keep(typingctx: Any, arguments: Any) -> Any:
    """Nothing, but a use: numba frees an array after its last use, and addresses are none that it sees."""
    return types.void(arguments), lambda context, builder, sig, args: context.get_dummy_value()


@numba.njit(parallel=True, **OPTIONS)
def _call_all(address: int, threads: int, pointer: int) -> None:
    for thread in numba.prange(threads):
        _call(address, thread, threads, pointer)


@numba.njit(inline="always", **OPTIONS)
def run(threads: int, worker: Any, arguments: Any) -> None:
    """Call the compiled worker(thread, threads, *arguments) once for each thread below `threads`, and wait for all."""
    address, pointer = _bind(worker, arguments)
    if threads == 1:
        _call(address, 0, 1, pointer)
    else:
        _call_all(address, threads, pointer)
    _keep(arguments)


def mask_threads(threads: int) -> None:
    """Let parallel loops called from this Python thread use that many threads; numba keeps the number per thread."""
    if getattr(_masked, "threads", None) != threads:
        numba.set_num_threads(threads)
        _masked.threads = threads
