"""Whether server and user are fit for the queue: what engines do is allowed, and the shared keys are of their kind.

Asked before an engine serves, and again when a request meets an error that may not be its own: what every request meets
is a fault of the configuration, for which none of them may go to the dead letters.
"""

from __future__ import annotations

import asyncio
import functools
import re
import time
from collections.abc import Sequence
from importlib import resources

import structlog
from redis.exceptions import RedisError, ResponseError

from pagemill.engine.errors import ConfigError
from pagemill.ingest.keys import QueueKeys, ShardKeys
from pagemill.ingest.redis import Client, is_forbidden, is_unavailable, shown_url, wait_for_server
from pagemill.ingest.script_calls import Call, run

TELL_S = 30.0  # what stays wrong is told again

_USED = re.compile(r"(?:redis\.p?call|ask)\('([A-Z]+)'(?:, '([A-Z]+)')?")
_CONTAINERS = ("XGROUP", "XINFO")  # their second word is part of the command
_PLAIN = (
    "XREADGROUP GROUP g c STREAMS <key> >",
    "XREAD STREAMS <key> 0",
    "STRLEN <key>",
)  # the scripts do the rest too

_log = structlog.get_logger(__name__)


@functools.cache
def commands() -> tuple[str, ...]:
    """What an engine does, in the scripts and beside them, each command once, with `<key>` in the place of a key."""
    found = set(_PLAIN)
    for file in (resources.files("pagemill.ingest") / "lua").iterdir():
        for word, second in _USED.findall(file.read_text()):
            found.add(" ".join([word, second, "<key>"] if word in _CONTAINERS else [word, "<key>"]))
    return tuple(sorted(found))


async def inspect(client: Client, shards: Sequence[ShardKeys]) -> str:
    """What is wrong, as a sentence without a full stop; empty where nothing is. Raises redis-py's errors."""
    found: list[str] = []
    calls = []
    for shard in shards:
        kinds = shard.kinds()
        channels = (shard.channel("x"), shard.end_channel("x"))
        calls.append(Call("inspect", tuple(kinds), (*channels, *kinds.values(), *commands())))
    try:
        replies = await run(client, calls)
    except ResponseError as error:  # the scripts may not even be sent
        replies = [error]
    for reply in replies:
        if isinstance(reply, BaseException):
            if not is_forbidden(reply):
                raise reply
            found.append(str(reply))
        else:
            found += [line.decode(errors="replace") for line in reply]
    return "; ".join(dict.fromkeys(found))


async def wait_until_fit(client: Client, keys: QueueKeys, url: str, stopping: asyncio.Event) -> bool:
    """`wait_for_server`, and look at every shard. False: stopped before. Raises `ConfigError`, which says all that is
    wrong."""
    while await wait_for_server(client, url, stopping):
        try:
            fault = await inspect(client, keys.shards)
        except (RedisError, OSError) as error:
            if not is_unavailable(error):
                raise
            continue  # it has gone again
        if fault:
            raise ConfigError(f"{shown_url(url)} is not fit for the queue: {fault}; see to it, or set key_prefix")
        return True
    return False


class Inspector:
    """Says whose fault an error is, and tells the log of what is wrong with the server."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._tell_at = float("-inf")

    async def blames(self, shard: ShardKeys, error: BaseException) -> bool:
        """Whether a command has failed with `error` for what is wrong with the server or the user. Otherwise it is the
        fault of the request that it was for."""
        try:
            fault = await inspect(self._client, [shard])
        except (RedisError, OSError) as other:
            if not is_unavailable(other):
                raise
            return True  # asked again when it is there
        if not fault and is_forbidden(error):
            fault = str(error)
        if fault and time.monotonic() >= self._tell_at:
            self._tell_at = time.monotonic() + TELL_S
            _log.error("redis is not fit for the queue, requests wait", shard=shard.tag, reason=fault)
        return bool(fault)
