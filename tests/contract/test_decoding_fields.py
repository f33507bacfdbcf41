"""Log-probabilities, penalties and structured output as a producer in any language sees them."""

from __future__ import annotations

import json
from typing import Any

from pagemill.engine.async_engine import AsyncEngine
from pagemill.ingest.client import AsyncClient
from pagemill.ingest.config import QueueConfig
from tests.contract.conftest import STORY, Outside, serving

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer"}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}


def test_log_probabilities_stand_beside_the_tokens(
    play: Any, engine: AsyncEngine, queue_config: QueueConfig, outside: Outside
) -> None:
    async def scenario() -> None:
        async with serving(engine, queue_config), AsyncClient(queue_config) as client:
            await outside.add("l", STORY | {"logprobs": 2, "prompt_logprobs": 1, "n": 2})
            await outside.add("plain", STORY)
            done = await outside.done("l")
            await outside.done("plain")
            handle = await client.submit(**STORY, logprobs=0)
            seen = [entry async for delta in handle for entry in delta.logprobs or ()]
            choice = (await handle.result(timeout=60)).choices[0]
        assert done["state"] == "completed"
        deltas = [item for item in await outside.events("l") if item["type"] == "delta"]
        assert [len(item["logprobs"]) for item in deltas] == [item["count"] for item in deltas]
        entries = [entry for item in deltas if item["index"] == 0 for entry in item["logprobs"]]
        assert [entry["token_id"] for entry in entries] == await outside.token_ids("plain")
        assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == await outside.text("plain")
        for entry in entries:
            assert entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2
            assert entry["top_logprobs"][0]["logprob"] >= entry["top_logprobs"][1]["logprob"]
        (told,) = [item["prompt_logprobs"] for item in deltas if "prompt_logprobs" in item]
        assert told[0] is None and len(told) == done["usage"]["prompt_tokens"]
        assert all(len(entry["top_logprobs"]) == 1 for entry in told[1:])
        assert {item["logprobs"] for item in await outside.events("plain") if item["type"] == "delta"} == {None}
        assert choice.logprobs == seen and [entry["token_id"] for entry in seen] == choice.token_ids
        await outside.assert_nothing_left()

    play(scenario())


def test_structured_output_goes_on_where_another_engine_stopped(
    play: Any, engine: AsyncEngine, queue_config: QueueConfig, outside: Outside
) -> None:
    body = {"prompt": "A city:", "response_format": FORMAT, "seed": 1, "max_tokens": 80, "frequency_penalty": 0.3}

    async def scenario() -> None:
        async with serving(engine, queue_config):
            await outside.add("whole", body)
            assert (await outside.done("whole"))["state"] == "completed"
        hasty = QueueConfig(redis_url=queue_config.redis_url, drain_timeout_s=0.0)
        async with serving(engine, hasty):
            await outside.add("cut", body | {"flush_ms": 0})
            await outside.first_delta("cut")
        assert (await outside.events("cut"))[-1]["type"] != "done", "too late: it had ended before the stop"
        async with serving(engine, queue_config):
            await outside.done("cut")
        assert await outside.token_ids("cut") == await outside.token_ids("whole")
        city = json.loads(await outside.text("cut"))
        assert set(city) == {"city", "people"}
        await outside.assert_nothing_left()

    play(scenario())


def test_a_broken_schema_is_refused_alone_while_neighbours_run(
    play: Any, engine: AsyncEngine, queue_config: QueueConfig, outside: Outside
) -> None:
    broken: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}},
        {"structured_outputs": {"regex": "(" * 500}},
        {"structured_outputs": {"grammar": "start: start"}},
        {"structured_outputs": {"json": {"type": "object", "minProperties": 5, "maxProperties": 2}}},
    ]

    async def scenario() -> None:
        async with serving(engine, queue_config):
            await outside.add("good", STORY)
            for index, fields in enumerate(broken):
                await outside.add(f"bad-{index}", {"prompt": "A city:"} | fields)
            assert (await outside.done("good"))["state"] == "completed"
            for index, fields in enumerate(broken):
                done = await outside.done(f"bad-{index}")
                assert (done["state"], done["error"]["code"]) == ("rejected", "invalid_request")
                assert done["error"]["param"] == next(iter(fields))
        await outside.assert_nothing_left()

    play(scenario())
