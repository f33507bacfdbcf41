"""OpenAI's client for Node.js: the example against a gateway and an engine."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pagemill.engine.async_engine import AsyncEngine
from tests.adapters.http_gateway import Web

EXAMPLE = Path(__file__).parents[2] / "examples" / "node_openai"


def test_the_example(tried: Any, engine: AsyncEngine) -> None:
    node = shutil.which("node")
    if node is None or not (EXAMPLE / "node_modules").is_dir():
        pytest.skip("needs node, and `npm ci` in examples/node_openai (`make test` does it where npm is)")

    async def scenario(web: Web) -> None:
        process = await asyncio.create_subprocess_exec(
            node or "", "chat.js", f"{web.url}/v1", cwd=EXAMPLE, stdout=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(60):
            output, _ = await process.communicate()
        assert process.returncode == 0
        told = json.loads(output)
        assert told["chat"]["text"] and told["chat"]["tokens"] == 24
        assert told["tool"]["name"] == "add" and set(told["tool"]["arguments"]) == {"a", "b"}
        assert told["tool"]["end"] == "tool_calls"
        assert told["responses"]["first"] and told["responses"]["then"] and told["responses"]["previous"]
        assert told["abort"]["chunks"] == 3
        async with asyncio.timeout(60):
            while engine.num_live:
                await asyncio.sleep(0.01)

    tried(scenario)


def test_nothing_in_it_says_where_packages_come_from() -> None:
    lock = json.loads((EXAMPLE / "package-lock.json").read_text())
    assert lock["packages"] and not any("resolved" in package for package in lock["packages"].values())
