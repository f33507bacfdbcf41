"""Starting `pagemill` as its users do: a process with arguments, an environment and two streams."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# One thread: the suite's machine has two cores, and two engines that both want two slow each other down fivefold.
SMALL = ("--num-blocks-override=256", "--max-num-seqs=16", "--max-num-batched-tokens=128", "--threads=1")


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PAGEMILL_")}
    return {**kept, **changes}


def pagemill(
    *arguments: str, cwd: Path | None = None, timeout: float = 240, stdin: str = "", **changes: str
) -> subprocess.CompletedProcess[str]:
    """Run to the end."""
    return subprocess.run(
        [sys.executable, "-m", "pagemill", *arguments],
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(**changes),
        check=False,
    )
