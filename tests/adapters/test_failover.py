"""Two gateways and two engines as processes: whichever dies, the client's next attempt goes on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import orjson
import pytest

from pagemill.ingest.embedded import EmbeddedServer
from pagemill.ingest.redis import connect_commands
from tests.adapters.deployment import Deployment, Role, deployed, engine_host, events_of
from tests.chaos.engines import EngineHost

TAG = "pm:{default.0}"
BODY: dict[str, Any] = {"prompt": "a queue is", "max_tokens": 48, "temperature": 0, "ignore_eos": True, "flush_ms": 0}
STEP_MS = 100  # whoever is to die in the middle of a request has seconds for it


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def run(loop: asyncio.Runner) -> Any:
    return loop.run


@pytest.fixture(scope="module")
def host(
    loop: asyncio.Runner, valkey: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineHost]:
    made = engine_host(valkey.url, tmp_path_factory.mktemp("engines"))
    yield loop.run(made.__aenter__())
    loop.run(made.__aexit__(None, None, None))


@asynccontextmanager
async def two_and_two(
    redis_url: str, host: EngineHost, step_ms: int = STEP_MS
) -> AsyncIterator[tuple[Deployment, Role, Role]]:
    async with deployed(redis_url, host) as deployment:
        first, second, *_ = await asyncio.gather(
            deployment.gateway("--heartbeat-timeout-s", "2.5"),
            deployment.gateway("--heartbeat-timeout-s", "2.5"),
            *(deployment.host.start(device_ms=step_ms) for _ in range(2)),
        )
        await deployment.until(first, lambda engines: len(engines) == 2)
        yield deployment, first, second


async def whole_text(deployment: Deployment, gateway: Role) -> str:
    """The undisturbed answer to BODY."""
    async with deployment.session.post(f"{gateway.url}/v1/completions", json=BODY) as answer:
        text: str = (await answer.json())["choices"][0]["text"]
        return text


def joined(events: list[dict[str, Any]]) -> str:
    return "".join(event["text"] for event in events if event["type"] == "delta")


def test_streams_go_on_at_the_other_gateway_and_the_other_engine(run: Any, redis_url: str, host: EngineHost) -> None:
    async def scenario() -> None:
        async with two_and_two(redis_url, host) as (deployment, first, second):
            session = deployment.session
            text = await whole_text(deployment, first)

            # A stream of native events, its engine killed in the middle: its reader notices nothing.
            async with session.post(f"{first.url}/v1/requests", json=BODY) as answer:
                place = answer.headers["Location"]
            seen: list[dict[str, Any]] = []
            async with session.get(f"{first.url}{place}/events") as answer:
                async for event in events_of(answer):
                    seen.append(event)
                    if len(seen) == 10:
                        owner = await owner_of(redis_url, place.rpartition("/")[2])
                        engine = next(item for item in deployment.host.alive if f"-{item.pid}-" in owner)
                        engine.kill()
            assert (seen[-1]["type"], seen[-1]["state"], joined(seen)) == ("done", "completed", text)
            assert seen[-1]["metrics"]["attempts"] == 2
            assert [event["seq"] for event in seen] == list(range(1, len(seen) + 1))
            await deployment.host.start(device_ms=STEP_MS)
            await deployment.until(second, lambda engines: len(engines) == 2)

            # The gateway that is read from is killed, twice: events go on behind the last one, at the other.
            async with session.post(f"{first.url}/v1/requests", json=BODY) as answer:
                place = answer.headers["Location"]
            async with session.post(
                f"{first.url}/v1/responses",
                json={"input": "a stream is", "max_output_tokens": 48, "background": True, "temperature": 0},
            ) as answer:
                response = (await answer.json())["id"]
            native, responses = await asyncio.gather(
                some(session, f"{first.url}{place}/events"),
                some(session, f"{first.url}/v1/responses/{response}?stream=true"),
            )
            await first.kill()
            headers = {"Last-Event-ID": str(native[-1]["seq"])}
            async with session.get(f"{second.url}{place}/events", headers=headers) as answer:
                native += [event async for event in events_of(answer)]
            assert joined(native) == text and native[-1]["state"] == "completed"
            assert [event["seq"] for event in native] == list(range(1, len(native) + 1))
            after = responses[-1]["sequence_number"]
            url = f"{second.url}/v1/responses/{response}?stream=true&starting_after={after}"
            async with session.get(url) as answer:
                responses += [event async for event in events_of(answer)]
            assert [event["sequence_number"] for event in responses] == list(range(len(responses)))
            final = responses[-1]
            assert final["type"] in ("response.completed", "response.incomplete"), final["type"]
            deltas = [event["delta"] for event in responses if event["type"] == "response.output_text.delta"]
            assert "".join(deltas) == final["response"]["output"][0]["content"][0]["text"]
            await deployment.until_idle(second)

    run(scenario())


def test_a_retry_with_an_idempotency_key_finds_its_answer(run: Any, redis_url: str, host: EngineHost) -> None:
    """OpenAI's client behind a balancer that leads to the gateway that lives; the one with its request is killed."""

    async def scenario() -> None:
        async with two_and_two(redis_url, host) as (deployment, first, second):
            text = await whole_text(deployment, second)
            before = await counted(redis_url, "submitted")
            async with balancer(first, second) as (port, taken):
                client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=4)
                extra = {name: BODY[name] for name in ("ignore_eos", "flush_ms")}
                plain = {name: BODY[name] for name in ("prompt", "max_tokens", "temperature")}
                asking = asyncio.create_task(
                    client.completions.create(
                        model="tiny", **plain, extra_body=extra, extra_headers={"Idempotency-Key": "order-7"}
                    )
                )
                await taken.wait()
                await deployment.until(second, lambda engines: sum(engine["running"] for engine in engines) == 1)
                await first.kill()
                answer = await asyncio.wait_for(asking, 60)
                assert answer.choices[0].text == text
                # Asked for as a stream, the same words would be another body; the same body is there again at once.
                again = await client.completions.with_raw_response.create(
                    model="tiny", **plain, extra_body=extra, extra_headers={"Idempotency-Key": "order-7"}
                )
                assert again.headers["Idempotent-Replayed"] == "true" and again.parse().choices[0].text == text
                await client.close()
            assert await counted(redis_url, "submitted") == before + 1

    run(scenario())


def test_whose_client_or_gateway_is_gone_is_stopped(run: Any, redis_url: str, host: EngineHost) -> None:
    async def scenario() -> None:
        async with two_and_two(redis_url, host, step_ms=150) as (deployment, first, second):
            body = {**BODY, "max_tokens": 200, "stream": True}
            # The client leaves, and half a minute before its end the request has ended.
            async with deployment.session.post(f"{first.url}/v1/completions", json=body) as answer:
                chunks = [event async for event in limited(events_of(answer), 5)]
                answer.close()
            name = chunks[0]["id"].removeprefix("cmpl-")
            fields = await until_ended(redis_url, name)
            assert fields["state"] == "cancelled"
            assert await tokens_of(redis_url, name) < 150
            await deployment.until_idle(second)
            # The gateway is killed: nobody cancels, and the watch lease runs out.
            body["watch_ms"] = 1000
            async with deployment.session.post(f"{first.url}/v1/completions", json=body) as answer:
                chunks = [event async for event in limited(events_of(answer), 5)]
                await first.kill()
            name = chunks[0]["id"].removeprefix("cmpl-")
            fields = await until_ended(redis_url, name)
            assert fields["state"] == "cancelled"
            assert await tokens_of(redis_url, name) < 150, "stopped by its lease, not at its end"
            await deployment.until_idle(second)

    run(scenario())


def test_readiness_follows_the_steps(run: Any, redis_url: str, host: EngineHost) -> None:
    """A frozen engine keeps its connections and its process; what stops is its steps."""

    async def scenario() -> None:
        async with deployed(redis_url, host) as deployment:
            gateway = await deployment.gateway("--heartbeat-timeout-s", "2.5")

            async def until_ready(status: int) -> dict[str, Any]:
                async with asyncio.timeout(60):
                    while True:
                        async with deployment.session.get(f"{gateway.url}/readyz") as answer:
                            if answer.status == status:
                                found: dict[str, Any] = await answer.json()
                                return found
                        await asyncio.sleep(0.05)

            assert (await until_ready(503))["status"] == "no engine"
            engine = await deployment.host.start()
            await until_ready(200)
            engine.freeze()
            assert await until_ready(503) == {"status": "no engine", "queues": ["default"]}
            async with deployment.session.get(f"{gateway.url}/healthz") as answer:
                assert answer.status == 200, "the gateway itself is well"
            engine.thaw()
            await until_ready(200)

    run(scenario())


async def some(session: aiohttp.ClientSession, url: str) -> list[dict[str, Any]]:
    """The first few events of a stream."""
    async with session.get(url) as answer:
        assert answer.status == 200, await answer.text()
        return [event async for event in limited(events_of(answer), 8)]


async def limited(events: AsyncIterator[dict[str, Any]], count: int) -> AsyncIterator[dict[str, Any]]:
    async for event in events:
        yield event
        count -= 1
        if not count:
            return


@asynccontextmanager
async def balancer(*gateways: Role) -> AsyncIterator[tuple[int, asyncio.Event]]:
    """A port that leads to the first of the gateways that lives, and an event that is set at its first connection."""
    taken = asyncio.Event()
    passing: set[asyncio.Task[Any]] = set()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        passing.add(task)
        taken.set()
        living = next(gateway for gateway in gateways if gateway.process.returncode is None)
        back, forth = await asyncio.open_connection("127.0.0.1", living.port)
        await asyncio.gather(copy(reader, forth), copy(back, writer))
        passing.discard(task)

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], taken
    finally:
        server.close()
        for task in passing:
            task.cancel()
        await asyncio.gather(*passing, return_exceptions=True)


async def asked(redis_url: str, *command: Any) -> Any:
    client = connect_commands(redis_url, "test")
    try:
        return await client.execute_command(*command)
    finally:
        await client.aclose()


async def owner_of(redis_url: str, request_id: str) -> str:
    owner: bytes = await asked(redis_url, "HGET", f"{TAG}:req:{request_id}", "owner")
    return owner.decode()


async def counted(redis_url: str, name: str) -> int:
    return int(await asked(redis_url, "HGET", f"{TAG}:stat", name) or 0)


async def tokens_of(redis_url: str, request_id: str) -> int:
    """How many tokens of a request were published."""
    found = await asked(redis_url, "XRANGE", f"{TAG}:ev:{request_id}", "-", "+")
    events = [orjson.loads(fields[1] if isinstance(fields, list) else fields[b"e"]) for _, fields in found]
    return sum(event["count"] for event in events if event["type"] == "delta")


async def until_ended(redis_url: str, request_id: str) -> dict[str, str]:
    client = connect_commands(redis_url, "test")
    try:
        async with asyncio.timeout(60):
            while True:
                fields: Any = await client.hgetall(f"{TAG}:req:{request_id}")
                if fields.get(b"finished"):
                    return {key.decode(): value.decode("utf-8", "replace") for key, value in fields.items()}
                await asyncio.sleep(0.02)
    finally:
        await client.aclose()
