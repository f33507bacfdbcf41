"""A gateway and the session's engine for a scenario."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pagemill.ingest.config import QueueConfig


@pytest.fixture
def tried(play: Any, engine: Any, queue_config: QueueConfig) -> Any:
    """Runs a scenario with a gateway and an engine, and sees that nothing is left of it."""
    from tests.adapters.http_gateway import gateway
    from tests.contract.conftest import Outside, serving

    def run(scenario: Any, **settings: Any) -> Any:
        async def with_gateway() -> Any:
            outside = Outside(queue_config.redis_url)
            async with serving(engine, queue_config):
                async with gateway(queue_config, **settings) as web:
                    found = await scenario(web)
                async with asyncio.timeout(60):
                    while engine.num_live:
                        await asyncio.sleep(0.01)
            await outside.assert_nothing_left()
            await outside.aclose()
            return found

        return play(with_gateway())

    return run
