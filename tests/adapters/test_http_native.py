"""Native requests, their events and how they are resumed; what an operator sees; and how a gateway ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from typing import Any

import orjson
import pytest
import structlog

from pagemill.engine.async_engine import AsyncEngine
from pagemill.ingest.config import QueueConfig
from tests.adapters.http_gateway import ENDLESS, Web, gateway
from tests.contract.conftest import STORY, Outside, serving


def events_of(text: str) -> list[tuple[int, dict[str, Any]]]:
    """Numbers and values of native events."""
    found = re.findall(r"id: (\d+)\ndata: (.*)\n\n", text)
    return [(int(number), orjson.loads(data)) for number, data in found]


async def read_until(reader: asyncio.StreamReader, kind: str) -> str:
    """A stream up to the first event of a type."""
    text = ""
    async with asyncio.timeout(60):
        while f'"type":"{kind}"' not in text:
            text += (await reader.readuntil(b"\n\n")).decode()
    return text


def asking(path: str, **headers: str) -> bytes:
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n".encode()


def test_a_request_its_events_and_its_result(tried: Any) -> None:
    async def scenario(web: Web) -> None:
        answer = await web.post("/v1/requests", {**STORY, "metadata": {"order": "7"}})
        assert answer.status == 202
        path = answer.headers["Location"]
        assert path == f"/v1/requests/{answer.json['id']}"
        events = await web.get(f"{path}/events")
        found = events_of(events.text)
        assert [number for number, _ in found] == [item["seq"] for _, item in found] == list(range(1, len(found) + 1))
        assert (found[0][1]["type"], found[-1][1]["type"]) == ("started", "done")
        assert found[-1][1]["metadata"] == {"order": "7"}
        text = "".join(item["text"] for _, item in found if item["type"] == "delta")
        record = (await web.get(path)).json
        assert (record["state"], record["choices"][0]["text"], record["error"]) == ("completed", text, None)
        for after in range(len(found)):
            rest = events_of((await web.get(f"{path}/events?after={after}")).text)
            assert rest == found[after:]
        assert (await web.get(f"{path}/events", headers={"Last-Event-ID": str(len(found))})).status == 204
        both = await web.get(f"{path}/events?after=0", headers={"Last-Event-ID": str(len(found) - 1)})
        assert events_of(both.text) == found[-1:]
        for bad, status in (("-1", 400), ("x", 400), ("1.5", 400), ("9" * 40, 400), ("99", 410)):
            wrong = await web.get(f"{path}/events?after={bad}")
            assert (wrong.status, wrong.error["param"]) == (status, "after")
        assert (await web.post(f"{path}/cancel")).json["state"] == "completed"
        for name, value in (("self", 1), ("traceparent", "x"), ("prompt_token_ids", 5)):
            wrong = await web.post("/v1/requests", {"prompt": "x", name: value})
            assert (wrong.status, wrong.error["param"]) == (400, name), wrong.text

    tried(scenario)


def test_another_gateway_goes_on_with_a_stream(tried: Any, queue_config: QueueConfig) -> None:
    async def scenario(web: Web) -> None:
        path = (await web.post("/v1/requests", {**STORY, "max_tokens": 60, "flush_ms": 0})).headers["Location"]
        async with web.socket() as (reader, writer):
            writer.write(asking(f"{path}/events"))
            begun = events_of(await read_until(reader, "delta"))
        async with gateway(queue_config) as other:
            last = begun[-1][0]
            rest = events_of((await other.get(f"{path}/events", headers={"Last-Event-ID": str(last)})).text)
        numbers = [number for number, _ in begun + rest]
        assert numbers == list(range(1, len(numbers) + 1)) and rest[-1][1]["state"] == "completed"

    tried(scenario)


def test_cancelling_and_tenants(tried: Any) -> None:
    async def scenario(web: Web) -> None:
        his, hers = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        path = (await web.post("/v1/requests", ENDLESS, headers=his)).headers["Location"]
        for method, tail in (("GET", ""), ("GET", "/events"), ("POST", "/cancel")):
            assert (await web.ask(method, path + tail, headers=hers)).status == 404
        assert (await web.post(f"{path}/cancel", headers=his)).json["state"] in ("cancelled", "requested")
        found = events_of((await web.get(f"{path}/events", headers=his)).text)
        assert found[-1][1]["state"] == "cancelled"
        again = [await web.post("/v1/requests", STORY, headers={**his, "Idempotency-Key": "k"}) for _ in range(2)]
        assert again[0].json["id"] == again[1].json["id"] and again[1].headers["Idempotent-Replayed"] == "true"
        other = await web.post("/v1/requests", STORY, headers={**hers, "Idempotency-Key": "k"})
        assert other.json["id"] != again[0].json["id"]
        for handle in (again[0], other):
            await web.get(f"{handle.headers['Location']}/events", headers=his if handle is not other else hers)

    tried(scenario, api_keys="his=one,hers=two")


def test_silence_is_filled_with_comments(play: Any, queue_config: QueueConfig) -> None:
    """No engine: OpenAI's stream is opened after a while and kept open, by comments without a blank line."""

    async def scenario() -> None:
        outside = Outside(queue_config.redis_url)
        async with gateway(queue_config, http_ping_s=0.05) as web, web.socket() as (reader, writer):
            body = b'{"prompt":"x","stream":true}'
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            async with asyncio.timeout(60):
                text = await reader.readuntil(b": ping\n\r\n")
                text += await reader.readuntil(b": ping\n\r\n")
            assert b"200 OK" in text and b"ping\n\n" not in text and b"data:" not in text
            writer.close()
            async with asyncio.timeout(60):
                while await outside.redis.xlen("pm:{default.0}:in:1"):
                    await asyncio.sleep(0.01)
        await outside.aclose()

    play(scenario())


def test_leaving_tells_open_streams(tried: Any, engine: AsyncEngine) -> None:
    """A gateway told to stop is not ready, lets requests end for a while, and ends the rest with an error frame."""

    async def scenario(web: Web) -> None:
        process = web.process
        slow = asyncio.create_task(web.post("/v1/completions", {**ENDLESS, "stream": True}))
        whole = asyncio.create_task(web.post("/v1/completions", ENDLESS))
        async with asyncio.timeout(60):
            begun = engine.output_tokens  # an answer that has not begun is refused with its status instead
            while engine.num_live < 2 or engine.output_tokens < begun + 200:
                await asyncio.sleep(0.005)
        stopping = asyncio.create_task(process.stop(0.3))
        streamed, answer = await slow, await whole
        assert streamed.status == 200 and "[DONE]" not in streamed.text
        assert streamed.frames[-1]["error"]["code"] == "gateway_stopping"
        assert (answer.status, answer.error["code"]) == (503, "gateway_stopping")
        await stopping
        with pytest.raises(OSError), contextlib.suppress(asyncio.IncompleteReadError):
            await asyncio.open_connection("127.0.0.1", web.port)

    tried(scenario)


def test_what_an_operator_sees(play: Any, engine: AsyncEngine, queue_config: QueueConfig, capsys: Any) -> None:
    # Other tests of the process may have set logging up in a way that leaves these lines out.
    before = structlog.get_config()
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, structlog.processors.KeyValueRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(),
    )

    async def scenario() -> None:
        async with gateway(queue_config) as web:
            assert (await web.get("/healthz")).json == {"status": "ok"}
            not_ready = await web.get("/readyz")
            assert (not_ready.status, not_ready.json["queues"]) == (503, ["default"])
            async with serving(engine, queue_config):
                async with asyncio.timeout(60):
                    while (await web.get("/readyz")).status != 200:
                        await asyncio.sleep(0.05)
                named = {"X-Request-Id": "my-trace-7"}
                done = await web.post("/v1/completions", {"prompt": "Hi", "max_tokens": 2}, headers=named)
                assert done.headers["x-request-id"] == "my-trace-7"
                bad = await web.get("/v1/models", headers={"X-Request-Id": "new\tline"})
                assert re.fullmatch(r"req_[0-9a-f]{32}", bad.headers["x-request-id"])
                text = (await web.get("/metrics")).text
            assert 'pagemill_http_requests_total{route="/v1/completions",status="200"} 1.0' in text
            assert 'pagemill_queue_events_total{event="completed",queue="default"} 1.0' in text
            assert re.search(r'pagemill_engine_free_blocks\{engine=".+",queue="default"\} \d', text)
            assert re.search(r'pagemill_engine_weight_bytes\{engine=".+",queue="default"\} \d', text)
            assert re.search(r'pagemill_engine_model_info\{dtype=".+",.*quantization="gguf",queue="default"\} 1', text)
            assert re.search(r"pagemill_http_first_token_seconds_count 0", text)
        printed = capsys.readouterr()
        (line,) = [line for line in (printed.out + printed.err).splitlines() if "my-trace-7" in line]
        assert "tenant" in line and "generation" in line and "/v1/completions" in line

    try:
        play(scenario())
    finally:
        structlog.configure(**before)


def test_many_streams_share_one_subscription(tried: Any, queue_config: QueueConfig) -> None:
    async def scenario(web: Web) -> None:
        outside = Outside(queue_config.redis_url)
        body = {"prompt": "One two", "max_tokens": 20, "ignore_eos": True, "stream": True}
        answers = [asyncio.create_task(web.post("/v1/completions", body)) for _ in range(12)]
        most = 0
        while not all(answer.done() for answer in answers):
            clients = await outside.redis.client_list()
            most = max(most, sum(client["sub"] != "0" for client in clients))
            await asyncio.sleep(0.02)
        assert most == 1
        texts = {"".join(chunk["choices"][0]["text"] for chunk in answer.result().frames[:-1]) for answer in answers}
        assert len(texts) >= 1 and all(answer.result().frames[-1] == "[DONE]" for answer in answers)
        await outside.aclose()

    tried(scenario)
