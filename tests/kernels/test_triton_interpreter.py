"""Runs `triton_interpreter_cases.py` in a process in which Triton interprets its kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: the CUDA kernels are not checked")

from pagemill.kernels.ops import select_ops

ROOT = Path(__file__).parents[2]
CASES = Path(__file__).with_name("triton_interpreter_cases.py")


def run_python(*arguments: str, interpret: bool) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["OMP_NUM_THREADS"] = "1"  # tiny tensors: a second thread only waits
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )


def test_kernels_in_the_interpreter() -> None:
    result = run_python("-m", "pytest", "-p", "no:cacheprovider", "--maxfail=5", str(CASES), interpret=True)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]


def test_gpu_check_runs_dry_in_the_interpreter() -> None:
    result = run_python("bench/gpu_check.py", "--interpret", interpret=False)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert "0 of" in result.stdout
    assert "no figures" in result.stdout


def test_the_interpreter_must_be_asked_for_in_the_environment() -> None:
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        select_ops("cpu", override="interpret")
