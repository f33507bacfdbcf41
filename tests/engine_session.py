"""One real engine for the session, on one event loop; nothing heavy is imported by tests that do not use it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def engine_loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def engine(engine_loop: asyncio.Runner) -> Iterator[Any]:
    from pagemill.engine.async_engine import AsyncEngine
    from tests.contract.conftest import ENGINE

    made = engine_loop.run(AsyncEngine.create(ENGINE))
    yield made
    engine_loop.run(made.stop())


@pytest.fixture
def play(engine_loop: asyncio.Runner) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Runs a scenario on the engine's event loop."""
    return engine_loop.run
