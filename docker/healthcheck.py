"""Whether the role that runs in this container is well: exit status 0 or 1, with the reason on standard error.

The role is read off the command line of process 1. A gateway answers /healthz; an engine, which has no port, renews its
heartbeat in Redis from its step loop; a sender of webhooks, which has none either, leaves a key there when it has asked
for work.
"""

from __future__ import annotations

import os
import socket
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROLES = ("engine", "gateway", "serve", "webhooks")
MAX_AGE_MS = 30_000


def role_of(words: Sequence[str]) -> str | None:
    """The first role among the words of a command line."""
    return next((word for word in words if word in ROLES), None)


def check_http(port: int) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=3) as answer:
        answer.read(1024)


def check_engine(redis_url: str, prefix: str, queue: str) -> None:
    """Raise unless an engine of this host has a fresh heartbeat on the queue's first shard."""
    with connect(redis_url) as client:
        seconds, micros = client.time()
        now = seconds * 1000 + micros // 1000
        beats = client.zrange(f"{prefix}:{{{queue}.0}}:hb", 0, -1, withscores=True)
    host = socket.gethostname()[:32]
    ages = [now - beat for name, beat in beats if name.decode().startswith(f"{host}-")]
    if not ages or min(ages) > MAX_AGE_MS:
        raise RuntimeError(f"no engine of {host} has a heartbeat" if not ages else f"{min(ages):.0f} ms without one")


def check_webhooks(redis_url: str, prefix: str, queue: str) -> None:
    """Raise unless a sender of webhooks on this host has asked for work lately: what it says of that expires."""
    host = socket.gethostname()[:32]
    with connect(redis_url) as client:
        if not client.exists(f"{prefix}:{{{queue}.0}}:hook:at:{host}"):
            raise RuntimeError(f"no sender of webhooks on {host} gets on")


def connect(redis_url: str) -> Any:
    import redis

    return redis.Redis.from_url(redis_url, protocol=2, socket_timeout=3, socket_connect_timeout=3)


def main() -> int:
    words = Path("/proc/1/cmdline").read_bytes().decode(errors="replace").split("\0")
    role = role_of(words)
    redis_url = os.environ.get("PAGEMILL_REDIS_URL", "redis://127.0.0.1:6379/0")
    prefix, queue = os.environ.get("PAGEMILL_KEY_PREFIX", "pm"), os.environ.get("PAGEMILL_QUEUE", "default")
    try:
        if role in ("gateway", "serve"):
            check_http(int(os.environ.get("PAGEMILL_HTTP_PORT", "8000")))
        elif role == "engine":
            check_engine(redis_url, prefix, queue)
        elif role == "webhooks":
            check_webhooks(redis_url, prefix, queue)
    except Exception as error:
        print(f"{role}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
