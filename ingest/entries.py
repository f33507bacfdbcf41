"""One entry of an input stream: the flat fields around a request's body."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pagemill.engine.errors import invalid
from pagemill.ingest.keys import QueueKeys, ShardKeys, is_request_id
from pagemill.ingest.schema import DEFAULT_TENANT, MAX_TTL_MS, RequestBody, check_tenant, parse_body

VERSION = b"1"


class UnreadableEntry(Exception):
    """An entry that nobody can answer, since it does not even say properly whose it is. `reason` is one word."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(frozen=True, slots=True)
class Offer:
    """Engine `owner` was given an entry, and this one has computed the `beginning` of its prompt. `level`: how long it
    is, see `placement.LEVELS`; `running`: requests that run there."""

    owner: str
    beginning: str
    level: int
    running: int


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry as it was delivered. `stream` is its priority 0..2, `entry_id` its id in that stream. `offer`: where it
    was delivered to another engine, which offers it to this one."""

    shard: ShardKeys
    stream: int
    entry_id: bytes
    fields: Mapping[bytes, bytes]
    offer: Offer | None = None

    @property
    def stream_key(self) -> str:
        return self.shard.streams[self.stream]

    @property
    def names(self) -> dict[str, str]:
        """What log lines say of its request before its body is read."""
        found = {name: self.fields.get(name.encode(), b"")[:128] for name in ("id", "tenant")}
        told = {name: value.decode(errors="backslashreplace") for name, value in found.items()}
        return {"request_id": told["id"], "tenant": told["tenant"] or DEFAULT_TENANT}


def read_id(fields: Mapping[bytes, bytes]) -> str:
    """The request id of an entry that can be answered. Raises `UnreadableEntry` for every other entry."""
    version = fields.get(b"v")
    if version != VERSION:
        shown = "missing" if version is None else ascii(version[:32].decode(errors="replace"))
        raise UnreadableEntry("unknown_version", f"field v must be 1, it is {shown}")
    raw_id = fields.get(b"id")
    if raw_id is None:
        raise UnreadableEntry("no_id", "field id is missing")
    request_id = raw_id.decode("ascii", errors="replace")
    if not is_request_id(request_id):
        raise UnreadableEntry(
            "invalid_id", f"field id may hold letters, digits and . _ - and at most 128 characters: {request_id[:64]!a}"
        )
    if b"body" not in fields and fields.get(b"blob") != b"1":
        raise UnreadableEntry("no_body", "neither field body nor blob is there")
    return request_id


def check_shard(keys: QueueKeys, entry: Entry, request_id: str) -> str:
    """The id, if its readers would look on the entry's shard. Raises `UnreadableEntry`."""
    right = keys.shard_of(request_id)
    if right != entry.shard:
        raise UnreadableEntry("wrong_shard", f"readers of this id look at shard {right.tag}")
    return request_id


def read_request(fields: Mapping[bytes, bytes], data: bytes, max_body_bytes: int) -> RequestBody:
    """Read the body `data` with what the entry's fields say about it. Raises `RequestError`.

    A field wins over the body: it is set by the producer's own code, while a body may be passed through from a user.
    """
    body = parse_body(data, max_body_bytes)
    changes: dict[str, Any] = {}
    if b"tenant" in fields:
        changes["tenant"] = check_tenant(fields[b"tenant"].decode(errors="replace"))
    if b"ttl_ms" in fields:
        digits = fields[b"ttl_ms"]
        if not digits.isdigit() or len(digits) > 12 or not 1 <= int(digits) <= MAX_TTL_MS:
            raise invalid(f"field ttl_ms must be an integer in [1, {MAX_TTL_MS}]", "ttl_ms")
        changes["ttl_ms"] = int(digits)
    return replace(body, **changes) if changes else body
