"""Suspects run with nothing beside them."""

from __future__ import annotations

import asyncio
from typing import Any

from pagemill.ingest.entries import Entry
from pagemill.ingest.intake import Postponed
from pagemill.ingest.keys import QueueKeys
from pagemill.ingest.quarantine import Quarantine

SHARD = QueueKeys("pm", "default").shards[0]


def entry(number: int) -> Entry:
    return Entry(SHARD, 1, b"%d-0" % number, {})


class Ward:
    """A quarantine and what happens around it."""

    def __init__(self) -> None:
        self.running = 0
        self.over: list[Entry] = []
        self.alone: list[Entry] = []
        self.cleared = asyncio.Event()
        self.quarantine = Quarantine(self.take, is_empty=lambda: self.running == 0, run_alone=self.run_alone)
        self.task = asyncio.create_task(self.quarantine.run())

    async def take(self, entry: Entry) -> Postponed | None:
        return None if entry in self.over else Postponed("suspect", "default")

    async def run_alone(self, entry: Entry) -> None:
        self.alone.append(entry)
        await self.cleared.wait()
        self.cleared.clear()

    async def pass_by(self) -> None:
        async with self.quarantine.passing():
            self.running += 1

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def test_suspects_begin_one_by_one_and_nothing_else_beside_them(run: Any) -> None:
    async def scenario() -> None:
        ward = Ward()
        await ward.pass_by()
        ward.quarantine.add(entry(4), old=True)
        for number in (1, 2, 3):
            ward.quarantine.add(entry(number))
        others = [asyncio.create_task(ward.pass_by()) for _ in range(3)]
        for _ in range(20):
            await asyncio.sleep(0)
        assert ward.alone == [] and ward.running == 1, "the running one is waited for, and nothing else begins"
        ward.running = 0
        ward.quarantine.notice()
        # The next one begins when the one before is cleared, although that goes on.
        for number in (1, 2, 3):
            await ward.until(lambda number=number: len(ward.alone) == number)
            assert not ward.quarantine.is_clear and ward.running == number - 1
            ward.running += 1
            ward.cleared.set()
        for _ in range(20):
            await asyncio.sleep(0)
        assert ward.alone == [entry(1), entry(2), entry(3)], "an old suspect waits until nothing runs"
        ward.running = 0
        ward.quarantine.notice()
        await ward.until(lambda: len(ward.alone) == 4)
        assert not any(other.done() for other in others)
        ward.cleared.set()
        await ward.until(lambda: all(other.done() for other in others))
        assert ward.alone[3] == entry(4) and ward.running == 3 and ward.quarantine.is_clear
        await ward.stop()

    run(scenario())


def test_suspects_that_come_later_join_suspects_and_nobody_else(run: Any) -> None:
    async def scenario() -> None:
        ward = Ward()
        for number in (1, 2):  # taken over one after the other, the first cleared before the second is known
            ward.quarantine.add(entry(number))
            await ward.until(lambda number=number: len(ward.alone) == number)
            ward.running += 1
            ward.cleared.set()
            await ward.until(lambda: ward.quarantine.is_clear)
        assert ward.running == 2
        await ward.pass_by()
        ward.quarantine.add(entry(3))
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(ward.alone) == 2, "somebody who came by itself is not drawn in"
        ward.running = 0
        ward.quarantine.notice()
        await ward.until(lambda: len(ward.alone) == 3)
        ward.cleared.set()
        ward.quarantine.add(entry(4), old=True)
        await ward.until(lambda: len(ward.alone) == 4)
        ward.running = 1
        ward.cleared.set()
        ward.quarantine.add(entry(5))
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(ward.alone) == 4, "nothing begins beside an old suspect"
        await ward.stop()

    run(scenario())


def test_a_suspect_that_is_over_does_not_wait_for_its_turn(run: Any) -> None:
    async def scenario() -> None:
        ward = Ward()
        ward.running = 1
        ward.over = [entry(1)]
        ward.quarantine.add(entry(1))
        async with asyncio.timeout(60):
            await ward.pass_by()
        assert ward.alone == []
        await ward.stop()

    run(scenario())


def test_an_engine_that_stops_lets_everybody_go(run: Any) -> None:
    async def scenario() -> None:
        ward = Ward()
        ward.running = 1
        ward.quarantine.add(entry(1))
        waiting = asyncio.create_task(ward.pass_by())
        ward.quarantine.open()
        async with asyncio.timeout(60):
            await waiting
        await ward.stop()

    run(scenario())
