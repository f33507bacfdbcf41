"""Sending the Lua scripts of `ingest/lua`.

A `Call` is sent by `run`, as many as wanted in one pipeline: raw EVALSHA, one round trip. What many requests do at the
same time is one call for all of them, as far as they lie in one slot. A server that has forgotten
the scripts (restart, failover) is taught them and gets the same calls again, which is safe because every script may be
repeated.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple

from redis.exceptions import NoScriptError

from pagemill.ingest.redis import Client, Command

MAX_TOGETHER = 32  # the server does nothing else while a script runs

_INCLUDE = re.compile(r"^ *-- include ([a-z_]+)\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Script:
    text: str
    sha: str


@functools.cache
def script(name: str, sharded: bool = False) -> Script:
    """A script with the functions that it needs where it says so, and the SHA-1 that the server knows it by. The server
    makes functions anew at every call, so a script has only those that it uses. `sharded`: its live events go out by
    SPUBLISH."""
    folder = resources.files("pagemill.ingest") / "lua"
    text = _INCLUDE.sub(lambda found: (folder / f"{found[1]}.lua").read_text(), (folder / f"{name}.lua").read_text())
    if sharded:
        text = text.replace("local PUBLISH = 'PUBLISH'", "local PUBLISH = 'SPUBLISH'")
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


class Call(NamedTuple):
    """One call of a script. `keys` all lie in one slot. `has_tokens`: it tells that a request has tokens.

    `shared`: arguments of a script that takes several requests at a time. Calls that have the same and lie in one slot
    go to the server as one, and each gets its own part of the reply.
    """

    name: str
    keys: tuple[str, ...]
    args: tuple[str | bytes | int, ...]
    has_tokens: bool = False
    shared: tuple[str | bytes | int, ...] = ()

    @property
    def size(self) -> int:
        """About how many bytes its arguments have: what is long comes as bytes."""
        return sum([len(arg) for arg in self.args if arg.__class__ is bytes])

    @property
    def slot(self) -> str:
        """The beginning of its keys, up to the end of their hash tag."""
        return self.keys[0].partition("}")[0]


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
    groups = _together(calls)
    commands: list[Command] = []
    for numbers in groups:
        members = [calls[number] for number in numbers]
        name, shared = members[0].name, members[0].shared
        keys = [key for call in members for key in call.keys]
        args = [arg for call in members for arg in call.args]
        sha = script(name, client.publishes_sharded).sha
        commands.append(("EVALSHA", sha, len(keys), *keys, *shared, *args))
    replies: list[Any] = [None] * len(calls)
    for numbers, reply in zip(groups, await client.send(commands), strict=True):
        is_shared = bool(calls[numbers[0]].shared) and not isinstance(reply, BaseException)
        for number, part in zip(numbers, reply if is_shared else [reply] * len(numbers), strict=True):
            replies[number] = part
    return replies


def _together(calls: Sequence[Call]) -> list[list[int]]:
    """Which calls go to the server as one, by their numbers."""
    groups: list[list[int]] = []
    open_groups: dict[tuple[Any, ...], list[int]] = {}
    for number, call in enumerate(calls):
        key = (call.name, call.slot, call.shared)
        group = open_groups.get(key) if call.shared else None
        if group is None or len(group) == MAX_TOGETHER:
            group = open_groups[key] = []
            groups.append(group)
        group.append(number)
    return groups
