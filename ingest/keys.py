"""Names in Redis. The only place that builds a key or a channel, and that says which shard a request lives on.

All keys of a shard share the hash tag `{queue.shard}`, so that one script may touch any of them on a cluster too.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
import zlib
from dataclasses import dataclass, field

REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
QUEUE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}")
PRIORITIES = 3
GROUP = "engines"

_OWN_ID = re.compile(r"r([0-9a-z]{1,4})_[0-9a-f]{12}7[0-9a-f]{3}[89ab][0-9a-f]{15}")
_BASE36 = "0123456789abcdefghijklmnopqrstuvwxyz"


def is_request_id(value: object) -> bool:
    return isinstance(value, str) and REQUEST_ID.fullmatch(value) is not None


def is_queue_name(value: object) -> bool:
    return isinstance(value, str) and QUEUE_NAME.fullmatch(value) is not None


def _base36(number: int) -> str:
    digits = ""
    while True:
        number, digit = divmod(number, 36)
        digits = _BASE36[digit] + digits
        if not number:
            return digits


def uuid7_hex() -> str:
    """A version 7 UUID (RFC 9562), 32 hex digits: 48 bits of Unix milliseconds, then 74 random bits."""
    random = int.from_bytes(os.urandom(10), "big")
    value = (time.time_ns() // 1_000_000 & (1 << 48) - 1) << 80 | random
    value = value & ~(0xF << 76) | 7 << 76
    value = value & ~(3 << 62) | 2 << 62
    return f"{value:032x}"


@dataclass(frozen=True, slots=True)
class ShardKeys:
    """The keys of one shard. `tag` is its hash tag with the braces; `base` what every key begins with, for scripts that
    build those of requests."""

    prefix: str
    tag: str
    base: str = field(init=False)
    streams: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "base", f"{self.prefix}:{self.tag}:")
        object.__setattr__(self, "streams", tuple(self._key(f"in:{priority}") for priority in range(PRIORITIES)))

    def _key(self, name: str) -> str:
        return self.base + name

    @property
    def waiting(self) -> str:
        return self._key("wait")

    @property
    def load(self) -> str:
        return self._key("load")

    def record(self, request_id: str) -> str:
        return self._key(f"req:{request_id}")

    def events(self, request_id: str) -> str:
        return self._key(f"ev:{request_id}")

    def channel(self, request_id: str) -> str:
        return self._key(f"ch:{request_id}")

    def blob(self, request_id: str) -> str:
        return self._key(f"blob:{request_id}")

    def note(self, request_id: str) -> str:
        """What an adapter keeps beside a request."""
        return self._key(f"note:{request_id}")

    def document(self, name: str) -> str:
        """What an adapter keeps on the shelf."""
        return self._key(f"doc:{name}")

    def end_channel(self, request_id: str) -> str:
        return self._key(f"end:{request_id}")

    def watch(self, request_id: str) -> str:
        return self._key(f"watch:{request_id}")

    def idempotency(self, tenant: str, key: str) -> str:
        return self._key(f"idem:{tenant}:{hashlib.sha256(key.encode()).hexdigest()}")

    @property
    def dead_letters(self) -> str:
        return self._key("dlq")

    @property
    def hooks_due(self) -> str:
        return self._key("hook:due")

    @property
    def hooks_dead(self) -> str:
        return self._key("hook:dead")

    @property
    def hooks_off(self) -> str:
        """URLs that are disabled, each with the reason."""
        return self._key("hook:off")

    def hook(self, delivery_id: str) -> str:
        return self._key(f"hook:{delivery_id}")

    def hook_sender(self, host: str) -> str:
        """There while a sender of webhooks on `host` gets on."""
        return self._key(f"hook:at:{host}")

    @property
    def delayed(self) -> str:
        return self._key("delay")

    @property
    def engines(self) -> str:
        return self._key("engines")

    @property
    def heartbeats(self) -> str:
        return self._key("hb")

    def warm(self, owner: str) -> str:
        """Names of the prompt beginnings that an engine has in its pool."""
        return self._key(f"warm:{owner}")

    def told(self, owner: str) -> str:
        """What other engines tell an engine."""
        return self._key(f"to:{owner}")

    @property
    def statistics(self) -> str:
        return self._key("stat")

    def lasting(self) -> frozenset[str]:
        """The keys that may exist without a time to live."""
        return frozenset(self.kinds()) - {self.waiting, self.load}

    def kinds(self) -> dict[str, str]:
        """The type of each key that all requests of the shard share."""
        streams = (*self.streams, self.dead_letters, self.hooks_dead)
        sorted_sets = (self.delayed, self.heartbeats, self.hooks_due, self.waiting)
        hashes = (self.engines, self.statistics, self.load)
        return dict.fromkeys(streams, "stream") | dict.fromkeys(sorted_sets, "zset") | dict.fromkeys(hashes, "hash")


@dataclass(frozen=True, slots=True)
class QueueKeys:
    """The keys of one queue, by shard."""

    prefix: str
    queue: str
    num_shards: int = 1
    shards: tuple[ShardKeys, ...] = field(init=False)

    def __post_init__(self) -> None:
        tags = (f"{{{self.queue}.{number}}}" for number in range(self.num_shards))
        object.__setattr__(self, "shards", tuple(ShardKeys(self.prefix, tag) for tag in tags))

    def new_id(self, idempotency_key: str | None = None) -> str:
        """A fresh request id that names its shard; requests with the same idempotency key meet on one shard."""
        unique = uuid7_hex()
        source = unique if idempotency_key is None else idempotency_key
        return f"r{_base36(zlib.crc32(source.encode()) % self.num_shards)}_{unique}"

    def shard_number(self, request_id: str) -> int:
        own = _OWN_ID.fullmatch(request_id)
        if own is not None and (number := int(own[1], 36)) < self.num_shards:
            return number
        return zlib.crc32(request_id.encode()) % self.num_shards

    def shard_of(self, request_id: str) -> ShardKeys:
        return self.shards[self.shard_number(request_id)]
