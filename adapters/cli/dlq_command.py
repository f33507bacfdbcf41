"""`pagemill dlq`: what nobody could answer, and what ended its engines. Look, send again, throw away."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import orjson

from pagemill.adapters.cli.foreign_words import cut, harmless, utc
from pagemill.adapters.cli.queue_access import on_queue
from pagemill.adapters.cli.settings import Settings
from pagemill.adapters.cli.status import DONE, FAILED
from pagemill.engine.errors import ConfigError, RequestError
from pagemill.ingest.dead_letters import DeadLetter, DeadLetters

NOTHING = "no dead letters"


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Returns 1 if any of several letters could not be sent again, else 0."""
    if args.dlq in ("retry", "purge") and bool(args.ids) == args.all:
        raise ConfigError(f"pagemill dlq {args.dlq} wants the ids of letters, or --all")
    queue = settings.queue()
    command = {"list": _list, "show": _show, "retry": _retry, "purge": _purge}[args.dlq]
    return on_queue(queue, "pagemill-dlq", lambda client: command(DeadLetters(client, queue), args))


async def _list(letters: DeadLetters, args: argparse.Namespace) -> int:
    shown = 0
    async for letter in letters.letters():
        shown += 1
        if args.json:
            print(orjson.dumps(_plain(letter)).decode())
            continue
        if shown == 1:
            print(f"{'letter':<20} {'since (UTC)':<19} {'reason':<16} {'tries':>5} {'request':<34} error")
        who = f"{letter.letter_id:<20} {utc(letter.dead_at_ms)} {letter.reason:<16} {letter.attempts:>5}"
        print(harmless(f"{who} {letter.request_id:<34} {cut(letter.error)}").rstrip())
    if not shown and not args.json:
        print(NOTHING, file=sys.stderr)
    return DONE


async def _show(letters: DeadLetters, args: argparse.Namespace) -> int:
    for letter in await letters.find(args.id):
        if args.json:
            print(orjson.dumps(_plain(letter)).decode())
        else:
            for name, value in _plain(letter).items():
                pairs = value.items() if isinstance(value, dict) else [(name, value)]
                for key, text in pairs:
                    print(harmless(f"{key}: {text}"))
    return DONE


async def _retry(letters: DeadLetters, args: argparse.Namespace) -> int:
    failed = 0
    chosen = await _chosen(letters, args)
    if not chosen:
        print(NOTHING, file=sys.stderr)
    for letter in chosen:
        try:
            request_id = await letters.retry(letter)
        except RequestError as error:
            failed += 1
            print(f"{letter.letter_id}: {error.code}: {error.message}", file=sys.stderr)
        else:
            print(harmless(f"{letter.letter_id}: {letter.request_id} goes again as {request_id}"))
    return FAILED if failed else DONE


async def _purge(letters: DeadLetters, args: argparse.Namespace) -> int:
    if args.all:
        count = await letters.purge()
    else:
        chosen = await _chosen(letters, args)
        for letter in chosen:
            await letters.remove(letter)
        count = len(chosen)
    print(f"{count} removed")
    return DONE


async def _chosen(letters: DeadLetters, args: argparse.Namespace) -> list[DeadLetter]:
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
