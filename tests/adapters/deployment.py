"""A deployment of processes on one server: gateways as their users start them, and engines of a tiny model that start
at once and can be killed or frozen."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from tests.adapters.processes import environment
from tests.chaos.engines import EngineHost
from tests.chaos.model import make_model


class Role:
    """A role's process, and its log as it comes. `url`: the last word of the line in which it says that it serves."""

    def __init__(self, process: asyncio.subprocess.Process, line: str) -> None:
        self.process, self.url = process, line.split()[-1]
        self.log: list[dict[str, Any]] = []
        self._reading = asyncio.create_task(self._read())

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @classmethod
    async def start(cls, name: str, redis_url: str, *options: str, **changes: str) -> Role:
        command = (sys.executable, "-m", "pagemill", name, "--redis-url", redis_url, "--log-format", "json", *options)
        process = await asyncio.create_subprocess_exec(
            *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(**changes)
        )
        if name == "webhooks":  # it has nothing to say of itself but in its log
            return cls(process, redis_url)
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        assert line.startswith("serving "), line
        return cls(process, line)

    async def until_logged(self, event: str, timeout_s: float = 60) -> dict[str, Any]:
        """The first line of its log with this event, once it is there."""
        async with asyncio.timeout(timeout_s):
            while not (found := [line for line in self.log if line["event"] == event]):
                await asyncio.sleep(0.02)
        return found[0]

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        await self._reading

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            with contextlib.suppress(orjson.JSONDecodeError):
                self.log.append(orjson.loads(line))


class Deployment:
    """Gateways and engines on one server. `figures` is what the dashboard shows."""

    def __init__(self, redis_url: str, host: EngineHost, session: aiohttp.ClientSession) -> None:
        self.redis_url, self.host, self.session = redis_url, host, session
        self.gateways: list[Role] = []

    async def gateway(self, *options: str, **changes: str) -> Role:
        role = await Role.start("gateway", self.redis_url, "--http-port", "0", *options, **changes)
        self.gateways.append(role)
        return role

    async def figures(self, gateway: Role) -> dict[str, Any]:
        async with self.session.get(f"{gateway.url}/overview.json") as answer:
            queue: dict[str, Any] = (await answer.json())["queues"]["default"]
            return queue

    async def until(self, gateway: Role, condition: Any, timeout_s: float = 60) -> dict[str, Any]:
        """The figures, once `condition` is true of the living engines."""
        async with asyncio.timeout(timeout_s):
            while True:
                found = await self.figures(gateway)
                living = [engine for engine in found["engines"] if engine["alive"]]
                if living and condition(living):
                    return found
                await asyncio.sleep(0.05)

    async def until_idle(self, gateway: Role) -> None:
        """Wait until no living engine holds a block: what was asked for has ended, seen from outside."""
        await self.until(
            gateway,
            lambda engines: all(
                engine["running"] == engine["waiting"] == 0 and engine["free_blocks"] == engine["num_blocks"]
                for engine in engines
            ),
        )


@asynccontextmanager
async def engine_host(redis_url: str, folder: Path) -> AsyncIterator[EngineHost]:
    """What engines are started from. They find an engine dead after some seconds."""
    model, logs = folder / "model", folder / "logs"
    logs.mkdir()
    await asyncio.to_thread(make_model, model)
    (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    settings = {"redis_url": redis_url, "heartbeat_timeout_s": 2.5, "poll_ms": 50, "block_ms": 100}
    async with EngineHost(model, logs, settings) as host:
        yield host


@asynccontextmanager
async def deployed(redis_url: str, host: EngineHost) -> AsyncIterator[Deployment]:
    """A server's deployment, without gateways or engines at first; at its end none is left."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        deployment = Deployment(redis_url, host, session)
        try:
            yield deployment
        finally:
            await asyncio.gather(*(role.kill() for role in deployment.gateways))
            for engine in host.alive:
                engine.kill()
                await engine.ended.wait()


async def events_of(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The values of a stream's frames as they come; ends where the connection breaks."""
    with contextlib.suppress(aiohttp.ClientError):
        async for line in answer.content:
            if line.startswith(b"data: {"):
                yield orjson.loads(line.removeprefix(b"data: "))
