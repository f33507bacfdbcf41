"""RQ: generations from jobs.

    def summarise(text):
        return generate(client, messages=[...], max_tokens=200).text

    queue.enqueue(summarise, text, job_timeout=120, retry=Retry(3), on_stopped=Callback(stopped))

    def stopped(job, connection):   # `rq`'s stop command kills the work horse; this runs beside it
        cancel(client, job.id)

The deadline is the job's timeout. Progress goes to `job.meta["generation"]`.
"""

from __future__ import annotations

from typing import Any

from pagemill.adapters.jobs.generation import (
    OnDelta,
    Progress,
    cancel_from_thread,
    generate_in_thread,
    with_deadline,
)
from pagemill.ingest.client import Client, Result


def generate(
    client: Client,
    prompt: str | None = None,
    *,
    on_delta: OnDelta | None = None,
    progress_s: float | None = 1.0,
    **body: Any,
) -> Result:
    """Generate for the job that runs here; `body` holds any other field of a request.

    `progress_s`: how often `meta["generation"]` is saved, with `text` and `tokens`; None: never. Raises
    `RequestFailed` where the request does not complete, `RuntimeError` outside a job; at the job's timeout the request
    is cancelled.
    """
    from rq import get_current_job
    from rq.timeouts import JobTimeoutException

    job: Any = get_current_job()
    if job is None:
        raise RuntimeError("no RQ job runs here")

    def report(progress: Progress) -> None:
        job.meta["generation"] = {"text": progress.text, "tokens": progress.tokens}
        job.save_meta()

    return generate_in_thread(
        client,
        key_of(job.id),
        with_deadline({"prompt": prompt, **body}, job.timeout),
        on_delta=on_delta,
        on_progress=None if progress_s is None else report,
        progress_s=progress_s or 0.0,
        cancels=(JobTimeoutException,),
    )


def key_of(job_id: str) -> str:
    return f"rq:{job_id}"


def cancel(client: Client, job_id: str) -> str:
    """Cancel what a job generates; replies as `Client.cancel`."""
    return cancel_from_thread(client, key_of(job_id))
