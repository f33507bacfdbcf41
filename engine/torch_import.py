"""Importing torch without what describes its operators to its compilers.

The last modules that `import torch` runs tell torch.compile, fake tensors and the meta device what each operator does,
which takes a third of the second that the import takes. The CPU kernels need none of it. So a process of our own puts
these modules off: they are there, and run when something imports them or looks into them, as compilers do.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from types import ModuleType

_FOR_COMPILERS = ("torch._meta_registrations", "torch._native")


class _PuttingOff(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in _FOR_COMPILERS else None
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


@contextlib.contextmanager
def without_compilers() -> Iterator[None]:
    """Within, `import torch` puts off what `complete` runs. Does nothing where this torch has no such modules."""
    finder = _PuttingOff()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def complete() -> None:
    """Run what was put off. Whoever uses the meta device asks for it: operators do not know what they lack."""
    for name in _FOR_COMPILERS:
        module = sys.modules.get(name)
        if module is not None:
            vars(module)
