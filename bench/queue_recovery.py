"""How soon somebody is answered when something is wrong: `python -m bench.queue_recovery [--only NAME] [--rounds N]`

* `forgotten`: from FLUSHALL under two engines to the whole answer of a request that comes after it, over the answer of
  one that comes before. Wanted: within a second.
* `away`: how long requests wait that an engine which is killed, frozen or told to end could serve best, and its
  heartbeat is fresh, over the same while it is there. Wanted: within half a second.
* `refused`: from a bad request to its answer, for each kind of bad input the best of some tries. Wanted: within 100 ms.
* `full`: behind an engine that has no room, how long a bad request waits for its answer, and how late one is told that
  its deadline has passed. Wanted: within a second.

Tests hold that nobody waits for a lease, a long read or a step; these are the times. The model of the first two is tiny
and random. The server is the embedded Valkey.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import structlog
from tests.chaos.engines import EngineHost, EngineProcess
from tests.chaos.model import make_model
from tests.chaos.reading import plain_client
from tests.contract.conftest import ENGINE, Outside, serving
from tests.contract.test_admission import clear, fill
from tests.contract.test_bad_input import REFUSED, refusal

from pagemill.engine.async_engine import AsyncEngine
from pagemill.ingest.client import AsyncClient
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.embedded import EmbeddedServer

Row = dict[str, Any]
TAG = "pm:{default.0}"
PREFIX = [3 + place % 90 for place in range(128)]


async def _two_engines(host: EngineHost, redis: Any, url: str) -> list[EngineProcess]:
    engines = [await host.start(redis_url=url) for _ in range(2)]
    async with asyncio.timeout(60):
        while await redis.zcard(f"{TAG}:hb") < 2:
            await asyncio.sleep(0.01)
    return engines


async def _end(engines: list[EngineProcess]) -> None:
    for engine in engines:
        engine.thaw()
        engine.kill()
        await engine.ended.wait()


async def _answer_s(client: AsyncClient) -> float:
    began = time.perf_counter()
    handle = await client.submit(prompt_token_ids=[5, 9, 7], max_tokens=2, temperature=0)
    await handle.result(timeout=60)
    return time.perf_counter() - began


async def forgotten(rounds: int, server: EmbeddedServer, folder: Path) -> list[Row]:
    before, after = [], []
    async with EngineHost(make_model(folder / "tiny"), folder, {"redis_url": server.url}) as host:
        async with AsyncClient(server.url) as client, plain_client(server.url) as redis:
            engines = await _two_engines(host, redis, server.url)
            await _answer_s(client)
            for _ in range(rounds):
                before.append(await _answer_s(client))
                began = time.perf_counter()
                await redis.flushall()
                await _answer_s(client)
                after.append(time.perf_counter() - began)
        await _end(engines)
    usual, most = statistics.median(before), max(after)
    return [{"before_s": usual, "after_median_s": statistics.median(after), "after_max_s": most, "ratio": most / usual}]


async def _waits(client: AsyncClient, first: int, passed: set[str]) -> list[float]:
    """What 16 requests behind the beginning wait for an engine, ms; the `passed` owners' requests are left out."""
    body = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
    handles = [await client.submit(prompt_token_ids=[*PREFIX, 100 + first + n], **body) for n in range(16)]
    waits = []
    for handle in handles:
        try:
            waits.append((await handle.result(timeout=10)).metrics["queue_ms"])
        except TimeoutError:
            passed.add(handle.id)  # a frozen engine was brought it by the read that it was waiting in
    return waits


async def away(rounds: int, server: EmbeddedServer, folder: Path) -> list[Row]:
    rows = []
    async with EngineHost(make_model(folder / "tiny"), folder, {"redis_url": server.url}) as host:
        for how in ("killed", "frozen", "leaves"):
            there, gone, stuck = [], [], set[str]()
            for _ in range(rounds):
                async with AsyncClient(server.url) as client, plain_client(server.url) as redis:
                    await redis.flushall()
                    engines = await _two_engines(host, redis, server.url)
                    first = await client.submit(prompt_token_ids=[*PREFIX, 99], max_tokens=2, temperature=0)
                    await first.result(timeout=60)
                    owner = (await redis.hget(f"{TAG}:req:{first.id}", "owner")).decode()
                    (has,) = [engine for engine in engines if f"-{engine.pid}-" in owner]
                    there += await _waits(client, 0, stuck)
                    {"killed": has.kill, "frozen": has.freeze, "leaves": has.terminate}[how]()
                    gone += await _waits(client, 20, stuck)
                    await _end(engines)
            usual, median = statistics.median(there), statistics.median(gone)
            row = {"how": how, "there_p50_ms": usual, "away_p50_ms": median, "away_max_ms": max(gone)}
            rows.append({**row, "stuck": len(stuck), "ratio": median / usual})
    return rows


async def refused(rounds: int, server: EmbeddedServer, folder: Path) -> list[Row]:
    engine = await AsyncEngine.create(ENGINE)
    outside = Outside(server.url)
    best: dict[str, float] = {}
    async with serving(engine, QueueConfig(redis_url=server.url)):
        for name, (body, _, _) in REFUSED.items():
            taken = []
            for number in range(rounds):
                began = time.perf_counter()
                await refusal(outside, f"{name}.{number}", body)
                taken.append(time.perf_counter() - began)
            best[name] = min(taken) * 1000
    await outside.aclose()
    await engine.stop()
    slowest = max(best, key=best.__getitem__)
    usual = statistics.median(best.values())
    return [{"p50_ms": usual, "max_ms": best[slowest], "slowest": slowest, "ratio": best[slowest] / usual}]


async def full(rounds: int, server: EmbeddedServer, folder: Path) -> list[Row]:
    engine = await AsyncEngine.create(ENGINE)
    outside = Outside(server.url)
    wrong, late = [], []
    async with serving(engine, QueueConfig(redis_url=server.url)):
        for number in range(rounds):
            await fill(engine, outside)
            await outside.add(f"wrong{number}", {"prompt": "x", "max_tokens": 0})
            await outside.add(f"late{number}", {"prompt": "x", "ttl_ms": 200})
            wrong.append((await outside.done(f"wrong{number}"))["metrics"]["queue_ms"])
            late.append((await outside.done(f"late{number}"))["metrics"]["queue_ms"] - 200)
            await clear(outside)
            await outside.redis.flushall()
    await outside.aclose()
    await engine.stop()
    return [{"refused_max_ms": max(wrong), "expired_late_max_ms": max(late)}]


BENCHES = {"forgotten": forgotten, "away": away, "refused": refused, "full": full}


async def run(only: list[str], rounds: int) -> None:
    for name in only or BENCHES:
        with EmbeddedServer() as server, tempfile.TemporaryDirectory() as folder:
            for row in await BENCHES[name](rounds, server, Path(folder)):
                rounded = {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}
                print(json.dumps({"bench": name, **rounded}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="how soon somebody is answered when something is wrong")
    parser.add_argument("--only", action="append", choices=tuple(BENCHES), default=[])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("error"))
    asyncio.run(run(args.only, args.rounds))


if __name__ == "__main__":
    main()
