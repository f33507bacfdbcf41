"""What is asked in one turn goes out together, and everybody gets the reply to what he asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from pagemill.ingest.client import AsyncClient, RequestFailed
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.gathering import MAX_BYTES, MAX_TOGETHER, MAX_UNDER_WAY, Gatherer

Run = Callable[[Coroutine[Any, Any, Any]], Any]


def test_each_gets_its_own_reply(run: Run) -> None:
    sent: list[list[int]] = []

    async def send(items: Sequence[int]) -> list[Any]:
        sent.append(list(items))
        await asyncio.sleep(0)
        return [ValueError(item) if item % 10 == 3 else item * 2 for item in items]

    async def scenario() -> None:
        gatherer = Gatherer(send, size=lambda item: MAX_BYTES if item == 5 else 1)
        replies = await asyncio.gather(*(gatherer.ask(item) for item in range(8)), return_exceptions=True)
        assert sent == [[0, 1, 2, 3, 4, 5], [6, 7]]  # nobody waits for what comes after a long one
        assert [str(reply) for reply in replies] == ["0", "2", "4", "3", "8", "10", "12", "14"]
        assert isinstance(replies[3], ValueError)
        sent.clear()
        await asyncio.gather(*(gatherer.ask(10 * item) for item in range(10, 10 + MAX_TOGETHER + 1)))
        assert [len(batch) for batch in sent] == [MAX_TOGETHER, 1]

    run(scenario())


def test_whoever_is_cancelled_takes_nobody_along(run: Run) -> None:
    sent: list[list[str]] = []
    answering, answer = asyncio.Event(), asyncio.Event()

    async def send(items: Sequence[str]) -> list[Any]:
        sent.append(list(items))
        answering.set()
        await answer.wait()
        return list(items)

    async def scenario() -> None:
        gatherer = Gatherer(send, size=len)
        tasks = [asyncio.create_task(gatherer.ask(name)) for name in ("a", "b", "c")]
        await asyncio.sleep(0)  # all have asked, nothing is sent yet
        tasks[0].cancel()
        async with asyncio.timeout(60):
            await answering.wait()
        assert sent == [["b", "c"]]
        tasks[1].cancel()
        answer.set()
        assert await tasks[2] == "c"
        assert tasks[0].cancelled() and tasks[1].cancelled()

    run(scenario())


def test_while_enough_are_under_way_what_is_asked_waits_and_goes_together(run: Run) -> None:
    sent: list[list[int]] = []
    answers: list[asyncio.Event] = []

    async def send(items: Sequence[int]) -> list[Any]:
        sent.append(list(items))
        answers.append(asyncio.Event())
        await answers[-1].wait()
        return list(items)

    async def scenario() -> None:
        gatherer = Gatherer(send, size=lambda item: 1)
        asked = []
        for number in range(MAX_UNDER_WAY + 3):
            asked.append(asyncio.create_task(gatherer.ask(number)))
            for _ in range(5):
                await asyncio.sleep(0)
        assert sent == [[number] for number in range(MAX_UNDER_WAY)]
        asked[-2].cancel()
        answers[1].set()
        async with asyncio.timeout(60):
            assert await asked[1] == 1
            while len(sent) == MAX_UNDER_WAY:
                await asyncio.sleep(0)
            assert sent[-1] == [MAX_UNDER_WAY, MAX_UNDER_WAY + 2]
            for answer in answers:
                answer.set()
            assert await asked[-1] == MAX_UNDER_WAY + 2

    run(scenario())


def test_an_error_of_all_is_told_to_each(run: Run) -> None:
    async def send(items: Sequence[str]) -> list[Any]:
        raise ConnectionError("away")

    async def scenario() -> None:
        gatherer = Gatherer(send, size=len)
        told = await asyncio.gather(*(gatherer.ask(name) for name in "ab"), return_exceptions=True)
        assert [str(error) for error in told] == ["away", "away"]

    run(scenario())


def test_many_requests_do_not_take_many_connections(queue_config: QueueConfig, run: Run) -> None:
    async def scenario() -> None:
        async with AsyncClient(queue_config, watchdog_s=600.0) as client:
            handles = await asyncio.gather(*(client.submit(prompt="x") for _ in range(200)))
            waiting = [asyncio.create_task(handle.result()) for handle in handles]
            await asyncio.gather(*(client.cancel(handle.id) for handle in handles))
            async with asyncio.timeout(60):
                for ended in await asyncio.gather(*waiting, return_exceptions=True):
                    assert isinstance(ended, RequestFailed) and ended.code == "cancelled"
            pool: Any = client._redis.connection_pool
            # 32 if each asked for itself
            assert len(pool._available_connections) + len(pool._in_use_connections) <= 12

    run(scenario())
