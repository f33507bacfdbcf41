"""The driver's side of the engine processes: start, kill, freeze, thaw and end them, and know which are alive."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(slots=True)
class EngineProcess:
    """One engine. `status` is set once it has ended: its exit status, or minus the signal that ended it."""

    pid: int
    frozen: bool = False
    asked_to_end: bool = False
    status: int | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def signal(self, number: int) -> None:
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and the host is about to say so
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.asked_to_end = True
        self.signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.asked_to_end = True
        self.signal(signal.SIGTERM)

    def freeze(self) -> None:
        self.frozen = True
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.frozen = False
        self.signal(signal.SIGCONT)


class EngineHost:
    """Starts engines with `settings` of the queue. Use as an async context manager: at its end none is left."""

    def __init__(self, model: Path, logs: Path, settings: dict[str, Any]) -> None:
        self._model = model
        self.logs = logs
        self._settings = settings
        self._process: Process | None = None
        self._lines: asyncio.Task[None] | None = None
        self._started: asyncio.Queue[EngineProcess] = asyncio.Queue()
        self._ready = asyncio.Event()
        self.engines: dict[int, EngineProcess] = {}

    async def __aenter__(self) -> EngineHost:
        command = (sys.executable, "-m", "tests.chaos.engine_host", str(self._model), str(self.logs))
        with (self.logs / "host.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, stderr=log, cwd=ROOT
            )
        self._lines = asyncio.create_task(self._read())
        ready = asyncio.create_task(self._ready.wait())
        async with asyncio.timeout(120):
            await asyncio.wait({ready, self._lines}, return_when=asyncio.FIRST_COMPLETED)
        if not self._ready.is_set():
            ready.cancel()
            raise RuntimeError(f"no engine can be started; see {self.logs / 'host.log'}")
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._process is not None and self._process.stdin is not None and self._lines is not None
        for engine in self.alive:
            engine.kill()
        self._process.stdin.close()
        await self._process.wait()
        await self._lines

    @property
    def alive(self) -> list[EngineProcess]:
        return [engine for engine in self.engines.values() if engine.status is None]

    async def start(self, **changes: Any) -> EngineProcess:
        """Start an engine, with `changes` of the settings."""
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(self._settings | changes).encode() + b"\n")
        return await self._started.get()

    def log_of(self, engine: EngineProcess) -> Path:
        return self.logs / f"engine-{engine.pid}.log"

    async def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        async for line in self._process.stdout:
            said = json.loads(line)
            if "ready" in said:
                self._ready.set()
            elif "started" in said:
                engine = self.engines[said["started"]] = EngineProcess(said["started"])
                self._started.put_nowait(engine)
            else:
                engine = self.engines[said["ended"]]
                engine.status = said["status"]
                engine.ended.set()
