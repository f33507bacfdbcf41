"""Two compiled functions for CPython's arenas: memory out of a heap, and elsewhere what was there before.

CPython gives back what it took before an allocator was replaced (arenas, and stacks of threads) by `free` of the new
one, which has to tell the one from the other by the address. It is called in the middle of an allocation, so it cannot
be Python; and it must outlive the interpreter, so nothing ever disposes of it.
"""

# llvmlite ships no types.
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import ctypes

import llvmlite.binding

_CODE = """
declare i64 @malloc(i64)
declare void @free(i64)
declare i64 @pagemill_arena_before(i64, i64)
declare void @pagemill_no_arena_before(i64, i64, i64)

define i64 @take(i64 %context, i64 %size) {{
    %block = call i64 @malloc(i64 %size)
    %offset = sub i64 %block, {begin}
    %inside = icmp ult i64 %offset, {length}
    br i1 %inside, label %heap, label %elsewhere
heap:
    ret i64 %block
elsewhere:
    call void @free(i64 %block)
    %other = call i64 @pagemill_arena_before(i64 %context, i64 %size)
    ret i64 %other
}}

define void @give_back(i64 %context, i64 %block, i64 %size) {{
    %offset = sub i64 %block, {begin}
    %inside = icmp ult i64 %offset, {length}
    br i1 %inside, label %heap, label %elsewhere
heap:
    call void @free(i64 %block)
    ret void
elsewhere:
    call void @pagemill_no_arena_before(i64 %context, i64 %block, i64 %size)
    ret void
}}
"""


class _ArenaAllocator(ctypes.Structure):
    """PyObjectArenaAllocator."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("context", "alloc", "free"))


def take_arenas_from(heap: range) -> None:
    """From now on CPython's arenas come from `heap`, addresses of malloc's, as long as it has room."""
    arenas = _ArenaAllocator()
    ctypes.pythonapi.PyObject_GetArenaAllocator(ctypes.byref(arenas))
    llvmlite.binding.add_symbol("pagemill_arena_before", arenas.alloc)
    llvmlite.binding.add_symbol("pagemill_no_arena_before", arenas.free)
    llvmlite.binding.initialize_native_target()
    llvmlite.binding.initialize_native_asmprinter()
    module = llvmlite.binding.parse_assembly(_CODE.format(begin=heap.start, length=len(heap)))
    machine = llvmlite.binding.Target.from_default_triple().create_target_machine()
    engine = llvmlite.binding.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))
    arenas.alloc = engine.get_function_address("take")
    arenas.free = engine.get_function_address("give_back")
    ctypes.pythonapi.PyObject_SetArenaAllocator(ctypes.byref(arenas))
