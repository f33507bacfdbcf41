"""`pagemill demo`: the whole product at work, and what it did in a table.

An embedded Valkey in a temporary folder, an engine worker, a gateway, and a client that knows nothing of the engine but
its queue. First three completions side by side, then chats that share one system prompt and so share its blocks, then
one more such chat over HTTP, as a web application asks.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pagemill.adapters.cli.progress import progress_bar
from pagemill.adapters.cli.settings import Settings
from pagemill.adapters.http.config import GatewayConfig
from pagemill.engine.errors import ConfigError, EngineDeadError, RequestError
from pagemill.ingest.client import AsyncClient, RequestFailed, Result
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.embedded import EmbeddedServer

if TYPE_CHECKING:
    from pagemill.engine.async_engine import AsyncEngine

COMPLETIONS = (
    "The lighthouse keeper opened the door and saw",
    "Three things every good kitchen needs are",
    "A queue is useful in a computer program because",
)
SYSTEM_PROMPT = (
    "You are the assistant of a small town library. You know its rules by heart: books are lent for four weeks and "
    "may be renewed twice, unless somebody else has asked for them. Films and games are lent for one week. A lost "
    "card costs three coins, a late book one coin a week, and nobody under twelve ever pays a fine. The reading room "
    "is open from nine to six, on Thursdays until nine, and closed on Mondays. The cellar holds maps, newspapers and "
    "letters of the town since 1820; they may be read there with clean hands and a pencil, but never borrowed. There "
    "is a story hour for children every Saturday at ten, a chess table by the east window, and a cat named Index who "
    "must not be fed. Answer in one or two short, friendly sentences. If you do not know, say so and offer to ask "
    "the librarian."
)
QUESTIONS = (
    "How long may I keep a novel?",
    "Are you open on Thursday evening?",
    "Can I borrow an old map of the town?",
    "My son is nine and his book is late. What does it cost?",
    "I have lost my card. What now?",
    "When is the story hour?",
    "May I give the cat some cheese?",
    "How long may I keep a film?",
    "Can I play chess here?",
    "Is the library open on Monday?",
    "May I renew a book three times?",
    "Do you have newspapers from 1850?",
)
HTTP_QUESTION = "Where may I read the old newspapers?"
STATISTICS_EVERY_S = 0.02


@dataclass(slots=True, eq=False)
class Run:
    """One request as its client sees it. Times in seconds since the demo's requests began to be sent."""

    label: str
    prompt: str
    body: dict[str, Any]
    text: str = ""
    result: Result | None = None
    error: RequestError | None = None


@dataclass(slots=True)
class Peak:
    """The most blocks in use, and shared by several sequences, that were seen at one time."""

    used: int = 0
    shared: int = 0


@dataclass(slots=True)
class View:
    """Shows text as it comes: growing lines on a terminal, one line a delta otherwise."""

    console: Console
    live: Live | None = None
    runs: list[Run] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)

    @contextlib.asynccontextmanager
    async def showing(self, title: str, runs: list[Run]) -> AsyncIterator[None]:
        self.console.print(f"\n{title}", style="bold")
        if not self.console.is_terminal:
            yield
            return
        self.runs = runs
        with Live(self._render(), console=self.console, refresh_per_second=12, vertical_overflow="crop") as self.live:
            yield
            self.live.update(self._render())
        self.live = None

    def delta(self, run: Run, text: str) -> None:
        run.text += text
        if self.live is not None:
            self.live.update(self._render())
        elif not self.console.is_terminal and text:
            line = f"{time.monotonic() - self.begun:7.2f} s  [{run.label}] {text!r}"
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _render(self) -> Group:
        lines = []
        for run in self.runs:
            line = Text(f"[{run.label}] ", style="cyan")
            line.append(f"{run.prompt} ", style="dim")
            line.append(" ".join(run.text.split()), style="default")
            lines.append(line)
        return Group(*lines)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Returns 0 where every request completed, else 1."""
    if args.chats < 1:
        raise ConfigError(f"--chats must be at least 1, got {args.chats}")
    console = Console(width=None if Console().is_terminal else 110)
    started = time.monotonic()
    import pagemill.adapters.http.server  # noqa: F401  where it is not installed, say so before anything is started

    console.print("Starting an embedded Valkey, a gateway and an engine that serves its queue ...")
    with EmbeddedServer() as server:
        return asyncio.run(_demo(args.chats, settings, QueueConfig(redis_url=server.url), console, started))


async def _demo(chats: int, settings: Settings, queue: QueueConfig, console: Console, started: float) -> int:
    from pagemill.adapters.http.server import GatewayProcess
    from pagemill.engine.async_engine import AsyncEngine
    from pagemill.ingest.worker import Worker

    with progress_bar() as progress:
        engine = await AsyncEngine.create(settings.engine(), progress)
    info = engine.info
    size = info.num_blocks * info.bytes_per_block / 2**20
    console.print(
        f"{info.model_name} in {info.dtype} on {info.device}, ready after {time.monotonic() - started:.1f} s; KV pool "
        f"of {info.num_blocks} blocks of {info.block_size} tokens ({size:,.0f} MiB); queue at {queue.redis_url}",
        highlight=False,
    )
    gateway = GatewayProcess(GatewayConfig(http_port=0), queue)
    url = await gateway.start()
    console.print(f"OpenAI's API at {url}/v1, a dashboard at {url}/ while this runs", highlight=False)
    worker = Worker(engine, queue)
    serving = asyncio.create_task(worker.run())
    try:
        return await _clients(chats, engine, serving, queue, url, console)
    finally:
        await gateway.stop(0)
        worker.stop()
        await asyncio.gather(serving, return_exceptions=True)
        await engine.stop()


async def _clients(
    chats: int, engine: AsyncEngine, serving: asyncio.Task[None], queue: QueueConfig, url: str, console: Console
) -> int:
    completions = [
        Run(
            str(number), prompt, {"prompt": prompt, "max_tokens": 64, "temperature": 0.8, "top_p": 0.95, "seed": number}
        )
        for number, prompt in enumerate(COMPLETIONS, start=1)
    ]
    questions = [
        Run(f"chat {number + 1}", question, _chat_body(question))
        for number, question in enumerate((QUESTIONS * (chats // len(QUESTIONS) + 1))[:chats])
    ]
    over_http = Run("http", HTTP_QUESTION, _chat_body(HTTP_QUESTION))
    peak = Peak()
    watching = asyncio.create_task(_watch_pool(engine, peak))
    begun = time.monotonic()
    view = View(console)
    try:
        async with AsyncClient(queue) as client:
            for title, runs in (
                ("Three completions, pushed onto the queue together:", completions),
                (f"{chats} chats behind one shared system prompt, together:", questions),
            ):
                async with view.showing(title, runs):
                    await _until_done(asyncio.gather(*(_follow(client, item, view) for item in runs)), serving)
            async with view.showing("One more of them over HTTP, as server-sent events:", [over_http]):
                await _until_done(_ask_http(client, url, over_http, view), serving)
    finally:
        watching.cancel()
    wall = time.monotonic() - begun
    runs = [*completions, *questions, over_http]
    await _until_done(_idle(engine), serving)
    await engine.check()
    _report(console, runs, engine, peak, wall)
    return 0 if all(item.result is not None for item in runs) else 1


def _chat_body(question: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
    return {"messages": messages, "max_tokens": 40, "temperature": 0.6, "seed": 1, "flush_ms": 150}


async def _follow(client: AsyncClient, run: Run, view: View) -> None:
    try:
        handle = await client.submit(**run.body)
        async for delta in handle:
            view.delta(run, delta.text)
        run.result = await handle.result()
    except RequestFailed as error:
        run.error = error


async def _ask_http(client: AsyncClient, url: str, run: Run, view: View) -> None:
    """Ask the gateway as OpenAI's clients do, and the queue for the request's figures afterwards."""
    import aiohttp

    request_id = ""
    body = {**run.body, "stream": True}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/chat/completions", json=body) as answer:
        async for line in answer.content:
            data = line.removeprefix(b"data: ").strip()
            if data == line.strip() or data == b"[DONE]":
                continue
            chunk = orjson.loads(data)
            if "error" in chunk:
                break
            request_id = chunk["id"].removeprefix("chatcmpl-")
            for choice in chunk["choices"]:
                view.delta(run, choice["delta"].get("content") or "")
    if not request_id:
        run.error = RequestError("engine_error", f"the gateway answered with status {answer.status}")
        return
    try:
        run.result = await client.attach(request_id).result()
    except RequestFailed as error:
        run.error = error


async def _until_done(work: Any, serving: asyncio.Task[None]) -> None:
    """Wait for `work`, but not after the engine has died: its requests would wait for another."""
    task = asyncio.ensure_future(work)
    await asyncio.wait([task, serving], return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        task.cancel()
        await serving
        raise EngineDeadError("the engine stopped while requests were waiting for it")
    await task


async def _watch_pool(engine: AsyncEngine, peak: Peak) -> None:
    while True:
        pool = engine.statistics().cache.pool
        peak.used, peak.shared = max(peak.used, pool.used), max(peak.shared, pool.shared)
        await asyncio.sleep(STATISTICS_EVERY_S)


async def _idle(engine: AsyncEngine) -> None:
    """The last event may be out before the engine has put its books in order."""
    while engine.num_live:
        await asyncio.sleep(STATISTICS_EVERY_S)


def _report(console: Console, runs: list[Run], engine: AsyncEngine, peak: Peak, wall: float) -> None:
    console.print("\nRequests", style="bold")
    table = Table()
    table.add_column("request")
    columns = ("prompt tokens", "of them cached", "output tokens", "first token ms", "tokens/s", "preemptions", "end")
    for name in columns:
        table.add_column(name, justify="right")
    for run in runs:
        if run.result is None:
            table.add_row(run.label, *[""] * 6, f"failed: {run.error}")
            continue
        usage, metrics = run.result.usage, run.result.metrics
        seconds = metrics["total_ms"] / 1000
        table.add_row(
            run.label,
            str(usage["prompt_tokens"]),
            str(usage["cached_tokens"]),
            str(usage["completion_tokens"]),
            f"{metrics['ttft_ms']:.0f}" if metrics["ttft_ms"] is not None else "-",
            f"{usage['completion_tokens'] / seconds:.1f}" if seconds else "-",
            str(metrics["preemptions"]),
            str(run.result.finish_reason),
        )
    console.print(table)
    done = [run.result for run in runs if run.result is not None]
    firsts = sorted(result.metrics["ttft_ms"] for result in done if result.metrics["ttft_ms"] is not None)
    tokens = sum(result.usage["completion_tokens"] for result in done)
    statistics = engine.statistics()
    cache, total = statistics.cache, engine.info.num_blocks
    console.print("\nTogether", style="bold")
    summary = Table(show_header=False)
    rows = (
        ("requests completed", f"{len(done)} of {len(runs)}"),
        ("time to first token, median", f"{firsts[len(firsts) // 2]:.0f} ms" if firsts else "-"),
        ("output tokens/s", f"{tokens / wall:.1f}  ({tokens} tokens in {wall:.1f} s)"),
        ("KV waste", f"{cache.waste_percent:.1f} %  (allocated slots without a token, mean over steps)"),
        ("blocks used, peak", f"{peak.used} of {total}"),
        ("blocks shared, peak", str(peak.shared)),
        ("prefix-hit tokens", f"{cache.hit_tokens} of {cache.queried_tokens} prompt tokens"),
        ("preemptions", str(statistics.preemptions)),
        ("blocks in use now", f"{cache.pool.used}  (checked: every block is accounted for)"),
    )
    for name, value in rows:
        summary.add_row(name, value)
    console.print(summary)
