"""Entries that nobody can answer: moved to the dead letters at once, with the reason, so that no neighbour waits."""

from __future__ import annotations

import structlog

from pagemill.ingest import scripts
from pagemill.ingest.entries import Entry, UnreadableEntry
from pagemill.ingest.redis import Client

_log = structlog.get_logger(__name__)


async def bury(client: Client, entry: Entry, owner: str, problem: UnreadableEntry) -> bool:
    """Move a delivered entry to the dead letters. False: it was not this consumer's any more."""
    reply = await scripts.run_one(client, scripts.dead_letter(entry, owner, problem.reason, problem.message))
    buried = bool(reply[0] == b"ok")
    if buried:
        _log.warning(
            "entry moved to the dead letters",
            stream=entry.stream_key,
            entry=entry.entry_id.decode(),
            reason=problem.reason,
            error=problem.message,
        )
    return buried
