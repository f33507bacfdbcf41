"""A gateway on a port of its own for a test, on the event loop of the session's engine, and ways to speak to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp
import orjson
from openai import AsyncOpenAI

from pagemill.adapters.http.config import GatewayConfig
from pagemill.adapters.http.server import GatewayProcess
from pagemill.ingest.config import QueueConfig

HI = [{"role": "user", "content": "Say hello."}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6}
ENDLESS: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 300, "ignore_eos": True, "flush_ms": 0}


class Spoken:
    """An answer: status, headers, and the body as text or JSON."""

    def __init__(self, status: int, headers: Any, data: bytes) -> None:
        self.status, self.headers, self.data = status, headers, data

    @property
    def text(self) -> str:
        return self.data.decode()

    @property
    def json(self) -> Any:
        return orjson.loads(self.data)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, which has exactly OpenAI's four names."""
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"], error
        assert self.headers["Content-Type"].startswith("application/json")
        assert "Traceback" not in self.text
        return error

    @property
    def frames(self) -> list[Any]:
        """The values of a stream's events; what is no event or comment is a failure."""
        found: list[Any] = []
        for block in self.text.split("\n\n"):
            lines = [line for line in block.split("\n") if line and not line.startswith(":")]
            if lines:
                assert len(lines) == 1 and lines[0].startswith("data: "), block
                data = lines[0].removeprefix("data: ")
                found.append(data if data == "[DONE]" else orjson.loads(data))
        return found


class Web:
    """A running gateway and a plain HTTP client."""

    def __init__(self, process: GatewayProcess, session: aiohttp.ClientSession) -> None:
        self.process, self.session, self.url = process, session, process.url
        self.port = int(process.url.rpartition(":")[2])

    async def get(self, path: str, **options: Any) -> Spoken:
        return await self.ask("GET", path, **options)

    async def post(self, path: str, body: Any = None, **options: Any) -> Spoken:
        if body is not None:
            options["json"] = body
        return await self.ask("POST", path, **options)

    async def ask(self, method: str, path: str, **options: Any) -> Spoken:
        async with self.session.request(method, self.url + path, **options) as answer:
            return Spoken(answer.status, answer.headers, await answer.read())

    def openai(self, **options: Any) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, **options})

    @asynccontextmanager
    async def socket(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield reader, writer
        finally:
            writer.close()

    async def raw(self, data: bytes, timeout: float = 60) -> bytes:
        """Send bytes as they are; what comes back until the server closes."""
        async with self.socket() as (reader, writer), asyncio.timeout(timeout):
            writer.write(data)
            return await reader.read()


@asynccontextmanager
async def gateway(queue: QueueConfig, **settings: Any) -> AsyncIterator[Web]:
    process = GatewayProcess(GatewayConfig(**{"http_port": 0, "http_drain_timeout_s": 0.0, **settings}), queue)
    await process.start()
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
            yield Web(process, session)
    finally:
        await process.stop()


@contextmanager
def raises_nothing_later() -> Iterator[list[dict[str, Any]]]:
    """Whatever the event loop complains about while the block runs is a failure."""
    loop, complaints = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    try:
        yield complaints
    finally:
        loop.set_exception_handler(None)
    assert not complaints, complaints
