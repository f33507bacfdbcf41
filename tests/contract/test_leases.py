"""Engines that die of a request, hang, or take long: who runs again, how often, and beside whom. Tiny models."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from pagemill.engine.async_engine import AsyncEngine, Pace
from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import EngineDeadError
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.leases import most_s
from pagemill.ingest.worker import Worker
from tests.chaos.engine_host import run_until_signal
from tests.contract.conftest import TAG, Outside
from tests.engine.tiny_models import CONFIGS, save_model

FATAL = 13  # a prompt that begins so ends the engine
BODY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 12, "flush_ms": 0}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder: Path = save_model(CONFIGS["llama-gqa"](), tmp_path_factory.mktemp("tiny"))
    return EngineConfig(
        model=str(folder),
        dtype="float32",
        max_model_len=128,
        num_blocks_override=65,
        threads=1,
        skip_tokenizer_init=True,
    )


def prompt(number: int) -> dict[str, Any]:
    return {**BODY, "prompt_token_ids": [20 + number, 21, 22, 23]}


class Steps:
    """A hold on an engine's steps."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.step = engine._parts.core.step
        self.requests = engine._parts.core.scheduler.requests
        self.go = threading.Event()
        self.go.set()
        self.held = threading.Event()
        self.hold_when_begun = False  # from a request's first token on, however slow whoever asked is to say so
        engine._parts.core.step = self  # type: ignore[method-assign]

    def __call__(self) -> Any:
        if any(request.prompt_token_ids[0] == FATAL for request in self.requests()):
            raise RuntimeError("the device is gone")
        if self.hold_when_begun and any(request.output_token_ids for request in self.requests()):
            self.go.clear()
        if not self.go.is_set():
            self.held.set()
            self.go.wait(60)
        return self.step()


class Supervisor:
    """Starts an engine, and another one when it has died, as a process manager would."""

    def __init__(self, tiny: EngineConfig, config: QueueConfig) -> None:
        self.deaths = 0
        self._tiny, self._config = tiny, config
        self._task = asyncio.create_task(self._run())
        self._worker: Worker | None = None

    async def _run(self) -> None:
        while True:
            engine = await AsyncEngine.create(self._tiny)
            Steps(engine)
            self._worker = Worker(engine, self._config)
            try:
                await self._worker.run()
                return
            except EngineDeadError:
                self.deaths += 1
            finally:
                await engine.stop()

    async def stop(self) -> None:
        assert self._worker is not None
        self._worker.stop()
        await self._task


async def alone(tiny: EngineConfig, config: QueueConfig, numbers: range) -> dict[int, list[int]]:
    """The tokens of some prompts, undisturbed."""
    outside = Outside(config.redis_url, "quiet")
    engine = await AsyncEngine.create(tiny)
    worker = Worker(engine, config.replace(queue="quiet"))
    task = asyncio.create_task(worker.run())
    for number in numbers:
        await outside.add(f"r{number}", prompt(number))
    tokens = {}
    for number in numbers:
        await outside.done(f"r{number}")
        tokens[number] = await outside.token_ids(f"r{number}")
    worker.stop()
    await task
    await engine.stop()
    await outside.aclose()
    return tokens


async def beaten(worker: Worker) -> None:
    """Wait for the next heartbeat."""
    renewed_at = worker._lease._renewed_at
    async with asyncio.timeout(60):
        while worker._lease._renewed_at == renewed_at:
            await asyncio.sleep(0.01)


async def ended(workers: Iterable[Worker], tasks: Iterable[asyncio.Task[None]], engines: Iterable[AsyncEngine]) -> None:
    for worker in workers:
        worker.stop()
    await asyncio.gather(*tasks)
    for engine in engines:
        await engine.stop()


def test_a_request_that_ends_its_engine_is_found_among_healthy_ones(
    play: Callable[..., Any], tiny: EngineConfig, queue_config: QueueConfig, outside: Outside
) -> None:
    config = queue_config.replace(retry_delay_ms=20)

    async def scenario() -> None:
        expected = await alone(tiny, config, range(12))
        # Four have tokens when the fatal one comes, four come with it.
        long = {"max_tokens": 100}
        for number in range(8, 12):
            await outside.add(f"r{number}", {**prompt(number), **long})
        supervisor = Supervisor(tiny, config)
        for number in range(8, 12):
            await outside.first_delta(f"r{number}")
        for number in range(4):
            await outside.add(f"r{number}", prompt(number))
        await outside.add("fatal", {**BODY, "prompt_token_ids": [FATAL, 1, 2]})
        for number in range(4, 8):
            await outside.add(f"r{number}", {**prompt(number), "max_attempts": 2})
        done = await outside.done("fatal")
        assert (done["state"], done["error"]["code"]) == ("failed", "poison")
        assert supervisor.deaths == 3
        for number in range(12):
            assert (await outside.done(f"r{number}"))["state"] == "completed"
            assert (await outside.token_ids(f"r{number}"))[:12] == expected[number]
            fields = await outside.redis.hmget(f"{TAG}:req:r{number}", "attempt", "released")
            # Bystanders burn nothing; who came with the fatal one was a suspect once.
            assert int(fields[0]) - int(fields[1]) <= (1 if number >= 8 else 2)
        ((_, letter),) = await outside.redis.xrange(f"{TAG}:dlq")
        assert (letter[b"reason"], letter[b"id"]) == (b"poison", b"fatal")
        await supervisor.stop()
        await outside.assert_nothing_left()

    play(scenario())


def test_many_that_died_together_are_soon_back_in_one_batch(
    play: Callable[..., Any], tiny: EngineConfig, queue_config: QueueConfig, outside: Outside
) -> None:
    """Nobody had a token, so all are suspects: they begin one by one and go on together."""
    config = queue_config.replace(retry_delay_ms=0)

    async def scenario() -> None:
        dying, heir = await AsyncEngine.create(tiny), await AsyncEngine.create(tiny)
        steps = Steps(dying)
        steps.go.clear()
        task = asyncio.create_task(Worker(dying, config).run())
        names = [f"r{number}" for number in range(16)]
        for number, name in enumerate(names):
            await outside.add(name, {**prompt(number), "max_tokens": 100})
        async with asyncio.timeout(60):
            while [await outside.redis.hget(f"{TAG}:req:{name}", "state") for name in names] != [b"running"] * 16:
                await asyncio.sleep(0.01)
        dying._parts.core.step = None  # type: ignore[method-assign,assignment]  # the next step fails
        steps.step = None
        steps.go.set()
        with pytest.raises(EngineDeadError):
            await task
        await dying.stop()
        lasting = Steps(heir)  # longer than a busy machine takes to begin the next one
        step = lasting.step

        def long_step() -> Any:
            threading.Event().wait(0.01)
            return step()

        lasting.step = long_step
        worker = Worker(heir, config)
        serving = asyncio.create_task(worker.run())
        most = 0
        while not any(item["type"] == "done" for item in await outside.events("r15")):
            most = max(most, worker.num_live)
            await asyncio.sleep(0.002)
        assert most >= 4, "they ran one after the other"
        for name in names:
            assert (await outside.done(name))["state"] == "completed"
        worker.stop()
        await serving
        await heir.stop()
        await outside.assert_nothing_left()

    play(scenario())


def test_a_hung_engine_loses_its_requests_and_drops_them_when_it_wakes(
    play: Callable[..., Any], tiny: EngineConfig, queue_config: QueueConfig, outside: Outside
) -> None:
    config = queue_config.replace(heartbeat_timeout_s=1.5, retry_delay_ms=0)

    async def scenario() -> None:
        (expected,) = (await alone(tiny, config, range(1))).values()
        hung, other = await AsyncEngine.create(tiny), await AsyncEngine.create(tiny)
        steps = Steps(hung)
        steps.hold_when_begun = True
        first = Worker(hung, config)
        tasks = [asyncio.create_task(first.run())]
        await outside.add("a", {**prompt(0), "max_tokens": 100})
        await outside.first_delta("a")
        await asyncio.to_thread(steps.held.wait, 60)
        assert not any(item["type"] == "done" for item in await outside.events("a"))
        second = Worker(other, config)
        tasks.append(asyncio.create_task(second.run()))
        done = await outside.done("a", timeout=60)
        assert done["state"] == "completed" and done["attempt"] == 2
        count = len(await outside.events("a"))
        steps.hold_when_begun = False
        steps.go.set()
        async with asyncio.timeout(60):
            while first.num_live or hung.num_live:
                await asyncio.sleep(0.01)
        assert len(await outside.events("a")) == count
        tokens = await outside.token_ids("a")
        assert len(tokens) == 100 and tokens[:12] == expected
        # Both are fit for the next request.
        for number in range(4):
            await outside.add(f"r{number}", prompt(number))
        for number in range(4):
            assert (await outside.done(f"r{number}"))["metrics"]["attempts"] == 1
        await ended((first, second), tasks, (hung, other))
        await outside.assert_nothing_left()

    play(scenario())


def test_an_engine_whose_steps_are_long_by_nature_keeps_its_requests(
    play: Callable[..., Any], tiny: EngineConfig, queue_config: QueueConfig, outside: Outside
) -> None:
    """It has got through a long step before; so one that is twice a lease is no reason to think that it hangs."""
    config = queue_config.replace(heartbeat_timeout_s=2.0)

    async def scenario() -> None:
        slow, other = await AsyncEngine.create(tiny), await AsyncEngine.create(tiny)
        steps = Steps(slow)
        step = steps.step

        def ordinary_step() -> Any:
            threading.Event().wait(0.05)
            return step()

        steps.step = ordinary_step
        workers = [Worker(slow, config)]
        tasks = [asyncio.create_task(workers[0].run())]
        await outside.add("a", {**prompt(0), "max_tokens": 100, "max_attempts": 1})
        await outside.first_delta("a")
        for hold_s in (2.5, 4.5):
            steps.held.clear()
            steps.go.clear()
            assert await asyncio.to_thread(steps.held.wait, 60)
            held = asyncio.create_task(asyncio.sleep(hold_s))
            if hold_s > 4:
                workers.append(Worker(other, config))
                tasks.append(asyncio.create_task(workers[1].run()))
            await held
            steps.go.set()
            await beaten(workers[0])  # which sees that it has got on
        done = await outside.done("a", timeout=60)
        assert (done["state"], done["metrics"]["attempts"]) == ("completed", 1)
        await ended(workers, tasks, (slow, other))
        await outside.assert_nothing_left()

    play(scenario())


def test_a_first_step_of_many_tokens_is_no_hang(
    play: Callable[..., Any], tiny: EngineConfig, queue_config: QueueConfig, outside: Outside
) -> None:
    """Nobody knows yet how long it takes, so it may last for several leases."""
    config = queue_config.replace(heartbeat_timeout_s=1.0)

    async def scenario() -> None:
        slow, other = await AsyncEngine.create(tiny), await AsyncEngine.create(tiny)
        core = slow._parts.core
        execute, go, held = core._runner.execute, threading.Event(), threading.Event()

        def long_execute(output: Any) -> Any:
            held.set()
            go.wait(60)
            return execute(output)

        core._runner.execute = long_execute  # type: ignore[method-assign]
        workers = [Worker(slow, config)]
        tasks = [asyncio.create_task(workers[0].run())]
        await outside.add("a", {**prompt(0), "max_attempts": 1})
        assert await asyncio.to_thread(held.wait, 60)
        workers.append(Worker(other, config))
        tasks.append(asyncio.create_task(workers[1].run()))
        await workers[1].ready.wait()
        for _ in range(12):  # of its heartbeats: three leases
            await beaten(workers[0])
        go.set()
        done = await outside.done("a")
        assert (done["state"], done["metrics"]["attempts"]) == ("completed", 1)
        await ended(workers, tasks, (slow, other))
        await outside.assert_nothing_left()

    play(scenario())


def test_how_long_a_step_may_last() -> None:
    assert most_s(Pace(tokens=512), 15) == 300, "nothing is known"
    assert most_s(Pace(tokens=1, largest=8, longest_s=6), 15) == 24
    assert most_s(Pace(tokens=512, largest=8, longest_s=0.5), 15) == 128, "in proportion"
    assert most_s(Pace(tokens=512, largest=8, longest_s=6), 15) == 300
    assert most_s(Pace(), 15) == 0, "no step is under way: the loop itself hangs"


def test_a_generation_of_many_leases_runs_once(
    play: Callable[..., Any], tiny: EngineConfig, queue_config: QueueConfig, outside: Outside
) -> None:
    config = queue_config.replace(heartbeat_timeout_s=1.0, max_attempts=1)

    async def scenario() -> None:
        engines = [await AsyncEngine.create(tiny) for _ in range(2)]
        for engine in engines:
            step = engine._parts.core.step

            def slow_step(step: Callable[[], Any] = step) -> Any:
                threading.Event().wait(0.1)  # a device of that speed
                return step()

            engine._parts.core.step = slow_step  # type: ignore[method-assign]
        workers = [Worker(engine, config) for engine in engines]
        tasks = [asyncio.create_task(worker.run()) for worker in workers]
        await outside.add("a", {**prompt(0), "max_tokens": 60})
        done = await outside.done("a")
        assert done["metrics"]["total_ms"] > 5000, "it did not last five leases"
        assert done["metrics"]["attempts"] == 1
        assert [item["type"] for item in await outside.events("a")].count("started") == 1
        for worker in workers:
            worker.stop()
        await asyncio.gather(*tasks)
        for engine in engines:
            await engine.stop()

    play(scenario())


def test_a_second_signal_stops_at_once_and_gives_back_what_runs(
    play: Callable[..., Any], tiny: EngineConfig, queue_config: QueueConfig, outside: Outside
) -> None:
    async def scenario() -> None:
        engine = await AsyncEngine.create(tiny)
        steps = Steps(engine)
        steps.hold_when_begun = True
        worker = Worker(engine, queue_config.replace(drain_timeout_s=60))
        task = asyncio.create_task(run_until_signal(worker))
        await outside.add("a", {**prompt(0), "max_tokens": 100, "max_attempts": 1})
        await outside.first_delta("a")
        await asyncio.to_thread(steps.held.wait, 60)
        os.kill(os.getpid(), signal.SIGTERM)
        done, _ = await asyncio.wait({task}, timeout=0.3)
        assert not done, "it waits for what runs"
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(60):
            await task
        steps.hold_when_begun = False
        steps.go.set()
        record = await outside.redis.hgetall(f"{TAG}:req:a")
        assert (record[b"state"], record[b"released"]) == (b"queued", b"1")
        assert not await outside.engines()
        await engine.stop()
        heir = await AsyncEngine.create(tiny)
        second = Worker(heir, queue_config)
        serving = asyncio.create_task(second.run())
        assert (await outside.done("a"))["state"] == "completed"
        assert len(await outside.token_ids("a")) == 100
        second.stop()
        await serving
        await heir.stop()
        await outside.assert_nothing_left()

    play(scenario())
