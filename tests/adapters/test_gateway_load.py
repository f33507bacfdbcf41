"""A slice of `make bench-gateway`: a crowd of which some stop reading, and a gateway process that is looked at."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from tests.adapters.deployment import Role
from tests.adapters.sse_crowd import Deaf, crowd, request
from tests.chaos.model import make_model

ROOT = Path(__file__).parents[2]
PLAIN = {"prompt": "a queue is", "ignore_eos": True, "stream": True, "flush_ms": 0, "max_tokens": 60}
MUCH = {**PLAIN, "n": 8, "logprobs": 20, "max_tokens": 200}


def test_who_reads_nothing_is_cut_and_nobody_else_notices(run: Any, redis_url: str, tmp_path: Path) -> None:
    """Two gateways: one is patient, so that whoever waited for those that read nothing would wait for ever; the other
    cuts them soon. How little the others notice, `make bench-gateway` tells."""

    async def scenario(stack: ExitStack) -> None:
        await asyncio.to_thread(make_model, tmp_path)
        command = (sys.executable, "-m", "tests.adapters.crowd_engine", redis_url, str(tmp_path), "40")
        engine = await asyncio.create_subprocess_exec(
            *command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT
        )
        patient, strict = await asyncio.gather(
            *(
                Role.start("gateway", redis_url, "--http-port", "0", "--http-write-timeout-s", seconds)
                for seconds in ("600", "1")
            )
        )
        try:
            assert engine.stdout is not None
            assert await asyncio.wait_for(engine.stdout.readline(), 60) == b"ready\n"
            process = psutil.Process(patient.process.pid)
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
                await crowd(patient.port, request("/v1/completions", {**PLAIN, "max_tokens": 3}), 36)
                before = process.memory_info().rss
                plain, much = (request("/v1/completions", body) for body in (PLAIN, MUCH))
                # Theirs stay open until they are cut: a client that goes by itself is not one.
                deaf = {
                    gateway: [stack.enter_context(closing(Deaf(gateway.port, much))) for _ in range(4)]
                    for gateway in (patient, strict)
                }
                await asyncio.gather(*(one.start() for ones in deaf.values() for one in ones))
                async with asyncio.timeout(60):
                    while await cut(session, strict.url) < 4:
                        await asyncio.sleep(0.1)
                # What they were sent has filled all buffers there; so it has at the other gateway.
                async with asyncio.timeout(100):
                    seen = await crowd(patient.port, plain, 36)
                assert seen.whole == 36, "whoever reads gets all"
                assert all(reader.frames > 20 for reader in seen.readers), "a token without text has no frame"
                async with session.get(f"{patient.url}/healthz") as answer:
                    assert answer.status == 200
                assert await cut(session, patient.url) == 0 and not any(one.was_cut() for one in deaf[patient])
                assert process.memory_info().rss - before < 60e6
                # The clients go.
                for one in deaf[patient]:
                    one.close()
                async with asyncio.timeout(60):
                    while (await figures(session, strict.url))["running"]:
                        await asyncio.sleep(0.1)
                left = await figures(session, strict.url)
                assert left["free_blocks"] == left["num_blocks"], "what was asked for by those is cancelled"
        finally:
            await patient.kill()
            await strict.kill()
            engine.terminate()
            await engine.wait()

    with ExitStack() as stack:
        run(scenario(stack))


async def cut(session: aiohttp.ClientSession, url: str) -> int:
    """How many clients the gateway has cut."""
    async with session.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return int(float(next(line.split()[1] for line in lines if line.startswith("pagemill_http_slow_readers_total"))))


async def figures(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """What the engine says of itself."""
    async with session.get(f"{url}/overview.json") as answer:
        engine: dict[str, Any] = (await answer.json())["queues"]["default"]["engines"][0]
        return engine
