"""The interpreter's memory in huge pages. Each case has a process of its own, since it is about all of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagemill.engine import interpreter_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what was asked for")
with_huge_pages = pytest.mark.skipif(
    not interpreter_memory._system_has_huge_pages(), reason="this system gives nobody huge pages"
)

_COMMON = """
import sys
from pagemill.engine import interpreter_memory
from pagemill.engine.interpreter_memory import gather

def asked_for(address):
    "Whether huge pages have been asked for where this lies."
    inside = False
    for line in open("/proc/self/smaps"):
        first, *rest = line.split()
        if not first.endswith(":"):
            low, high = (int(end, 16) for end in first.split("-"))
            inside = low <= address < high
        elif inside and first == "VmFlags:":
            return "hg" in rest

def resident(what="VmRSS:"):
    "MiB."
    return int(next(line for line in open("/proc/self/status") if line.startswith(what)).split()[1]) // 1024

def some(count):
    return [(number, str(number)) for number in range(count)]
"""


def _run(program: str, **environment: str) -> list[str]:
    """The lines that it prints. It must end well, its memory given back as an interpreter does at its end."""
    done = subprocess.run(
        [sys.executable, "-c", _COMMON + program],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@with_huge_pages
def test_small_objects_of_any_thread_and_the_blocks_of_the_first_lie_where_huge_pages_were_asked_for() -> None:
    program = """
import ctypes, threading
malloc = ctypes.CDLL(None).malloc
malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
assert gather()
small = some(100_000)
thread = threading.Thread(target=lambda: small.extend(some(100_000)))
thread.start()
thread.join()
print(*(asked_for(id(small[place])) for place in (50_000, 99_999, 150_000, 199_999)), asked_for(malloc(100_000)))
"""
    assert _run(program) == ["True True True True True"]


@with_huge_pages
def test_what_was_taken_before_is_given_back_to_where_it_came_from() -> None:
    """Arenas, and the pieces of a thread's stack that deep calls have taken (CPython takes both from one place)."""
    program = """
sys.setrecursionlimit(20_000)
before = some(300_000)
def deep(left):
    return gather() if left == 0 else deep(left - 1)
assert deep(8_000)
full = resident()
del before
print(full - resident() > 15)
def again(left):
    return 0 if left == 0 else again(left - 1)
for _ in range(100):
    again(8_000)
"""
    assert _run(program) == ["True"]


@with_huge_pages
def test_memory_does_not_grow_when_arenas_come_and_go() -> None:
    program = """
from pagemill.kernels.cpu import python_arenas
python_arenas._ROOM = 150 * 2**20
assert gather()
highest = []
for _ in range(8):
    kept = some(400_000)
    highest.append(resident())
    place = asked_for(id(kept[-1]))
    del kept
print(place, highest[-1] - highest[1] < 16, highest)
"""
    assert _run(program)[0].startswith("True True")


@with_huge_pages
def test_arenas_are_mapped_as_ever_when_there_is_no_room_left() -> None:
    program = """
from pagemill.kernels.cpu import python_arenas
python_arenas._ROOM = 20 * 2**20
assert gather()
kept = some(1_000_000)
full = resident()
print(asked_for(id(kept[50_000])), asked_for(id(kept[-1])))
del kept
print(full - resident() > 50)
taken = resident("VmData:")
for _ in range(3):
    kept = some(1_000_000)
    del kept
print(resident("VmData:") - taken < 16)
"""
    assert _run(program) == ["True False", "True", "True"]


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONMALLOC": "malloc"},
        {"PYTHONMALLOC": "debug"},
        {"PYTHONMALLOC": "pymalloc_debug"},
        {"PYTHONDEVMODE": "1"},
        {"PYTHONTRACEMALLOC": "5"},
    ],
)
def test_other_allocators_of_the_interpreter_do_not_mind(environment: dict[str, str]) -> None:
    program = """
before = some(50_000)
gather()
after = some(50_000)
del before, after
print("well")
"""
    assert _run(program, **environment) == ["well"]


@with_huge_pages
@pytest.mark.parametrize(("mib", "heap"), [(200, False), (800, True)])
def test_a_limit_on_memory_leaves_the_rest_as_it_was(mib: int, heap: bool) -> None:
    """Of the two regions the first or none fits in."""
    program = f"""
import resource
resource.setrlimit(resource.RLIMIT_DATA, ({mib} * 2**20, {mib} * 2**20))
print(gather())
many = some(300_000)
print(asked_for(id(many[-1])))
del many
"""
    assert _run(program) == [str(heap), "False"]


@with_huge_pages
def test_without_llvm_the_heap_alone_is_in_huge_pages() -> None:
    program = """
sys.modules["llvmlite"] = None
print(gather(), asked_for(id(some(100_000)[-1])), asked_for(id(b"x" * 3_000_000) + 2_500_000))
"""
    assert _run(program) == ["True False True"]


def test_a_system_without_huge_pages_is_left_alone(tmp_path: Path) -> None:
    setting = tmp_path / "enabled"
    setting.write_text("always madvise [never]\n")
    program = f"""
from pathlib import Path
answers = []
for path in ({str(setting)!r}, "/nowhere"):
    interpreter_memory._SETTING = Path(path)
    answers.append(gather())
print(*answers, asked_for(id(some(100_000)[-1])))
"""
    assert _run(program) == ["False False False"]


@with_huge_pages
@pytest.mark.parametrize(
    ("command", "gathers"),
    [("serve", True), ("engine", True), ("bench", True), ("--debug serve", True), ("config", False)],
)
def test_commands_that_compute_begin_with_it(command: str, gathers: bool) -> None:
    program = f"""
sys.argv = ["pagemill", *{command.split()!r}, "--help"]
from pagemill.__main__ import main
try:
    main()
except SystemExit:
    pass
print(asked_for(id(some(100_000)[-1])))
"""
    assert _run(program)[-1] == str(gathers)
