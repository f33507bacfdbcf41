"""A connection that listens to channels: SUBSCRIBE, or SSUBSCRIBE on a Cluster, and what comes in.

redis-py's own `PubSub` connects anew by itself, in the middle of a `subscribe` or a read, and says nothing of it; what
was published meanwhile is missed without a trace. Here a connection that is lost is an error, and nothing is made anew.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError

from pagemill.ingest.redis import REPLY_TIMEOUT_S, Client, ClusterClient

PING_S = 15.0  # silence after which the other side is asked whether it is there; as long again, and it is not

Kind = Literal["message", "subscribe", "unsubscribe"]

_KINDS: Mapping[bytes, Kind] = {
    b"message": "message",
    b"smessage": "message",
    b"subscribe": "subscribe",
    b"ssubscribe": "subscribe",
    b"unsubscribe": "unsubscribe",
    b"sunsubscribe": "unsubscribe",
}


class Listener:
    """One connection. Not for two readers at a time; subscribing while somebody reads is fine."""

    def __init__(self, connection: Any, *, sharded: bool) -> None:
        self._connection = connection
        self._prefix = "S" if sharded else ""
        self._heard_at = time.monotonic()

    async def subscribe(self, *channels: bytes) -> None:
        """Ask for channels; `next` brings the server's confirmations. Raises where the connection is lost."""
        if channels:
            await self._send(f"{self._prefix}SUBSCRIBE", *channels)

    async def unsubscribe(self, *channels: bytes) -> None:
        """Ask for an end."""
        if channels:
            await self._send(f"{self._prefix}UNSUBSCRIBE", *channels)

    async def next(self) -> tuple[Kind, bytes, bytes]:
        """The next message as kind, channel and data. Waits; raises where the connection is lost or refused."""
        while True:
            reply: Any = await self._connection.read_response()
            self._heard_at = time.monotonic()
            kind = _KINDS.get(reply[0]) if isinstance(reply, list) else None
            if kind is not None:
                return kind, reply[1], reply[2] if kind == "message" else b""

    async def keep_asking(self) -> None:
        """Ping after a silence, and end the connection where nothing comes back: its reader is told."""
        while True:
            await asyncio.sleep(PING_S / 3)
            silent_s = time.monotonic() - self._heard_at
            if silent_s > 2 * PING_S:
                await self.aclose()
                return
            if silent_s > PING_S:
                await self._send("PING")

    async def aclose(self) -> None:
        await self._connection.disconnect(nowait=True)

    async def _send(self, *words: str | bytes) -> None:
        if not self._connection.is_connected:
            raise ConnectionError("the connection that listens is lost")
        async with asyncio.timeout(REPLY_TIMEOUT_S):
            await self._connection.send_command(*words, check_health=False)


OpenListener = Callable[[str], Awaitable[Listener]]
"""Connects a listener for the channels that lie where a key lies. Raises as redis-py does."""


def listener_opener(client: Client) -> OpenListener:
    """Listeners on the server, master or Cluster of `client`."""

    async def open_listener(key: str) -> Listener:
        if isinstance(client, ClusterClient):
            kind, options = await client.node_options(key)
            connection: Any = kind(**options | {"retry": Retry(NoBackoff(), 0)})
        else:
            pool: Any = client.connection_pool
            connection = pool.make_connection()
            connection.retry = Retry(NoBackoff(), 0)
        try:
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                await connection.connect()
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return Listener(connection, sharded=isinstance(client, ClusterClient))

    return open_listener
