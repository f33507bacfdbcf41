"""When a process that computes looks for garbage.

Nearly all that a start makes stays: modules, weights, a block object for each 16 tokens of the pool. To walk over it
takes 50 to 100 ms, and Python does that whenever a quarter as many objects have come: in the middle of a step.
"""

from __future__ import annotations

import gc

_USUAL_COLLECTIONS = gc.get_threshold()
_OBJECTS_OF_A_START = 300_000  # with a model of 30 layers half of them are made


def import_engine() -> None:
    """Looking for garbage among modules takes a seventh of the time that importing them takes. So nobody looks here,
    nor until `keep_what_is_there` unless there are more objects than a start makes that does not compile."""
    from pagemill.engine.torch_import import without_compilers

    gc.disable()
    try:
        with without_compilers():
            import pagemill.ingest.worker  # noqa: F401
    finally:
        gc.enable()
    gc.freeze()
    gc.collect()  # takes no time now, and begins to count
    gc.set_threshold(_OBJECTS_OF_A_START)


def keep_what_is_there() -> None:
    """To be called when the engine is made: all of it lives as long as the process, and no collection need walk over
    it."""
    if any(gc.get_count()[1:]):  # there were so many objects that one has been made: kernels were compiled
        gc.collect()
    gc.freeze()
    gc.set_threshold(*_USUAL_COLLECTIONS)
