"""`pagemill dlq`: what nobody could answer, and what ended its engines. Look, send again, throw away."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import orjson
from redis.exceptions import RedisError

from pagemill.adapters.cli.settings import Settings
from pagemill.adapters.cli.status import DONE, FAILED, UnreachableError
from pagemill.engine.errors import ConfigError, RequestError
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.dead_letters import DeadLetter, DeadLetters
from pagemill.ingest.redis import connect_commands, is_unavailable

CUT = 72  # characters of an error in the list


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Returns 1 if any of several letters could not be sent again, else 0."""
    if args.dlq in ("retry", "purge") and bool(args.ids) == args.all:
        raise ConfigError(f"pagemill dlq {args.dlq} wants the ids of letters, or --all")
    try:
        return asyncio.run(_run(args, settings.queue()))
    except (RedisError, OSError) as error:
        if isinstance(error, RedisError) and not is_unavailable(error):
            raise
        raise UnreachableError(str(error)) from error


async def _run(args: argparse.Namespace, queue: QueueConfig) -> int:
    client = connect_commands(queue.redis_url, "pagemill-dlq")
    letters = DeadLetters(client, queue)
    command = {"list": _list, "show": _show, "retry": _retry, "purge": _purge}[args.dlq]
    try:
        return await command(letters, args)
    finally:
        await client.aclose()


async def _list(letters: DeadLetters, args: argparse.Namespace) -> int:
    shown = 0
    async for letter in letters.letters():
        shown += 1
        if args.json:
            print(orjson.dumps(_plain(letter)).decode())
            continue
        if shown == 1:
            print(f"{'letter':<20} {'since (UTC)':<19} {'reason':<16} {'tries':>5} {'request':<34} error")
        since = datetime.fromtimestamp(letter.dead_at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
        error = letter.error if len(letter.error) <= CUT else letter.error[: CUT - 3] + "..."
        line = (
            f"{letter.letter_id:<20} {since} {letter.reason:<16} {letter.attempts:>5} {letter.request_id:<34} {error}"
        )
        print(_harmless(line).rstrip())
    if not shown and not args.json:
        print("no dead letters", file=sys.stderr)
    return DONE


async def _show(letters: DeadLetters, args: argparse.Namespace) -> int:
    for letter in await letters.find(args.id):
        if args.json:
            print(orjson.dumps(_plain(letter)).decode())
        else:
            for name, value in _plain(letter).items():
                pairs = value.items() if isinstance(value, dict) else [(name, value)]
                for key, text in pairs:
                    print(_harmless(f"{key}: {text}"))
    return DONE


async def _retry(letters: DeadLetters, args: argparse.Namespace) -> int:
    failed = 0
    for letter in await _chosen(letters, args):
        try:
            request_id = await letters.retry(letter)
        except RequestError as error:
            failed += 1
            print(f"{letter.letter_id}: {error.code}: {error.message}", file=sys.stderr)
        else:
            print(_harmless(f"{letter.letter_id}: {letter.request_id} goes again as {request_id}"))
    return FAILED if failed else DONE


async def _purge(letters: DeadLetters, args: argparse.Namespace) -> int:
    if args.all:
        count = await letters.purge()
    else:
        chosen = list(await _chosen(letters, args))
        for letter in chosen:
            await letters.remove(letter)
        count = len(chosen)
    print(f"{count} removed")
    return DONE


async def _chosen(letters: DeadLetters, args: argparse.Namespace) -> Iterable[DeadLetter]:
    if args.all:
        return [letter async for letter in letters.letters()]
    return [letter for name in dict.fromkeys(args.ids) for letter in await letters.find(name)]


def _plain(letter: DeadLetter) -> dict[str, Any]:
    fields = {name.decode(errors="backslashreplace"): _text(value) for name, value in letter.fields.items()}
    return {
        "letter": letter.letter_id,
        "reason": letter.reason,
        "error": letter.error,
        "attempts": letter.attempts,
        "stream": letter.stream,
        "entry": letter.entry_id,
        "fields": fields,
    }


def _text(value: bytes) -> str:
    return value.decode(errors="backslashreplace")


def _harmless(line: str) -> str:
    """Without what a terminal would take for a command: a letter holds whatever somebody sent."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)
