"""Clients of several queues: a model's name says which."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import redis

from pagemill.adapters.cli.main import run as run_command
from pagemill.engine.errors import ConfigError, RequestError
from pagemill.ingest.client import AsyncClient, Client
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.model_map import read_models
from tests.ingest.producer import Producer

MODELS = {"small": "a", "large": "b", "big": "b"}


def test_models_are_given_as_a_mapping_or_as_text() -> None:
    assert read_models(None) == {} == read_models("")
    assert read_models("small=a, large=b,big=b") == MODELS == read_models(MODELS)
    assert read_models("org/model=7b=q") == {"org/model=7b": "q"}
    for bad in ("small", "=a", "small=", "small=with space", {"small": 3}, {"": "a"}):
        with pytest.raises(ConfigError, match="models must map names to queues"):
            read_models(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("model", [None, "huge", 7, ""])
def test_an_unknown_model_is_refused_with_those_that_are_known(queue_config: QueueConfig, run: Any, model: Any) -> None:
    async def scenario() -> None:
        async with AsyncClient(queue_config, models=MODELS) as client:
            for call in (
                lambda: client.submit(prompt="x", model=model),
                lambda: client.cancel("x", model=model),
                lambda: asyncio.to_thread(client.attach, "x", model=model),
            ):
                with pytest.raises(RequestError, match="known: small, large, big") as refused:
                    await call()
                assert refused.value.param == "model"
                assert refused.value.code == ("invalid_request" if model is None else "unsupported_model")

    run(scenario())


def test_a_request_goes_to_its_models_queue_and_is_followed_there(queue_config: QueueConfig, run: Any) -> None:
    async def scenario() -> None:
        async with AsyncClient(queue_config, models=MODELS) as client:
            for model, queue in MODELS.items():
                handle = await client.submit(prompt="x", model=model, id=f"r-{model}")
                producer = Producer(queue_config.replace(queue=queue), handle.id)
                await producer.begin()
                assert b"model" not in producer.entry.fields[b"body"]  # type: ignore[union-attr]
                await producer.delta()
                await producer.done()
                assert (await handle.result(timeout=60)).token_ids == [1]
                again = client.attach(handle.id, model=model)
                assert [delta.token_ids async for delta in again] == [[1]]
                assert await client.cancel(handle.id, model=model) == "completed"
                await producer.aclose()
            waiting = await client.submit(prompt="x", model="small")
            assert await waiting.cancel() == "cancelled"
        async with AsyncClient(queue_config, models="only=b") as client:
            assert (await client.submit(prompt="x")).id and (await client.submit(prompt="x", model="only")).id

    run(scenario())


def test_the_synchronous_client_and_the_shell_do_the_same(queue_config: QueueConfig) -> None:
    with Client(queue_config, models=MODELS) as client, redis.Redis.from_url(queue_config.redis_url) as plain:
        handle = client.submit("x", model="large")
        assert plain.xlen("pm:{b.0}:in:1") == 1
        assert client.attach(handle.id, model="big").cancel() == "cancelled" and handle.cancel() == "cancelled"
        other = client.submit("x", model="small")
        threads = [threading.Thread(target=other.cancel) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert plain.xlen("pm:{a.0}:in:1") == 0
        flags = ["--models", "small=a,large=b", "--redis-url", queue_config.redis_url]
        assert run_command(["submit", "hello", "--detach", "--model", "large", *flags]) == 0
        assert plain.xlen("pm:{b.0}:in:1") == 1
        assert run_command(["submit", "hello", "--detach", "--model", "huge", *flags]) != 0
        assert run_command(["cancel", "never-there", "--model", "small", *flags]) == 0
        assert plain.hget("pm:{a.0}:req:never-there", "cancel") == b"1"
