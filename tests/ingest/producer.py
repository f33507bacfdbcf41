"""Whoever owns a request and tells of it, by the scripts that an engine uses."""

from __future__ import annotations

import contextlib
from typing import Any

import orjson
from redis.exceptions import ResponseError

from pagemill.ingest import scripts
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.entries import Entry
from pagemill.ingest.events import NO_CHAIN, event, extend_chain
from pagemill.ingest.keys import GROUP, QueueKeys
from pagemill.ingest.redis import connect_commands


class Producer:
    """Owns one request and publishes `count` one-token deltas and the end of it."""

    def __init__(self, config: QueueConfig, request_id: str) -> None:
        self.redis = connect_commands(config.redis_url, "producer")
        self.shard = QueueKeys(config.key_prefix, config.queue).shard_of(request_id)
        self.request_id = request_id
        self.seq = 0
        self.chain = NO_CHAIN
        self.tokens: list[int] = []
        self.texts: list[str] = []
        self.attempt = 1
        self.entry: Entry | None = None

    async def begin(self) -> None:
        stream = self.shard.streams[1]
        if not await self.redis.exists(self.shard.record(self.request_id)):
            await self.redis.xadd(stream, {"v": 1, "id": self.request_id, "body": "{}"})
        with contextlib.suppress(ResponseError):  # the group is there
            await self.redis.xgroup_create(stream, GROUP, id="0", mkstream=True)
        reply: Any = await self.redis.xreadgroup(GROUP, "e1", {stream: ">"}, count=1)
        ((_, ((entry_id, fields),)),) = reply
        self.entry = Entry(self.shard, 1, entry_id, fields)
        call = scripts.begin(self.entry, "e1", self.request_id, ttl_ms=60_000, tenant="default", seed=1)
        assert (await scripts.run_one(self.redis, call))[0] == b"ok"

    async def delta(self, text: str | None = None, token_id: int | None = None) -> None:
        self.seq += 1
        token_id = self.seq if token_id is None else token_id
        self.chain = extend_chain(self.chain, [token_id])
        self.tokens.append(token_id)
        self.texts.append(f"{self.seq} " if text is None else text)
        fields = {"index": 0, "offset": self.seq - 1, "count": 1, "token_ids": [token_id]}
        fields |= {"text": self.texts[-1], "text_offset": 0, "logprobs": None}
        data = event(self.seq, self.attempt, "delta", **fields, chain=self.chain)
        call = scripts.append(self.shard, self.request_id, "e1", self.attempt, self.seq - 1, [data])
        assert (await scripts.run_one(self.redis, call)).startswith(b"ok")

    async def done(self, state: str = "completed", **fields: Any) -> None:
        assert self.entry is not None
        text = "".join(self.texts)
        choice = {"index": 0, "text": text, "token_ids": self.tokens, "finish_reason": "stop", "stop_reason": None}
        ends = [
            event(self.seq + 1, self.attempt, "choice", index=0, finish_reason="stop", stop_reason=None),
            event(
                self.seq + 2,
                self.attempt,
                "done",
                state=state,
                usage={"completion_tokens": self.seq},
                metrics={},
                **fields,
            ),
        ]
        call = scripts.finish(
            self.entry,
            self.request_id,
            "e1",
            self.attempt,
            self.seq,
            ends,
            state=state,
            result=orjson.dumps([choice]),
            usage=orjson.dumps({"completion_tokens": self.seq}),
            metrics=b"{}",
            error=orjson.dumps(fields["error"]) if "error" in fields else b"",
            num_tokens=self.seq,
            result_ttl_ms=3_600_000,
            replay_ttl_ms=600_000,
        )
        assert (await scripts.run_one(self.redis, call)).startswith(b"ok")

    async def aclose(self) -> None:
        await self.redis.aclose()


def expected_text(count: int) -> str:
    return "".join(f"{number} " for number in range(1, count + 1))
