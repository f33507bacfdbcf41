"""`pagemill batch`: a file of requests through the queue, its answers in the same order."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from pagemill.adapters.cli.settings import Settings
from pagemill.adapters.cli.status import DONE, FAILED, UnreachableError
from pagemill.adapters.jobs.batch import OnLine, run_batch
from pagemill.adapters.jobs.batch_file import BatchFile, BatchState, write_lines
from pagemill.engine.errors import ConfigError
from pagemill.ingest.client import AsyncClient, QueueUnavailableError
from pagemill.ingest.config import QueueConfig

LINE_EVERY_S = 5.0


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Returns 1 if any line failed, else 0."""
    if args.window < 1:
        raise ConfigError("--window must be at least 1")
    source = Path(args.file)
    stem = source.with_suffix("")
    output = Path(args.output or f"{stem}.out.jsonl")
    name = output.name.removesuffix(".jsonl").removesuffix(".out")
    errors = Path(args.errors or output.with_name(f"{name}.errors.jsonl"))
    if len({path.absolute() for path in (source, output, errors)}) < 3:
        raise ConfigError("requests, --output and --errors must be three files")
    with (
        contextlib.closing(BatchFile(source)) as file,
        BatchState(output.with_name(f"{name}.state.jsonl")) as state,
    ):
        try:
            with _progress(len(file.lines)) as on_line:
                asyncio.run(_run(args, settings.queue(), file, state, on_line))
        except KeyboardInterrupt:
            print("stopped; the same command goes on where this was", file=sys.stderr)
            raise
        good = write_lines(output, state.outputs(file.lines, good=True))
        bad = write_lines(errors, state.outputs(file.lines, good=False))
        if not bad:
            state.remove()
    print(f"{good} answered: {output}" + (f"; {bad} failed: {errors}" if bad else ""), file=sys.stderr)
    return FAILED if bad else DONE


async def _run(
    args: argparse.Namespace, queue: QueueConfig, file: BatchFile, state: BatchState, on_line: OnLine
) -> None:
    told_at = 0.0

    def on_wait(why: str) -> None:
        nonlocal told_at
        if time.monotonic() - told_at > LINE_EVERY_S:
            told_at = time.monotonic()
            print(f"waiting: {why}", file=sys.stderr)

    async with AsyncClient(queue) as client:
        try:
            await client.overview()  # a server that goes away is waited for; one that never was is told
        except QueueUnavailableError as error:
            raise UnreachableError(str(error)) from error
        await run_batch(client, file, state, window=args.window, model=args.model, on_line=on_line, on_wait=on_wait)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[OnLine]:
    """A bar on a terminal; otherwise a line now and then."""
    if not sys.stderr.isatty():
        yield _Lines(total).count
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[failed]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task("batch", total=total, failed="")
        failures = 0

        def count(good: bool) -> None:
            nonlocal failures
            failures += not good
            bars.update(task, advance=1, failed=f"{failures} failed" if failures else "")

        yield count


class _Lines:
    def __init__(self, total: int) -> None:
        self._total = total
        self._done = self._failed = 0
        self._told_at = time.monotonic()

    def count(self, good: bool) -> None:
        self._done += 1
        self._failed += not good
        if time.monotonic() - self._told_at >= LINE_EVERY_S:
            self._told_at = time.monotonic()
            failed = f", {self._failed} failed" if self._failed else ""
            print(f"{self._done} of {self._total}{failed}", file=sys.stderr, flush=True)
