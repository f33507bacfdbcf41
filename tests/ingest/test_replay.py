"""A server that loses what a reader was told: the same again is silent, another text is told to be another."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import orjson
import pytest

from pagemill.engine.errors import RequestError
from pagemill.ingest.client import AsyncClient
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.events import NO_CHAIN, Transcript, extend_chain
from pagemill.ingest.replay import Replay
from tests.ingest.producer import Producer

Run = Callable[[Coroutine[Any, Any, Any]], Any]


def cut(token_ids: list[int], cuts: list[int], attempt: int, first_seq: int = 1) -> list[dict[str, Any]]:
    """Delta events of one choice whose text is a letter for each token, cut at these places."""
    events, start, chain = [], 0, NO_CHAIN
    for number, end in enumerate(sorted({*cuts, len(token_ids)} - {0})):
        piece = token_ids[start:end]
        chain = extend_chain(chain, piece)
        text = "".join(chr(97 + token_id % 26) for token_id in piece)
        place = {"index": 0, "offset": start, "count": len(piece), "text_offset": start}
        kind = {"seq": first_seq + number, "attempt": attempt, "type": "delta"}
        events.append({**kind, **place, "token_ids": piece, "text": text, "chain": chain, "logprobs": None})
        start = end
    return events


def fold(events: list[Any]) -> Transcript:
    return Transcript.of(events)


def test_any_two_runs_end_in_the_second_ones_text_and_say_where_they_part() -> None:
    random_ = random.Random(3)
    for _ in range(400):
        first = [random_.randrange(3) for _ in range(random_.randint(1, 12))]
        same = random_.randint(0, len(first))
        second = first[:same] + [random_.randrange(3) for _ in range(random_.randint(0, 12))]
        told = fold(cut(first, random_.sample(range(13), 4), 1))
        replay = Replay(told)
        news: list[Any] = []
        events = cut(second, random_.sample(range(13), 4), 2) if second else []
        for event in events:
            news += replay.feed(event)
        news += replay.feed(
            {"seq": 99, "attempt": 2, "type": "choice", "index": 0, "finish_reason": "stop", "stop_reason": None}
        )
        # A reader that follows what comes out has the second run's text, and is told of every difference.
        reader = fold(cut(first, [], 1)).choice(0)
        for event in news:
            if event["type"] == "rewind":
                assert first[: event["to_offset"]] == second[: event["to_offset"]]
                reader.rewind(event["to_offset"], event["to_text_offset"])
            elif event["type"] == "delta":
                assert reader.continues(event) and event["text_offset"] == reader.text_length
                reader.extend(event["token_ids"], event["text"])
        assert reader.token_ids == second == told.choice(0).token_ids
        assert reader.text == told.choice(0).text == fold(events).choice(0).text
        if second[: len(first)] == first:
            assert not any(event["type"] == "rewind" for event in news)


def test_a_rewind_from_an_engine_takes_tokens_and_their_text_back() -> None:
    events: list[Any] = cut([1, 2, 3, 4], [2], 1)
    transcript = fold([*events, {"seq": 3, "attempt": 2, "type": "rewind", "index": 0, "to_offset": 2}])
    choice = transcript.choice(0)
    assert (choice.token_ids, choice.text, choice.chain) == ([1, 2], "bc", events[0]["chain"])
    assert choice.continues(cut([1, 2, 5], [2], 2)[1])
    assert not choice.continues(events[1] | {"chain": "00000000"})


class Rewritten:
    """A request of which the server has lost the last events, its engine being gone as well."""

    def __init__(self, producer: Producer) -> None:
        self.producer = producer

    async def lose(self, keep: int) -> None:
        """Go back to when `keep` events were there, and begin anew."""
        redis, shard = self.producer.redis, self.producer.shard
        events, record = shard.events("a"), shard.record("a")
        kept: Any = await redis.xrange(events, "-", f"{keep}-0")
        await redis.delete(events)
        for entry_id, fields in kept:
            await redis.xadd(events, fields, id=entry_id)
        await redis.expire(events, 60)
        await redis.hset(record, mapping={"seq": keep, "attempt": 2})
        self.producer.seq = keep
        del self.producer.tokens[keep:], self.producer.texts[keep:]
        self.producer.attempt = 2
        self.producer.chain = extend_chain(NO_CHAIN, list(range(1, keep + 1)))


@pytest.mark.parametrize("differs", [False, True])
def test_a_reader_outlives_a_server_that_lost_events(queue_config: QueueConfig, run: Run, differs: bool) -> None:
    async def scenario() -> None:
        producer = Producer(queue_config, "a")
        async with AsyncClient(queue_config, watchdog_s=0.2) as client:
            await producer.begin()
            seen: list[Any] = []
            ten = asyncio.Event()

            async def read() -> None:
                async for event in client.attach("a").events():
                    seen.append(event)
                    if len(seen) == 10:
                        ten.set()

            reading = asyncio.create_task(read())
            iterating = asyncio.create_task(_tokens(client))
            for _ in range(10):
                await producer.delta()
            await asyncio.wait_for(ten.wait(), 60)
            await Rewritten(producer).lose(6)
            for number in range(7, 15):
                await producer.delta(token_id=100 + number if differs and number >= 9 else None)
            await producer.done()
            await asyncio.wait_for(reading, 60)
            rewinds = [event for event in seen if event["type"] == "rewind"]
            if not differs:
                assert not rewinds
                assert [token for event in seen for token in event.get("token_ids", ())] == list(range(1, 15))
                assert await iterating == list(range(1, 15))
            else:
                (rewind,) = rewinds
                assert (rewind["index"], rewind["to_offset"]) == (0, 8)
                with pytest.raises(RequestError, match="not true any more"):
                    await iterating
            truth = [*range(1, 9), *(100 + number if differs else number for number in range(9, 15))]
            assert Transcript.of(seen).choice(0).token_ids == truth
            assert seen[-1]["type"] == "done" and [event["type"] for event in seen].count("done") == 1
            assert (await client.attach("a").result(timeout=60)).token_ids == truth
        await producer.aclose()

    async def _tokens(client: AsyncClient) -> list[int]:
        return [token async for delta in client.attach("a") for token in delta.token_ids]

    run(scenario())


def test_a_chain_that_does_not_fit_is_noticed_when_nothing_else_is(queue_config: QueueConfig, run: Run) -> None:
    """All that was lost has been written anew, with the same numbers, before the reader looks again."""

    async def scenario() -> None:
        producer = Producer(queue_config, "a")
        async with AsyncClient(queue_config, watchdog_s=600) as client:
            await producer.begin()
            seen: list[Any] = []
            five = asyncio.Event()

            async def read() -> None:
                async for event in client.attach("a").events():
                    seen.append(event)
                    if len(seen) == 5:
                        five.set()

            reading = asyncio.create_task(read())
            for _ in range(5):
                await producer.delta()
            await asyncio.wait_for(five.wait(), 60)
            await Rewritten(producer).lose(3)
            events, record = producer.shard.events("a"), producer.shard.record("a")
            producer.attempt = 1
            await producer.redis.hset(record, "attempt", 1)
            for data in cut([1, 2, 3, 104, 105, 106], [1, 2, 3, 4, 5], 1)[3:]:
                await producer.redis.xadd(events, {"e": orjson.dumps(data)}, id=f"{data['seq']}-0")
            await producer.redis.hset(record, "seq", 6)
            producer.seq, producer.chain = 6, extend_chain(NO_CHAIN, [1, 2, 3, 104, 105, 106])
            await producer.delta(token_id=107)
            await producer.done()
            await asyncio.wait_for(reading, 60)
            assert [event["to_offset"] for event in seen if event["type"] == "rewind"] == [3]
            assert Transcript.of(seen).choice(0).token_ids == [1, 2, 3, 104, 105, 106, 107]
        await producer.aclose()

    run(scenario())
