"""Gathering and sending events: against a real Valkey, with increments written by hand."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import orjson
import pytest

from pagemill.engine.errors import RequestError
from pagemill.engine.outputs import RequestMetrics, SequenceOutput
from pagemill.ingest import scripts
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.embedded import EmbeddedServer
from pagemill.ingest.entries import Entry
from pagemill.ingest.events import Transcript
from pagemill.ingest.intake import Intake
from pagemill.ingest.keys import GROUP, QueueKeys
from pagemill.ingest.live_request import Ending, LiveRequest
from pagemill.ingest.outbox import MAX_FLUSH_BYTES, Outbox
from pagemill.ingest.redis import Client, connect_commands
from pagemill.ingest.schema import RequestBody

Run = Callable[[Coroutine[Any, Any, Any]], Any]
SHARD = QueueKeys("pm", "default").shards[0]


async def begun(client: Client, request_id: str = "a", **body: Any) -> LiveRequest:
    """A request that this engine owns."""
    stream = SHARD.streams[1]
    if not await client.exists(stream):
        await client.xgroup_create(stream, GROUP, id="0", mkstream=True)
    await client.xadd(stream, {"v": 1, "id": request_id, "body": "{}"})
    reply: Any = await client.xreadgroup(GROUP, "e", {stream: ">"}, count=1)
    ((_, ((entry_id, fields),)),) = reply
    entry = Entry(SHARD, 1, entry_id, fields)
    call = scripts.begin(entry, "e", request_id, ttl_ms=60_000, tenant="default", seed=1)
    answer = scripts.BeginReply.read(await scripts.run_one(client, call))
    assert isinstance(answer, scripts.BeginReply)
    return LiveRequest(entry, request_id, "e", answer, RequestBody.from_mapping({"prompt": "x", **body}), "m")


async def events(client: Client, request_id: str = "a") -> list[dict[str, Any]]:
    items: Any = await client.xrange(SHARD.events(request_id))
    return [orjson.loads(fields[b"e"]) for _, fields in items]


def token(number: int, text: str = "t ", **options: Any) -> SequenceOutput:
    return SequenceOutput("a", token_ids=[number], text=text, final="finish_reason" in options, **options)


class Bench:
    """An outbox at work, and what it has told."""

    def __init__(self, config: QueueConfig) -> None:
        self.client = connect_commands(config.redis_url, "test")
        self.cancelled: list[str] = []
        self.ended: list[str] = []
        self.outbox = Outbox(
            self.client,
            config,
            on_cancel=lambda live, why: self.cancelled.append(why),
            on_end=lambda live, outcome: self.ended.append(outcome),
        )
        self.task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Bench:
        self.task = asyncio.create_task(self.outbox.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self.task is not None
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.client.aclose()

    async def sent(self) -> None:
        async with asyncio.timeout(60):
            await self.outbox.join()


def test_increments_become_events(queue_config: QueueConfig, run: Run) -> None:
    async def scenario() -> None:
        async with Bench(queue_config) as bench:
            live = await begun(bench.client, flush_ms=60_000)
            live.prompt_tokens = 3
            bench.outbox.put(live, SequenceOutput("a", started=True))
            await bench.sent()
            bench.outbox.put(live, token(5))
            await bench.sent()
            for number in (6, 7):
                bench.outbox.put(live, token(number))
            # Gathered until the end comes, which takes everything along in one step.
            assert [item["type"] for item in await events(bench.client)] == ["started", "delta"]
            metrics = RequestMetrics(queue_ms=1, ttft_ms=2, total_ms=3, cached_tokens=2)
            bench.outbox.put(live, token(8, "", finish_reason="stop", stop_reason=8, metrics=metrics))
            await bench.sent()
            kinds = [
                (item["type"], item.get("token_ids"), item.get("text_offset")) for item in await events(bench.client)
            ]
            assert kinds[:3] == [("started", None, None), ("delta", [5], 0), ("delta", [6, 7, 8], 2)]
            choice, done = (await events(bench.client))[3:]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 8)
            assert done["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "cached_tokens": 2}
            assert done["metrics"]["total_ms"] >= 3 and "error" not in done
            assert bench.ended == ["written"] and await bench.client.xlen(SHARD.streams[1]) == 0
            # What the engine still says afterwards counts for nothing.
            bench.outbox.put(live, token(9))
            await bench.sent()
            assert len(await events(bench.client)) == 5

    run(scenario())


def test_one_pipeline_carries_what_all_requests_say(queue_config: QueueConfig, run: Run) -> None:
    async def scenario() -> None:
        async with Bench(queue_config) as bench:
            lives = [await begun(bench.client, f"r{number}", flush_ms=0) for number in range(50)]
            for live in lives:
                bench.outbox.put(live, token(1))
            await bench.sent()
            assert bench.outbox.flushes == 1
            for live in lives:
                assert len(await events(bench.client, live.request_id)) == 1

    run(scenario())


def test_many_long_results_do_not_go_in_one_flush(queue_config: QueueConfig, run: Run) -> None:
    """Tokens that come meanwhile would wait for all of them."""

    async def scenario() -> None:
        async with Bench(queue_config) as bench:
            names = [f"r{number}" for number in range(8)]
            lives = [await begun(bench.client, name) for name in names]
            for live in lives:
                bench.outbox.put(live, SequenceOutput("a", started=True))
            await bench.sent()
            before = bench.outbox.flushes
            for live in lives:
                bench.outbox.put(live, token(5, "x" * MAX_FLUSH_BYTES, finish_reason="length"))
            await bench.sent()
            assert bench.outbox.flushes - before == len(lives)
            assert bench.ended == ["written"] * len(lives)
            for name in names:
                assert (await events(bench.client, name))[-1]["type"] == "done"

    run(scenario())


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_cancel_beats_an_end_that_is_not_written_yet(queue_config: QueueConfig, run: Run, by_hand: bool) -> None:
    async def scenario() -> None:
        async with Bench(queue_config) as bench:
            live = await begun(bench.client)
            bench.outbox.put(live, token(1, started=True))
            await bench.sent()
            await bench.client.hset(SHARD.record("a"), "cancel", "1")
            if by_hand:
                bench.outbox.put(live, token(2))
                bench.outbox.flush_now(live)
                await bench.sent()
                assert bench.cancelled == ["cancelled"]
                live.stopping = Ending("cancelled", RequestError("cancelled", "the request was cancelled"))
                bench.outbox.put(live, SequenceOutput("a", finish_reason="cancelled", final=True))
            else:
                bench.outbox.put(live, token(2, finish_reason="length"))
            await bench.sent()
            items = await events(bench.client)
            assert [item["seq"] for item in items] == list(range(1, len(items) + 1))
            assert [item["type"] for item in items[-3:]] == ["delta", "choice", "done"]
            assert items[-2]["finish_reason"] == "cancelled" and items[-1]["state"] == "cancelled"
            assert [n for item in items if item["type"] == "delta" for n in item["token_ids"]] == [1, 2]

    run(scenario())


def test_events_wait_while_redis_is_away(run: Run) -> None:
    """Nothing is lost, nothing doubled, and what gathers meanwhile goes out in one event."""

    async def scenario() -> None:
        server = EmbeddedServer()
        await asyncio.to_thread(server.start)
        config = QueueConfig(redis_url=server.url)
        try:
            async with Bench(config) as bench:
                live = await begun(bench.client, flush_ms=0)
                bench.outbox.put(live, token(1, started=True))
                await bench.sent()
                await asyncio.to_thread(server.kill)
                for number in range(2, 20):
                    bench.outbox.put(live, token(number))
                    await asyncio.sleep(0)
                bench.outbox.put(live, token(20, finish_reason="length"))
                await asyncio.sleep(1)  # several tries fail
                await asyncio.to_thread(server.start)
                await bench.sent()
                items = await events(bench.client)
                assert [n for item in items if item["type"] == "delta" for n in item["token_ids"]] == list(range(1, 21))
                assert items[-1]["state"] == "completed" and len(items) <= 7
                assert bench.ended == ["written"]
        finally:
            server.stop()

    run(scenario())


def test_lost_events_are_sent_again(queue_config: QueueConfig, run: Run) -> None:
    """A promoted replica that lacks the last writes is given them again from the request's own store."""

    async def scenario() -> None:
        async with Bench(queue_config) as bench:
            live = await begun(bench.client, flush_ms=0)
            for number in range(1, 6):
                bench.outbox.put(live, token(number))
                await bench.sent()
            before = await events(bench.client)
            await bench.client.delete(SHARD.events("a"))
            await bench.client.xadd(SHARD.events("a"), {"e": orjson.dumps(before[0])}, id="1-0")
            await bench.client.expire(SHARD.events("a"), 60)
            await bench.client.hset(SHARD.record("a"), "seq", "1")
            bench.outbox.put(live, token(6))
            await bench.sent()
            assert (await events(bench.client))[:5] == before and len(await events(bench.client)) == 6

    run(scenario())


def test_that_it_has_a_token_is_said_until_the_server_knows(queue_config: QueueConfig, run: Run) -> None:
    """Said once, and again after a server has lost it: by this an engine's death is not blamed on the request."""

    async def scenario() -> None:
        async with Bench(queue_config) as bench:
            live = await begun(bench.client, flush_ms=0)
            record = SHARD.record("a")
            bench.outbox.put(live, token(5))
            await bench.sent()
            assert await bench.client.hget(record, "progress") == b"1"
            await bench.client.hdel(record, "progress")
            bench.outbox.put(live, token(6))
            await bench.sent()
            assert await bench.client.hget(record, "progress") is None
            # The server is back to when it had nothing.
            await bench.client.delete(SHARD.events("a"))
            await bench.client.hset(record, "seq", 0)
            bench.outbox.put(live, token(7))
            await bench.sent()
            assert await bench.client.hget(record, "progress") == b"1"
            assert [item["token_ids"] for item in await events(bench.client)] == [[5], [6], [7]]

    run(scenario())


def test_requests_of_others_are_given_up(queue_config: QueueConfig, run: Run) -> None:
    async def scenario() -> None:
        async with Bench(queue_config) as bench:
            lives = {name: await begun(bench.client, name, flush_ms=0) for name in ("stale", "gone", "refused", "mine")}
            await bench.client.hset(SHARD.record("stale"), "owner", "other")
            await bench.client.delete(SHARD.record("gone"))
            await bench.client.set(SHARD.events("refused"), "no stream", ex=60)
            for live in lives.values():
                bench.outbox.put(live, token(1))
            await bench.sent()
            assert sorted(bench.ended) == ["lost", "lost", "refused"]
            assert [name for name, live in lives.items() if not live.detached] == ["mine"]
            bench.outbox.put(lives["mine"], token(2, finish_reason="length"))
            await bench.sent()
            assert (await events(bench.client, "mine"))[-1]["state"] == "completed"

    run(scenario())


def test_a_cancellation_is_never_forgotten(queue_config: QueueConfig, run: Run) -> None:
    """Whatever the moment, even while a command is on its way: who is told to end ends."""

    async def scenario() -> None:
        bench = Bench(queue_config)
        live = await begun(bench.client, flush_ms=0)
        moments = random.Random(3)
        for number in range(300):
            task = asyncio.create_task(bench.outbox.run())
            bench.outbox.put(live, token(number))
            await asyncio.sleep(moments.random() * 0.0015)
            task.cancel()
            done, _ = await asyncio.wait({task}, timeout=60)
            assert done, "the outbox goes on"
        await bench.client.aclose()

    run(scenario())


def test_lost_events_of_an_earlier_engine_are_sent_again_and_what_does_not_fit_is_refused(
    queue_config: QueueConfig, run: Run
) -> None:
    async def scenario() -> None:
        async with Bench(queue_config) as bench:
            first = await begun(bench.client, flush_ms=0)
            bench.outbox.put(first, SequenceOutput("a", started=True))
            for number in (5, 6, 7):
                bench.outbox.put(first, token(number))
                await bench.sent()
            told = await events(bench.client)
            await bench.client.xclaim(SHARD.streams[1], GROUP, "heir", 0, [first.entry.entry_id])
            call = scripts.begin(first.entry, "heir", "a", ttl_ms=60_000, tenant="default", seed=1)
            answer = scripts.BeginReply.read(await scripts.run_one(bench.client, call))
            assert isinstance(answer, scripts.BeginReply) and answer.seq == len(told) == 4
            heir = LiveRequest(first.entry, "a", "heir", answer, first.body, "m")
            intake = Intake(bench.client, queue_config, "heir", "m", asyncio.Event())
            await intake.recall(heir)
            assert heir.choices[0].token_ids == [5, 6, 7]
            # The server goes back to two events.
            kept: Any = await bench.client.xrange(SHARD.events("a"), count=2)
            await bench.client.delete(SHARD.events("a"))
            for entry_id, fields in kept:
                await bench.client.xadd(SHARD.events("a"), fields, id=entry_id)
            await bench.client.hset(SHARD.record("a"), "seq", 2)
            bench.outbox.put(heir, token(8))
            await bench.sent()
            assert (await events(bench.client))[:4] == told
            assert [item.get("token_ids") for item in (await events(bench.client))[1:]] == [[5], [6], [7], [8]]
            bench.outbox.put(heir, token(9, finish_reason="length"))
            await bench.sent()

            second = await begun(bench.client, "b", flush_ms=0)
            bench.outbox.put(second, SequenceOutput("b", started=True))
            for number in (5, 6):
                bench.outbox.put(second, token(number))
                await bench.sent()
            key = SHARD.events("b")
            kept = await bench.client.xrange(key)
            for damage, left in (
                (lambda data: data.replace(b'"token_ids":[6]', b'"token_ids":[7]'), [1, 2]),
                (lambda data: data.replace(b'"offset":1', b'"offset":2'), [1, 2]),
                (lambda data: None if b'"token_ids":[5]' in data else data, [1]),
                (lambda data: data[:-1], []),
                (lambda data: b"[]", []),
                (lambda data: None, []),
            ):
                await bench.client.delete(key)
                for entry_id, fields in kept:
                    if (data := damage(fields[b"e"])) is not None:
                        await bench.client.xadd(key, {"e": data}, id=entry_id)
                await bench.client.expire(key, 60)
                await bench.client.hset(SHARD.record("b"), "seq", len(kept))
                call = scripts.begin(second.entry, "e", "b", ttl_ms=60_000, tenant="default", seed=1)
                answer = scripts.BeginReply.read(await scripts.run_one(bench.client, call))
                assert isinstance(answer, scripts.BeginReply)
                heir = LiveRequest(second.entry, "b", "e", answer, second.body, "m")
                await Intake(bench.client, queue_config, "e", "m", asyncio.Event()).recall(heir)
                assert [item["seq"] for item in await events(bench.client, "b")] == left
                assert heir.published == heir.begun.seq == len(left)
                assert await bench.client.hget(SHARD.record("b"), "seq") == b"%d" % len(left)

    run(scenario())


@pytest.mark.parametrize("end", ["same", "differs", "shorter"])
def test_an_heir_says_only_where_it_differs_from_events_that_were_lost(
    queue_config: QueueConfig, run: Run, end: str
) -> None:
    """The stream lost its end, the record knows what had been told."""

    async def scenario() -> None:
        async with Bench(queue_config) as bench:
            first = await begun(bench.client, flush_ms=0)
            bench.outbox.put(first, SequenceOutput("a", started=True))
            for number in (5, 6, 7, 8):
                bench.outbox.put(first, token(number))
                await bench.sent()
            for lost in (b"4-0", b"5-0"):
                await bench.client.xdel(SHARD.events("a"), lost)
            for _ in range(2):  # the first heir dies before it has said anything
                call = scripts.begin(first.entry, "e", "a", ttl_ms=60_000, tenant="default", seed=1)
                answer = scripts.BeginReply.read(await scripts.run_one(bench.client, call))
                assert isinstance(answer, scripts.BeginReply)
                heir = LiveRequest(first.entry, "a", "e", answer, first.body, "m")
                await Intake(bench.client, queue_config, "e", "m", asyncio.Event()).recall(heir)
                bench.outbox.put(heir, SequenceOutput("a", started=True))
                await bench.sent()
                assert heir.choices[0].token_ids == [5, 6] and answer.told == f"4 {first.choices[0].chain}"
            bench.outbox.put(heir, token(7))
            await bench.sent()
            assert (await events(bench.client))[-1]["type"] == "started", "not known yet whether it is the same"
            if end == "shorter":
                bench.outbox.put(heir, SequenceOutput("a", finish_reason="stop", final=True))
            else:
                bench.outbox.put(heir, token(8 if end == "same" else 9))
                bench.outbox.put(heir, token(10, finish_reason="stop"))
            await bench.sent()
            told = await events(bench.client)
            assert [item["seq"] for item in told] == list(range(1, len(told) + 1))
            rewinds = [item for item in told if item["type"] == "rewind"]
            assert [(item["index"], item["to_offset"]) for item in rewinds] == ([] if end == "same" else [(0, 2)])
            transcript = Transcript.of(told)
            ends = {"same": [7, 8, 10], "differs": [7, 9, 10], "shorter": [7]}
            assert transcript.choice(0).token_ids == [5, 6, *ends[end]] and transcript.done is not None

    run(scenario())


def test_a_stream_that_is_deleted_under_its_engine_is_written_anew(queue_config: QueueConfig, run: Run) -> None:
    async def scenario() -> None:
        async with Bench(queue_config) as bench:
            live = await begun(bench.client, flush_ms=0)
            for number in (5, 6):
                bench.outbox.put(live, token(number))
                await bench.sent()
            await bench.client.delete(SHARD.events("a"))
            bench.outbox.put(live, token(7))
            await bench.sent()
            assert [item["token_ids"] for item in await events(bench.client)] == [[5], [6], [7]]
            assert await bench.client.pttl(SHARD.events("a")) > 0
            await bench.client.delete(SHARD.events("a"))
            bench.outbox.put(live, token(8, finish_reason="stop"))
            await bench.sent()
            told = await events(bench.client)
            assert [item["seq"] for item in told] == [1, 2, 3, 4, 5] and told[-1]["type"] == "done"
            assert await bench.client.pttl(SHARD.events("a")) > 0

    run(scenario())
