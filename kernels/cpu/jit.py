"""How the CPU kernels are compiled, and where compiled code is kept between processes.

numba keys its cache by the source of the one function that is called, not by what it imports, so that an edited helper
would silently run as old code. Here the folder itself is named after a hash of all kernel sources and of what compiled
them. Only functions that Python calls are cached; the helpers they inline are part of them.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite  # type: ignore[import-untyped]
import numba
import numba.core.config

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


def kernel(function: F) -> F:
    """Compile a function that Python calls; its machine code is kept on disk once `keep_compiled` has been called."""
    compiled = numba.njit(**OPTIONS)(function)
    _entries.append(compiled)
    return cast(F, compiled)


def keep_compiled(cache_dir: str | None = None) -> Path | None:
    """Keep machine code under `cache_dir` (default ~/.cache/pagemill) and use what an earlier process left there.

    Where that cannot be written, a private temporary folder; where that cannot either, nothing is kept. Returns the
    folder, or None.
    """
    for folder in _candidates(cache_dir):
        if _writable(folder):
            break
    else:
        return None
    before = numba.core.config.CACHE_DIR
    numba.core.config.CACHE_DIR = str(folder)
    try:
        for entry in _entries:
            entry.enable_caching()
    finally:
        numba.core.config.CACHE_DIR = before
    return folder


def _candidates(cache_dir: str | None) -> list[Path]:
    user = os.getuid() if hasattr(os, "getuid") else "user"
    temporary = Path(tempfile.gettempdir()) / f"pagemill-{user}"
    try:
        first = Path(cache_dir).expanduser() if cache_dir else Path.home() / ".cache" / "pagemill"
    except RuntimeError:  # no home directory
        return [temporary / "numba" / _fingerprint()]
    return [root / "numba" / _fingerprint() for root in (first, temporary)]


def _fingerprint() -> str:
    digest = hashlib.sha256()
    digest.update(f"{sys.version_info} {numba.__version__} {llvmlite.__version__}".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _writable(folder: Path) -> bool:
    """Make the folder, and see that it is this user's own, up to the root: what lies there is executed."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            pass
        states = [path.stat() for path in (folder, folder.parent, folder.parent.parent)]
    except OSError:
        return False
    if not hasattr(os, "getuid"):
        return True
    return all(state.st_uid == os.getuid() and not state.st_mode & stat.S_IWOTH for state in states)
