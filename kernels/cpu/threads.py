"""How many threads kernels get where nobody says."""

from __future__ import annotations

import os


def available_threads() -> int:
    """Cores that this process may run on (taskset, cpusets). An engine also heeds its CPU quota, and says so."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
