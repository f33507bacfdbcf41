"""Cores that OpenMP has taken away from the threads of this process.

torch brings OpenMP, and where OMP_PROC_BIND, OMP_PLACES or GOMP_CPU_AFFINITY is set, as images for computing have it,
OpenMP binds the thread that loads it to one *place*, a core, and means to bind its other threads to the other places.
The engine's threads are none of OpenMP's. They inherit what the thread that starts them may use, so that all would run
on that one core.
"""

from __future__ import annotations

import contextlib
import ctypes
import os


def let_go() -> None:
    """Let this thread and the main thread run on every place that OpenMP has, where they are bound to one of them.

    Does nothing before something has loaded OpenMP.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    places = _places()
    every = frozenset().union(*places)
    for thread in (os.getpid(), 0):
        # A sandbox may refuse it; the engine then makes do with what it has.
        with contextlib.suppress(OSError):
            if os.sched_getaffinity(thread) in places:
                os.sched_setaffinity(thread, every)


def _places() -> list[frozenset[int]]:
    """OpenMP's places, the numbers of their cores; none where it binds nothing."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "omp_get_num_places"):
        return []
    places = []
    for place in range(library.omp_get_num_places()):
        numbers = (ctypes.c_int * library.omp_get_place_num_procs(place))()
        library.omp_get_place_proc_ids(place, numbers)
        places.append(frozenset(numbers))
    return places
