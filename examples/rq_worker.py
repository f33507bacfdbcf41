"""RQ jobs that generate.

pagemill serve                                       # in one terminal
rq worker --url redis://localhost:6379/2             # in another, from the folder above
python -m examples.rq_worker
"""

from __future__ import annotations

import os
from typing import Any

from redis import Redis
from rq import Callback, Queue, Retry

from pagemill import Client
from pagemill.adapters.jobs.rq_job import cancel, generate

REDIS = os.environ.get("REDIS_URL", "redis://localhost:6379")
client = Client(redis_url=f"{REDIS}/0")


def summarise(text: str) -> str:
    messages = [{"role": "user", "content": f"Summarise in one sentence:\n{text}"}]
    return generate(client, messages=messages, max_tokens=100).text


def stopped(job: Any, connection: Any) -> None:
    """After `send_stop_job_command`: the process that waited is gone, its request need not go on."""
    cancel(client, job.id)


if __name__ == "__main__":
    from examples.rq_worker import stopped as on_stopped  # by the name that the worker imports
    from examples.rq_worker import summarise as task

    queue = Queue(connection=Redis.from_url(f"{REDIS}/2"))
    job = queue.enqueue(task, "A long text", job_timeout=300, retry=Retry(max=3), on_stopped=Callback(on_stopped))
    print(job.id)
