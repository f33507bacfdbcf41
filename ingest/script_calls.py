"""Sending the Lua scripts of `ingest/lua`.

A `Call` is sent by `run`, as many as wanted in one pipeline: raw EVALSHA, one round trip. A server that has forgotten
the scripts (restart, failover) is taught them and gets the same calls again, which is safe because every script may be
repeated.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from redis.exceptions import NoScriptError

from pagemill.ingest.redis import Client

# What stands before a script beside common.lua.
_PARTS: Mapping[str, tuple[str, ...]] = {
    "submit": ("hooks", "waiting", "admission"),
    "accept": ("hooks", "waiting", "admission"),
    "begin": ("hooks", "waiting", "suspicion"),
    "oldest": ("hooks", "waiting"),
    "append": ("hooks",),
    "finish": ("hooks",),
    "reap": ("suspicion",),
    "cancel": ("hooks", "waiting"),
    "release": ("hooks", "waiting"),
    "sweep": ("hooks", "waiting"),
}


@dataclass(frozen=True, slots=True)
class Script:
    text: str
    sha: str


@functools.cache
def script(name: str, sharded: bool = False) -> Script:
    """A script with the functions that it needs before it, and the SHA-1 that the server knows it by. `sharded`: its
    live events go out by SPUBLISH."""
    folder = resources.files("pagemill.ingest") / "lua"
    text = "".join((folder / f"{part}.lua").read_text() for part in ("common", *_PARTS.get(name, ()), name))
    if sharded:
        text = text.replace("local PUBLISH = 'PUBLISH'", "local PUBLISH = 'SPUBLISH'")
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a script. `keys` all lie in one slot. `has_tokens`: it tells that a request has tokens."""

    name: str
    keys: tuple[str, ...]
    args: tuple[str | bytes | int, ...]
    has_tokens: bool = False


async def run(client: Client, calls: Sequence[Call]) -> list[Any]:
    """Send `calls` in one pipeline. Raw replies in order; a call that failed has its exception in its place.

    Raises redis-py's connection errors; then any of the calls may or may not have been executed.
    """
    replies = await _send(client, calls)
    missing = [number for number, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
    if missing:
        for name in {calls[number].name for number in missing}:
            await client.script_load(script(name, client.publishes_sharded).text)
        again = await _send(client, [calls[number] for number in missing])
        for number, reply in zip(missing, again, strict=True):
            replies[number] = reply
    return replies


async def run_one(client: Client, call: Call) -> Any:
    """Send one call and return its raw reply. Raises what it failed with."""
    (reply,) = await run(client, [call])
    if isinstance(reply, BaseException):
        raise reply
    return reply


async def _send(client: Client, calls: Sequence[Call]) -> list[Any]:
    pipeline = client.pipeline(transaction=False)
    for call in calls:
        pipeline.execute_command(
            "EVALSHA", script(call.name, client.publishes_sharded).sha, len(call.keys), *call.keys, *call.args
        )
    return await client.run_pipeline(pipeline)
