"""Readers that know the protocol page and nothing of the package: plain Redis commands, one reader a request.

Each folds the events that it got into choices and raises `Violation` where a token is lost, doubled or out of place.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import struct
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from tests.chaos.catalogue import Task

WATCHDOG_S = 1.0
ENDED = ("completed", "cancelled", "failed", "expired", "rejected")


class Violation(Exception):
    """The claim does not hold for request `request_id`. `events`: its events, record and dead letters as text."""

    def __init__(self, request_id: str, message: str) -> None:
        super().__init__(f"{request_id}: {message}")
        self.request_id = request_id
        self.events: list[str] = []


@dataclass(slots=True)
class _Choice:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    chain: int = 0
    finish_reason: str | None = None


@dataclass(slots=True)
class Fold:
    """What the events of one request say so far."""

    request_id: str
    seq: int = 0
    choices: dict[int, _Choice] = field(default_factory=dict)
    done: dict[str, Any] | None = None
    rewinds: int = 0

    def add(self, item: dict[str, Any]) -> None:
        """Take the next event in."""
        self._require(item["seq"] == self.seq + 1, f"event {item['seq']} follows event {self.seq}")
        self._require(self.done is None, "an event after done")
        self.seq = item["seq"]
        if item["type"] == "delta":
            self._delta(item)
        elif item["type"] == "choice":
            self.choices.setdefault(item["index"], _Choice()).finish_reason = item["finish_reason"]
        elif item["type"] == "rewind":
            self.rewinds += 1
        elif item["type"] == "done":
            self.done = item

    def _delta(self, item: dict[str, Any]) -> None:
        choice = self.choices.setdefault(item["index"], _Choice())
        ids = item["token_ids"]
        self._require(item["offset"] == len(choice.token_ids), f"offset {item['offset']} in event {self.seq}")
        self._require(item["count"] == len(ids), f"count {item['count']} in event {self.seq}")
        self._require(item["text_offset"] == len(choice.text), f"text_offset in event {self.seq}")
        choice.token_ids += ids
        choice.text += item["text"]
        choice.chain = zlib.crc32(struct.pack(f"<{len(ids)}I", *ids), choice.chain)
        self._require(int(item["chain"], 16) == choice.chain, f"chain of event {self.seq}")

    def check(self, task: Task) -> None:
        """Hold what was read against the undisturbed answer: all of it if completed, else a beginning."""
        assert self.done is not None
        state = self.done["state"]
        self._require(state in ("completed", "cancelled"), f"ended as {state}: {self.done.get('error')}")
        self._require(self.rewinds == 0, "its tokens were taken back")
        for index, answer in enumerate(task.answers):
            choice = self.choices.get(index, _Choice())
            ids = tuple(choice.token_ids)
            if state == "completed" or choice.finish_reason not in (None, "cancelled"):
                self._require(ids == answer.token_ids, f"choice {index} is {ids} and not {answer.token_ids}")
                self._require(choice.text == answer.text, f"text {choice.text!r} and not {answer.text!r}")
                self._require(choice.finish_reason == answer.finish_reason, f"ended by {choice.finish_reason}")
            else:
                self._require(ids == answer.token_ids[: len(ids)], f"choice {index} begins {ids}")
                # A character whose bytes were cut in two by the cancel is shown as a replacement.
                whole = choice.text.rstrip("\ufffd")
                self._require(answer.text.startswith(whole), f"text {choice.text!r} of {answer.text!r}")

    def _require(self, holds: bool, message: str) -> None:
        if not holds:
            raise Violation(self.request_id, message)


@dataclass(frozen=True, slots=True)
class Manner:
    """How a reader behaves: the share of live messages that it loses, its pause after each event, when it comes (s)."""

    loss: float = 0.0
    pause_s: float = 0.0
    comes_after_s: float = 0.0


def plain_client(url: str) -> aioredis.Redis:
    """A client that repeats nothing by itself."""
    return aioredis.Redis.from_url(url, protocol=2, socket_timeout=3, retry=Retry(NoBackoff(), 0))


async def read(url: str, tag: str, request_id: str, manner: Manner, rng: random.Random) -> Fold:
    """Follow one request to its end as docs/protocol.md says, over connections that may break at any moment."""
    await asyncio.sleep(manner.comes_after_s)
    fold = Fold(request_id)
    async with plain_client(url) as client:
        while fold.done is None:
            # A connection that broke is made anew, and the stream is read again from the last event on.
            with contextlib.suppress(RedisError, OSError):
                async with contextlib.aclosing(_events(client, tag, fold, manner, rng)) as items:
                    async for item in items:
                        fold.add(item)
                        if fold.done is not None:
                            break
                        if manner.pause_s:
                            await asyncio.sleep(manner.pause_s)
            if fold.done is None:
                await asyncio.sleep(0.05)
    return fold


async def _events(
    client: aioredis.Redis, tag: str, fold: Fold, manner: Manner, rng: random.Random
) -> AsyncIterator[dict[str, Any]]:
    name = fold.request_id
    async with client.pubsub() as pubsub:
        await pubsub.subscribe(f"{tag}:ch:{name}")
        while (await pubsub.get_message(timeout=WATCHDOG_S) or {}).get("type") != "subscribe":
            pass
        while True:
            stored = await client.xrange(f"{tag}:ev:{name}", f"({fold.seq}-0")
            for _, fields in stored:
                yield json.loads(fields[b"e"])
            state, seq = await client.hmget(f"{tag}:req:{name}", "state", "seq")
            if not stored and state is None and fold.seq:
                raise Violation(name, f"the record is gone after event {fold.seq}")
            if not stored and state is not None and state.decode() in ENDED and int(seq) <= fold.seq:
                raise Violation(name, f"it has ended as {state.decode()} and has no event after {fold.seq}")
            while True:
                message = await pubsub.get_message(timeout=WATCHDOG_S)
                if message is None:
                    break
                if message["type"] != "message" or rng.random() < manner.loss:
                    continue
                number, _, data = message["data"].partition(b" ")
                if int(number) == fold.seq + 1:
                    yield json.loads(data)
                elif int(number) > fold.seq + 1:
                    break
