"""The playground: a prompt, its answer as it comes, cancel, and going on after a reload."""

from __future__ import annotations

from aiohttp import web

from pagemill.adapters.http.dashboard import asset

PATH = "/playground"


async def page(_: web.Request) -> web.Response:
    return asset("playground.html", "text/html")


async def script(_: web.Request) -> web.Response:
    return asset("playground.js", "text/javascript")
