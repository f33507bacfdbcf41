"""The Lua scripts of `ingest/lua`, each as a typed call and a typed reply.

A `Call` is made by one of the functions below and sent by `run`, as many as wanted in one pipeline: raw EVALSHA, one
round trip. A server that has forgotten the scripts (restart, failover) is taught them and gets the same calls again,
which is safe because every script may be repeated.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

from redis.exceptions import NoScriptError, ResponseError

from pagemill.ingest.entries import Entry
from pagemill.ingest.keys import GROUP, ShardKeys
from pagemill.ingest.redis import Client

GRACE_MS = 3_600_000  # how long keys of a live request outlast its deadline


@dataclass(frozen=True, slots=True)
class Script:
    text: str
    sha: str


@functools.cache
def script(name: str) -> Script:
    """A script with the functions of common.lua before it, and the SHA-1 that the server knows it by."""
    folder = resources.files("pagemill.ingest") / "lua"
    text = (folder / "common.lua").read_text() + (folder / f"{name}.lua").read_text()
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a script. `keys` all lie in one slot."""

    name: str
    keys: tuple[str, ...]
    args: tuple[str | bytes | int, ...]


async def run(client: Client, calls: Sequence[Call]) -> list[Any]:
    """Send `calls` in one pipeline. Raw replies in order; a call that failed has its exception in its place.

    Raises redis-py's connection errors; then any of the calls may or may not have been executed.
    """
    replies = await _send(client, calls)
    missing = [number for number, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
    if missing:
        for name in {calls[number].name for number in missing}:
            await client.script_load(script(name).text)
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
        pipeline.execute_command("EVALSHA", script(call.name).sha, len(call.keys), *call.keys, *call.args)
    return await client.run_pipeline(pipeline)


@dataclass(frozen=True, slots=True)
class SubmitReply:
    """`request_id` is the id that answers: with "attached" and "conflict" that of the earlier request."""

    status: Literal["ok", "repeated", "attached", "conflict", "duplicate"]
    request_id: str
    state: str | None = None

    @classmethod
    def read(cls, reply: list[bytes]) -> SubmitReply:
        status, request_id, *state = (word.decode() for word in reply)
        if status not in ("ok", "repeated", "attached", "conflict", "duplicate"):
            raise ResponseError(f"submit was answered {status[:64]!r}")
        return cls(status, request_id, state[0] if state else None)  # type: ignore[arg-type]


def submit(
    shard: ShardKeys,
    request_id: str,
    body: bytes,
    *,
    priority: int,
    submission: str,
    ttl_ms: int,
    tenant: str,
    as_blob: bool,
    traceparent: str | None = None,
    idempotency_key: str | None = None,
    idempotency_ttl_ms: int = 86_400_000,
) -> Call:
    """Accept a request. `submission` is a fresh random word, the same when the call is repeated."""
    keys = [shard.streams[priority], shard.record(request_id), shard.blob(request_id), shard.statistics]
    if idempotency_key is not None:
        keys.append(shard.idempotency(tenant, idempotency_key))
    body_hash = hashlib.sha256(body).hexdigest()
    blob = "1" if as_blob else "0"
    args = (request_id, priority, body, body_hash, submission, ttl_ms, GRACE_MS, tenant, blob, traceparent or "")
    return Call("submit", tuple(keys), (*args, idempotency_ttl_ms))


@dataclass(frozen=True, slots=True)
class BeginReply:
    """Where a request stands that this engine now owns. Times are ms of the server's clock."""

    attempt: int
    released: int
    seq: int
    seed: int
    created: int
    deadline: int
    now: int
    cancelled: bool

    @classmethod
    def read(cls, reply: list[bytes]) -> BeginReply | Literal["lost", "duplicate", "ended"]:
        if reply[0] != b"ok":
            return reply[0].decode()  # type: ignore[return-value]
        attempt, released, seq, seed, created, deadline, now = (int(number) for number in reply[1:8])
        return cls(attempt, released, seq, seed, created, deadline, now, reply[8] == b"1")


def begin(entry: Entry, owner: str, request_id: str, *, ttl_ms: int, tenant: str, seed: int) -> Call:
    """Become the owner of a delivered entry. `ttl_ms` and `tenant` count for an entry without a record."""
    shard = entry.shard
    return Call(
        "begin",
        (
            shard.record(request_id),
            shard.events(request_id),
            entry.stream_key,
            shard.dead_letters,
            shard.statistics,
        ),
        (GROUP, entry.entry_id, owner, request_id, ttl_ms, tenant, entry.stream, seed, GRACE_MS),
    )


@dataclass(frozen=True, slots=True)
class WriteReply:
    """What `append` and `finish` say. `seq`: events that are there now; with "gap" fewer than the caller believes."""

    status: Literal["ok", "gap", "stale", "gone", "cancelled"]
    seq: int = 0
    cancel: bool = False
    expired: bool = False

    @classmethod
    def read(cls, reply: bytes) -> WriteReply:
        status, *numbers = reply.decode().split()
        seq, cancel, expired = (*(int(number) for number in numbers), 0, 0, 0)[:3]
        return cls(status, seq, bool(cancel), bool(expired))  # type: ignore[arg-type]


def append(shard: ShardKeys, request_id: str, owner: str, attempt: int, offset: int, events: Sequence[bytes]) -> Call:
    """Publish events number offset + 1, offset + 2 ... of a running request."""
    return Call(
        "append",
        (shard.record(request_id), shard.events(request_id)),
        (owner, attempt, offset, shard.channel(request_id), GRACE_MS, *events),
    )


def finish(
    entry: Entry,
    request_id: str,
    owner: str,
    attempt: int,
    offset: int,
    events: Sequence[bytes],
    *,
    state: str,
    result: bytes,
    usage: bytes,
    metrics: bytes,
    error: bytes,
    num_tokens: int,
    result_ttl_ms: int,
    replay_ttl_ms: int,
    dead_letter: str = "",
) -> Call:
    """End a running request in `state`. `dead_letter`: a reason to keep the entry among the dead letters."""
    shard = entry.shard
    keys = (
        shard.record(request_id),
        shard.events(request_id),
        entry.stream_key,
        shard.dead_letters,
        shard.statistics,
        shard.blob(request_id),
    )
    fence = (GROUP, entry.entry_id, owner, attempt, offset, shard.channel(request_id), state)
    end = (result_ttl_ms, replay_ttl_ms, result, usage, metrics, error, num_tokens, dead_letter)
    return Call("finish", keys, (*fence, *end, *events))


def cancel(
    shard: ShardKeys, request_id: str, *, done: bytes, error: bytes, result_ttl_ms: int, replay_ttl_ms: int
) -> Call:
    """Cancel a request; replies b"cancelled", b"requested", b"noted", or b"ended" and its state.

    `done` is its terminal event with seq 1, used where nothing has been published yet.
    """
    keys = (shard.record(request_id), shard.events(request_id), shard.statistics, shard.blob(request_id))
    args = (GROUP, shard.channel(request_id), result_ttl_ms, replay_ttl_ms, done, error)
    return Call("cancel", (*keys, *shard.streams), args)


def release(shard: ShardKeys, request_id: str, owner: str, attempt: int) -> Call:
    """Give a running request back without burning an attempt."""
    return Call("release", (shard.record(request_id),), (owner, attempt))


def heartbeat(shard: ShardKeys, owner: str, description: bytes) -> Call:
    """Say that an engine lives; replies the server's time in ms."""
    return Call("heartbeat", (shard.heartbeats, shard.engines), (owner, description))


def adopt(shard: ShardKeys, stream: int, owner: str, *, timeout_ms: int, count: int) -> Call:
    """Take over entries of engines without a fresh heartbeat; replies entries, as XRANGE does."""
    return Call("adopt", (shard.streams[stream], shard.heartbeats), (GROUP, owner, timeout_ms, count))


def retire(shard: ShardKeys, owner: str) -> Call:
    """Take a stopping engine off the lists."""
    return Call("retire", (shard.heartbeats, shard.engines, *shard.streams), (GROUP, owner))


def dead_letter(entry: Entry, owner: str, reason: str, message: str) -> Call:
    """Move a delivered entry that cannot be answered to the dead letters."""
    shard = entry.shard
    return Call(
        "dead_letter",
        (entry.stream_key, shard.dead_letters, shard.statistics),
        (GROUP, entry.entry_id, owner, reason, message),
    )
