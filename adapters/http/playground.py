"""The page at `/`: a prompt, its answer as it comes, cancel, and going on after a reload."""

from __future__ import annotations

from importlib import resources

from aiohttp import web

_POLICY = "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'"


async def page(_: web.Request) -> web.Response:
    return _file("playground.html", "text/html", {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"})


async def script(_: web.Request) -> web.Response:
    return _file("playground.js", "text/javascript", {"Cache-Control": "no-cache"})


def _file(name: str, kind: str, headers: dict[str, str]) -> web.Response:
    data = (resources.files("pagemill.adapters.http") / name).read_bytes()
    return web.Response(body=data, content_type=kind, charset="utf-8", headers=headers)
