"""Entries that nobody can answer, and requests that ended their engines: put aside with the reason, to be looked at.

A letter holds `reason`, `error`, `attempts`, `stream`, `entry`, and then the fields of the entry as they were sent,
each cut to `FIELD_BYTES`. A body that travelled in a key of its own is kept there for a week.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from pagemill.engine.errors import RequestError, invalid
from pagemill.ingest import scripts
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.entries import Entry, UnreadableEntry, read_id, read_request
from pagemill.ingest.keys import PRIORITIES, QueueKeys, ShardKeys
from pagemill.ingest.redis import Client

FIELD_BYTES = 65_536
PAGE = 100

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One letter. `fields` are those of the entry; the same name may have been sent twice, then the last one counts."""

    shard: ShardKeys
    letter_id: str
    reason: str
    error: str
    attempts: int
    stream: str
    entry_id: str
    fields: Mapping[bytes, bytes]

    @property
    def request_id(self) -> str:
        """The id that was sent, as far as it can be shown; empty where there was none."""
        return self.fields.get(b"id", b"")[:128].decode(errors="backslashreplace")

    @property
    def dead_at_ms(self) -> int:
        """When it was put here, in ms of the server's clock."""
        return int(self.letter_id.partition("-")[0])

    @classmethod
    def read(cls, shard: ShardKeys, letter_id: bytes, flat: list[bytes]) -> DeadLetter:
        names, values = flat[::2], flat[1::2]
        own = {name: value.decode(errors="backslashreplace") for name, value in zip(names[:5], values[:5], strict=True)}
        attempts = own.get(b"attempts", "")
        return cls(
            shard,
            letter_id.decode(),
            reason=own.get(b"reason", ""),
            error=own.get(b"error", ""),
            attempts=int(attempts) if attempts.isdecimal() else 0,
            stream=own.get(b"stream", ""),
            entry_id=own.get(b"entry", ""),
            fields=dict(zip(names[5:], values[5:], strict=True)),
        )


class DeadLetters:
    """The dead letters of a queue, on all of its shards."""

    def __init__(self, client: Client, config: QueueConfig) -> None:
        self._client = client
        self._config = config
        self._keys = QueueKeys(config.key_prefix, config.queue, config.shards)

    async def letters(self) -> AsyncIterator[DeadLetter]:
        """All of them, shard by shard, the oldest first."""
        for shard in self._keys.shards:
            last = "-"
            while True:
                page = await self._range(shard, last, "+")
                for letter in page:
                    yield letter
                if len(page) < PAGE:
                    break
                last = "(" + page[-1].letter_id

    async def find(self, letter_id: str) -> list[DeadLetter]:
        """The letters with this id: one, or with several shards perhaps more. Raises `RequestError` for no such id."""
        ms, dash, number = letter_id.partition("-")
        if not dash or not (ms + number).isdecimal():
            raise invalid(f"a dead letter's id looks like 1795968413315-0, got {letter_id[:40]!r}", "id")
        found = [letter for shard in self._keys.shards for letter in await self._range(shard, letter_id, letter_id)]
        if not found:
            raise invalid(f"there is no dead letter {letter_id[:40]}", "id")
        return found

    async def retry(self, letter: DeadLetter) -> str:
        """Submit the letter's request again, under a new id, and remove the letter. Returns the id.

        Doing it twice makes one request. Raises `RequestError`: it cannot be read, or the queue does not take it now.
        """
        fields, shard = letter.fields, letter.shard
        try:
            request_id = read_id(fields)
        except UnreadableEntry as problem:
            raise invalid(f"dead letter {letter.letter_id} cannot be sent again: {problem.message}", "id") from problem
        data = fields.get(b"body")
        if data is None:
            blob: Any = await self._client.get(shard.blob(request_id))
            if blob is None:
                raise RequestError("request_lost", f"the body of {request_id} is not kept any more", param="body")
            data = bytes(blob)
        elif len(data) >= FIELD_BYTES:
            raise RequestError("request_lost", f"the body of {request_id} was cut to {FIELD_BYTES} bytes", param="body")
        body = read_request(fields, data, self._config.max_body_bytes)
        priority = int(letter.stream[-1]) if letter.stream[-1:] in [str(n) for n in range(PRIORITIES)] else 1
        again = f"dead-letter:{letter.stream}:{letter.letter_id}"
        new_id = self._keys.new_id(again)
        call = scripts.submit(
            self._keys.shard_of(new_id),
            new_id,
            data,
            priority=priority,
            submission=again,
            ttl_ms=self._config.default_ttl_ms if body.ttl_ms is None else body.ttl_ms,
            tenant=body.tenant,
            as_blob=len(data) > self._config.blob_bytes,
            tokens=body.estimated_tokens,
            idempotency_key=again,
            idempotency_ttl_ms=int(self._config.idempotency_ttl_s * 1000),
            admission=scripts.Admission.of(self._config),
            keeping=scripts.Keeping.of(self._config),
            callback=body.stored_callback,
        )
        reply = scripts.SubmitReply.read(await scripts.run_one(self._client, call))
        if reply.status == "refused":
            raise reply.refusal()
        await self.remove(letter)
        return reply.request_id

    async def remove(self, letter: DeadLetter) -> None:
        await self._client.xdel(letter.shard.dead_letters, letter.letter_id)

    async def purge(self) -> int:
        """Remove all letters; returns how many there were."""
        return sum([await self._client.xtrim(shard.dead_letters, maxlen=0) for shard in self._keys.shards])

    async def _range(self, shard: ShardKeys, first: str, last: str) -> list[DeadLetter]:
        page: Any = await scripts.run_one(self._client, scripts.letters(shard, first, last, PAGE))
        return [DeadLetter.read(shard, *item) for item in page]


async def bury(client: Client, entry: Entry, owner: str, problem: UnreadableEntry) -> bool:
    """Move a delivered entry to the dead letters. False: it was not this consumer's any more."""
    reply = await scripts.run_one(client, scripts.dead_letter(entry, owner, problem.reason, problem.message))
    buried = bool(reply[0] == b"ok")
    if buried:
        _log.warning(
            "entry moved to the dead letters",
            **entry.names,
            stream=entry.stream_key,
            entry=entry.entry_id.decode(),
            reason=problem.reason,
            error=problem.message,
        )
    return buried
