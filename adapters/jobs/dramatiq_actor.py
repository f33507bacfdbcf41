"""Dramatiq: generations from actors.

    broker.add_middleware(CurrentMessage())

    @dramatiq.actor(time_limit=120_000, max_retries=3)
    def summarise(text):
        save(generate(client, messages=[...], max_tokens=200).text)

The deadline is the message's time limit. A worker that shuts down leaves the request running, and the message that is
delivered again finds it. Dramatiq has no way to stop a message; `cancel` ends what it generates.
"""

from __future__ import annotations

from typing import Any

from pagemill.adapters.jobs.generation import OnDelta, cancel_from_thread, generate_in_thread, with_deadline
from pagemill.ingest.client import Client, Result


def generate(client: Client, prompt: str | None = None, *, on_delta: OnDelta | None = None, **body: Any) -> Result:
    """Generate for the message that is processed here; `body` holds any other field of a request.

    Raises `RequestFailed` where the request does not complete, `RuntimeError` where the middleware CurrentMessage is
    missing; at the time limit the request is cancelled.
    """
    from dramatiq import get_broker
    from dramatiq.middleware import CurrentMessage, TimeLimit, TimeLimitExceeded

    message: Any = CurrentMessage.get_current_message()
    if message is None:
        raise RuntimeError("no message is processed here, or the broker lacks the middleware CurrentMessage")
    broker = get_broker()
    default_ms = next((item.time_limit for item in broker.middleware if isinstance(item, TimeLimit)), None)
    actor = broker.get_actor(message.actor_name)
    limit_ms = message.options.get("time_limit") or actor.options.get("time_limit", default_ms)
    return generate_in_thread(
        client,
        key_of(message.message_id),
        with_deadline({"prompt": prompt, **body}, None if limit_ms is None else limit_ms / 1000),
        on_delta=on_delta,
        cancels=(TimeLimitExceeded,),
    )


def key_of(message_id: str) -> str:
    return f"dramatiq:{message_id}"


def cancel(client: Client, message_id: str) -> str:
    """Cancel what a message generates; replies as `Client.cancel`."""
    return cancel_from_thread(client, key_of(message_id))
