"""Dramatiq actors that generate.

pagemill serve                                       # in one terminal
dramatiq examples.dramatiq_worker                    # in another
python -c 'from examples.dramatiq_worker import summarise; summarise.send("A long text")'
"""

from __future__ import annotations

import os

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import CurrentMessage

from pagemill import Client
from pagemill.adapters.jobs.dramatiq_actor import generate

REDIS = os.environ.get("REDIS_URL", "redis://localhost:6379")
broker = RedisBroker(url=f"{REDIS}/3")
broker.add_middleware(CurrentMessage())  # tells `generate` which message it works for
dramatiq.set_broker(broker)
client = Client(redis_url=f"{REDIS}/0")


@dramatiq.actor(time_limit=300_000, max_retries=5)
def summarise(text: str) -> None:
    messages = [{"role": "user", "content": f"Summarise in one sentence:\n{text}"}]
    print(generate(client, messages=messages, max_tokens=100).text)
