"""When a delivery that failed is tried again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

JITTER = 0.2
MAX_RETRY_AFTER_S = 21_600.0


def next_delay_s(delays: Sequence[float], tries: int, retry_after_s: float | None = None) -> float | None:
    """Seconds until the next try, after `tries` of them; None: that was the last.

    `retry_after_s`: what the receiver asked for. It can put a try off, by six hours at most, and not bring it forward.
    """
    if tries > len(delays):
        return None
    delay = delays[tries - 1] * random.uniform(1 - JITTER, 1 + JITTER)
    return max(delay, min(retry_after_s or 0.0, MAX_RETRY_AFTER_S))


def read_retry_after(value: str | None, now: datetime | None = None) -> float | None:
    """The seconds of a Retry-After header (RFC 9110: a number, or a date); None where it says nothing usable."""
    if value is None:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit():
        return min(float(text[:12]), MAX_RETRY_AFTER_S)
    try:
        when = parsedate_to_datetime(text)
    except ValueError:
        return None
    when = when if when.tzinfo is not None else when.replace(tzinfo=UTC)
    return max(0.0, min((when - (now or datetime.now(UTC))).total_seconds(), MAX_RETRY_AFTER_S))
