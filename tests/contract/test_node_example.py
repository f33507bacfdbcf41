"""A client in another language, made from the protocol page: the example in Node.js against the engine."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pagemill.engine.async_engine import AsyncEngine
from pagemill.ingest.config import QueueConfig
from tests.contract.conftest import STORY, TAG, Outside, serving

EXAMPLE = Path(__file__).parents[2] / "examples" / "node"

SCRIPT = """
import { Queue } from './queue.js';
const [url, body] = process.argv.slice(-2);
const queue = new Queue(url);
const first = await queue.submit(JSON.parse(body), { id: 'story' });
const endless = await queue.submit({ ...JSON.parse(body), max_tokens: 300 });
const read = async (id, after) => {
  const events = [];
  for await (const event of queue.events(id, after)) {
    events.push(event);
    if (id === endless && event.type === 'delta' && events.length < 4) await queue.cancel(id);
  }
  return events;
};
const [early, twin, cancelled] = await Promise.all([read(first), read(first), read(endless)]);
const late = await read(first, 2);
console.log(JSON.stringify({ early, twin, cancelled, late }));
queue.close();
"""


def test_the_node_example(
    play: Any, engine: AsyncEngine, queue_config: QueueConfig, outside: Outside, story: list[int]
) -> None:
    node = shutil.which("node")
    if node is None or not (EXAMPLE / "node_modules" / "ioredis").is_dir():
        pytest.skip("needs node, and `npm ci` in examples/node (`make test` does it where npm is)")

    async def scenario() -> None:
        async with serving(engine, queue_config):
            process = await asyncio.create_subprocess_exec(
                *(node or "", "--input-type=module", "-e", SCRIPT, "--", queue_config.redis_url, json.dumps(STORY)),
                cwd=EXAMPLE,
                stdout=asyncio.subprocess.PIPE,
            )
            async with asyncio.timeout(60):
                output, _ = await process.communicate()
            assert process.returncode == 0
        told = json.loads(output)
        stored = await outside.events("story")
        assert told["early"] == told["twin"] == stored and told["late"] == stored[2:]
        assert [token for item in stored if item["type"] == "delta" for token in item["token_ids"]] == story
        assert told["cancelled"][-1]["state"] == "cancelled"
        assert not await outside.redis.pubsub_channels(f"{TAG}:*")
        await outside.assert_nothing_left()

    play(scenario())
