"""Clients that end what they send before they are answered: whoever only does that is told something, always."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.adapters.http_gateway import ENDLESS, HI, Web

HEAD = "POST {} HTTP/1.{}\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"


def posted(path: str, body: Any, version: int = 1) -> bytes:
    data = json.dumps(body).encode()
    return HEAD.format(path, version, len(data)).encode() + data


async def half(web: Web, data: bytes, after: bytes | None = None) -> bytes:
    """What a client gets that sends `data` and no more: at once, or once it has seen `after`."""
    async with web.socket() as (reader, writer), asyncio.timeout(60):
        writer.write(data)
        seen = b"" if after is None else await reader.readuntil(after)
        writer.write_eof()
        return seen + await reader.read()


def test_what_is_at_hand_is_sent(tried: Any) -> None:
    async def scenario(web: Web) -> None:
        for version in (0, 1):
            told = await half(web, f"GET /v1/models HTTP/1.{version}\r\nHost: localhost\r\n\r\n".encode())
            assert b" 200 OK\r\n" in told and b'"smollm2-135m"' in told
            told = await half(web, posted("/v1/chat/completions", {"messages": 1}, version))
            assert b" 400 " in told and b'"param":"messages"' in told
        told = await half(web, posted("/v1/requests", {"prompt": "a", "max_tokens": 1}))
        assert b" 202 " in told
        two = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2
        assert (await half(web, two)).count(b"HTTP/1.1 200 OK") == 2, "one behind the other"

    tried(scenario)


def test_a_generation_is_ended_and_its_client_told(tried: Any) -> None:
    async def scenario(web: Web) -> None:
        chat = {**{name: ENDLESS[name] for name in ("max_tokens", "ignore_eos", "flush_ms")}, "messages": HI}
        asked = [("/v1/completions", ENDLESS), ("/v1/chat/completions", chat)]
        asked.append(("/v1/responses", {"input": "Count.", "max_output_tokens": 300, "ttl_ms": 59_000}))
        for path, body in asked:
            told = await half(web, posted(path, body))
            assert b" 499 " in told and b'"code":"connection_half_closed"' in told, path
            told = await half(
                web, posted(path, {**body, "stream": True}), after=b'"delta":' if "chat" in path else b"data"
            )
            assert told.count(b"connection_half_closed") == 1 and b"[DONE]" not in told, path
        assert b"pagemill_http_disconnects_total 6.0" in (await web.get("/metrics")).data

    tried(scenario)


def test_half_a_request_is_none(tried: Any) -> None:
    async def scenario(web: Web) -> None:
        assert await half(web, b"GET /v1/mod") == b""
        assert await half(web, posted("/v1/completions", ENDLESS)[:-3]) == b""
        assert await half(web, b"") == b""
        assert (await web.get("/healthz")).status == 200

    tried(scenario)
