"""Tasks that the job workers of the tests run, some in processes of their own. `PAGEMILL_TEST_URL` names the server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import celery
from celery.signals import worker_init

from pagemill.adapters.jobs import celery_task, rq_job
from pagemill.ingest.client import Client

URL = os.environ.get("PAGEMILL_TEST_URL", "redis://127.0.0.1:1/0")
QUEUE = "jobs"
SHORT: dict[str, Any] = {"prompt": "Once upon a time there was", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
LONG: dict[str, Any] = {**SHORT, "max_tokens": 400}


class FirstTryFails(Exception):
    pass


def fail_once(marker: str) -> Any:
    """A callback for deltas that raises at the first one it ever sees: a worker that dies in mid-answer."""

    def on_delta(_: Any) -> None:
        if not Path(marker).exists():
            Path(marker).touch()
            raise FirstTryFails

    return on_delta


app = celery.Celery("tests", broker=f"{URL}/1", backend=f"{URL}/1")
app.conf.update(broker_connection_retry_on_startup=True, worker_hijack_root_logger=False)
client = Client(redis_url=f"{URL}/0", queue=QUEUE)
celery_task.cancel_on_revoke(client)


@worker_init.connect
def use_client(**_: Any) -> None:
    """Before the pool's processes are forked the client has a thread and connections, which are not the children's."""
    thread = client.thread()
    thread.run(thread.client.overview())


@app.task(bind=True, soft_time_limit=60, max_retries=2)
def celery_short(self: Any, marker: str) -> list[Any]:
    states = []
    fail = fail_once(marker)

    def on_delta(delta: Any) -> None:
        fail(delta)
        states.append(self.AsyncResult(self.request.id).state)

    try:
        result = celery_task.generate(self, client, progress_s=0.0, on_delta=on_delta, **SHORT, flush_ms=0)
    except FirstTryFails as error:
        raise self.retry(exc=error, countdown=0) from error
    return [result.text, self.request.retries, "PROGRESS" in states]


@app.task(bind=True)
def celery_where(self: Any) -> list[Any]:
    """The text, and the process that made it."""
    return [celery_task.generate(self, client, **SHORT, metadata={"task": self.request.id}).text, os.getpid()]


@app.task(bind=True)
def celery_too_large(self: Any) -> str:
    return celery_task.generate(self, client, "x" * 2_000_000).text


@app.task(bind=True)
def celery_long(self: Any) -> str:
    return celery_task.generate(self, client, **LONG, ttl_ms=60_000).text


def rq_short(marker: str) -> str:
    return rq_job.generate(client, progress_s=0.0, on_delta=fail_once(marker), **SHORT).text


def rq_where() -> list[Any]:
    return [rq_job.generate(client, **SHORT).text, os.getpid()]


def rq_stopped(job: Any, connection: Any) -> None:
    rq_job.cancel(client, job.id)


def rq_long() -> str:
    return rq_job.generate(client, **LONG, ttl_ms=60_000).text
