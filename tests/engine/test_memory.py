"""What the machine allows, and what of it becomes the KV pool."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import ConfigError
from pagemill.engine.machine import available_cores, memory_limit, process_memory, processor_features
from pagemill.engine.memory import BudgetTable, CpuMemory, size_pool

GIB = 1 << 30
MIB = 1 << 20
HELD = 100 * MIB


def machine(root: Path, cgroup: str = "", mountinfo: str = "", files: dict[str, str] | None = None) -> Path:
    """A tree with /proc and /sys of a machine with 8 GiB available, on which this process holds 100 MiB."""
    texts = {
        "proc/meminfo": "MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB\n",
        "proc/self/status": f"Name:\tpagemill\nVmRSS:\t  999999 kB\nRssAnon:\t {HELD // 1024} kB\nRssShmem:\t 0 kB\n",
        "proc/self/cgroup": cgroup,
        "proc/self/mountinfo": mountinfo,
    } | (files or {})
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2_MOUNT = "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"


def test_without_control_groups_the_available_memory_counts(tmp_path: Path) -> None:
    assert memory_limit(machine(tmp_path)) == HELD + 8 * GIB


def test_version_2_limits_of_the_group_and_of_its_parents(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/outer/inner"
    root = machine(
        tmp_path,
        "0::/outer/inner\n",
        V2_MOUNT,
        {
            f"{group}/memory.max": "max\n",
            "sys/fs/cgroup/outer/memory.max": str(2 * GIB),
            "sys/fs/cgroup/outer/memory.current": str(GIB),
            "sys/fs/cgroup/outer/memory.stat": f"anon {GIB // 2}\ninactive_file {GIB // 4}\n",
        },
    )
    assert memory_limit(root) == HELD + 2 * GIB - (GIB - GIB // 4), "cached files are given up under pressure"
    (root / group / "memory.max").write_text(str(GIB))
    (root / group / "memory.current").write_text(str(GIB // 2))
    assert memory_limit(root) == HELD + GIB // 2


def test_version_1_limits(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        "4:memory:/jobs/one\n3:cpuset:/\n0::/\n",
        V1_MOUNT,
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/jobs/one/memory.limit_in_bytes": str(3 * GIB),
            "sys/fs/cgroup/memory/jobs/one/memory.usage_in_bytes": str(GIB),
            "sys/fs/cgroup/memory/jobs/one/memory.stat": f"total_inactive_file {GIB}\n",
        },
    )
    assert memory_limit(root) == HELD + 3 * GIB


def test_a_container_sees_its_own_group_as_the_root_of_the_mount(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        "0::/docker/abc/app\n",
        V2_MOUNT.replace(" / /sys", " /docker/abc /sys"),
        {"sys/fs/cgroup/app/memory.max": str(GIB), "sys/fs/cgroup/memory.max": "max"},
    )
    assert memory_limit(root) == HELD + GIB


def test_what_others_in_the_group_hold_can_leave_nothing(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": str(GIB), "sys/fs/cgroup/memory.current": str(2 * GIB)}
    assert memory_limit(machine(tmp_path, "0::/\n", V2_MOUNT, files)) == HELD


def test_cores_are_lowered_to_the_cpu_quota(tmp_path: Path) -> None:
    plain = available_cores(machine(tmp_path / "a"))
    assert plain >= 1
    quota = {"sys/fs/cgroup/cpu.max": "50000 100000\n"}
    assert available_cores(machine(tmp_path / "b", "0::/\n", V2_MOUNT, quota)) == 1
    none = {"sys/fs/cgroup/cpu.max": "max 100000\n"}
    assert available_cores(machine(tmp_path / "c", "0::/\n", V2_MOUNT, none)) == plain
    mount = V1_MOUNT.replace("memory", "cpu,cpuacct")
    one = {
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "100000",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
    }
    assert available_cores(machine(tmp_path / "d", "2:cpu,cpuacct:/\n", mount, one)) == 1


@pytest.mark.parametrize(
    ("inner", "outer", "cores"),
    [("max 100000", "200000 100000", 2), ("300000 100000", "max 100000", 3), ("400000 100000", "100000 50000", 2),
     ("1000 100000", "max 100000", 1), ("150000 100000", "max 100000", 2), ("nonsense", "300000 0", 8)],
)  # fmt: skip
@pytest.mark.parametrize("version", [1, 2])
def test_every_group_above_counts(
    inner: str, outer: str, cores: int, version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
    files = {}
    for folder, text in (("pod/app", inner), ("pod", outer)):
        quota, _, period = text.partition(" ")
        if version == 2:
            files[f"sys/fs/cgroup/{folder}/cpu.max"] = f"{text}\n"
        else:
            files[f"sys/fs/cgroup/cpu,cpuacct/{folder}/cpu.cfs_quota_us"] = f"{'-1' if quota == 'max' else quota}\n"
            files[f"sys/fs/cgroup/cpu,cpuacct/{folder}/cpu.cfs_period_us"] = f"{period}\n"
    mount, line = (V2_MOUNT, "0::/pod/app\n")
    if version == 1:
        mount, line = V1_MOUNT.replace("memory", "cpu,cpuacct"), "2:cpu,cpuacct:/pod/app\n"
    assert available_cores(machine(tmp_path, line, mount, files)) == cores


def test_affinity_counts() -> None:
    """As under taskset."""
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
        "from pagemill.engine.machine import available_cores; print(available_cores())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


def test_where_the_system_does_not_say_all_cores_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(process: int) -> set[int]:
        raise PermissionError("not in this sandbox")

    monkeypatch.setattr("os.sched_getaffinity", refused)
    monkeypatch.setattr("os.cpu_count", lambda: 5)
    assert available_cores(machine(tmp_path)) == 5


BOUND = """
import os, threading
import torch
from pagemill.engine import openmp
bound = os.sched_getaffinity(0)
worker = []
def unbind():
    openmp.let_go()
    worker.append(os.sched_getaffinity(0))
thread = threading.Thread(target=unbind)
thread.start(), thread.join()
print(sorted(bound), sorted(worker[0]), sorted(os.sched_getaffinity(0)))
"""


@pytest.mark.parametrize(
    ("variables", "free"),
    [({"OMP_PROC_BIND": "true"}, "all"), ({"OMP_PLACES": "cores"}, "all"), ({"GOMP_CPU_AFFINITY": "first"}, "first")],
)
def test_what_openmp_binds_is_let_go(variables: dict[str, str], free: str) -> None:
    """Within what it was given: the first core alone, or all that were there before."""
    here = sorted(os.sched_getaffinity(0))
    given = {name: str(here[0]) if value == "first" else value for name, value in variables.items()}
    command = [sys.executable, "-c", BOUND]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **given}, timeout=60)
    expected = here if free == "all" else here[:1]
    assert done.stdout.strip() == f"{here[:1]} {expected} {expected}"


def test_threads_that_openmp_has_not_bound_stay_as_they_are() -> None:
    code = (
        "import os, torch; from pagemill.engine import openmp; here = os.sched_getaffinity(0); openmp.let_go(); "
        "assert os.sched_getaffinity(0) == here; os.sched_setaffinity(0, {min(here)}); openmp.let_go(); "
        "assert os.sched_getaffinity(0) == {min(here)}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_real_machine() -> None:
    assert 0 < process_memory() < memory_limit()


def test_peak_counts_what_was_given_back() -> None:
    def run() -> None:
        with mmap.mmap(-1, 64 * MIB) as memory:
            for offset in range(0, len(memory), 4096):
                memory[offset] = 1

    assert 60 * MIB <= CpuMemory().peak(run) <= 80 * MIB


# ---------------------------------------------------------------- sizing


def size(config: EngineConfig, **changes: int) -> BudgetTable:
    numbers = {
        "max_model_len": 100_000,
        "bytes_per_block": MIB,
        "limit": 10 * GIB,
        "weights": GIB,
        "held": 2 * GIB,
        "activations": GIB,
    } | changes
    return size_pool(config, device="cpu", **numbers)


def test_the_pool_is_what_the_fraction_leaves() -> None:
    table = size(EngineConfig(gpu_memory_utilization=0.5))
    assert table.num_blocks == 2 * 1024
    assert (table.other, table.pool, table.source) == (GIB, 2 * GIB, "gpu_memory_utilization")
    assert "2,048.0 MiB" in str(table)
    assert table.to_dict()["kv_tokens"] == 2047 * 16


def test_never_more_than_all_sequences_can_fill() -> None:
    config = EngineConfig(max_num_seqs=3, block_size=16)
    assert size(config, max_model_len=33).num_blocks == 3 * 3 + 1
    given = config.replace(kv_cache_memory_bytes=GIB)
    assert size(given, max_model_len=33).num_blocks == 3 * 3 + 1


def test_given_sizes_win() -> None:
    config = EngineConfig(gpu_memory_utilization=0.01, kv_cache_memory_bytes=100 * MIB + 5)
    assert size(config).num_blocks == 100
    table = size(config.replace(num_blocks_override=7))
    assert (table.num_blocks, table.source) == (8, "num_blocks_override")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gpu_memory_utilization": 0.3}, "room for 0 blocks of 16 tokens.* 3.0 MiB, are needed. Raise gpu_memory"),
        ({"kv_cache_memory_bytes": 2 * MIB}, "room for 1 blocks.*Raise kv_cache_memory_bytes"),
        ({"num_blocks_override": 1}, "room for 1 blocks.*Raise num_blocks_override"),
        ({"kv_cache_memory_bytes": 8 * GIB}, "asks for a KV pool of 8192.0 MiB, but only 7168.0 MiB are left"),
        ({"num_blocks_override": 1 << 40}, "num_blocks_override asks for"),
    ],
)
def test_a_pool_too_small_or_too_large_is_refused_with_numbers(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        size(EngineConfig(**settings))  # type: ignore[arg-type]


def test_one_block_is_enough_for_a_context_of_one_block() -> None:
    assert size(EngineConfig(num_blocks_override=1, block_size=256), max_model_len=200).num_blocks == 2


def test_what_a_processor_can_do_is_read_where_linux_says_it(tmp_path: Path) -> None:
    assert processor_features(tmp_path) == frozenset()
    info = tmp_path / "proc" / "cpuinfo"
    info.parent.mkdir()
    info.write_text("processor\t: 0\nvmx flags\t: vnmi\nflags\t\t: fpu avx2 avx512_bf16\n\nflags\t: other\n")
    assert processor_features(tmp_path) == {"fpu", "avx2", "avx512_bf16"}
    info.write_text("processor\t: 0\nFeatures\t: fp asimd bf16\nCPU implementer\t: 0x41\n")
    assert processor_features(tmp_path) == {"fp", "asimd", "bf16"}
