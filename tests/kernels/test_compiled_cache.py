"""Where compiled kernels are kept, what happens where nothing can be, and that a second process compiles nothing."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numba
import pytest
import torch

from pagemill.kernels.cpu import jit, threads
from pagemill.kernels.cpu.ops import CpuOps
from pagemill.kernels.cpu.warm_up import warm_up
from pagemill.kernels.layout import KVLayout

_LAYOUT = KVLayout(num_blocks=1, num_layers=1, block_size=1, num_kv_heads=1, head_dim=2)


@pytest.fixture(autouse=True)
def default_cache_afterwards() -> object:
    yield
    jit.keep_compiled()


def test_the_folder_is_private_and_named_after_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = jit.keep_compiled(str(tmp_path))
    assert folder is not None
    assert folder.parent == tmp_path / "numba"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert jit.keep_compiled(str(tmp_path)) == folder
    sources = tmp_path / "cpu"
    shutil.copytree(Path(jit.__file__).parent, sources)
    monkeypatch.setattr(jit, "__file__", str(sources / "jit.py"))
    assert jit.keep_compiled(str(tmp_path)) == folder
    with (sources / "simd.py").open("a") as source:  # a helper, which numba itself would not look at
        source.write("# edited\n")
    edited = jit.keep_compiled(str(tmp_path))
    assert edited != folder
    monkeypatch.setattr(numba, "__version__", "0.0")
    assert jit.keep_compiled(str(tmp_path)) not in (folder, edited)


def test_other_users_of_numba_keep_their_cache_folder(tmp_path: Path) -> None:
    before = numba.core.config.CACHE_DIR
    jit.keep_compiled(str(tmp_path))
    assert before == numba.core.config.CACHE_DIR


def test_where_the_folder_cannot_be_made_a_temporary_one_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    monkeypatch.setattr(jit.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    folder = jit.keep_compiled(str(in_the_way))
    assert folder is not None
    assert tmp_path / "tmp" in folder.parents


def test_where_nothing_can_be_written_kernels_run_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    monkeypatch.setattr(jit.tempfile, "gettempdir", lambda: str(in_the_way))
    ops = CpuOps(cache_dir=str(in_the_way))
    assert ops.compiled_folder is None
    assert ops.rms_norm(torch.ones(1, 4), torch.ones(4), 0.0).tolist() == [[1.0] * 4]


def test_a_folder_that_others_can_write_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "shared"
    (root / "numba").mkdir(parents=True)
    (root / "numba").chmod(0o777)
    monkeypatch.setattr(jit.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    folder = jit.keep_compiled(str(root))
    assert folder is not None
    assert root not in folder.parents


def test_warm_up_covers_what_a_model_calls_and_tells_its_progress() -> None:
    told: list[tuple[str, float]] = []
    warm_up(CpuOps(), _LAYOUT, lambda stage, share: told.append((stage, share)))
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)


_SECOND_PROCESS = """
import numba.core.event, sys, torch
compiled = []
class Listener(numba.core.event.Listener):
    def on_start(self, event): compiled.append(event.data["dispatcher"].py_func.__name__)
    def on_end(self, event): pass
from pagemill.kernels.cpu.ops import CpuOps
ops = CpuOps(cache_dir=sys.argv[1])
with numba.core.event.install_listener("numba:compile", Listener()):
    ops.silu_and_mul(torch.ones(2, 8))
    ops.paged_attention
print(len(compiled))
"""


def test_a_second_process_finds_what_the_first_compiled(tmp_path: Path) -> None:
    counts = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", _SECOND_PROCESS, str(tmp_path)],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert "Warning" not in done.stderr
        counts.append(int(done.stdout))
    assert counts[0] > 0
    assert counts[1] == 0


@pytest.mark.parametrize(
    ("text", "expected"), [("max 100000", None), ("150000 100000", 1.5), ("50000 100000", 0.5), ("nonsense", None)]
)
def test_the_cgroup_quota_is_read(
    text: str, expected: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "cpu.max"
    limit.write_text(text)
    monkeypatch.setattr(threads, "_CGROUP_V2", limit)
    assert threads._quota() == expected
    cores = len(os.sched_getaffinity(0))
    assert threads.available_threads() == (cores if expected is None else max(1, min(cores, -int(-expected // 1))))


def test_an_old_cgroup_quota_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_CGROUP_V2", tmp_path / "absent")
    monkeypatch.setattr(threads, "_CGROUP_V1", tmp_path)
    assert threads._quota() is None
    (tmp_path / "cpu.cfs_quota_us").write_text("-1")
    (tmp_path / "cpu.cfs_period_us").write_text("100000")
    assert threads._quota() is None
    (tmp_path / "cpu.cfs_quota_us").write_text("100000")
    assert threads._quota() == 1.0


def test_the_team_has_the_threads_asked_for_and_torch_keeps_to_one() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert CpuOps(threads=3).threads == 3
        assert torch.get_num_threads() == 1
        assert CpuOps().threads == threads.available_threads()
    finally:
        torch.set_num_threads(before)
