"""What the queue costs: `python -m bench.queue_overhead [--only NAME] [--requests N] [--model NAME] [--json]`

* `throughput`: tokens/s of the chat workload through the queue (server and client in processes of their own), over
  tokens/s of the same engine called directly. Three ways: `queue`, deltas are published and the client waits for the
  results, as most do; `deltas`, the client reads each of them; `unstreamed`, the requests say `stream: false`. Taken in
  turns, each round begun by another one, the medians compared. What each process spends of a core for a token is told
  as well, since other work on the machine disturbs it less.
* `latency`: from `submit` to the step that computes the request's first token, on an idle engine, through the queue and
  directly; what the queue adds, ms.
* `flush`: one flush of 32 running sequences, a delta each, over one bare pipeline of 32 XADD and 32 PUBLISH with the
  same bytes.
* `engines`: tokens/s of two engine processes over one. Each step takes 40 ms more, as if the model ran on a device of
  its own, so that the cores of this machine are not what is measured.

The model of `latency` and `engines` is tiny and random. The server is the embedded Valkey.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import bench.as_served  # noqa: F401
import structlog
from bench.workloads import workloads
from tests.chaos.engines import EngineHost
from tests.chaos.model import engine_config, make_model

from pagemill.adapters.cli.garbage import keep_what_is_there
from pagemill.engine.async_engine import AsyncEngine
from pagemill.engine.config import EngineConfig
from pagemill.engine.outputs import SequenceOutput
from pagemill.engine.prompt import TokenIds
from pagemill.ingest import scripts
from pagemill.ingest.client import AsyncClient, AsyncHandle
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.embedded import EmbeddedServer
from pagemill.ingest.entries import Entry
from pagemill.ingest.events import event
from pagemill.ingest.keys import GROUP, QueueKeys
from pagemill.ingest.redis import connect_commands
from pagemill.ingest.schema import RequestBody
from pagemill.ingest.worker import Worker

Row = dict[str, Any]
Bodies = list[dict[str, Any]]


@asynccontextmanager
async def _served(engine: AsyncEngine, url: str) -> AsyncIterator[None]:
    worker = Worker(engine, QueueConfig(redis_url=url))
    task = asyncio.create_task(worker.run())
    await worker.ready.wait()
    try:
        yield
    finally:
        worker.stop()
        await task


async def _directly(engine: AsyncEngine, number: int, body: dict[str, Any]) -> int:
    """Run one request on the engine itself; returns its tokens."""
    read = RequestBody.from_mapping(body)
    assert read.prompt_token_ids is not None
    name = f"direct-{number}-{time.monotonic_ns()}"
    request = await engine.prepare(name, TokenIds(read.prompt_token_ids), read.params)
    ended = asyncio.Event()
    tokens = 0

    def sink(output: SequenceOutput) -> None:
        nonlocal tokens
        tokens += len(output.token_ids)
        if output.final:
            ended.set()

    engine.submit(request, sink)
    await ended.wait()
    return tokens


async def send(url: str, bodies: Bodies, *, deltas: bool = False) -> tuple[float, float]:
    """Send all, read all, as a client does; returns tokens/s and seconds of the processor."""

    async def read(handle: AsyncHandle) -> int:
        if deltas:
            return sum([len(delta.token_ids) async for delta in handle])
        return len((await handle.result()).token_ids)

    async with AsyncClient(url) as client:
        started, cpu_started = time.perf_counter(), time.process_time()
        handles = await asyncio.gather(*(client.submit(**body) for body in bodies))
        tokens = sum(await asyncio.gather(*map(read, handles)))
        return tokens / (time.perf_counter() - started), time.process_time() - cpu_started


async def _server_cpu(client: Any) -> float:
    """Seconds of the processor that the server has used."""
    info = await client.info("cpu")
    return float(info["used_cpu_user"] + info["used_cpu_sys"])


async def throughput(args: argparse.Namespace, server: EmbeddedServer, folder: Path) -> Row:
    chat = workloads()["chat"][: args.requests]
    bodies: Bodies = [
        {"prompt_token_ids": prompt, "max_tokens": count, "ignore_eos": True, "temperature": 0.8, "seed": number}
        for number, (prompt, count) in enumerate(chat)
    ]
    tokens = sum(count for _, count in chat)
    engine = await AsyncEngine.create(
        EngineConfig(model=args.model, threads=args.threads, enable_prefix_caching=False, max_num_seqs=96)
    )
    keep_what_is_there()
    await _directly(engine, 0, bodies[0] | {"max_tokens": 8})
    redis = connect_commands(server.url, "bench")
    rates: defaultdict[str, list[float]] = defaultdict(list)
    spent: defaultdict[str, list[float]] = defaultdict(list)  # of a core, microseconds a token

    async def directly() -> None:
        started, cpu_started = time.perf_counter(), time.process_time()
        assert sum(await asyncio.gather(*(_directly(engine, n, body) for n, body in enumerate(bodies)))) == tokens
        rates["direct"].append(tokens / (time.perf_counter() - started))
        spent["direct"].append((time.process_time() - cpu_started) / tokens * 1e6)

    async def through_the_queue(way: str) -> None:
        extra = {"stream": False} if way == "unstreamed" else {}
        path = folder / f"{way}.json"
        path.write_text(json.dumps([body | extra for body in bodies]))
        command = (sys.executable, "-m", "bench.queue_overhead", "--send", server.url, str(path))
        command += ("--deltas",) if way == "deltas" else ()
        async with _served(engine, server.url):
            cpu_started, server_started = time.process_time(), await _server_cpu(redis)
            client = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            output, _ = await client.communicate()
            rate, client_s = map(float, output.split())
            rates[way].append(rate)
            spent[f"{way}_engine"].append((time.process_time() - cpu_started) / tokens * 1e6)
            spent[f"{way}_server"].append((await _server_cpu(redis) - server_started) / tokens * 1e6)
            spent[f"{way}_client"].append(client_s / tokens * 1e6)

    ways = ("queue", "deltas", "unstreamed")
    runs = [directly, *(partial(through_the_queue, way) for way in ways)]
    for number in range(args.rounds):
        begin = number % len(runs)  # who goes first in a round may find memory that is not there yet
        for one in (*runs[begin:], *runs[:begin]):
            await one()
    await redis.aclose()
    await engine.stop()
    medians = {name: statistics.median(found) for name, found in rates.items()}
    row = {f"{name}_tok_s": rate for name, rate in medians.items()}
    row |= {"ratio" if way == "queue" else f"{way}_ratio": medians[way] / medians["direct"] for way in ways}
    return row | {f"{name}_us": statistics.median(found) for name, found in spent.items()}


class _Clocked:
    """A runner that notes when it first computes each request."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.last = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def execute(self, output: Any) -> Any:
        if any(item.start == 0 for item in output.scheduled):
            self.last = time.perf_counter()
        return self._runner.execute(output)


async def latency(args: argparse.Namespace, server: EmbeddedServer, folder: Path) -> Row:
    engine = await AsyncEngine.create(engine_config(make_model(folder / "tiny")).replace(enable_prefix_caching=False))
    core: Any = engine._parts.core
    core._runner = clock = _Clocked(core._runner)
    body = {"prompt_token_ids": [5, 9, 7], "max_tokens": 2, "temperature": 0}
    taken: dict[str, list[float]] = {"direct": [], "queue": []}
    async with _served(engine, server.url), AsyncClient(server.url) as client:
        for number in range(args.repeat):
            started = time.perf_counter()
            await _directly(engine, number, body)
            taken["direct"].append(clock.last - started)
            started = time.perf_counter()
            handle = await client.submit(**body)
            await handle.result()
            taken["queue"].append(clock.last - started)
    await engine.stop()
    direct, queue = (statistics.median(taken[name][5:]) * 1000 for name in ("direct", "queue"))
    tail = statistics.quantiles(taken["queue"][5:], n=20)[18] * 1000
    return {"direct_p50_ms": direct, "queue_p50_ms": queue, "queue_p95_ms": tail, "added_p50_ms": queue - direct}


async def flush(args: argparse.Namespace, server: EmbeddedServer, folder: Path) -> Row:
    client = connect_commands(server.url, "bench")
    shard = QueueKeys("pm", "bench").shards[0]
    body = json.dumps({"prompt": "bench", "max_tokens": 1000})
    names = [f"flush-{number}" for number in range(32)]
    for stream in shard.streams:
        await client.xgroup_create(stream, GROUP, id="0", mkstream=True)
    for name in names:
        words = {"v": "1", "id": name, "body": body}
        entry_id: Any = await client.xadd(shard.streams[1], words)  # type: ignore[arg-type]
        await client.xreadgroup(GROUP, "bench", {shard.streams[1]: ">"}, count=1)
        call = scripts.begin(Entry(shard, 1, entry_id, {}), "bench", name, ttl_ms=600_000, tenant="default", seed=1)
        begun = scripts.BeginReply.read(await scripts.run_one(client, call))
        assert not isinstance(begun, str), begun
    fields: Row = {"index": 0, "count": 1, "token_ids": [504], "text": " the", "logprobs": None, "chain": "63548b63"}
    taken: dict[str, list[float]] = {"bare": [], "scripts": []}
    for seq in range(1, args.repeat + 1):
        data = event(seq, 1, "delta", **fields, offset=seq - 1, text_offset=4 * (seq - 1))
        calls = [scripts.append(shard, name, "bench", 1, seq - 1, [data]) for name in names]
        taken["scripts"].append(await _timed(lambda calls=calls: scripts.run(client, calls)))

        async def bare(seq: int = seq, data: bytes = data) -> None:
            pipeline = client.pipeline(transaction=False)
            for name in names:
                pipeline.execute_command("XADD", shard.events(f"bare-{name}"), f"{seq}-0", "e", data)
                pipeline.execute_command("PUBLISH", shard.channel(f"bare-{name}"), b"%d %s" % (seq, data))
            await client.run_pipeline(pipeline)

        taken["bare"].append(await _timed(bare))
    await client.flushall()
    await client.aclose()
    scripted, plain = (statistics.median(taken[name][5:]) * 1000 for name in ("scripts", "bare"))
    return {"scripts_ms": scripted, "bare_ms": plain, "ratio": scripted / plain}


async def _timed(work: Callable[[], Awaitable[Any]]) -> float:
    started = time.perf_counter()
    await work()
    return time.perf_counter() - started


async def engines(args: argparse.Namespace, server: EmbeddedServer, folder: Path) -> Row:
    settings = {"redis_url": server.url, "device_ms": 40}
    body: dict[str, Any] = {"prompt_token_ids": [5, 9, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    # Short ones: while the last run there is nothing to fill the free seats with.
    bodies: Bodies = [body for _ in range(1024)]
    rates = []
    async with EngineHost(make_model(folder / "tiny"), folder, settings) as host:
        for count in (1, 2):
            running = [await host.start() for _ in range(count)]
            await send(server.url, bodies[:32])
            rates.append(statistics.median([(await send(server.url, bodies))[0] for _ in range(args.rounds)]))
            for engine in running:
                engine.terminate()
                await engine.ended.wait()
    return {"one_tok_s": rates[0], "two_tok_s": rates[1], "ratio": rates[1] / rates[0]}


BENCHES = {"throughput": throughput, "latency": latency, "flush": flush, "engines": engines}


async def run(args: argparse.Namespace) -> None:
    for name in args.only or BENCHES:
        with EmbeddedServer() as server, tempfile.TemporaryDirectory() as folder:
            row = await BENCHES[name](args, server, Path(folder))
        if args.json:
            print(json.dumps({"bench": name, **row}))
        else:
            print(f"{name:12}", *(f"{key} {value:.3g}" for key, value in row.items()), sep="  ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=tuple(BENCHES))
    parser.add_argument("--requests", type=int, default=32, help="of the chat workload (%(default)s of 96)")
    parser.add_argument("--model", default="smollm2-135m", help="of `throughput`")
    parser.add_argument("--threads", type=int, default=1, help="of its engine; server and client want a core, too")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=300, help="of `latency` and `flush`")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--send", nargs=2, metavar=("URL", "FILE"), help=argparse.SUPPRESS)
    parser.add_argument("--deltas", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("warning"))
    if args.send is not None:
        url, path = args.send
        print(*asyncio.run(send(url, json.loads(Path(path).read_text()), deltas=args.deltas)))
        return
    asyncio.run(run(args))


if __name__ == "__main__":
    main()
