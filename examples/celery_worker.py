"""A Celery worker whose tasks generate.

pagemill serve                                                   # in one terminal
celery -A examples.celery_worker worker -P prefork -c 8          # in another
python -c 'from examples.celery_worker import summarise; print(summarise.delay("A long text").get())'
"""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

from pagemill import Client
from pagemill.adapters.jobs.celery_task import cancel_on_revoke, generate
from pagemill.adapters.jobs.generation import is_retriable
from pagemill.ingest.client import RequestFailed

REDIS = os.environ.get("REDIS_URL", "redis://localhost:6379")
app = Celery("summaries", broker=f"{REDIS}/1", backend=f"{REDIS}/1")
client = Client(redis_url=f"{REDIS}/0")
cancel_on_revoke(client)


# acks_late: a task whose worker dies is delivered again, and finds its request where it was.
@app.task(bind=True, acks_late=True, soft_time_limit=300, max_retries=5)
def summarise(self: Any, text: str) -> str:
    messages = [{"role": "user", "content": f"Summarise in one sentence:\n{text}"}]
    try:
        return generate(self, client, messages=messages, max_tokens=100).text
    except RequestFailed as error:
        if not is_retriable(error):
            raise
        raise self.retry(exc=error, countdown=(error.retry_after_ms or 5000) / 1000) from error
