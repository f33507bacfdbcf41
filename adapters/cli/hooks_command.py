"""`pagemill hooks`: what waits to be sent, what was given up and which URLs are off; and the signing secrets."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import orjson

from pagemill.adapters.cli.foreign_words import cut, harmless, utc
from pagemill.adapters.cli.queue_access import on_queue
from pagemill.adapters.cli.settings import Settings
from pagemill.adapters.cli.status import DONE, FAILED
from pagemill.adapters.webhook.secret_store import SecretStore
from pagemill.engine.errors import ConfigError, RequestError, invalid
from pagemill.ingest.callback import check_url
from pagemill.ingest.deliveries import Deliveries


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Returns 1 if any of several deliveries could not be sent again, else 0."""
    if args.hooks == "rotate-secret":
        return _rotate(args, settings)
    if args.hooks == "retry" and bool(args.ids) == args.all:
        raise ConfigError("pagemill hooks retry wants the ids of deliveries, or --all")
    queue = settings.queue()
    command = {"list": _list, "retry": _retry, "disable": _disable, "enable": _enable}[args.hooks]
    return on_queue(queue, "pagemill-hooks", lambda client: command(Deliveries(client, queue), args))


def _rotate(args: argparse.Namespace, settings: Settings) -> int:
    if args.keep_h < 0:
        raise ConfigError("--keep-h must be at least 0")
    store = SecretStore(settings.webhook().webhook_secrets)
    secret = store.rotate(args.name, args.keep_h * 3600)
    print(secret)
    old = len(store.keys(args.name)) - 1
    beside = f"; {old} older sign beside it for {args.keep_h:g} h" if old > 0 else ""
    print(f"{args.name} in {store.path}{beside}", file=sys.stderr)
    return DONE


async def _list(deliveries: Deliveries, args: argparse.Namespace) -> int:
    rows = 0
    async for delivery in deliveries.pending():
        if args.tenant not in (None, delivery.tenant):
            continue
        rows += 1
        what = "sending" if delivery.leased else delivery.state
        _row(args, delivery.delivery_id, what, delivery.due or 0, delivery)
    async for letter in deliveries.dead():
        if args.tenant not in (None, letter.tenant):
            continue
        rows += 1
        _row(args, letter.delivery_id, letter.reason, letter.dead_at_ms, letter)
    for url, why in sorted((await deliveries.disabled()).items()) if args.tenant is None else ():
        rows += 1
        since, _, reason = why.partition(" ")
        if args.json:
            print(orjson.dumps({"off": url, "since": int(since), "reason": reason}).decode())
        else:
            print(harmless(f"off since {utc(int(since))}: {url} ({reason})"))
    if not rows and not args.json:
        print("no webhooks wait, none were given up", file=sys.stderr)
    return DONE


def _row(args: argparse.Namespace, name: str, what: str, at_ms: int, item: Any) -> None:
    status = int(item.status) if item.status.isdigit() else None
    if args.json:
        shown = {"hook": name, "state": what, "request": item.request_id, "tenant": item.tenant, "type": item.type}
        shown |= {"url": item.url, "at": at_ms}
        print(orjson.dumps({**shown, "tries": item.tries, "status": status, "error": item.error}).decode())
        return
    told = f" {item.status} {cut(item.error)}".rstrip() if item.status or item.error else ""
    print(
        harmless(
            f"{name} {what:<9} {utc(at_ms)} tries {item.tries} {item.type} {item.request_id} of {item.tenant} "
            f"{item.url}{told}"
        )
    )


async def _retry(deliveries: Deliveries, args: argparse.Namespace) -> int:
    wanted = set(args.ids)
    found = failed = 0
    async for letter in deliveries.dead():
        if not (args.all and args.tenant in (None, letter.tenant)) and letter.delivery_id not in wanted:
            continue
        found += 1
        wanted.discard(letter.delivery_id)
        try:
            await deliveries.retry(letter)
        except RequestError as error:
            failed += 1
            print(f"{letter.delivery_id}: {error.code}: {error.message}", file=sys.stderr)
        else:
            print(f"{letter.delivery_id}: is sent again")
    if args.all and not found:
        whose = "" if args.tenant is None else f" of {args.tenant}"
        print(harmless(f"no webhooks{whose} were given up"), file=sys.stderr)
    for name in sorted(wanted):
        failed += 1
        print(harmless(f"{name[:80]}: no such webhook was given up"), file=sys.stderr)
    return FAILED if failed else DONE


async def _disable(deliveries: Deliveries, args: argparse.Namespace) -> int:
    await deliveries.disable(check_url(args.url), "by hand", int(time.time() * 1000))
    print(harmless(f"{args.url}: nothing is sent there any more"))
    return DONE


async def _enable(deliveries: Deliveries, args: argparse.Namespace) -> int:
    if not args.url:
        raise invalid("a URL is needed", "url")
    await deliveries.enable(args.url)
    print(harmless(f"{args.url}: webhooks are sent there again; `pagemill hooks retry` sends what was given up"))
    return DONE
