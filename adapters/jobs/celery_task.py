"""Celery: generations from bound tasks.

    @app.task(bind=True, acks_late=True, soft_time_limit=120)
    def summarise(self, text):
        return generate(self, client, messages=[...], max_tokens=200).text

    cancel_on_revoke(client)        # once, where the app is made

The deadline is the task's soft time limit, else its hard one. Progress goes to the result backend as state "PROGRESS".
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from pagemill.adapters.jobs.generation import (
    OnDelta,
    Progress,
    cancel_from_thread,
    generate_in_thread,
    with_deadline,
)
from pagemill.ingest.client import Client, Result


def generate(
    task: Any,
    client: Client,
    prompt: str | None = None,
    *,
    on_delta: OnDelta | None = None,
    progress_s: float | None = 1.0,
    **body: Any,
) -> Result:
    """Generate for the bound task `task`; `body` holds any other field of a request.

    `progress_s`: how often state "PROGRESS" is written, with `text` and `tokens`; None: never. Raises `RequestFailed`
    where the request does not complete; at the soft time limit the request is cancelled.
    """
    from celery.exceptions import SoftTimeLimitExceeded

    # Called as a plain function a task has no id: that is a generation of its own.
    task_id = task.request.id

    def report(progress: Progress) -> None:
        task.update_state(state="PROGRESS", meta={"text": progress.text, "tokens": progress.tokens})

    return generate_in_thread(
        client,
        key_of(task_id or f"direct:{uuid4()}"),
        with_deadline({"prompt": prompt, **body}, _limit_s(task)),
        on_delta=on_delta,
        on_progress=None if progress_s is None or task_id is None else report,
        progress_s=progress_s or 0.0,
        cancels=(SoftTimeLimitExceeded,),
    )


def key_of(task_id: str) -> str:
    return f"celery:{task_id}"


def cancel(client: Client, task_id: str) -> str:
    """Cancel what a task generates; replies as `Client.cancel`."""
    return cancel_from_thread(client, key_of(task_id))


def cancel_on_revoke(client: Client) -> None:
    """Cancel the requests of tasks that are revoked, for as long as the process lives.

    The worker hears of a revocation before the task starts, or when it terminates it (`terminate=True`): a task that
    runs and is only revoked runs on, as Celery has it.
    """
    from celery.signals import task_revoked

    def revoked(request: Any = None, **_: Any) -> None:
        cancel(client, request.id)

    task_revoked.connect(revoked, weak=False)


def _limit_s(task: Any) -> float | None:
    """The time limit of this call, of the task, or of the app; the soft one first."""
    hard, soft = task.request.timelimit or (None, None)
    conf = task.app.conf
    limits = (soft, task.soft_time_limit, conf.task_soft_time_limit, hard, task.time_limit, conf.task_time_limit)
    return next((float(limit) for limit in limits if limit), None)
