"""Several choices, and beams, through the queue."""

from __future__ import annotations

from typing import Any

import pytest

from pagemill.engine.async_engine import AsyncEngine
from pagemill.ingest.client import AsyncClient
from pagemill.ingest.config import QueueConfig
from tests.contract.conftest import STORY, TAG, Outside, serving

CHOICES = {"prompt": "My name is", "max_tokens": 10, "n": 3, "seed": 5, "ignore_eos": True}


def texts(events: list[dict[str, Any]]) -> dict[int, str]:
    found: dict[int, str] = {}
    for item in events:
        if item["type"] == "delta":
            assert item["text_offset"] == len(found.get(item["index"], ""))
            found[item["index"]] = found.get(item["index"], "") + item["text"]
    return found


@pytest.mark.parametrize("stream", [True, False])
def test_each_choice_has_its_deltas_and_its_end(
    play: Any, engine: AsyncEngine, queue_config: QueueConfig, outside: Outside, stream: bool
) -> None:
    async def scenario() -> None:
        async with serving(engine, queue_config):
            await outside.add("a", CHOICES | {"stream": stream})
            done = await outside.done("a")
        events = await outside.events("a")
        assert [item["seq"] for item in events] == list(range(1, len(events) + 1))
        assert done["usage"]["completion_tokens"] == 30 and done["usage"]["prompt_tokens"] < 10
        tokens = dict.fromkeys(range(3), 0)
        for item in events:
            if item["type"] == "delta":
                assert item["offset"] == tokens[item["index"]] and item["count"] == len(item["token_ids"])
                tokens[item["index"]] += item["count"]
        assert tokens == {0: 10, 1: 10, 2: 10}
        ends = [(item["index"], item["finish_reason"]) for item in events if item["type"] == "choice"]
        assert ends == [(0, "length"), (1, "length"), (2, "length")]
        assert len(set(texts(events).values())) == 3
        await outside.assert_nothing_left()

    play(scenario())


def test_choices_go_on_where_another_engine_stopped(
    play: Any, engine: AsyncEngine, queue_config: QueueConfig, outside: Outside
) -> None:
    """The worker is stopped in mid-generation without time to drain; the next one takes the request over."""

    async def scenario() -> None:
        async with serving(engine, queue_config):
            await outside.add("whole", CHOICES)
            await outside.done("whole")
        hasty = QueueConfig(redis_url=queue_config.redis_url, drain_timeout_s=0.0)
        async with serving(engine, hasty):
            await outside.add("cut", CHOICES | {"flush_ms": 0})
            await outside.first_delta("cut")
        assert (await outside.events("cut"))[-1]["type"] != "done", "too late: it had ended before the stop"
        async with serving(engine, queue_config):
            await outside.done("cut")
        assert texts(await outside.events("cut")) == texts(await outside.events("whole"))
        await outside.assert_nothing_left()

    play(scenario())


def test_beams_are_told_at_the_end_best_first(
    play: Any, engine: AsyncEngine, queue_config: QueueConfig, outside: Outside
) -> None:
    async def scenario() -> None:
        async with serving(engine, queue_config):
            await outside.add("b", {"prompt": "The capital of France is", "max_tokens": 6, "beam_width": 4, "n": 2})
            done = await outside.done("b")
        events = await outside.events("b")
        assert [item["type"] for item in events] == ["started", "delta", "delta", "choice", "choice", "done"]
        assert done["state"] == "completed" and "Paris" in texts(events)[0]
        await outside.assert_nothing_left()

    play(scenario())


def test_cancelling_ends_every_choice(
    play: Any, engine: AsyncEngine, queue_config: QueueConfig, outside: Outside
) -> None:
    async def scenario() -> None:
        async with serving(engine, queue_config):
            await outside.add("c", CHOICES | {"max_tokens": 300, "flush_ms": 0})
            await outside.first_delta("c")
            await outside.redis.hset(f"{TAG}:req:c", "cancel", "1")
            done = await outside.done("c")
        assert done["state"] == "cancelled"
        ends = [item["finish_reason"] for item in await outside.events("c") if item["type"] == "choice"]
        assert ends == ["cancelled"] * 3
        await outside.assert_nothing_left()

    play(scenario())


def test_the_client_sees_all_choices(play: Any, engine: AsyncEngine, queue_config: QueueConfig) -> None:
    async def scenario() -> None:
        async with serving(engine, queue_config), AsyncClient(queue_config) as client:
            handle = await client.submit(**(STORY | {"n": 2, "temperature": 1.0, "seed": 3}))
            result = await handle.result(timeout=60)
            assert [choice.index for choice in result.choices] == [0, 1]
            assert result.choices[0].text != result.choices[1].text

    play(scenario())
