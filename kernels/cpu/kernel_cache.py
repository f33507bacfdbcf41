"""Where compiled kernels are kept between processes.

numba's own cache does not do for a product. It keys by the source of the one function that is called, not by what that
imports, so an edited helper would silently run as old code. It needs a folder that it can write, also when everything
is there. And its index is read, changed and written back: of two processes that compile at once, one may leave a name
that leads to the other's machine code. So here:

* The folder is named after a hash of all kernel sources, of what compiles them and of how that is configured.
* A file holds one kernel for one signature and one processor (name and features), so there is no index, a cache that
  was filled on another processor does no harm, and whoever writes last writes the same. Files appear whole or not at
  all. A file begins with the digest of the rest: one that a crash or a full disk cut short counts as missing.
* Kernels are read from every folder that can be trusted, writable or not, and written to the first that can be written.
  Where none can, or the disk is full, nothing is kept, and that is said once.

What lies there is executed, so a folder is trusted only where nobody but this user and root can have put it there: by
its owner, and by who may write it, be it everybody or a group with others in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite  # type: ignore[import-untyped]
import numba
import numba.core.config
import structlog
from numba.core.caching import _Cache
from numba.core.compiler import CompileResult
from numba.core.runtime import rtsys
from numba.core.serialize import dumps

import pagemill

_log = structlog.get_logger(__name__)

Report = Callable[[str, int, float], None]
"""Called with a kernel's name as its compilation begins, how many this process has compiled before it, and the seconds
that those took."""

# What changes the code that numba makes, beside the versions: see its page "Environment variables".
_CONFIGURATION = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK", "DEBUGINFO_DEFAULT", "ENABLE_AVX")

_DIGEST = hashlib.sha256().digest_size


class KernelCache:
    """The folders of one process, and what it compiled. `folder`: where it writes, None where it cannot."""

    def __init__(self, cache_dir: str | None = None, report: Report | None = None) -> None:
        readable: list[Path] = []
        self.folder: Path | None = None
        for path in _candidates(cache_dir):
            if _trusted(path):
                readable.append(path)
                if _writable(path):
                    self.folder = path
                    break
        self.readable = tuple(readable)
        self.compiled: dict[str, float] = {}
        """Seconds of each kernel that was in no folder, by its file's name."""
        self.loaded = 0
        self._report = report
        self._inner: list[float] = []  # seconds of the kernels that a kernel under way has had compiled
        if self.folder is None:
            tried = [str(path) for path in _candidates(cache_dir)]
            _log.warning("compiled kernels cannot be kept: no folder of our own can be written", tried=tried)

    def of(self, function: Callable[..., Any]) -> _Cache:
        """numba's cache for one kernel."""
        return _KernelFiles(self, f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}")

    def read(self, name: str) -> bytes | None:
        """A kernel's file, without its digest; None where there is none, or none that is whole."""
        for folder in self.readable:
            try:
                content = (folder / name).read_bytes()
            except OSError:
                continue
            if hashlib.sha256(content[_DIGEST:]).digest() == content[:_DIGEST]:
                self.loaded += 1
                return content[_DIGEST:]
            _log.warning("a compiled kernel is damaged and compiled anew", file=str(folder / name))
        return None

    def write(self, name: str, content: bytes) -> None:
        if self.folder is None:
            return
        try:
            handle, temporary = tempfile.mkstemp(prefix=f"{name[:80]}.", suffix=".part", dir=self.folder)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(hashlib.sha256(content).digest() + content)
                # Whoever may read the folder may read its files: a cache made by root serves an engine of a user.
                os.chmod(temporary, 0o644)
                os.replace(temporary, self.folder / name)
            except BaseException:
                os.unlink(temporary)
                raise
        except OSError as error:
            _log.warning("compiled kernels cannot be kept any more", folder=str(self.folder), error=str(error))
            self.folder = None

    def begin(self, kernel: str) -> None:
        self._inner.append(0.0)
        if self._report is not None:
            self._report(kernel, len(self.compiled), sum(self.compiled.values()))

    def end(self, kernel: str, name: str, seconds: float) -> None:
        """Kernels call kernels, so what one takes is counted without those that were compiled for it."""
        own = max(0.0, seconds - (self._inner.pop() if self._inner else 0.0))
        if self._inner:
            self._inner[-1] += seconds
        self.compiled[name] = own
        _log.info("compiled a kernel", kernel=kernel, seconds=round(own, 2))


class _KernelFiles(_Cache):  # type: ignore[misc]
    """One kernel's files in the cache, a signature each, as numba's dispatcher asks for them."""

    def __init__(self, cache: KernelCache, kernel: str) -> None:
        self._cache = cache
        self._kernel = kernel
        self._begun: float | None = None

    @property
    def cache_path(self) -> str | None:
        return None if self._cache.folder is None else str(self._cache.folder)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        content = self._cache.read(self._name(sig, target_context.codegen()))
        if content is not None:
            # Machine code wants numba's runtime and nothing that compiling wants, which takes 0.15 s to set up.
            rtsys.initialize(target_context)
            return CompileResult._rebuild(target_context, *pickle.loads(content))
        target_context.refresh()
        self._cache.begin(self._kernel)
        self._begun = time.perf_counter()
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        name = self._name(sig, data.codegen)
        now = time.perf_counter()
        # None: the compilation was begun for another cache, which this one has replaced since.
        self._cache.end(self._kernel, name, now - (now if self._begun is None else self._begun))
        if data.library.has_dynamic_globals:
            _log.warning("a kernel holds addresses of this process and cannot be kept", kernel=self._kernel)
            return
        self._cache.write(name, dumps(data._reduce()))

    def _name(self, sig: Any, codegen: Any) -> str:
        key = repr((str(sig), codegen.magic_tuple()))
        return f"{self._kernel}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.kernel"

    def enable(self) -> None:
        """Nothing to do: it is on as long as there is a folder."""

    def disable(self) -> None:
        """Nothing to do, as above."""

    def flush(self) -> None:
        """Nothing to do: other kernels are in the same folder, and a stale file is never asked for."""


def fingerprint() -> str:
    """Of the kernels' sources, what compiles them, and how that is configured."""
    digest = hashlib.sha256()
    settings = [(name, getattr(numba.core.config, name, None)) for name in _CONFIGURATION]
    versions = (pagemill.__version__, sys.version_info, numba.__version__, llvmlite.__version__)
    digest.update(repr((versions, settings)).encode())
    here = Path(__file__).parent
    for source in sorted([*here.glob("*.py"), *here.parent.glob("*.py")]):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _candidates(cache_dir: str | None) -> list[Path]:
    user = os.getuid() if hasattr(os, "getuid") else "user"
    roots = []
    with contextlib.suppress(RuntimeError):  # no home directory
        roots.append(Path(cache_dir).expanduser() if cache_dir else Path.home() / ".cache" / "pagemill")
    with contextlib.suppress(OSError):  # no folder for temporary files, or none with room
        roots.append(Path(tempfile.gettempdir()) / f"pagemill-{user}")
    return [root / "numba" / fingerprint() for root in roots]


def _trusted(folder: Path) -> bool:
    """Whether the folder is there, or can be made, and belongs to this user or root up to the root of the cache."""
    levels = (folder.parent.parent, folder.parent, folder)
    try:
        for level in levels:
            if not level.is_dir():
                level.mkdir(parents=True, exist_ok=True, mode=0o755)  # whatever the umask: nobody else may write
        states = [level.stat() for level in levels]
    except OSError:
        return False
    if not hasattr(os, "getuid"):
        return True
    return all(state.st_uid in (os.getuid(), 0) and not _may_be_written_by_others(state) for state in states)


def _may_be_written_by_others(state: os.stat_result) -> bool:
    """Whether the mode lets anybody write but the owner and root."""
    by_group = state.st_mode & stat.S_IWGRP and not _is_own_group(state.st_gid, state.st_uid)
    return bool(by_group or state.st_mode & stat.S_IWOTH)


def _is_own_group(group: int, user: int) -> bool:
    """Whether nobody but this user and root is in a group: many systems give every user one of the same name, and a
    umask that lets it write. Root's own group is nobody's on a usual system, and in a container it is the user's."""
    import grp
    import pwd

    if group == 0:
        return True
    try:
        entry, name = grp.getgrgid(group), pwd.getpwuid(user).pw_name
    except KeyError:  # a user or a group that the system has no name for, as in containers
        return group == user
    return entry.gr_name == name and set(entry.gr_mem) <= {name, "root"}


def _writable(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
