"""A gateway as a process of its own, several queues, and a crowd of clients of whom some do not read."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from pagemill.adapters.http.config import GatewayConfig
from pagemill.engine.async_engine import AsyncEngine
from pagemill.engine.errors import ConfigError
from pagemill.ingest.config import QueueConfig
from tests.adapters.http_gateway import ENDLESS, HI, Web, gateway
from tests.adapters.processes import environment, pagemill
from tests.chaos import servers
from tests.contract.conftest import Outside, serving


def test_the_gateway_imports_no_engine() -> None:
    code = "import sys, pagemill.adapters.http.server; print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"


def test_a_gateway_that_is_killed_leaves_nothing_running(
    play: Any, engine: AsyncEngine, queue_config: QueueConfig, tmp_path: Path
) -> None:
    """Nobody can cancel for it, so the queue's watch lease does. Another is told to end, and does."""
    command = [sys.executable, "-m", "pagemill", "gateway", "--redis-url", queue_config.redis_url, "--http-port", "0"]

    async def begun() -> tuple[asyncio.subprocess.Process, str]:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment(), cwd=tmp_path
        )
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        assert "serving queue 'default'" in line
        return process, line.split()[-1]

    async def scenario() -> None:
        outside = Outside(queue_config.redis_url)
        (killed, url), (told, other) = await asyncio.gather(begun(), begun())
        async with serving(engine, queue_config), aiohttp.ClientSession() as session:
            body = {**ENDLESS, "stream": True, "watch_ms": 1000}
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                assert answer.status == 200
                first = await answer.content.readuntil(b"\n\n")
                killed.kill()
                text = b""
                with contextlib.suppress(aiohttp.ClientError):
                    while more := await answer.content.readany():
                        text += more
                assert b"[DONE]" not in text, text
            name = orjson.loads(first.removeprefix(b"data: "))["id"].removeprefix("cmpl-")
            assert (await outside.done(name, timeout=60))["state"] == "cancelled"
            async with session.post(f"{other}/v1/chat/completions", json={"messages": HI, "max_tokens": 2}) as answer:
                assert answer.status == 200
            told.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(told.wait(), 60) == 0
            await killed.wait()
        await outside.assert_nothing_left()
        await outside.aclose()

    play(scenario())


def test_models_lead_to_their_queues(play: Any, engine: AsyncEngine, queue_config: QueueConfig) -> None:
    async def scenario() -> None:
        second = queue_config.replace(queue="second")
        async with serving(engine, second), gateway(queue_config, models="big=second,small=default") as web:
            assert [model["id"] for model in (await web.get("/v1/models")).json["data"]] == ["big", "small"]
            answer = await web.post("/v1/completions", {"model": "big", "prompt": "Hi", "max_tokens": 2})
            assert (answer.status, answer.json["model"]) == (200, "big")
            first = await web.post("/v1/completions", {"prompt": "Hi", "max_tokens": 2})
            assert first.json["model"] == "big"
            wrong = await web.post("/v1/completions", {"model": "smollm2-135m", "prompt": "Hi"})
            assert (wrong.status, wrong.error["code"]) == (404, "model_not_found")
            native = await web.post("/v1/requests", {"model": "big", "prompt": "Hi", "max_tokens": 2})
            assert "done" in (await web.get(f"{native.headers['Location']}/events")).text
            assert (await web.get("/readyz")).json["queues"] == ["default"]

    play(scenario())


def test_on_a_cluster(play: Any, engine: AsyncEngine) -> None:
    """Everything that the gateway keeps lies on some shard, and it asks each shard at its own node."""

    async def scenario(nodes: list[Any]) -> None:
        queue = QueueConfig(redis_url=f"redis+cluster://127.0.0.1:{nodes[0].port}", shards=4, block_ms=100)
        async with serving(engine, queue), gateway(queue) as web:
            assert (await web.get("/readyz")).status == 200
            made = await web.post("/v1/responses", {"input": "Hi", "max_output_tokens": 2, "background": True})
            async with asyncio.timeout(60):
                while (await web.get(f"/v1/responses/{made.json['id']}")).json["status"] in ("queued", "in_progress"):
                    await asyncio.sleep(0.02)
            body = {"messages": HI, "max_tokens": 2}
            lines = [
                {"custom_id": str(n), "method": "POST", "url": "/v1/chat/completions", "body": body} for n in range(5)
            ]
            async with web.openai() as client:
                file = await client.files.create(file=("in", b"\n".join(map(orjson.dumps, lines))), purpose="batch")
                batch = await client.batches.create(
                    input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
                )
                async with asyncio.timeout(60):
                    while (batch := await client.batches.retrieve(batch.id)).status != "completed":
                        await asyncio.sleep(0.05)
                assert len((await client.files.content(batch.output_file_id or "")).text.splitlines()) == 5
            text = (await web.get("/metrics")).text
            assert 'pagemill_queue_events_total{event="completed",queue="default"} 6.0' in text

    with servers.cluster() as nodes:
        play(scenario(nodes))


def test_a_crowd_of_which_some_read_nothing(tried: Any, engine: AsyncEngine) -> None:
    """Twelve clients, and one that reads nothing: the others get whole answers, and that one is cut."""

    async def scenario(web: Web) -> None:
        body = orjson.dumps({"messages": HI, "max_tokens": 30, "ignore_eos": True, "stream": True, "n": 8,
                             "logprobs": True, "top_logprobs": 20, "flush_ms": 0})  # fmt: skip
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        deaf = []
        for _ in range(1):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", web.port))
            sock.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            deaf.append(sock)
        reading = [
            web.post("/v1/completions", {"prompt": "One two", "max_tokens": 4, "ignore_eos": True, "stream": True})
            for _ in range(12)
        ]
        for answer in await asyncio.gather(*reading):
            assert answer.frames[-1] == "[DONE]"
            assert answer.frames[-2]["choices"][0]["finish_reason"] == "length"
        assert (await web.get("/healthz")).status == 200
        async with asyncio.timeout(60):
            while web.process.gateway.metrics.slow_readers._value.get() < len(deaf) or engine.num_live:
                await asyncio.sleep(0.05)
        for sock in deaf:
            sock.close()

    tried(scenario, http_write_timeout_s=0.5)


def test_settings(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for wrong in (
        *({"http_port": 70_000}, {"http_host": ""}, {"http_ping_s": 0}, {"models": "a"}, {"models": "a=b c"}),
        *({"cors_origins": "example.org"}, {"http_host": "192.168.1.1"}, {"http_max_body_bytes": True}),
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            GatewayConfig(**wrong)
    shown = pagemill("config", cwd=tmp_path, PAGEMILL_API_KEYS="me=very-secret").stdout
    assert "very-secret" not in shown and "api_keys is set and not shown" in shown
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ran = pagemill("gateway", "--http-port", port, cwd=tmp_path)
    assert ran.returncode == 2 and f"port {port}" in ran.stderr and "--http-port" in ran.stderr
