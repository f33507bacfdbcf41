"""The `callback` of a request: where its webhooks go, which ones, and the name of the secret that signs them.

What depends on the sending side (allowed addresses, known secrets) is told there; a URL that no setting could make
right is refused with the request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import orjson

from pagemill.engine.errors import RequestError, invalid

MAX_URL = 2048  # characters
STARTED = "request.started"
END_EVENTS = ("request.completed", "request.failed", "request.cancelled")
EVENTS = (STARTED, *END_EVENTS)
DEFAULT_SECRET = "default"

_FIELDS = ("url", "events", "secret")
_SECRET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def end_event(state: str) -> str:
    """The webhook type of a final state: what expired or was rejected has failed."""
    return f"request.{state}" if state in ("completed", "cancelled") else "request.failed"


def is_secret_name(value: object) -> bool:
    return isinstance(value, str) and _SECRET_NAME.fullmatch(value) is not None


@dataclass(frozen=True, slots=True)
class Callback:
    """A checked callback. `events` are full type names; `secret` is a name, never a key."""

    url: str
    events: tuple[str, ...] = END_EVENTS
    secret: str = DEFAULT_SECRET

    @classmethod
    def from_value(cls, value: Any) -> Callback:
        """Check a request's `callback`. Raises `RequestError("invalid_request")`, naming the field."""
        if not isinstance(value, Mapping):
            raise invalid("callback must be an object with url, events and secret", "callback")
        for name in value:
            if name not in _FIELDS:
                shown = str(name)[:64]
                raise invalid(f"callback has no field {shown!r}; it has {', '.join(_FIELDS)}", f"callback.{shown}")
        url = check_url(value.get("url"))
        events = END_EVENTS if value.get("events") is None else _events(value["events"])
        secret = value.get("secret")
        if secret is None:
            return cls(url, events)
        if not is_secret_name(secret):
            raise invalid(
                "callback.secret is the name of a configured secret: letters, digits and . _ -, at most 64 characters",
                "callback.secret",
            )
        return cls(url, events, secret)

    def stored(self, metadata: Mapping[str, str] | None) -> bytes:
        """As the record keeps it, for scripts that end a request without an engine; `metadata` comes as JSON text."""
        told = orjson.dumps(metadata or {}).decode()
        return orjson.dumps({"url": self.url, "events": self.events, "secret": self.secret, "metadata": told})


def salvaged(data: bytes) -> Callback | None:
    """The callback of a body that is refused for something else, where it can be read: somebody waits to hear of it."""
    try:
        body = orjson.loads(data)
        return Callback.from_value(body["callback"]) if isinstance(body, dict) and body.get("callback") else None
    except (orjson.JSONDecodeError, RequestError):
        return None


def check_url(url: Any) -> str:
    """A callback's URL, if it can be one at all. Raises `RequestError`."""
    name = "callback.url"
    if not isinstance(url, str):
        raise invalid(f"{name} must be a string", name)
    if not 0 < len(url) <= MAX_URL:
        raise invalid(f"{name} must have 1 to {MAX_URL} characters, got {len(url)}", name)
    if any(char <= " " or char == "\x7f" or char == "\\" for char in url):
        raise invalid(f"{name} must not hold spaces, backslashes or control characters", name)
    try:
        url.encode()
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except (ValueError, UnicodeError) as error:
        raise invalid(f"{name} is no URL: {str(error)[:100]}", name) from None
    if parts.scheme not in ("https", "http"):
        raise invalid(f"{name} must start with https:// (or http:// where that is allowed)", name)
    if not host or port == 0:
        raise invalid(f"{name} has no usable host and port", name)
    if "@" in parts.netloc:
        raise invalid(f"{name} must not hold a user or a password", name)
    return url


def _events(value: Any) -> tuple[str, ...]:
    name = "callback.events"
    if not isinstance(value, list | tuple) or not value:
        raise invalid(f"{name} must be a list of one or more of {', '.join(EVENTS)}", name)
    full = [item if isinstance(item, str) and item in EVENTS else f"request.{str(item)[:64]}" for item in value]
    for event in full:
        if event not in EVENTS:
            raise invalid(f"{name} may hold {', '.join(EVENTS)}, got {event.removeprefix('request.')!r}", name)
    return tuple(event for event in EVENTS if event in full)
