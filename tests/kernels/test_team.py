"""The team of kernel threads: every part exactly once, whoever calls, sleeps, ends or forks."""

from __future__ import annotations

import gc
import multiprocessing
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pagemill.kernels.cpu import team as team_module
from pagemill.kernels.cpu.jit import helper, kernel
from pagemill.kernels.cpu.ops import CpuOps
from pagemill.kernels.cpu.shared_words import load, store, yield_core
from pagemill.kernels.cpu.team import Team, run


@helper
def _count(part: int, parts: int, counts: Any) -> None:
    counts[part] += 1
    counts[-1] = parts


@kernel
def count_parts(board: int, counts: Any) -> None:
    run(board, 8, _count, (counts,))


def test_every_part_runs_exactly_once() -> None:
    team = Team(3)
    for _ in range(3000):
        counts = np.zeros(25, np.int64)
        count_parts(team.board(), counts)
        assert counts.tolist() == [1] * 24 + [24]


def test_a_team_of_one_has_no_board_and_no_threads() -> None:
    before = set(threading.enumerate())
    counts = np.zeros(2, np.int64)
    count_parts(Team(1).board(), counts)
    assert counts.tolist() == [1, 1]
    assert set(threading.enumerate()) <= before  # those of other tests may end meanwhile


def test_several_threads_may_call_at_once() -> None:
    """One call has the team; the others run alone meanwhile. None waits for another, none sees another's work."""
    ops = CpuOps(threads=2)
    inputs = [torch.randn(200, 576) for _ in range(4)]
    expected = [ops.rms_norm(x, torch.ones(576), 1e-5) for x in inputs]
    wrong: list[int] = []

    def call(index: int) -> None:
        for _ in range(200):
            if not torch.equal(ops.rms_norm(inputs[index], torch.ones(576), 1e-5), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=call, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong


def test_helpers_end_with_their_team() -> None:
    before = set(threading.enumerate())
    team = Team(3)
    count_parts(team.board(), np.zeros(25, np.int64))
    helpers = set(threading.enumerate()) - before
    assert len(helpers) == 2
    del team
    gc.collect()
    for helper_thread in helpers:
        helper_thread.join(60)
        assert not helper_thread.is_alive()


def asleep(team: Team, rank: int) -> bool:
    """Whether a helper sleeps, or does so before long."""
    word = team_module._SLEEPS + team_module._LINE * (rank - 1)
    deadline = time.monotonic() + 60
    while not team._words[word] and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    return bool(team._words[word])


@helper
def _wait_for_all(part: int, parts: int, counts: Any) -> None:
    """A part that ends only when every part has been begun: so each needs a thread of its own."""
    counts[part] = 1
    tries = 0
    while counts[:parts].sum() < parts and tries < 2_000_000:
        tries += 1
        yield_core()
    counts[-1] += 1 if tries < 2_000_000 else 100


@kernel
def meet(board: int, counts: Any) -> None:
    run(board, 1, _wait_for_all, (counts,))


def test_idle_helpers_sleep_and_are_woken_by_a_call() -> None:
    team = Team(3)
    for _ in range(20):
        counts = np.zeros(4, np.int64)
        meet(team.board(), counts)
        assert counts[:3].tolist() == [1] * 3
        assert counts[3] < 100, "a helper slept through a call"
        assert asleep(team, 1) and asleep(team, 2)


def test_a_call_wakes_helpers_in_compiled_code_too() -> None:
    """As the layers of a step do, of which a later one may find the helpers asleep: Python is not asked again."""
    team = Team(2)
    count_parts(team.board(), np.zeros(17, np.int64))
    assert asleep(team, 1)
    counts = np.zeros(3, np.int64)
    meet(team._board, counts)
    assert counts[:2].tolist() == [1, 1] and counts[2] < 100


@kernel
def sleep_behind_call(board: int, gate: int) -> int:
    """What a helper does that is on its way to sleep when a call comes: it has not seen it."""
    store(board, team_module._GATE, gate)
    team_module._sleep(board, 1, 0)
    return load(board, team_module._SLEEPS)


def test_a_call_that_meets_a_helper_on_its_way_to_sleep_keeps_it_awake() -> None:
    words = np.zeros(64, np.int64)
    words[team_module._THREADS] = 2
    opened = 1 << team_module._CALL | team_module._OPEN
    done: list[int] = []
    board = int(words.ctypes.data)
    going = threading.Thread(target=lambda: done.append(sleep_behind_call(board, opened)), daemon=True)
    going.start()
    going.join(60)
    assert done == [0]


def test_a_team_that_never_worked_ends_too() -> None:
    before = set(threading.enumerate())
    team = Team(2)
    (helping,) = set(threading.enumerate()) - before
    del team
    gc.collect()
    helping.join(60)
    assert not helping.is_alive()


def test_a_process_ends_at_once_after_a_call() -> None:
    """Its helpers are then awake, and must not come back to an interpreter that is gone."""
    code = (
        "import torch; from pagemill.kernels.cpu.ops import CpuOps; x = torch.randn(200, 576)\n"
        "ops = CpuOps(threads=3)\n"
        "for _ in range(9): ops.rms_norm(x, torch.ones(576), 1e-5)\n"
        "raise SystemExit(3)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (3, "")


def _call_after_fork(team: Team, results: Any) -> None:
    counts = np.zeros(17, np.int64)
    count_parts(team._board, counts)
    results.put(counts.tolist())


def test_a_forked_child_has_no_helpers_and_does_not_miss_them() -> None:
    team = Team(2)
    count_parts(team.board(), np.zeros(17, np.int64))
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=_call_after_fork, args=(team, results))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert results.get() == [1] * 16 + [16]


def _generate_after_fork(llm: Any, params: Any, results: Any) -> None:
    results.put(llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids)


def test_a_user_may_fork_a_process_with_an_engine_in_it(tmp_path: Path) -> None:
    """As multiprocessing does by default before Python 3.14: the child has no helper threads, and goes on without."""
    from pagemill.engine.blank_model import write_blank_llama
    from pagemill.engine.llm import LLM
    from pagemill.engine.sampling_params import SamplingParams

    write_blank_llama(tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", threads=2, skip_tokenizer_init=True, num_blocks_override=16)
    params = SamplingParams(seed=1, max_tokens=12, ignore_eos=True)
    expected = llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids
    context = multiprocessing.get_context("fork")
    for _ in range(2):
        results = context.SimpleQueue()
        child = context.Process(target=_generate_after_fork, args=(llm, params, results))
        child.start()
        child.join(60)
        assert child.exitcode == 0
        assert results.get() == expected
    assert llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids == expected


def _engine_of_its_own(folder: Path, params: Any, results: Any) -> None:
    from pagemill.engine.llm import LLM

    llm = LLM(str(folder), dtype="float32", threads=2, skip_tokenizer_init=True, num_blocks_override=16)
    results.put(llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids)


def test_workers_that_were_forked_off_a_running_engine_make_engines_of_their_own(tmp_path: Path) -> None:
    """As a server that forks its workers does (prefork), with an engine at work in the master all the time."""
    from pagemill.engine.blank_model import write_blank_llama
    from pagemill.engine.llm import LLM
    from pagemill.engine.sampling_params import SamplingParams

    write_blank_llama(tmp_path)
    params = SamplingParams(seed=1, max_tokens=12, ignore_eos=True)
    llm = LLM(str(tmp_path), dtype="float32", threads=2, skip_tokenizer_init=True, num_blocks_override=16)
    expected = llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    workers = [context.Process(target=_engine_of_its_own, args=(tmp_path, params, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    assert llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids == expected
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
        assert results.get() == expected
