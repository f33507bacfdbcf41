"""From an owned request to one that the engine works on, or that has its end."""

from __future__ import annotations

import time
from functools import partial

import structlog
from redis.exceptions import RedisError

from pagemill.engine.async_engine import AsyncEngine
from pagemill.engine.errors import EngineDeadError, RequestError
from pagemill.engine.prompt import Prompt, TokenIds
from pagemill.ingest.intake import Intake
from pagemill.ingest.live_request import Ending, LiveRequest
from pagemill.ingest.outbox import Outbox
from pagemill.ingest.placement import HeldPrefixes
from pagemill.ingest.schema import RequestBody

_log = structlog.get_logger(__name__)


class Starter:
    """Hands owned requests to an engine; what they generate goes to the outbox."""

    def __init__(self, engine: AsyncEngine, intake: Intake, outbox: Outbox, held: HeldPrefixes | None = None) -> None:
        self._engine = engine
        self._intake = intake
        self._outbox = outbox
        self._held = held

    async def start(self, live: LiveRequest) -> None:
        """Hand an owned request to the engine, going on where another one stopped; or end it if it is to end here."""
        try:
            if live.begun.seq > 0:
                await self._intake.recall(live)
            if live.stopping is None:
                await self._prepare(live)
            if live.stopping is not None:
                live.ending = live.stopping
        except RequestError as error:
            live.ending = Ending("failed" if live.has_tokens else "rejected", error)
        except (RedisError, OSError, EngineDeadError):
            raise
        except Exception as error:
            # Whatever one request trips over must not end its neighbours.
            _log.exception("request failed to start", **live.names)
            live.ending = Ending("failed", RequestError("engine_error", f"{type(error).__name__}: {error}"))
        if live.ending is not None:
            self._outbox.flush_now(live)

    async def _prepare(self, live: LiveRequest) -> None:
        body = live.body
        assert body is not None
        request = await self._engine.prepare(
            live.request_id,
            _prompt(body),
            body.params,
            tenant=body.tenant,
            cache_salt=body.cache_salt,
            priority=live.entry.stream,
            seed=live.begun.seed,
        )
        live.transcript.tool_parser = request.tool_parser
        live.transcript.reasoning_parser = request.reasoning_parser
        live.prompt_tokens = len(request.prompt_token_ids)
        if self._held is not None:
            self._held.learn(live.beginnings, request)
        # It may have come back from an engine that took it over: what ran of it here is on its way out.
        await self._engine.wait_until_gone(live.request_id)
        if live.stopping is None and not live.detached:
            told = [choice.token_ids for choice in live.choices]
            time_left_s = live.expires_at - time.monotonic()
            self._engine.submit(request, partial(self._outbox.put, live), told, time_left_s=time_left_s)


def _prompt(body: RequestBody) -> Prompt:
    if body.prompt_token_ids is not None:
        return TokenIds(body.prompt_token_ids)
    if body.chat is not None:
        return body.chat
    assert body.prompt is not None
    return body.prompt
