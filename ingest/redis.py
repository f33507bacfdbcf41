"""Redis clients, one kind for each use, and which failures mean "try again".

redis-py repeats by itself what was not answered. That is right for commands that may be repeated (here all are: every
write is a fenced script) and wrong for a blocking read, which would be delivered to nobody.
RESP 2 throughout: its reply shapes are the same in every release of redis-py and every server.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Sequence
from typing import Any, cast
from urllib.parse import urlsplit, urlunsplit

import redis.asyncio as aioredis
import structlog
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import Connection, SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    ClusterError,
    ConnectionError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

from pagemill.engine.errors import ConfigError
from pagemill.ingest.address import ServerAddress, parse_address

# What redis-py tells the server of itself. Where it is not given, each new connection reads its version from the files
# of the installed package.
_driver: dict[str, Any]
try:
    from redis.driver_info import DriverInfo

    _driver = {"driver_info": DriverInfo()}
except ImportError:  # an older one, which reads them once
    _driver = {}

hiredis: Any
try:
    import hiredis
except ImportError:  # producers are installed without it
    hiredis = None

_log = structlog.get_logger(__name__)

# The server is there but cannot serve now: it loads its data, has become a replica, is full or cannot save.
_UNAVAILABLE = (
    ConnectionError,
    TimeoutError,
    OSError,
    BusyLoadingError,
    ReadOnlyError,
    MasterDownError,
    MovedError,
    AskError,
    TryAgainError,
    ClusterDownError,
    ClusterError,  # redis-py's own: redirected too often, while a slot moves or its node is away
    OutOfMemoryError,
    NoScriptError,
)
_UNAVAILABLE_WORDS = ("MISCONF", "NOREPLICAS", "CLUSTERDOWN", "BUSY ", "UNKILLABLE", "LOADING", "READONLY", "OOM")
_BROKEN_OFF = ("Script killed by user",)

# The user may not: said plainly, in a script of Valkey, in one of Redis 7.0. Or the command has been renamed.
_FORBIDDEN_WORDS = (
    *("NOPERM", "ACL failure in script", "The user executing the script can't"),
    *("unknown command", "Unknown command", "Unknown Redis command"),
)

Command = tuple[str | bytes | int, ...]

MIN_VERSION = (7, 0)

REPLY_TIMEOUT_S = 5.0
CONNECTIONS = 32  # of one client; more calls at a time wait for a free one, where redis-py's pool would refuse them
KEPT = 4  # of them beside the pool, which looks at a connection before and after each use
SENTINEL_TIMEOUT_S = 1.0  # until the next Sentinel is asked

_SHAPE: dict[str, Any] = {
    "decode_responses": False,
    "protocol": 2,
    "socket_connect_timeout": 5,
    "socket_timeout": None,
    **_driver,
}


@functools.cache
def _packing(kind: Any) -> Any:
    """A kind of connection that has hiredis write its commands, where that is installed. The asyncio side of redis-py
    uses it for replies only, and writes an engine's flush, hundreds of arguments, ten times as slowly."""
    if hiredis is None:
        return kind

    class Packing(kind):  # type: ignore[misc]
        def pack_command(self, *args: Any) -> list[bytes]:
            return [hiredis.pack_command((*args[0].split(), *args[1:]))]

    return Packing


async def _exchange(connection: Any, commands: Sequence[Command]) -> list[Any]:
    packed = [chunk for words in commands for chunk in connection.pack_command(*words)]
    await connection.send_packed_command(packed)
    replies: list[Any] = []
    for _ in commands:
        try:
            replies.append(await connection.read_response())
        except ResponseError as error:
            replies.append(error)
    return replies


class ServerClient(aioredis.Redis):
    """A client of one server, or of the master that Sentinels name. See `connect_commands`."""

    publishes_sharded = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        pool: Any = self.connection_pool
        pool.connection_class = _packing(pool.connection_class)
        self._free_connections = asyncio.Semaphore(CONNECTIONS)
        self._kept: list[Any] = []

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        async with self._free_connections, asyncio.timeout(REPLY_TIMEOUT_S):
            return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands in one go. Raw replies in order; a command that failed has its exception in its place.

        For what goes out with every step of an engine: redis-py's pipelines do as much around each as the rest takes.
        """
        async with self._free_connections, asyncio.timeout(REPLY_TIMEOUT_S):
            pool: Any = self.connection_pool
            connection = self._kept.pop() if self._kept else await pool.get_connection()
            try:
                retry: Any = connection.retry
                replies: list[Any] = await retry.call_with_retry(
                    lambda: _exchange(connection, commands), lambda error: connection.disconnect()
                )
            except BaseException:
                # A reply that comes later would be taken for that of the next command.
                await connection.disconnect(nowait=True)
                await pool.release(connection)
                raise
            if len(self._kept) < KEPT:
                self._kept.append(connection)
            else:
                await pool.release(connection)
            return replies

    async def run_pipeline(self, pipeline: Any) -> list[Any]:
        """Send a pipeline. Replies in order; a command that failed has its exception in its place."""
        async with self._free_connections, asyncio.timeout(REPLY_TIMEOUT_S):
            if self._kept and len(pipeline):  # one without commands would not give it back
                pipeline.connection = self._kept.pop()  # goes back to the pool, where `send` finds it
            return list(await pipeline.execute(raise_on_error=False))


class ClusterClient(aioredis.RedisCluster):
    """A client of a Cluster. See `connect_commands`. Every command and script here has its keys in one slot.

    What redis-py says of a Cluster that cannot be reached is no `RedisError`; it becomes a `ConnectionError`.
    """

    publishes_sharded = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._free_connections = asyncio.Semaphore(CONNECTIONS)

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        async with self._free_connections, asyncio.timeout(REPLY_TIMEOUT_S):
            try:
                return await super().execute_command(*args, **options)
            except RedisClusterException as error:
                raise ConnectionError(str(error)) from error

    async def run_pipeline(self, pipeline: Any) -> list[Any]:
        """Send a pipeline, to several nodes where it has to. Replies as `ServerClient.run_pipeline`."""
        async with self._free_connections, asyncio.timeout(REPLY_TIMEOUT_S):
            try:
                replies = list(await pipeline.execute(raise_on_error=False))
            except RedisClusterException as error:
                raise ConnectionError(str(error)) from error
        return [ConnectionError(str(reply)) if isinstance(reply, RedisClusterException) else reply for reply in replies]

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        """See `ServerClient.send`. What scripts reply is raw; of other commands redis-py reads the replies."""
        pipeline = self.pipeline(transaction=False)
        for words in commands:
            pipeline.execute_command(*words)
        return await self.run_pipeline(pipeline)

    async def node_options(self, key: str) -> tuple[type[Connection], dict[str, Any]]:
        """How to connect to the node that has `key` now."""
        await self.execute_command("EXISTS", key)  # a node that has it no more says who has
        try:
            node: Any = self.get_node_from_key(key)
        except RedisClusterException as error:
            raise ConnectionError(str(error)) from error
        return node.connection_class, dict(node.connection_kwargs)


Client = ServerClient | ClusterClient


def connect_commands(url: str, name: str) -> Client:
    """For commands that may be repeated: a pool of connections, three retries.

    A command takes `REPLY_TIMEOUT_S` at most, retries included; then it raises `TimeoutError`. The time starts when
    one of the client's connections is free. redis-py's own `socket_timeout` is off: with it each send goes through
    `asyncio.wait_for`, which before Python 3.12 forgets a cancellation that comes while the send completes. A task that
    was told to end would go on for ever.
    """
    address = parse_address(url)
    retry = Retry(ExponentialWithJitterBackoff(base=0.01, cap=0.5), 3)
    options = {**_SHAPE, "client_name": name, "retry": retry, "health_check_interval": 15}
    if address.kind == "cluster":
        return ClusterClient(**_cluster_options(address, options))
    return cast(ServerClient, _server_client(ServerClient, address, options))


def connect_blocking(url: str, name: str) -> Any:
    """For XREADGROUP BLOCK: no time limit of its own and no retry, since a repeated read is another delivery."""
    address = parse_address(url)
    options = {**_SHAPE, "client_name": name, "retry": Retry(NoBackoff(), 0)}
    if address.kind == "cluster":
        return _BlockingCluster(**_cluster_options(address, options))
    if address.kind == "single":
        options["single_connection_client"] = True
    return _server_client(aioredis.Redis, address, options)


class _BlockingCluster(aioredis.RedisCluster):
    async def execute_command(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().execute_command(*args, **options)
        except RedisClusterException as error:
            raise ConnectionError(str(error)) from error


def _server_client(kind: type[aioredis.Redis], address: ServerAddress, options: dict[str, Any]) -> aioredis.Redis:
    if address.kind == "single":
        return kind.from_url(address.url, **options)
    given: dict[str, Any] = {**parse_url(address.url), **options}
    for name in ("host", "port"):
        given.pop(name, None)
    limits = {"socket_timeout": SENTINEL_TIMEOUT_S, "socket_connect_timeout": SENTINEL_TIMEOUT_S, "protocol": 2}
    asking = {**limits, "retry": Retry(NoBackoff(), 0), **dict(address.sentinel_options)}
    if given.pop("connection_class", None) is SSLConnection:
        given["ssl"] = True
        asking |= {"ssl": True, **{key: value for key, value in given.items() if key.startswith("ssl_")}}
    sentinels: Any = Sentinel
    made = sentinels(address.hosts, sentinel_kwargs=asking)
    return cast(aioredis.Redis, made.master_for(address.service, redis_class=kind, **given))


def _cluster_options(address: ServerAddress, options: dict[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = {**parse_url(address.url), **options}
    for name in ("host", "port", "db"):
        given.pop(name, None)
    if given.pop("connection_class", None) is SSLConnection:
        given["ssl"] = True
    # Slots of others may be without a node; ours are looked at when they are wanted.
    return {**given, "startup_nodes": [ClusterNode(*host) for host in address.hosts], "require_full_coverage": False}


def shown_url(url: str) -> str:
    """A URL without its user and password, for logs and messages."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=""))


def is_unavailable(error: BaseException) -> bool:
    """Whether the same command may succeed later, unchanged."""
    return isinstance(error, _UNAVAILABLE) or (
        isinstance(error, ResponseError) and str(error).startswith(_UNAVAILABLE_WORDS + _BROKEN_OFF)
    )


def is_forbidden(error: BaseException) -> bool:
    """Whether the user may not do this, or the server knows the command by another name: for a person to mend."""
    return isinstance(error, NoPermissionError) or (
        isinstance(error, ResponseError) and str(error).startswith(_FORBIDDEN_WORDS)
    )


def may_pass(error: BaseException) -> bool:
    """Whether the same command may succeed later, unchanged, perhaps once a person has mended something."""
    return is_unavailable(error) or is_forbidden(error)


def is_group_lost(error: ResponseError) -> bool:
    """Whether stream or group have gone (FLUSHALL, DEL): NOGROUP, or UNBLOCKED for a blocked reader of Redis 7.0."""
    text = str(error)
    return "NOGROUP" in text or text.startswith("UNBLOCKED")


class Backoff:
    """Waiting times that double from 0.1 s to 5 s, with jitter; `reset` after a success."""

    __slots__ = ("_wait",)

    def __init__(self) -> None:
        self._wait = 0.1

    def reset(self) -> None:
        self._wait = 0.1

    async def sleep(self) -> None:
        await asyncio.sleep(self._wait * random.uniform(0.5, 1.0))
        self._wait = min(5.0, self._wait * 2)


async def wait_for_server(client: Client, url: str, stopping: asyncio.Event) -> bool:
    """Wait until the server answers, with one line in the log. False: stopped before.

    Raises `ConfigError` where the server is too old or refuses the password.
    """
    backoff = Backoff()
    waiting = False
    while not stopping.is_set():
        try:
            info = await client.info()
        except AuthenticationError as error:
            raise ConfigError(f"{shown_url(url)} refuses user or password: {error}") from error
        except (RedisError, OSError) as error:
            if not is_unavailable(error):
                raise ConfigError(f"{shown_url(url)} cannot be used: {error}") from error
            if not waiting:
                _log.warning("waiting for redis", url=shown_url(url), reason=str(error))
            waiting = True
            await backoff.sleep()
            continue
        version = str(info["redis_version"])
        if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
            raise ConfigError(f"the server at {shown_url(url)} is Redis {version}; 7.0 is the least, or Valkey 7.2")
        if info.get("maxmemory") and info.get("maxmemory_policy") != "noeviction":
            _log.warning("redis may evict requests: set maxmemory-policy to noeviction", url=shown_url(url))
        return True
    return False
