"""Engines as processes of their own that start at once: `python -m tests.chaos.engine_host MODEL LOGS`.

This process loads the model once and forks an engine for every line on its standard input: the queue's settings as
JSON, and perhaps `device_ms`, how much longer each step takes. It says `{"started": pid}` and later
`{"ended": pid, "status": n}` (minus the signal where one ended it), and ends with its standard input; its engines are
killed with it. It has no thread, so that a fork leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from pagemill.adapters.cli.signals import stopped_by_signal
from pagemill.engine.assembly import EngineParts, build
from pagemill.engine.async_engine import AsyncEngine
from pagemill.engine.scheduler_output import SchedulerOutput
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.worker import Worker
from tests.chaos.model import engine_config

PR_SET_PDEATHSIG = 1
DEADLY = [5, 6, 5, 6]  # a prompt that begins so ends the process in the step that computes it, as a bad kernel would


class OddRunner:
    """The model runner, slower by `delay_s` a step, and mortal."""

    def __init__(self, runner: Any, delay_s: float) -> None:
        self._runner = runner
        self._delay_s = delay_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def execute(self, output: SchedulerOutput) -> Any:
        if any(item.request.prompt_token_ids[: len(DEADLY)] == DEADLY for item in output.scheduled):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._delay_s:
            time.sleep(self._delay_s)
        return self._runner.execute(output)


async def run_until_signal(worker: Worker) -> None:
    """As `pagemill engine` does."""
    serving = asyncio.create_task(worker.run())
    with stopped_by_signal(worker, serving):
        try:
            await serving
        except asyncio.CancelledError:
            if not serving.cancelled():
                raise


async def serve(parts: EngineParts, settings: dict[str, Any]) -> None:
    """Serve the queue until a signal; then the pool has to be whole and empty."""
    core: Any = parts.core
    core._runner = OddRunner(core._runner, settings.pop("device_ms", 0) / 1000)
    engine = AsyncEngine(parts, asyncio.get_running_loop())
    await run_until_signal(Worker(engine, QueueConfig(**settings)))
    async with asyncio.timeout(60):
        while engine.num_live:
            await asyncio.sleep(0.01)
    await engine.check()
    await engine.stop()


def run_engine(parts: EngineParts, settings: dict[str, Any], logs: Path, host: int) -> int:
    """The forked child's life. Returns its exit status."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != host:
        return 1
    log = os.open(logs / f"engine-{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    try:
        asyncio.run(serve(parts, settings))
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def main(model: str, logs: str) -> None:
    channel = os.dup(1)
    os.dup2(2, 1)  # log lines go elsewhere

    def say(**what: Any) -> None:
        os.write(channel, json.dumps(what).encode() + b"\n")

    parts = build(engine_config(Path(model)))
    host = os.getpid()
    say(ready=host)
    commands = b""
    while True:
        readable, _, _ = select.select([0], [], [], 0.02)
        if readable:
            received = os.read(0, 65536)
            if not received:
                return
            commands += received
        while b"\n" in commands:
            line, _, commands = commands.partition(b"\n")
            pid = os.fork()
            if pid == 0:
                os._exit(run_engine(parts, json.loads(line), Path(logs), host))
            say(started=pid)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            say(ended=pid, status=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(*sys.argv[1:])
