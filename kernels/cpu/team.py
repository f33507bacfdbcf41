"""A team of threads for the kernels, in which the caller never waits for a thread that has not come.

A step makes some two hundred short parallel calls. With OpenMP (numba's `prange`) each of them ends in a barrier for
the whole team, so that on a machine with anything else to do, such as the Redis server and the clients of this very
engine, a call may wait a scheduler's time slice for a thread that has nothing left to do: 20 ms instead of 80 us was
measured. Here work is cut into parts that are claimed one by one. The caller claims parts like everybody else, shuts
the gate when none is left and then waits only for those inside. A helper that sleeps, is not scheduled, or did not
survive a fork costs nothing but its help. It also needs no OpenMP library, and a worker is compiled once: it is called
by address.

The board, int64 words, is all that threads share. A helper spins a while for the next call, yielding its core to
whoever wants it, and then sleeps until the caller wakes it. Only Python can wake it, so while compiled code makes many
calls in a row the team is *held*: nobody goes to sleep, however long the caller works alone in between.
"""

# llvmlite and numba ship no types, and `intrinsic` returns what numba makes of a function.
# mypy: disable-error-code="untyped-decorator, import-untyped, no-any-return"

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagemill.kernels.cpu.jit import OPTIONS, kernel

# Words of the board. Those that are written while others spin on them have a cache line of their own.
_GATE = 0  # call number << 16 | _OPEN | helpers inside
_NEXT = 8  # the next part to claim
_BUSY = 16  # 1 while some thread's call has the team
_PARTS, _WORKER, _FRAME = 24, 25, 26  # the call at the gate
_STOP = 32
_HELD = 33  # how many callers hold the team
_THREADS = 34  # how many are in use
_WAITED = 40  # nanoseconds that callers have waited for a thread that was long in coming
_WORDS = 48

_OPEN = 1 << 15
_INSIDE = _OPEN - 1
_CALL = 16  # the shift of the call number

_SPINS = 200  # looks at the gate before a core is first offered to others
_PATIENCE_NS = 300_000  # a wait as long as this is no matter of parts of unequal size
_YIELDS = 2000  # offers before a helper goes to sleep; about a millisecond on an idle machine

_MONOTONIC = int(time.CLOCK_MONOTONIC)
_I64 = ir.IntType(64)
_POINTER = ir.IntType(8).as_pointer()
_WORKER_TYPE = ir.FunctionType(ir.VoidType(), [_I64, _I64, _POINTER])


def _word(builder: Any, board: Any, index: Any) -> Any:
    return builder.gep(builder.inttoptr(board, _I64.as_pointer()), [index])


@intrinsic
def _load(typingctx: Any, board: Any, index: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load_atomic(_word(builder, *args), "seq_cst", 8)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def _store(typingctx: Any, board: Any, index: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store_atomic(args[2], _word(builder, args[0], args[1]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def _add(typingctx: Any, board: Any, index: Any, value: Any) -> Any:
    """Add to a word; returns what it was before."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _word(builder, args[0], args[1]), args[2], "seq_cst")

    return types.int64(types.int64, types.int64, types.int64), codegen


@intrinsic
def _swap_if(typingctx: Any, board: Any, index: Any, expected: Any, value: Any) -> Any:
    """Set a word if it is what was expected; returns whether it was."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        result = builder.cmpxchg(_word(builder, args[0], args[1]), args[2], args[3], "seq_cst", "seq_cst")
        return builder.extract_value(result, 1)

    return types.boolean(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def _yield_core(typingctx: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.IntType(32), []), "sched_yield")
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _now(typingctx: Any) -> Any:
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


@intrinsic
def _bind(typingctx: Any, worker: Any, arguments: Any) -> Any:
    """Two addresses: a function (part, parts, frame) that calls worker(part, parts, *arguments); its frame."""
    worker_signature = worker.get_call_type(typingctx, (types.int64, types.int64, *arguments.types), {})

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        compiled = worker.dispatcher.get_compile_result(worker_signature)
        context.active_code_library.add_linking_library(compiled.library)
        callee = context.declare_function(builder.module, compiled.fndesc)
        frame = cgutils.alloca_once_value(builder, args[1])

        shell = ir.Function(builder.module, _WORKER_TYPE, builder.module.get_unique_name("pagemill_worker"))
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
def address_of(typingctx: Any, worker: Any) -> Any:
    """The address of a function that calls a compiled worker(part, parts, frame), frame being an address: int64."""
    worker_signature = worker.get_call_type(typingctx, (types.int64,) * 3, {})

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        compiled = worker.dispatcher.get_compile_result(worker_signature)
        context.active_code_library.add_linking_library(compiled.library)
        callee = context.declare_function(builder.module, compiled.fndesc)
        shell = ir.Function(builder.module, _WORKER_TYPE, builder.module.get_unique_name("pagemill_worker"))
        shell.linkage = "internal"
        inner = ir.IRBuilder(shell.append_basic_block("entry"))
        frame = inner.ptrtoint(shell.args[2], _I64)
        context.call_conv.call_function(inner, callee, types.none, worker_signature.args, [*shell.args[:2], frame])
        inner.ret_void()
        return builder.ptrtoint(shell, _I64)

    return types.int64(worker), codegen


@intrinsic
def _call(typingctx: Any, worker: Any, part: Any, parts: Any, frame: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        function = builder.inttoptr(args[0], _WORKER_TYPE.as_pointer())
        builder.call(function, [args[1], args[2], builder.inttoptr(args[3], _POINTER)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def _keep(typingctx: Any, arguments: Any) -> Any:
    """Nothing, but a use: numba frees an array after its last use, and addresses are none that it sees."""
    return types.void(arguments), lambda context, builder, sig, args: context.get_dummy_value()


@numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)
def _share(board: int, worker: int, frame: int, parts_per_thread: int) -> None:
    """Run a call on the team; alone where another thread's call has it."""
    parts = parts_per_thread * _load(board, _THREADS)
    if not _swap_if(board, _BUSY, 0, 1):
        for part in range(parts):
            _call(worker, part, parts, frame)
        return
    _store(board, _PARTS, parts)
    _store(board, _WORKER, worker)
    _store(board, _FRAME, frame)
    _store(board, _NEXT, 0)
    _store(board, _GATE, ((_load(board, _GATE) >> _CALL) + 1) << _CALL | _OPEN)
    part = _add(board, _NEXT, 1)
    while part < parts:
        _call(worker, part, parts, frame)
        part = _add(board, _NEXT, 1)
    inside = (_add(board, _GATE, -_OPEN) - _OPEN) & _INSIDE
    spins = 0
    since = 0
    while inside > 0:
        spins += 1
        if spins > _SPINS:
            if since == 0:
                since = _now()
            _yield_core()
        inside = _load(board, _GATE) & _INSIDE
    if since != 0:
        waited = _now() - since
        if waited > _PATIENCE_NS:
            _add(board, _WAITED, waited)
    _store(board, _BUSY, 0)


@kernel
def _serve(board: int, rank: int, last_call: int) -> int:
    """Help with calls until none has come for a while, or the team is dissolved or does without this helper; returns
    the last call helped with."""
    idle = 0
    while (
        (idle < _SPINS + _YIELDS or _load(board, _HELD) > 0)
        and _load(board, _STOP) == 0
        and rank < _load(board, _THREADS)
    ):
        gate = _load(board, _GATE)
        if gate & _OPEN == 0 or gate >> _CALL == last_call or not _swap_if(board, _GATE, gate, gate + 1):
            idle += 1
            if idle > _SPINS:
                _yield_core()
            continue
        idle = 0
        last_call = gate >> _CALL
        parts, worker, frame = _load(board, _PARTS), _load(board, _WORKER), _load(board, _FRAME)
        part = _add(board, _NEXT, 1)
        while part < parts:
            _call(worker, part, parts, frame)
            part = _add(board, _NEXT, 1)
        _add(board, _GATE, -1)
    return last_call


@numba.njit(inline="always", **OPTIONS)
def run(board: int, parts_per_thread: int, worker: Any, arguments: Any) -> None:
    """Call the compiled worker(part, parts, *arguments) for every part, on the team of a board; board 0 means alone.

    A worker that takes its items from a counter of its own wants one part for each thread; one that divides rows among
    the parts wants several, so that a slow thread holds up little.
    """
    address, frame = _bind(worker, arguments)
    if board == 0:
        _call(address, 0, 1, frame)
    else:
        _share(board, address, frame, parts_per_thread)
    _keep(arguments)


@numba.njit(inline="always", **OPTIONS)
def run_at(board: int, parts_per_thread: int, worker: int, frame: int) -> None:
    """`run` for a worker whose address is known (`address_of`), and the address of what it takes."""
    if board == 0:
        _call(worker, 0, 1, frame)
    else:
        _share(board, worker, frame, parts_per_thread)


class Team:
    """`threads` - 1 helper threads beside the caller's. They end when the team is no longer referenced.

    `use` makes do with fewer; the rest sleep.
    """

    def __init__(self, threads: int) -> None:
        self._in_use = threads
        words = np.zeros(_WORDS + 8, np.int64)
        start = -words.ctypes.data % 64 // 8
        self._words = words[start : start + _WORDS]
        self._words[_THREADS] = threads
        self._board = int(self._words.ctypes.data)
        self._asked = [0]
        self._wake = [threading.Event() for _ in range(threads - 1)]
        for rank, event in enumerate(self._wake, 1):
            arguments = (self._words, rank, event, self._asked)
            threading.Thread(target=_help, args=arguments, name="pagemill-kernel", daemon=True).start()
        weakref.finalize(self, _dissolve, self._words, self._wake)

    @property
    def threads(self) -> int:
        """How many are in use, the caller's among them."""
        return self._in_use

    def use(self, threads: int) -> None:
        """Use so many from the next call on, at most as many as there are."""
        self._in_use = self._words[_THREADS] = threads

    @property
    def waited_s(self) -> float:
        """Seconds that callers have waited, all in all, for threads that came late: the system ran others instead."""
        return float(self._words[_WAITED]) / 1e9

    def board(self) -> int:
        """The board to run a call on, with the helpers awake; 0 for a team of one."""
        if self._in_use == 1:
            return 0
        self._asked[0] += 1
        for event in self._wake[: self._in_use - 1]:
            if not event.is_set():
                event.set()
        return self._board

    @contextlib.contextmanager
    def held(self) -> Iterator[int]:
        """The board, with helpers that stay awake until the end, for compiled code that makes many calls."""
        if self._in_use == 1:
            yield 0
            return
        hold(self._board, 1)  # before they are woken: they would be asleep again by the time that this is compiled
        try:
            yield self.board()
        finally:
            hold(self._board, -1)


@kernel
def hold(board: int, count: int) -> None:
    """Hold the team of a board so many times more, or less."""
    _add(board, _HELD, count)


def _help(words: npt.NDArray[np.int64], rank: int, wake: threading.Event, asked: list[int]) -> None:
    last_call = 0
    while not words[_STOP]:
        wake.wait()
        before = asked[0]
        last_call = _serve(int(words.ctypes.data), rank, last_call)
        wake.clear()
        # Whoever asked while the helper was on its way to sleep saw it awake still. Such a call would be made alone,
        # and of a step that is a single call all of it.
        if asked[0] != before and rank < words[_THREADS]:
            wake.set()


def _dissolve(words: npt.NDArray[np.int64], wake: list[threading.Event]) -> None:
    words[_STOP] = 1
    for event in wake:
        event.set()
