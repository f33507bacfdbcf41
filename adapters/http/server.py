"""Listening: aiohttp's server with JSON for errors of HTTP itself, bounds on slow peers, and an orderly end."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from typing import Any

import structlog
from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

from pagemill.adapters.http.app import make_app
from pagemill.adapters.http.batch_runner import BatchRunner
from pagemill.adapters.http.body import bad_encoding
from pagemill.adapters.http.config import GatewayConfig
from pagemill.adapters.http.errors import http_error, internal_error
from pagemill.adapters.http.gateway import Gateway
from pagemill.adapters.http.half_close import HalfCloseProtocol
from pagemill.adapters.http.middleware import SERVER_NAME
from pagemill.engine.errors import ConfigError
from pagemill.ingest.config import QueueConfig

MAX_HEAD_LINE = 8190  # bytes of a request line or of one header
MAX_HEADERS = 100
SEND_BUFFER = 128 << 10  # bytes in the system for one client
LINGER_S = 2.0  # how long the rest of a body is read after an answer that did not want it

_log = structlog.get_logger(__name__)
_quiet = logging.getLogger("pagemill.http")
_quiet.addHandler(logging.NullHandler())
_quiet.propagate = False


class JsonProtocol(HalfCloseProtocol):
    """A connection. What cannot be read as HTTP is answered in JSON, and no answer may take for ever to be read."""

    __slots__ = ("write_timeout_s",)
    write_timeout_s: float

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The system would buffer megabytes for a client that reads nothing; this bounds it, and lets it be noticed."""
        peer = transport.get_extra_info("socket")
        if peer is not None:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        super().connection_made(transport)

    def handle_error(
        self, request: Any, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """An error outside of any handler."""
        if status >= 500:
            _log.error("a request failed outside of its handler", reason=repr(exc))
            error = internal_error()
        else:
            lines = (message or "").strip().splitlines()
            reason = lines[0] if lines else "the request is not HTTP"
            error = http_error(status, reason, {"Server": SERVER_NAME})
            error.code = "invalid_http"
            if "content-encoding" in reason:
                error = bad_encoding("another")
        response = error.response()
        response.force_close()
        return response

    async def finish_response(
        self, request: Any, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if isinstance(resp, web.HTTPException):  # raised before any handler: an expectation that nobody knows
            resp = http_error(resp.status, resp.text or resp.reason).response()
        try:
            async with asyncio.timeout(self.write_timeout_s):
                return await super().finish_response(request, resp, start_time)
        except TimeoutError:
            if self.transport is not None:
                self.transport.abort()
            return resp, True


class GatewayServer(web.Server):
    """Makes a `JsonProtocol` for each connection."""

    def __init__(self, made: web.Server, write_timeout_s: float, options: dict[str, Any]) -> None:
        super().__init__(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=True,
            loop=asyncio.get_running_loop(),
        )
        self._options = options
        self._write_timeout_s = write_timeout_s

    def __call__(self) -> web.RequestHandler:
        protocol = JsonProtocol(self, loop=asyncio.get_running_loop(), **self._options)
        protocol.write_timeout_s = self._write_timeout_s
        return protocol


class _NoAccessLog(AbstractAccessLogger):
    """The middleware writes its own line for each request."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        return None

    @property
    def enabled(self) -> bool:
        return False


class GatewayRunner(web.AppRunner):
    """An application whose connections are `JsonProtocol`s."""

    def __init__(self, app: web.Application, config: GatewayConfig) -> None:
        super().__init__(app, shutdown_timeout=2.0)
        self._write_timeout_s = config.http_write_timeout_s
        self._options = {
            "keepalive_timeout": config.http_idle_timeout_s,
            "lingering_time": LINGER_S,
            "max_line_size": MAX_HEAD_LINE,
            "max_field_size": MAX_HEAD_LINE,
            "max_headers": MAX_HEADERS,
            "access_log_class": _NoAccessLog,
            "logger": _quiet,
        }

    async def _make_server(self) -> web.Server:
        return GatewayServer(await super()._make_server(), self._write_timeout_s, self._options)


class GatewayProcess:
    """A gateway that listens. `start` raises `ConfigError` where it cannot; `stop` drains and ends it."""

    def __init__(self, config: GatewayConfig, queue: QueueConfig) -> None:
        self._config = config
        self.gateway = Gateway(config, queue)
        self._runner = GatewayRunner(make_app(self.gateway), config)
        self._batches = BatchRunner(self.gateway)
        self._limits: asyncio.Task[None] | None = None
        self.url = ""

    async def start(self) -> str:
        """Listen; returns the URL."""
        host, port = self._config.http_host, self._config.http_port
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            await self._runner.cleanup()
            await self.gateway.aclose()
            reason = error.strerror or str(error)
            raise ConfigError(f"cannot listen on {host}, port {port} ({reason}); --http-port takes another") from error
        self._batches.start()
        self._limits = asyncio.get_running_loop().create_task(self.gateway.limits.run())
        bound = self._runner.addresses[0]
        self.url = f"http://{_shown(bound[0])}:{bound[1]}"
        return self.url

    async def stop(self, drain_s: float | None = None) -> None:
        """Take no new connections, let open requests end within `drain_s` (None: the setting), tell the rest, close."""
        for site in list(self._runner.sites):
            await site.stop()
        await self.gateway.drain(self._config.http_drain_timeout_s if drain_s is None else drain_s)
        await self._batches.stop()
        if self._limits is not None:
            self._limits.cancel()
            await asyncio.gather(self._limits, return_exceptions=True)
        await self._runner.cleanup()
        await self.gateway.aclose()


def _shown(address: str) -> str:
    return f"[{address}]" if ipaddress.ip_address(address.partition("%")[0]).version == 6 else address
