"""Where compiled kernels are kept, what happens where nothing can be, and that a second process compiles nothing."""

from __future__ import annotations

import ctypes
import grp
import json
import os
import pwd
import resource
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numba
import pytest
import torch

from pagemill.kernels.cpu import jit, kernel_cache, threads
from pagemill.kernels.cpu.kernel_cache import KernelCache, fingerprint
from pagemill.kernels.cpu.ops import CpuOps

_ONES = torch.ones(1, 4)


@pytest.fixture(autouse=True)
def default_cache_afterwards() -> object:
    yield
    jit.keep_compiled()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go in this test; nothing is there."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(kernel_cache.tempfile, "gettempdir", lambda: str(folder))
    return folder


def test_the_folder_is_named_after_sources_versions_and_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = KernelCache(str(tmp_path))
    assert cache.folder == tmp_path / "numba" / fingerprint()
    assert KernelCache(str(tmp_path)).folder == cache.folder
    sources = tmp_path / "kernels" / "cpu"
    here = Path(kernel_cache.__file__).parent
    shutil.copytree(here, sources)
    for source in here.parent.glob("*.py"):
        shutil.copy(source, sources.parent)
    monkeypatch.setattr(kernel_cache, "__file__", str(sources / "kernel_cache.py"))
    names = {fingerprint()}
    assert names == {cache.folder.name}
    for name in ("simd.py", "../rng.py"):  # what numba itself would not look at: a helper, and constants
        with (sources / name).open("a") as source:
            source.write("# edited\n")
        names.add(fingerprint())
    monkeypatch.setattr(numba, "__version__", "0.0")
    names.add(fingerprint())
    monkeypatch.setattr(numba.core.config, "BOUNDSCHECK", 1)
    names.add(fingerprint())
    assert len(names) == 5


@pytest.mark.parametrize("umask", [0o022, 0o000, 0o077])
def test_only_its_owner_can_write_the_folder(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        cache = KernelCache(str(tmp_path / "new"))
    finally:
        os.umask(before)
    assert cache.folder is not None
    assert tmp_path / "new" in cache.folder.parents
    for level in (cache.folder, *cache.folder.parents[:2]):
        assert stat.S_IMODE(level.stat().st_mode) == 0o755 & ~umask


def test_other_users_of_numba_keep_their_cache_folder(tmp_path: Path) -> None:
    before = numba.core.config.CACHE_DIR
    jit.keep_compiled(str(tmp_path))
    assert before == numba.core.config.CACHE_DIR


def test_where_the_folder_cannot_be_made_a_temporary_one_is_used(tmp_path: Path, temporary: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    cache = KernelCache(str(in_the_way))
    assert cache.folder is not None
    assert temporary in cache.folder.parents


def test_where_nothing_can_be_written_kernels_run_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    monkeypatch.setattr(kernel_cache.tempfile, "gettempdir", lambda: str(in_the_way))
    ops = CpuOps(cache_dir=str(in_the_way), threads=1)
    assert (ops.cache.folder, ops.cache.readable) == (None, ())
    assert ops.rms_norm(_ONES, _ONES[0], 0.0).tolist() == [[1.0] * 4]


def test_without_any_folder_for_temporary_files_the_cache_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine whose disk for them is full: Python then knows no such folder."""

    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(kernel_cache.tempfile, "gettempdir", none)
    assert KernelCache(str(tmp_path)).folder == tmp_path / "numba" / fingerprint()
    (tmp_path / "file").write_text("not a folder")
    assert KernelCache(str(tmp_path / "file")).folder is None


def test_a_folder_that_others_can_write_is_not_trusted(tmp_path: Path, temporary: Path) -> None:
    root = tmp_path / "shared"
    (root / "numba").mkdir(parents=True)
    (root / "numba").chmod(0o777)
    cache = KernelCache(str(root))
    assert cache.folder is not None
    assert root not in cache.folder.parents


@pytest.mark.parametrize(
    ("group", "names", "members", "trusted"),
    [
        (0, {}, [], True),
        (777, {}, [], True),
        (100, {}, [], False),
        (777, {777: "users"}, [], False),
        (100, {100: "anna"}, [], True),
        (100, {100: "anna"}, ["anna", "root"], True),
        (100, {100: "anna"}, ["anna", "berta"], False),
    ],
)
def test_a_folder_that_a_group_with_others_can_write_is_not_trusted(
    group: int,
    names: dict[int, str],
    members: list[str],
    trusted: bool,
    tmp_path: Path,
    temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = tmp_path / "shared"
    (root / "numba").mkdir(parents=True)
    (root / "numba").chmod(0o775)
    real = Path.stat

    def as_of(path: Path, **options: Any) -> os.stat_result:
        fields = list(real(path, **options))
        return os.stat_result([*fields[:4], 777, group if path.name == "numba" else 777, *fields[6:]])

    def user(number: int) -> Any:
        assert number == 777
        if not names:
            raise KeyError(number)
        return SimpleNamespace(pw_name="anna")

    monkeypatch.setattr(Path, "stat", as_of)
    monkeypatch.setattr(os, "getuid", lambda: 777)
    monkeypatch.setattr(pwd, "getpwuid", user)
    monkeypatch.setattr(grp, "getgrgid", lambda number: SimpleNamespace(gr_name=names[number], gr_mem=members))
    assert any(root in folder.parents for folder in KernelCache(str(root)).readable) is trusted


def test_a_folder_of_root_is_read_and_one_of_another_user_is_not(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image is filled by root and run by somebody else."""
    folder = KernelCache(str(tmp_path)).folder
    assert folder is not None
    real = Path.stat
    for owner, trusted in ((0, True), (12345, False)):

        def as_of(path: Path, owner: int = owner, **options: Any) -> os.stat_result:
            fields = list(real(path, **options))
            return os.stat_result([*fields[:4], owner if tmp_path in path.parents else 777, *fields[5:]])

        with monkeypatch.context() as patch:
            patch.setattr(Path, "stat", as_of)
            patch.setattr(os, "getuid", lambda: 777)
            assert (folder in KernelCache(str(tmp_path)).readable) is trusted


def test_a_file_appears_whole_and_a_damaged_one_counts_as_missing(tmp_path: Path) -> None:
    cache = KernelCache(str(tmp_path))
    assert cache.folder is not None
    cache.write("a.kernel", b"machine code")
    assert cache.read("a.kernel") == b"machine code"
    assert [path.name for path in cache.folder.iterdir()] == ["a.kernel"]
    whole = (cache.folder / "a.kernel").read_bytes()
    for damaged in (b"", whole[:10], whole[:-1], whole[:-1] + b"x", b"\0" * len(whole)):
        (cache.folder / "a.kernel").write_bytes(damaged)
        assert cache.read("a.kernel") is None
    cache.write("a.kernel", b"machine code")
    assert cache.read("a.kernel") == b"machine code"
    assert cache.read("b.kernel") is None


_PROCESS = """
import json, sys, torch
from pagemill.kernels.cpu.ops import CpuOps
from pagemill.kernels.cpu.target import processor
told = []
ops = CpuOps(cache_dir=sys.argv[1], threads=1, report=lambda *report: told.append(report))
ops.silu_and_mul(torch.ones(2, 8))
ops.rms_norm(torch.ones(1, 4), torch.ones(4), 0.0)
names = [name.partition("-")[0] for name in ops.cache.compiled]
print(json.dumps({"compiled": names, "told": told, "loaded": ops.cache.loaded, "folder": str(ops.cache.folder),
                  "processor": processor(), "can_compile": "numba.core.inline_closurecall" in sys.modules}))
"""


def _start(folder: Path, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _PROCESS, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def _end(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert "Warning" not in errors
    return {**json.loads(output.splitlines()[-1]), "output": output + errors}


_BOTH = ["elementwise.silu_and_mul", "elementwise.rms_norm"]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A folder that two processes have compiled into at once, and what they told."""
    folder = tmp_path_factory.mktemp("filled")
    return folder, [_end(process) for process in [_start(folder), _start(folder)]]


def test_the_first_process_tells_what_it_compiles_and_the_next_has_nothing_to(
    filled: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, results = filled
    for result in results:
        assert len(result["compiled"]) + result["loaded"] == 2
        assert [name for name, _, _ in result["told"]] == result["compiled"]
        assert [done for _, done, _ in result["told"]] == list(range(len(result["compiled"])))
        assert [seconds > 0 for _, _, seconds in result["told"]] == [False, True][: len(result["compiled"])]
    assert any(result["compiled"] == _BOTH for result in results)
    following = _end(_start(folder))
    assert (following["compiled"], following["loaded"], following["told"]) == ([], 2, [])
    assert all(result["can_compile"] for result in results if result["compiled"])
    assert not following["can_compile"]  # setting that up takes as long as loading all kernels


def test_what_is_missing_is_compiled_after_others_were_loaded(
    filled: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    for name in _BOTH:
        cache = tmp_path / name
        shutil.copytree(filled[0], cache)
        (missing,) = cache.rglob(f"{name}-*.kernel")
        missing.unlink()
        result = _end(_start(cache))
        assert (result["compiled"], result["loaded"], result["can_compile"]) == ([name], 1, True)


def test_what_another_processor_compiled_is_left_alone(filled: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, _ = filled
    before = set(folder.rglob("*.kernel"))
    environment = {**os.environ, "NUMBA_CPU_NAME": "nehalem", "NUMBA_CPU_FEATURES": "+sse4.2"}
    other = _end(_start(folder, env=environment))
    assert (other["compiled"], other["processor"]) == (_BOTH, "nehalem")
    assert len(before) == 2
    assert len(set(folder.rglob("*.kernel")) - before) == 2


def _small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))


def test_a_full_disk_costs_the_cache_and_nothing_else(tmp_path: Path) -> None:
    """Not a full disk but a limit on files: the same failure of the same write."""
    result = _end(_start(tmp_path, preexec_fn=_small_files))
    assert result["compiled"] == _BOTH
    assert result["folder"] == "None"
    assert result["output"].count("cannot be kept any more") == 1
    assert not list(tmp_path.rglob("*.kernel"))
    assert not list(tmp_path.rglob("*.part"))


def _without_privileges() -> None:
    """Permissions count for root as well, once it has lost CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH."""
    if os.getuid() == 0:
        libc = ctypes.CDLL(None)
        for capability in (1, 2):
            libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


def test_a_read_only_cache_is_read(filled: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    cache, home = tmp_path / "cache", tmp_path / "home"
    shutil.copytree(filled[0], cache)
    home.mkdir()
    for folder in (home, cache, *cache.rglob("*")):
        folder.chmod(stat.S_IMODE(folder.stat().st_mode) & ~0o222)
    result = _end(_start(cache, env={**os.environ, "HOME": str(home)}, preexec_fn=_without_privileges))
    assert (result["compiled"], result["loaded"]) == ([], 2)
    assert str(cache) not in result["folder"]


def test_the_team_has_the_threads_asked_for_and_torch_keeps_to_one() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert CpuOps(threads=3).threads == 3
        assert torch.get_num_threads() == 1
        assert CpuOps().threads == threads.available_threads()
    finally:
        torch.set_num_threads(before)


def test_functions_of_two_processes_are_not_taken_for_one_another(tmp_path: Path) -> None:
    """Helpers that the same code has made have the same name, and in each of two processes the same number."""
    (tmp_path / "twins.py").write_text("""
import sys
from pagemill.kernels.cpu import jit

def made(factor):
    @jit.helper
    def walk(n):  # calls itself twice, so it is not inlined
        if n <= 0:
            return 0
        return factor + walk(n - 1) + walk(n - 2)
    return walk

three = made(3) if "first" in sys.argv else None
five = made(5) if "second" in sys.argv else None

@jit.kernel
def first(n):
    return three(n)

@jit.kernel
def second(n):
    return five(n)

jit.keep_compiled(sys.argv[1])
print(*(globals()[name](5) for name in sys.argv[2:]))
""")
    said = []
    for kernels in (["first"], ["second"], ["first", "second"]):
        command = [sys.executable, str(tmp_path / "twins.py"), str(tmp_path / "cache"), *kernels]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.splitlines()[-1].split())  # after lines that say what is compiled
    assert said == [["36"], ["60"], ["36", "60"]]
    assert len(list((tmp_path / "cache").rglob("*.kernel"))) == 2  # the third process compiled nothing
