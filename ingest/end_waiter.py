"""Waiting for a request's end without its events: told by a channel of its own, the record then has the result.

A reader of all events costs processor time for each token, in the server and in its own process, beside the engine
where they share a machine. Most callers want the result alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from pagemill.engine.errors import RequestError
from pagemill.ingest.follower import Follower, Standing
from pagemill.ingest.results import Choice, Result

if TYPE_CHECKING:
    from pagemill.ingest.event_hub import EventHub


class EndWaiter(Follower):
    """Waits for the end of one request; made by `EventHub.wait_for_end`, for the names see `Follower`."""

    def __init__(self, hub: EventHub, request_id: str, *, expected: bool, patience_s: float | None) -> None:
        channel = hub.keys.shard_of(request_id).end_channel(request_id)
        super().__init__(hub, request_id, channel, expected=expected, patience_s=patience_s)

    def hear(self, message: bytes) -> None:
        self.fall_behind()

    async def result(self) -> Result:
        """How the request has ended, whatever its state. Raises `request_lost` where that will not be known, and
        `deadline_exceeded` where nobody has ended it in time."""
        await self._until_confirmed()
        while True:
            self._wake.clear()
            standing = await self._look_at_record("result", "usage", "metrics", "error")
            if standing is not None:
                if standing.has_ended:
                    return await self._result_of(standing)
                await self._look_at_deadline(standing.deadline)
            await self._until_woken()

    async def _result_of(self, standing: Standing) -> Result:
        # The record does not have what the sender wrote beside its request; the last event has, while it is kept.
        last: Any = await self._hub.command("XREVRANGE", self._stream, "+", "-", "COUNT", 1)
        try:
            choices, usage, metrics, error = (orjson.loads(value) if value else None for value in standing.more)
            done = orjson.loads(last[0][1][b"e"]) if last else {}
            return Result(
                request_id=self.request_id,
                state=standing.state,
                choices=[Choice(**choice) for choice in choices or ()],
                usage=usage or {},
                metrics=metrics or {},
                error=error,
                metadata=done.get("metadata") or {},
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise RequestError("request_lost", "the request's result cannot be read") from error
