"""What this process may use of the machine: memory and cores, control groups included.

A container sees the whole machine in /proc/meminfo and in os.cpu_count(); what it gets is in its control group and in
every group above. Both versions of the groups are read, each through its own mount.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

UNLIMITED = 1 << 60  # version 1 writes "no limit" as 2**63 rounded down to a page


@dataclass(frozen=True, slots=True)
class _GroupFiles:
    """Folders of this process's group and its parents, innermost first, for one mounted hierarchy."""

    version: int
    folders: tuple[Path, ...]


def memory_limit(root: Path = Path("/")) -> int:
    """Bytes this process may hold in total: what it holds now plus what machine and control groups still leave it.

    `root` is where /proc and /sys lie; tests point it at a tree of their own.
    """
    held = _process_memory(root)
    headroom = [_available_memory(root), *(room for room in _group_headroom(root) if room is not None)]
    return held + max(0, min(headroom))


def process_memory() -> int:
    """Bytes of memory that this process holds for itself; mapped files do not count, they can be dropped."""
    return _process_memory(Path("/"))


def available_cores(root: Path = Path("/")) -> int:
    """Cores this process may use: its affinity, lowered to the CPU quota of its control groups; at least 1."""
    cores = _affine_cores()
    for files in _groups(root, "cpu"):
        for folder in files.folders:
            quota = _cpu_quota(folder, files.version)
            if quota is not None:
                cores = min(cores, max(1, round(quota)))
    return max(1, cores)


def processor_features(root: Path = Path("/")) -> frozenset[str]:
    """What the processor can do, as Linux calls it: avx2, avx512_bf16, amx_bf16; on Arm asimd, bf16. Nothing elsewhere.
    (torch says it under names of its own, from a later release on than the oldest that is supported.)"""
    for line in _read_text(root / "proc" / "cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def _affine_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # no Linux; a sandbox that refuses the question
        return os.cpu_count() or 1


def _cpu_quota(folder: Path, version: int) -> float | None:
    if version == 2:
        fields = _read_text(folder / "cpu.max").split()
        quota, period = (fields[0], fields[1]) if len(fields) == 2 else ("max", "1")
    else:
        quota = _read_text(folder / "cpu.cfs_quota_us").strip()
        period = _read_text(folder / "cpu.cfs_period_us").strip()
    if not quota.isdigit() or not period.isdigit() or int(quota) == 0 or int(period) == 0:
        return None
    return int(quota) / int(period)


def _available_memory(root: Path) -> int:
    fields = _table(root / "proc/meminfo")
    available = fields.get("MemAvailable", fields.get("MemFree"))
    return UNLIMITED if available is None else available * 1024


def _process_memory(root: Path) -> int:
    fields = _table(root / "proc/self/status")
    return (fields.get("RssAnon", fields.get("VmRSS", 0)) + fields.get("RssShmem", 0)) * 1024


def _group_headroom(root: Path) -> Iterator[int | None]:
    for files in _groups(root, "memory"):
        names = (
            ("memory.max", "memory.current", "inactive_file")
            if files.version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        for folder in files.folders:
            limit = _read_text(folder / names[0]).strip()
            if not limit.isdigit() or int(limit) >= UNLIMITED:
                continue
            usage = _read_text(folder / names[1]).strip()
            # Cached file pages are charged to the group but given up under pressure.
            reclaimable = _table(folder / "memory.stat").get(names[2], 0)
            used = max(0, int(usage) - reclaimable) if usage.isdigit() else 0
            yield int(limit) - used


def _groups(root: Path, controller: str) -> Iterator[_GroupFiles]:
    """The hierarchies of `controller` that are mounted and that this process has a group in."""
    memberships: dict[str, str] = {}  # controller, or "" for version 2 -> path of the group
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3:
            for name in fields[1].split(","):
                memberships[name] = fields[2]
    for line in _read_text(root / "proc/self/mountinfo").splitlines():
        before, separator, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if not separator or len(left) < 5 or len(right) < 3:
            continue
        if right[0] == "cgroup2" and "" in memberships:
            version, group = 2, memberships[""]
        elif right[0] == "cgroup" and controller in right[2].split(",") and controller in memberships:
            version, group = 1, memberships[controller]
        else:
            continue
        mount = root / left[4].lstrip("/")
        yield _GroupFiles(version, tuple(_folders(mount, _relative(group, left[3]))))


def _relative(group: str, mount_root: str) -> str:
    """The group's path below the mount: inside a container the mount shows only a part of the hierarchy."""
    if mount_root not in ("", "/") and (group == mount_root or group.startswith(mount_root + "/")):
        group = group[len(mount_root) :]
    return group.strip("/")


def _folders(mount: Path, group: str) -> Iterator[Path]:
    parts = [part for part in group.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        folder = mount.joinpath(*parts[:depth])
        if folder.is_dir():
            yield folder


def _table(path: Path) -> dict[str, int]:
    """`name: number unit` or `name number` lines."""
    table: dict[str, int] = {}
    for line in _read_text(path).splitlines():
        fields = line.replace(":", " ").split()
        if len(fields) >= 2 and fields[1].isdigit():
            table[fields[0]] = int(fields[1])
    return table


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not there: another kernel, another version of the groups, no permission
        return ""
