"""CPython's arenas in huge pages: two compiled functions that hand out a region of addresses.

CPython maps arenas of 1 MiB, for objects of up to 512 bytes, one by one; too small for huge pages, and nobody asks for
them. `PyObject_SetArenaAllocator` is its documented way to have them elsewhere. Its functions are called in the middle
of an allocation, so they cannot be Python; and they must outlive the interpreter, so nothing ever disposes of them.
CPython also gives back by `free` of the new allocator what it took from the one before, and takes other things than
arenas (stacks of threads): by size and by address these go where they went before. The caller holds the interpreter's
lock, each time.
"""

# llvmlite ships no types.
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import ctypes

import llvmlite.binding

from pagemill.kernels.cpu.arena import huge_pages

_ARENA = 2**20  # bytes: CPython's ARENA_SIZE
_ROOM = 1024 * _ARENA  # bytes of addresses: a start takes 66 arenas

_CODE = """
@unused = internal global i64 {begin}
@returned = internal global i64 0

declare i64 @pagemill_arena_before(i64, i64)
declare void @pagemill_no_arena_before(i64, i64, i64)

define i64 @take(i64 %context, i64 %size) {{
    %is_arena = icmp eq i64 %size, {arena}
    br i1 %is_arena, label %again, label %elsewhere
again:
    %last = load i64, {pointer} @returned
    %is_none = icmp eq i64 %last, 0
    br i1 %is_none, label %new, label %reuse
reuse:
    %place = inttoptr i64 %last to {pointer}
    %next = load i64, {pointer} %place
    store i64 %next, {pointer} @returned
    ret i64 %last
new:
    %first = load i64, {pointer} @unused
    %is_full = icmp eq i64 %first, {end}
    br i1 %is_full, label %elsewhere, label %cut
cut:
    %rest = add i64 %first, {arena}
    store i64 %rest, {pointer} @unused
    ret i64 %first
elsewhere:
    %other = call i64 @pagemill_arena_before(i64 %context, i64 %size)
    ret i64 %other
}}

define void @give_back(i64 %context, i64 %block, i64 %size) {{
    %offset = sub i64 %block, {begin}
    %is_ours = icmp ult i64 %offset, {room}
    br i1 %is_ours, label %keep, label %elsewhere
keep:
    %last = load i64, {pointer} @returned
    %place = inttoptr i64 %block to {pointer}
    store i64 %last, {pointer} %place
    store i64 %block, {pointer} @returned
    ret void
elsewhere:
    call void @pagemill_no_arena_before(i64 %context, i64 %block, i64 %size)
    ret void
}}
"""


class _ArenaAllocator(ctypes.Structure):
    """PyObjectArenaAllocator."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("context", "alloc", "free"))


def gather_arenas() -> None:
    """From now on CPython's arenas lie side by side in huge pages, as long as there is room. What is given back is kept
    for the next one. Raises `MemoryError` where the system has no such addresses left."""
    room = huge_pages(_ROOM)
    arenas = _ArenaAllocator()
    ctypes.pythonapi.PyObject_GetArenaAllocator(ctypes.byref(arenas))
    llvmlite.binding.add_symbol("pagemill_arena_before", arenas.alloc)
    llvmlite.binding.add_symbol("pagemill_no_arena_before", arenas.free)
    llvmlite.binding.initialize_native_target()
    llvmlite.binding.initialize_native_asmprinter()
    begin = room.ctypes.data
    pointer = "ptr" if llvmlite.binding.llvm_version_info[0] >= 15 else "i64*"
    code = _CODE.format(begin=begin, end=begin + _ROOM, room=_ROOM, arena=_ARENA, pointer=pointer)
    machine = llvmlite.binding.Target.from_default_triple().create_target_machine()
    engine = llvmlite.binding.create_mcjit_compiler(llvmlite.binding.parse_assembly(code), machine)
    engine.finalize_object()
    for kept in (engine, room):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    arenas.alloc = engine.get_function_address("take")
    arenas.free = engine.get_function_address("give_back")
    ctypes.pythonapi.PyObject_SetArenaAllocator(ctypes.byref(arenas))
