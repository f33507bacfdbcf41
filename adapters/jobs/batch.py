"""Runs a batch file through the queue: so many lines at a time, each exactly as often as it takes.

A line's requests are found by keys that are made from its content, so after a crash of whatever kind the next run
follows what is running and gets what has ended; only what is not kept any more is generated again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from pagemill.adapters.jobs.batch_file import BatchFile, BatchState, Line, answered, failed, read_custom_id, read_work
from pagemill.adapters.jobs.generation import is_retriable, submit
from pagemill.engine.errors import RequestError, invalid
from pagemill.ingest.client import AsyncClient, QueueUnavailableError, Result

TRIES = 3  # of a line whose engines fail
LEAST_WAIT_S, MAX_WAIT_S = 0.2, 30.0

_REFUSED = frozenset(("queue_full", "no_engine", "deadline_unreachable"))  # for now; nothing was tried

OnLine = Callable[[bool], None]


async def run_batch(
    client: AsyncClient,
    file: BatchFile,
    state: BatchState,
    *,
    window: int = 64,
    model: str | None = None,
    on_line: OnLine = lambda _: None,
    on_wait: Callable[[str], None] = lambda _: None,
) -> None:
    """Run what is not done yet. `on_line(good)` after each line, `on_wait(why)` while the queue takes nothing.

    Cancelled, it leaves what is submitted running. A queue that is full, away or without engines is waited for.
    """
    todo = _todo(file, state, on_line)

    async def work() -> None:
        for line in todo:
            raw = file.read(line)
            custom_id = read_custom_id(raw)
            try:
                results, body = await _answer(client, line, raw, model, on_wait)
            except RequestError as error:
                state.add(line.key, failed(custom_id, line, error))
                on_line(False)
            else:
                state.add(line.key, answered(custom_id, line, results[0].request_id, body))
                on_line(True)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(max(1, min(window, len(file.lines)))):
                group.create_task(work())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the disk is full, say


def _todo(file: BatchFile, state: BatchState, on_line: OnLine) -> Iterator[Line]:
    """Lines that are to be run. A `custom_id` that was used before is an error: the answers could not be told apart."""
    used: dict[str, int] = {}
    for line in file.lines:
        custom_id = read_custom_id(file.read(line))
        if custom_id is not None and used.setdefault(custom_id, line.number) != line.number:
            error = invalid(f"custom_id {custom_id[:64]!r} is that of line {used[custom_id]} too", "custom_id")
            state.add(line.key, failed(custom_id, line, error))
            on_line(False)
        elif state.is_done(line.key):
            on_line(True)
        else:
            yield line


async def _answer(
    client: AsyncClient, line: Line, raw: bytes, model: str | None, on_wait: Callable[[str], None]
) -> tuple[list[Result], dict[str, object]]:
    work = read_work(raw, model=model, max_bytes=client.config.max_body_bytes)
    failures, wait_s = 0, LEAST_WAIT_S
    while True:
        try:
            handles = [await submit(client, f"{line.key}/{place}", body) for place, body in enumerate(work.bodies)]
            results = [await handle.result() for handle in handles]
            return results, work.answer(results)
        except QueueUnavailableError as error:
            on_wait(str(error))
            await asyncio.sleep(wait_s)
        except RequestError as error:
            if error.code in _REFUSED:
                on_wait(error.message)
                asked_s = (error.retry_after_ms or 0) / 1000
                await asyncio.sleep(min(MAX_WAIT_S, max(wait_s, asked_s)))
            elif is_retriable(error) and (failures := failures + 1) < TRIES:
                await asyncio.sleep(wait_s)
            else:
                raise
        wait_s = min(MAX_WAIT_S, wait_s * 2)
