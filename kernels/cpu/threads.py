"""How many threads this process may use, by affinity and cgroup."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP_V2 = Path("/sys/fs/cgroup/cpu.max")
_CGROUP_V1 = Path("/sys/fs/cgroup/cpu")


def available_threads() -> int:
    """Cores that this process may run on, at most what its cgroup's CPU quota pays for; at least 1."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = _quota()
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def _quota() -> float | None:
    """The cgroup's quota in cores, or None where there is none."""
    try:
        if _CGROUP_V2.exists():
            limit, period = _CGROUP_V2.read_text().split()
            return None if limit == "max" else int(limit) / int(period)
        limit_v1 = int((_CGROUP_V1 / "cpu.cfs_quota_us").read_text())
        return None if limit_v1 <= 0 else limit_v1 / int((_CGROUP_V1 / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
