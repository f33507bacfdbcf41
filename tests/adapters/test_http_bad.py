"""What is no proper request: an answer in JSON for each, nothing in the queue, and the gateway goes on."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import zlib
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as aioredis

from pagemill.adapters.http.auth import ApiKeys
from pagemill.adapters.http.config import GatewayConfig
from pagemill.engine.errors import ConfigError
from pagemill.ingest.config import QueueConfig
from tests.adapters.http_gateway import HI, Spoken, Web, gateway

JSON = {"Content-Type": "application/json"}
CHAT = "/v1/chat/completions"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
DEEP = b'{"prompt":' + b"[" * 5000 + b"]" * 5000 + b"}"


@pytest.fixture
def alone(run: Any, queue_config: QueueConfig) -> Any:
    """Runs a scenario with a gateway and no engine; afterwards nothing is in Redis."""

    def with_gateway(scenario: Any, **settings: Any) -> None:
        async def running() -> None:
            async with gateway(queue_config, **settings) as web:
                await scenario(web)
            async with aioredis.Redis.from_url(queue_config.redis_url, protocol=2) as server:
                assert await server.keys("*") == []

        run(running())

    return with_gateway


BODIES: list[tuple[bytes, dict[str, str], int, str]] = [
    (b"", JSON, 400, "invalid_json"),
    (b"{", JSON, 400, "invalid_json"),
    (b"[]", JSON, 400, "invalid_json"),
    (b"null", JSON, 400, "invalid_json"),
    (b'{"messages": NaN}', JSON, 400, "invalid_json"),
    (b'\xff{"prompt": "x"}', JSON, 400, "invalid_json"),
    (b'{"prompt": "\\ud800"}', JSON, 400, "invalid_json"),
    (b"\xef\xbb\xbf{}", JSON, 400, "invalid_json"),
    (DEEP, JSON, 400, "invalid_json"),
    (b'{"prompt":' + b'{"a":' * 40 + b"1" + b"}" * 41, JSON, 400, "invalid_json"),
    (b'{"a\\u0000b": 1}', JSON, 400, "invalid_request"),
    (b"{" + b'"x":1,' * 9 + b'"' + b"n" * 9000 + b'":1}', JSON, 400, "invalid_request"),
    (b'{"prompt":"x"}', {"Content-Type": "text/plain"}, 415, "unsupported_media_type"),
    (b"prompt=x", {"Content-Type": "application/x-www-form-urlencoded"}, 415, "unsupported_media_type"),
    (b'{"prompt":"x"}', {"Content-Type": "application/json; charset=utf-16"}, 415, "unsupported_media_type"),
    (b'{"prompt":"x"}', {**JSON, "Content-Encoding": "lzma"}, 415, "unsupported_encoding"),
    (b'{"prompt":1e400}', JSON, 400, "invalid_json"),
    (b'{"prompt":"x"}{}', JSON, 400, "invalid_json"),
    (b'{"__proto__":{}}', JSON, 400, "invalid_request"),
    (b"not gzip", {**JSON, "Content-Encoding": "gzip"}, 400, "invalid_body"),
    (gzip.compress(b'{"prompt":' + b" " * 3_000_000 + b'"x"}'), {**JSON, "Content-Encoding": "gzip"}, 413, "too_large"),
    (b'"' + b"x" * 3_000_000 + b'"', JSON, 413, "too_large"),
]


def test_bodies_that_are_none(alone: Any) -> None:
    async def scenario(web: Web) -> None:
        for data, headers, status, code in BODIES:
            for path in ("/v1/completions", CHAT, "/v1/requests"):
                answer = await web.ask("POST", path, data=data, headers=headers)
                assert (answer.status, answer.error["code"]) == (status, code), (data[:60], answer.text)

    alone(scenario)


def test_packed_bodies_are_read(alone: Any) -> None:
    async def scenario(web: Web) -> None:
        body = b'{"prompt":"x","nonsense":1}'
        for packed, name in ((gzip.compress(body), "gzip"), (zlib.compress(body), "deflate")):
            answer = await web.ask("POST", "/v1/completions", data=packed, headers={**JSON, "Content-Encoding": name})
            assert (answer.status, answer.error["param"]) == (400, "nonsense")

    alone(scenario)


PATHS = [
    ("GET", "/v1/nope", 404), ("GET", "/v1/chat/completions", 405), ("PUT", CHAT, 405), ("DELETE", "/v1/models", 405),
    ("POST", "/chat/completions", 404), ("GET", "/v1/../etc/passwd", 404), ("GET", "/v1/models/%2e%2e%2f%2e%2e", 404),
    ("GET", "/v1/models/a%00b", 404), ("GET", "/v1/requests/..%2f..%2fetc", 404), ("GET", "/v1/requests/%F0%9F", 404),
    ("GET", "/v1/requests/" + "a" * 3000, 404), ("POST", "/v1/requests/nobody/cancel", 404),
    ("GET", "/v1/requests/nobody/events", 404), ("GET", "//v1/models", 404), ("TRACE", "/v1/models", 405),
    ("GET", "/v1/v1/models", 404), ("CONNECT", "localhost:80", 404), ("POST", "http://evil.example/v1/x", 404),

]  # fmt: skip


def test_paths_and_methods(alone: Any) -> None:
    async def scenario(web: Web) -> None:
        for method, path, status in PATHS:
            rest = "Host: localhost\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
            answer = await web.raw(f"{method} {path} HTTP/1.1\r\n{rest}".encode())
            spoken = read(answer)
            assert spoken.status == status and spoken.error, (method, path, answer)
        head = await web.ask("HEAD", "/v1/models")
        assert head.status == 200 and head.data == b"" and int(head.headers["Content-Length"]) > 0
        assert (await web.ask("OPTIONS", CHAT)).status == 204

    alone(scenario)


def read(answer: bytes) -> Spoken:
    """A raw answer taken apart."""
    head, _, data = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return Spoken(int(first.split()[1]), headers, data)


HEADS = [
    b"nonsense\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
    b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"X-%d: 1\r\n" % n for n in range(300)) + b"\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nbad header\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999999\r\n\r\n{}",
    b"GET /healthz HTTP/1.1\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
]


def test_what_is_not_http(alone: Any) -> None:
    async def scenario(web: Web) -> None:
        for data in HEADS:
            spoken = read(await web.raw(data))
            assert (spoken.status, spoken.error["code"]) == (400, "invalid_http"), data[:60]
            assert spoken.headers["Server"] == "pagemill", "no more is told of what it runs on"
        assert (await web.get("/healthz")).status == 200

    alone(scenario)


def test_slow_and_broken_bodies(alone: Any) -> None:
    async def scenario(web: Web) -> None:
        chunked = POST + b"Transfer-Encoding: chunked\r\n\r\n"
        slow, endless, broken, silent = await asyncio.gather(
            web.raw(POST + b"Content-Length: 100\r\n\r\n{"),
            web.raw(chunked + b"1\r\n{\r\n"),
            web.raw(chunked + b"zz\r\n{\r\n"),
            web.raw(b"GET /healthz HTT"),  # the head never ends
        )
        assert (read(slow).status, read(slow).error["code"]) == (408, "request_timeout")
        assert read(endless).status == 408
        assert read(broken).status == 400 and read(broken).error
        assert silent == b""

    alone(scenario, http_read_timeout_s=0.3, http_idle_timeout_s=0.6)


ODD: list[tuple[bytes, int, str | None]] = [
    (b"Expect: magic\r\nContent-Length: 2\r\n\r\n{}", 417, None),
    (b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}", 400, "invalid_request"),
    (b"Content-Encoding: br\r\nContent-Length: 2\r\n\r\n{}", 415, "unsupported_encoding"),
    (b"Content-Encoding: zstd\r\nContent-Length: 2\r\n\r\n{}", 415, "unsupported_encoding"),
    (b"Upgrade: h2c\r\nContent-Length: 2\r\n\r\n{}", 400, "invalid_request"),
    (b"Content-Length: 1\r\n\r\n{}", 400, "invalid_http"),
    (b'Idempotency-Key: \xff\r\nContent-Length: 14\r\n\r\n{"prompt":"x"}', 400, "invalid_request"),
]


def test_odd_heads_are_answered_in_json(alone: Any) -> None:
    async def scenario(web: Web) -> None:
        for rest, status, code in ODD:
            answer = await web.raw(POST.replace(b"\r\n", b"\r\nConnection: close\r\n", 1) + rest)
            spoken = read(answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n"))
            assert (spoken.status, spoken.error["code"]) == (status, code), (rest, answer)
        for host in (b"[::1", b"loc alhost", b"", b"localhost.evil.example", b"evil@localhost.example"):
            answer = await web.raw(b"GET /v1/models HTTP/1.1\r\nConnection: close\r\nHost: " + host + b"\r\n\r\n")
            assert read(answer).error["code"] == "forbidden_host", (host, answer)
        old = await web.raw(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert old.startswith(b"HTTP/1.0 200") and b"Connection: keep-alive" not in old
        double = await web.ask("GET", "/v1/v1/models")
        assert "base URL" in double.error["message"]

    alone(scenario)


def test_a_connection_goes_on_after_an_error(alone: Any) -> None:
    async def scenario(web: Web) -> None:
        bad = POST + b"Content-Length: 1\r\n\r\n{"
        good = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        answer = await web.raw(bad + bad + good)
        assert answer.count(b"HTTP/1.1 400") == 2 and answer.count(b"HTTP/1.1 200") == 1

    alone(scenario)


def test_without_keys_only_this_machine_is_served(alone: Any) -> None:
    async def scenario(web: Web) -> None:
        rebound = await web.get("/v1/models", headers={"Host": "evil.example"})
        assert (rebound.status, rebound.error["code"]) == (403, "forbidden_host")
        foreign = await web.ask("OPTIONS", CHAT, headers={"Origin": "https://evil.example"})
        assert foreign.status == 403 and "Access-Control-Allow-Origin" not in foreign.headers
        for host in ("localhost:8000", "127.0.0.1", "[::1]:9"):
            assert (await web.get("/v1/models", headers={"Host": host})).status == 200

    alone(scenario)
    with pytest.raises(ConfigError, match="http_host"):
        GatewayConfig(http_host="0.0.0.0")


def test_keys_are_tenants(alone: Any, tmp_path: Path) -> None:
    hashed = hashlib.sha256(b"third-key").hexdigest()
    file = tmp_path / "keys"
    file.write_text(f"# ours\nhers second-key\n\nhers sha256:{hashed}  # rotated\n")

    async def scenario(web: Web) -> None:
        for given in (None, "Bearer", "Bearer wrong", "Basic first-key", "Bearer first-key2", "bearer \udcff"):
            headers = {} if given is None else {"Authorization": given}
            answer = await web.raw(
                b"GET /v1/nope HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                + b"".join(f"{k}: {v}\r\n".encode("utf-8", "surrogateescape") for k, v in headers.items())
                + b"\r\n"
            )
            spoken = read(answer)
            assert (spoken.status, spoken.error["code"]) == (401, "invalid_api_key"), given
            assert spoken.headers["WWW-Authenticate"] == "Bearer"
        assert (await web.get("/metrics")).status == 401
        assert (await web.get("/healthz", headers={"Host": "anything"})).status == 200
        for key in ("first-key", "second-key", "third-key"):
            assert (await web.get("/v1/models", headers={"Authorization": f"Bearer {key}"})).status == 200
        other = await web.post(
            "/v1/requests", {"prompt": "x", "tenant": "his"}, headers={"Authorization": "Bearer third-key"}
        )
        assert (other.status, other.error["param"]) == (403, "tenant")

    alone(scenario, api_keys="his=first-key", api_keys_file=str(file))
    keys = ApiKeys.of(GatewayConfig(api_keys="his=first-key", api_keys_file=str(file)))
    assert [keys.tenant_of(key) for key in ("first-key", "second-key", "third-key", "no")] == [
        "his",
        "hers",
        "hers",
        None,
    ]
    assert "first-key" not in repr(keys)


def test_without_redis(run: Any, refusing_url: str) -> None:
    """The gateway lives, says what is wrong, and asks clients to come back."""

    async def scenario() -> None:
        async with gateway(QueueConfig(redis_url=refusing_url)) as web:
            assert (await web.get("/healthz")).status == 200
            assert (await web.get("/readyz")).status == 503
            assert b"pagemill_http_requests_total" in (await web.get("/metrics")).data
            answer = await web.post(CHAT, {"messages": HI, "max_tokens": 1})
            assert (answer.status, answer.error["code"]) == (503, "queue_unavailable")
            assert answer.headers["x-should-retry"] == "true" and int(answer.headers["retry-after-ms"]) > 0

    run(asyncio.wait_for(scenario(), 120))
