"""How long a start takes: `python -m bench.start_time [--runs N] [--model NAME]`

Each run starts `pagemill serve` with everything cached that a first start leaves behind (one comes before the runs and
is not counted), waits until it says that it serves, and stops it. Told are the medians of when each phase was over, in
seconds since the process was made, with the least and the most; the processor time until ready, which other work on the
machine disturbs less; and the most memory that the process had. Then the same for commands that need no engine.

Python finds its bytecode, as it does in an installation, whatever PYTHONDONTWRITEBYTECODE says here: the start that is
not counted writes it to a folder that goes away. Without it a start compiles every module of Pagemill anew.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# What a start says, in this order, and what is over then.
PHASES = (
    ("embedded server started", "embedded server answers"),
    ("webhooks are sent", "engine imported, gateway listens"),
    ("memory budget", "model and kernels loaded, memory measured"),
    ("engine serves the queue", "tokenizer, scheduler and pool made"),
    ("serving ", "ready: Redis connected, first look at the queue done"),
)
QUICK = (["--help"], ["--version"], ["config"])


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _peak_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def start(model: str, environment: dict[str, str]) -> dict[str, float]:
    """Seconds until each phase of one start was over, processor seconds and MiB."""
    seen: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="pagemill-start-") as folder:
        command = [sys.executable, "-m", "pagemill", "serve", "--model", model, "--port", "0", "--http-port", "0"]
        command += ["--data-dir", folder, "--log-format", "json"]
        begun = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        assert process.stdout is not None
        for line in process.stdout:
            for sign, what in PHASES:
                if what not in seen and (sign in line if sign != "serving " else line.startswith(sign)):
                    seen[what] = time.perf_counter() - begun
            if len(seen) == len(PHASES):
                break
        else:
            raise SystemExit(f"pagemill serve ended before it served, with status {process.wait()}")
        seen["processor seconds until ready"] = _cpu_seconds(process.pid)
        seen["peak memory, MiB"] = _peak_mib(process.pid)
        process.send_signal(signal.SIGTERM)
        process.communicate()
    return seen


def quick(arguments: list[str], environment: dict[str, str]) -> float:
    """Seconds of a whole command that needs no engine."""
    begun = time.perf_counter()
    command = [sys.executable, "-m", "pagemill", *arguments]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True, env=environment)
    return time.perf_counter() - begun


def _row(what: str, values: list[float]) -> str:
    figures = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    return json.dumps({"what": what, **{name: round(value, 3) for name, value in figures.items()}})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--model", default="smollm2-135m")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pagemill-bytecode-") as folder:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        start(args.model, environment)
        runs = [start(args.model, environment) for _ in range(args.runs)]
        for what in runs[0]:
            print(_row(what, [run[what] for run in runs]), flush=True)
        for arguments in QUICK:
            times = [quick(arguments, environment) for _ in range(args.runs)]
            print(_row("pagemill " + " ".join(arguments), times), flush=True)


if __name__ == "__main__":
    main()
