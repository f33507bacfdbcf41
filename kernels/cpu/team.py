"""A team of threads for the kernels, in which the caller never waits for a thread that has not come.

A step makes some two hundred short parallel calls. With OpenMP (numba's `prange`) each of them ends in a barrier for
the whole team, so that on a machine with anything else to do, such as the Redis server and the clients of this very
engine, a call may wait a scheduler's time slice for a thread that has nothing left to do: 20 ms instead of 80 us was
measured. Here work is cut into parts that are claimed one by one. The caller claims parts like everybody else, shuts
the gate when none is left and then waits only for those inside. A helper that sleeps, is not scheduled, or did not
survive a fork costs nothing but its help. It also needs no OpenMP library, and a worker is compiled once: it is called
by address.

The board, int64 words, is all that threads share. A helper spins a while for the next call, yielding its core to
whoever wants it, and then sleeps on a semaphore of the board until a caller posts it. It does all this in compiled
code: once it has begun it does not come back to Python before its team is dissolved. A helper that slept in Python
needed the interpreter's lock to go to sleep and to wake, at the very moments at which the step's own Python ran; and
one that came back to Python while the process was ending could abort it.

That no call is slept through is an argument of two words. A helper says that it sleeps and then looks at the gate; a
caller opens the gate and then looks who sleeps. One of them sees the other. Who resets the word has to act: a caller
posts, a helper stays awake. Posting takes no lock, so a process forked at any moment finds none that nobody holds.
"""

# llvmlite and numba ship no types, and `intrinsic` returns what numba makes of a function.
# mypy: disable-error-code="untyped-decorator, import-untyped, no-any-return"

from __future__ import annotations

import threading
import weakref
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagemill.kernels.cpu.jit import OPTIONS, helper, kernel
from pagemill.kernels.cpu.shared_words import (
    add,
    load,
    make_semaphore,
    now,
    post,
    store,
    swap_if,
    wait,
    yield_core,
)

# Words of the board. Those that are written while others spin on them have a cache line of their own.
_GATE = 0  # call number << 16 | _OPEN | helpers inside
_NEXT = 8  # the next part to claim
_BUSY = 16  # 1 while some thread's call has the team
_PARTS, _WORKER, _FRAME = 24, 25, 26  # the call at the gate
_STOP, _THREADS = 32, 33  # whether to end; how many threads are in use
_WAITED = 40  # nanoseconds that callers have waited for a thread that was long in coming
_SLEEPS = 48  # of each helper 8 words: whether it sleeps, and a semaphore
_LINE = 8

_OPEN = 1 << 15
_INSIDE = _OPEN - 1
_CALL = 16  # the shift of the call number

_SPINS = 200  # looks at the gate before a core is first offered to others
_PATIENCE_NS = 300_000  # a wait as long as this is no matter of parts of unequal size
_YIELDS = 2000  # offers before a helper goes to sleep; about a millisecond on an idle machine

_I64 = ir.IntType(64)
_POINTER = ir.IntType(8).as_pointer()
_WORKER_TYPE = ir.FunctionType(ir.VoidType(), [_I64, _I64, _POINTER])


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


@helper
def _sleep_word(rank: int) -> int:
    return _SLEEPS + _LINE * (rank - 1)


@helper
def _semaphore(board: int, rank: int) -> int:
    return board + 8 * (_sleep_word(rank) + 1)


@helper
def _wake(board: int, threads: int) -> None:
    """Wake those helpers of a team of so many threads that sleep."""
    for rank in range(1, threads):
        if load(board, _sleep_word(rank)) != 0 and swap_if(board, _sleep_word(rank), 1, 0):
            post(_semaphore(board, rank))


@helper
def _is_called(board: int, rank: int, last_call: int) -> bool:
    """Whether a helper has something to do, which may be to end."""
    gate = load(board, _GATE)
    called = gate & _OPEN != 0 and gate >> _CALL != last_call and rank < load(board, _THREADS)
    return called or load(board, _STOP) != 0


@helper
def _sleep(board: int, rank: int, last_call: int) -> None:
    """Sleep until somebody calls. A signal wakes nobody."""
    word = _sleep_word(rank)
    store(board, word, 1)
    if _is_called(board, rank, last_call) and swap_if(board, word, 1, 0):
        return
    while load(board, word) != 0:
        wait(_semaphore(board, rank))


@kernel
def _end(board: int, threads: int) -> None:
    """Let the helpers go."""
    store(board, _STOP, 1)
    _wake(board, threads)


@numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)
def _share(board: int, worker: int, frame: int, parts_per_thread: int) -> None:
    """Run a call on the team; alone where another thread's call has it."""
    threads = load(board, _THREADS)
    parts = parts_per_thread * threads
    if not swap_if(board, _BUSY, 0, 1):
        for part in range(parts):
            _call(worker, part, parts, frame)
        return
    store(board, _PARTS, parts)
    store(board, _WORKER, worker)
    store(board, _FRAME, frame)
    store(board, _NEXT, 0)
    store(board, _GATE, ((load(board, _GATE) >> _CALL) + 1) << _CALL | _OPEN)
    _wake(board, threads)
    part = add(board, _NEXT, 1)
    while part < parts:
        _call(worker, part, parts, frame)
        part = add(board, _NEXT, 1)
    inside = (add(board, _GATE, -_OPEN) - _OPEN) & _INSIDE
    spins = 0
    since = 0
    while inside > 0:
        spins += 1
        if spins > _SPINS:
            if since == 0:
                since = now()
            yield_core()
        inside = load(board, _GATE) & _INSIDE
    if since != 0:
        waited = now() - since
        if waited > _PATIENCE_NS:
            add(board, _WAITED, waited)
    store(board, _BUSY, 0)


@kernel
def _serve(board: int, rank: int) -> bool:
    """Help with calls until the team is dissolved; returns whether the system has what a helper sleeps on."""
    if make_semaphore(_semaphore(board, rank)) != 0:
        return False
    idle = 0
    last_call = 0
    while load(board, _STOP) == 0:
        if idle >= _SPINS + _YIELDS or rank >= load(board, _THREADS):
            _sleep(board, rank, last_call)
            idle = 0
            continue
        gate = load(board, _GATE)
        if gate & _OPEN == 0 or gate >> _CALL == last_call or not swap_if(board, _GATE, gate, gate + 1):
            idle += 1
            if idle > _SPINS:
                yield_core()
            continue
        idle = 0
        last_call = gate >> _CALL
        parts, worker, frame = load(board, _PARTS), load(board, _WORKER), load(board, _FRAME)
        part = add(board, _NEXT, 1)
        while part < parts:
            _call(worker, part, parts, frame)
            part = add(board, _NEXT, 1)
        add(board, _GATE, -1)
    return True


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
        self.threads = threads
        """How many are in use, the caller's among them: changed by `use`."""
        size = _SLEEPS + _LINE * (threads - 1)
        words = np.zeros(size + _LINE, np.int64)
        start = -words.ctypes.data % 64 // 8
        self._words = words[start : start + size]
        self._words[_THREADS] = threads
        self._board = int(self._words.ctypes.data)
        self._waited = self._words.data[_WAITED : _WAITED + 1]
        self._called = threading.Event()
        self._is_called = False
        for rank in range(1, threads):
            arguments = (self._words, rank, self._called)
            threading.Thread(target=_help, args=arguments, name="pagemill-kernel", daemon=True).start()
        # At the end of the process the helpers are left where they are: no thread should come back to Python then.
        weakref.finalize(self, _dissolve, self._words, threads, self._called).atexit = False

    def use(self, threads: int) -> None:
        """Use so many from the next call on, at most as many as there are."""
        self.threads = self._words[_THREADS] = threads

    @property
    def waited_s(self) -> float:
        """Seconds that callers have waited, all in all, for threads that came late: the system ran others instead."""
        waited: int = self._waited[0]
        return waited / 1e9

    def board(self) -> int:
        """The board to run a call on; 0 for a team of one."""
        if self.threads == 1:
            return 0
        if not self._is_called:
            self._is_called = True
            self._called.set()
        return self._board


def _help(words: npt.NDArray[np.int64], rank: int, called: threading.Event) -> None:
    called.wait()  # what is compiled before the first call has no place on disk yet
    if not words[_STOP] and not _serve(int(words.ctypes.data), rank):
        raise OSError("a kernel thread ends: the system has no semaphores within a process; use threads=1")


def _dissolve(words: npt.NDArray[np.int64], threads: int, called: threading.Event) -> None:
    if called.is_set():
        _end(int(words.ctypes.data), threads)
    else:
        words[_STOP] = 1
        called.set()
