"""Job workers: calling the engine from tasks of Celery, RQ, Dramatiq and arq."""
