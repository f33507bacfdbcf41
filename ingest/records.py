"""A request's record as its reader sees it: where it stands, and once it has ended, its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from pagemill.engine.errors import RequestError
from pagemill.ingest.events import TERMINAL_STATES
from pagemill.ingest.keys import ShardKeys
from pagemill.ingest.redis import Client

_FIELDS = (
    *("state", "tenant", "attempt", "priority", "seq", "created", "deadline", "started", "finished"),
    *("cancel", "result", "usage", "metrics", "error"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Times are server ms, None where the request has not come so far. `seq`: events so far. `result`, `usage`,
    `metrics` and `error` are there once it has ended, `error` only where it did not complete."""

    request_id: str
    state: str
    tenant: str
    attempt: int
    priority: int
    seq: int
    created: int | None
    deadline: int | None
    started: int | None
    finished: int | None
    is_cancelled: bool
    result: list[dict[str, Any]] | None
    usage: Mapping[str, int] | None
    metrics: Mapping[str, Any] | None
    error: Mapping[str, Any] | None

    @property
    def has_ended(self) -> bool:
        return self.state in TERMINAL_STATES


async def read_record(client: Client, shard: ShardKeys, request_id: str) -> Record | None:
    """The record of a request; None where there is none, or only a note that it is to be cancelled.

    Raises redis-py's errors, and `request_lost` for one that cannot be read.
    """
    values: Any = await client.execute_command("HMGET", shard.record(request_id), *_FIELDS)
    given = dict(zip(_FIELDS, values, strict=True))
    if given["state"] is None:
        return None
    try:
        return _record(request_id, given)
    except (ValueError, orjson.JSONDecodeError) as error:
        raise RequestError("request_lost", "the request's record has been damaged") from error


def _record(request_id: str, given: Mapping[str, Any]) -> Record:
    return Record(
        request_id=request_id,
        state=given["state"].decode(),
        tenant=(given["tenant"] or b"default").decode(),
        attempt=int(given["attempt"] or 0),
        priority=int(given["priority"] or 0),
        seq=int(given["seq"] or 0),
        created=_number(given["created"]),
        deadline=_number(given["deadline"]),
        started=_number(given["started"]),
        finished=_number(given["finished"]),
        is_cancelled=given["cancel"] is not None,
        result=_json(given["result"]),
        usage=_json(given["usage"]),
        metrics=_json(given["metrics"]),
        error=_json(given["error"]),
    )


def _number(value: bytes | None) -> int | None:
    return int(value) if value else None


def _json(value: bytes | None) -> Any:
    return orjson.loads(value) if value else None
