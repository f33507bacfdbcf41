"""How the CPU kernels are compiled.

Only functions that Python calls are kept on disk (`kernel_cache`); the helpers they inline are part of them.

Helpers that are not inlined have names, by which the processor's code is linked: of two that have the same, all callers
get the first. numba numbers the functions of a process from one on, lest two that a function has made (a tile of two
widths, say) should be taken for one another. Files of the cache come from many processes, each with numbers of its own,
which meant other functions: attention read another tile's rows. So numbers begin at random here.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.core.bytecode import FunctionIdentity

from pagemill.kernels.cpu.kernel_cache import KernelCache, Report

FunctionIdentity._unique_ids = itertools.count(secrets.randbits(60))

F = TypeVar("F", bound=Callable[..., Any])

# Sums may be reordered and contracted, which vectorising needs; NaN and infinity keep their meaning.
OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "fastmath": {"reassoc", "contract", "nsz", "arcp"},
}

_entries: list[Any] = []


def helper(function: F) -> F:
    """Compile a function that only other kernels call, without the wrappers for Python, a tenth of the time."""
    return cast(F, numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)(function))


def exact_helper(function: F) -> F:
    """The same without licence to reorder sums, which numba gives to all instructions, also those of intrinsics."""
    options = OPTIONS | {"fastmath": False}
    return cast(F, numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)(function))


def kernel(function: F) -> F:
    """Compile a function that Python calls; its machine code is kept on disk once `keep_compiled` has been called."""
    compiled = numba.njit(**OPTIONS)(function)
    _entries.append(compiled)
    return cast(F, compiled)


def entries() -> tuple[Any, ...]:
    """Every kernel defined so far, as numba's dispatcher."""
    return tuple(_entries)


def keep_compiled(cache_dir: str | None = None, report: Report | None = None) -> KernelCache:
    """Keep machine code under `cache_dir` (default ~/.cache/pagemill) and use what an earlier process left there.

    report: called as a kernel's compilation begins, see `kernel_cache.Report`. Returns the cache, which knows where it
    reads and writes and what had to be compiled.
    """
    cache = KernelCache(cache_dir, report)
    keep_in(cache)
    return cache


def keep_in(cache: KernelCache) -> None:
    """Keep what has been defined so far in a cache: again where kernels were defined since."""
    for entry in _entries:
        entry._cache = cache.of(entry.py_func)
