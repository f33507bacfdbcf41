"""`pagemill submit`, `watch` and `cancel`: a client from the shell. Text goes to standard output, all else to standard
error."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import orjson
from redis.exceptions import RedisError

from pagemill.adapters.cli.parser import given_body
from pagemill.adapters.cli.settings import Settings, without_password
from pagemill.adapters.cli.status import UnreachableError
from pagemill.engine.errors import invalid
from pagemill.ingest.client import AsyncClient, AsyncHandle, QueueUnavailableError, Result
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.model_map import read_models
from pagemill.ingest.redis import connect_commands

NOTICE_AFTER_S = 3.0  # silence after which a waiting person is told what is missing


def run(args: argparse.Namespace, settings: Settings) -> int:
    command = {"submit": _submit, "watch": _watch, "cancel": _cancel}[args.command]
    try:
        return asyncio.run(command(args, _client(settings)))
    except (QueueUnavailableError, RedisError) as error:
        raise UnreachableError(str(error)) from error


def _client(settings: Settings) -> Callable[[], AsyncClient]:
    """Makes the client inside the loop, with the queues of all models where they are mapped."""
    queue, models = settings.queue(), read_models(settings.values["models"])
    return lambda: AsyncClient(queue, models=models)


async def _submit(args: argparse.Namespace, make_client: Callable[[], AsyncClient]) -> int:
    body = given_body(args) | _prompt(args)
    async with make_client() as client:
        queue = client.for_model(body.get("model")).config
        handle = await client.submit(**body)
        if args.detach:
            print(handle.request_id)
            return 0
        if sys.stderr.isatty():
            print(f"request {handle.request_id}", file=sys.stderr)
        return await _show(handle, queue, args)


def _prompt(args: argparse.Namespace) -> dict[str, Any]:
    text = args.prompt
    if text is None or text == "-":
        if sys.stdin.isatty():
            print("reading the prompt from standard input; end it with Ctrl-D", file=sys.stderr)
        try:
            text = sys.stdin.read().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise invalid(f"standard input is not {error.encoding}: {error.reason}", "prompt") from error
    if not (args.chat or args.system):
        return {"prompt": text}
    system = [{"role": "system", "content": args.system}] if args.system else []
    return {"messages": [*system, {"role": "user", "content": text}]}


async def _watch(args: argparse.Namespace, make_client: Callable[[], AsyncClient]) -> int:
    async with make_client() as client:
        handle, queue = client.attach(args.id, model=args.model), client.for_model(args.model).config
        await _check_reachable(queue)
        if not args.json:
            return await _show(handle, queue, args)
        async with asyncio.timeout(args.timeout):
            async for event in handle.events():
                print(orjson.dumps(event).decode(), flush=True)
        await handle.result()
    return 0


async def _cancel(args: argparse.Namespace, make_client: Callable[[], AsyncClient]) -> int:
    async with make_client() as client:
        outcome = await client.cancel(args.id, model=args.model)
    meaning = {
        "cancelled": "cancelled; it had not started",
        "requested": "its engine ends it now",
        "noted": "not known yet; it will be cancelled when it comes",
    }
    print(f"{args.id}: {meaning.get(outcome, f'had ended before: {outcome}')}")
    return 0


async def _show(handle: AsyncHandle, queue: QueueConfig, args: argparse.Namespace) -> int:
    """Print the text as it comes, further choices after it, or the result as JSON. Raises `RequestFailed`, and
    `TimeoutError`."""
    notice = asyncio.create_task(_notice(queue))
    begun = False
    try:
        async with asyncio.timeout(args.timeout):
            async for delta in handle:
                notice.cancel()
                if not args.json and delta.index == 0:
                    begun = True
                    print(delta.text, end="", flush=True)
            result = await handle.result()
    except asyncio.CancelledError:
        print(f"\nrequest {handle.request_id} goes on; `pagemill cancel {handle.request_id}` ends it", file=sys.stderr)
        raise
    finally:
        notice.cancel()
        if begun:
            print()
    if args.json:
        print(_json(result))
    else:
        for choice in result.choices[1:]:
            print(f"\n[{choice.index + 1}] {choice.text}")
    return 0


async def _notice(queue: QueueConfig) -> None:
    """Say why nothing happens, if nothing happens."""
    await asyncio.sleep(NOTICE_AFTER_S)
    url = without_password(queue.redis_url)
    print(
        f"waiting: no engine has started this request yet (is one running on {url}, queue "
        f"{queue.queue!r}? `pagemill engine` starts one)",
        file=sys.stderr,
    )


def _json(result: Result) -> str:
    return orjson.dumps(dataclasses.asdict(result)).decode()


async def _check_reachable(queue: QueueConfig) -> None:
    """A reader waits for a server that comes back; a person at a shell wants to know that there is none."""
    client = connect_commands(queue.redis_url, "pagemill-cli")
    try:
        await client.ping()
    finally:
        await client.aclose()
