"""Generations from the tasks of Celery, RQ, Dramatiq and arq, each run by its own worker against a real engine."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from pagemill.adapters.jobs import arq_job, celery_task, dramatiq_actor, rq_job
from pagemill.adapters.jobs.generation import (
    Progress,
    cancel_from_thread,
    generate_in_thread,
    is_retriable,
    request_id,
    with_deadline,
)
from pagemill.engine.errors import RequestError
from pagemill.ingest.client import AsyncClient, Client, QueueUnavailableError, RequestFailed
from pagemill.ingest.embedded import EmbeddedServer
from pagemill.ingest.records import Record
from pagemill.ingest.results import refused_result
from tests.adapters.job_engine import engine_at_work
from tests.adapters.processes import environment

TAG = "pm:{jobs.0}"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def url(valkey: EmbeddedServer) -> Iterator[str]:
    """The server with an engine at work on the queue "jobs", in a thread of this process."""
    with engine_at_work(valkey, "jobs") as base:
        yield base


@pytest.fixture(scope="module")
def tasks(url: str) -> Any:
    """The module of tasks, its client on the test's server."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEMILL_TEST_URL", url)
        from tests.adapters import job_tasks
    return job_tasks


@pytest.fixture(scope="module")
def story(tasks: Any) -> str:
    """The text of SHORT."""
    text: str = tasks.client.submit(**tasks.SHORT).result(60).text
    return text


def submitted(url: str) -> int:
    with redis.Redis.from_url(url) as client:
        return int(client.hget(f"{TAG}:stat", "submitted") or 0)  # type: ignore[arg-type]


def record(client: Client, name: str) -> Record | None:
    thread = client.thread()
    return thread.run(thread.client.record(name))


def until(condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def ends_as(client: Client, key: str, state: str, generation: int = 0) -> None:
    def has_ended() -> Record | None:
        found = record(client, request_id(key, generation))
        return found if found is not None and found.has_ended else None

    assert until(has_ended).state == state


def test_a_key_is_generated_once(tasks: Any, url: str, story: str) -> None:
    before = submitted(url)
    progress: list[Progress] = []
    texts = [
        generate_in_thread(tasks.client, "core:a", tasks.SHORT, on_progress=progress.append, progress_s=0.0).text
        for _ in range(2)
    ]
    assert texts == [story, story] and submitted(url) == before + 1
    assert progress[0].text and story.startswith(progress[0].text) and progress[-1].tokens == 24
    with pytest.raises(RequestError) as caught:
        generate_in_thread(tasks.client, "core:a", {**tasks.SHORT, "max_tokens": 3})
    assert caught.value.code == "idempotency_conflict" and not is_retriable(caught.value)


def test_only_what_failed_is_generated_again(tasks: Any, story: str) -> None:
    class Stop(BaseException):
        pass

    def stop(_: Any) -> None:
        raise Stop

    # Cancelled before its first try, as a task that is revoked while it waits.
    cancel_from_thread(tasks.client, "core:b")
    with pytest.raises(RequestFailed) as caught:
        generate_in_thread(tasks.client, "core:b", tasks.SHORT)
    assert caught.value.code == "cancelled"
    # The next try is a new generation; one that is stopped in the middle is cancelled, and the one after is another.
    with pytest.raises(Stop):
        generate_in_thread(tasks.client, "core:b", tasks.SHORT, on_progress=stop, progress_s=0.0, cancels=(Stop,))
    ends_as(tasks.client, "core:b", "cancelled", 1)
    # Left by an exception that says nothing about the request, it runs on.
    with pytest.raises(Stop):
        generate_in_thread(tasks.client, "core:b", tasks.SHORT, on_progress=stop, progress_s=0.0)
    ends_as(tasks.client, "core:b", "completed", 2)
    assert generate_in_thread(tasks.client, "core:b", tasks.SHORT).text == story
    assert record(tasks.client, request_id("core:b", 3)) is None


@contextlib.contextmanager
def working(url: str, folder: Path, *command: str) -> Iterator[None]:
    """A worker's process while the block runs."""
    with (folder / "log").open("w") as log:
        worker = subprocess.Popen(
            [sys.executable, *command],
            env={**environment(), "PAGEMILL_TEST_URL": url} | {"PYTHONPATH": ":".join(filter(None, sys.path))},
            cwd=ROOT,
            stdout=log,
            stderr=log,
        )
        try:
            yield
        finally:
            worker.terminate()
            worker.wait(60)


def celery_worker(*options: str) -> list[str]:
    command = ["-m", "celery", "-A", "tests.adapters.job_tasks", "worker", "-l", "warning", *options]
    return [*command, "--without-gossip", "--without-mingle"]


def names_of_clients(url: str) -> set[str]:
    """The names under which clients are connected to the server."""
    with redis.Redis.from_url(f"{url}/0") as client:
        found: Any = client.client_list()
        return {connection["name"] for connection in found}


def test_celery(tasks: Any, url: str, story: str, tmp_path: Path) -> None:
    with working(url, tmp_path, *celery_worker("-c", "2")):  # the default pool, of processes
        before = submitted(url)
        asked = tasks.celery_short.delay(str(tmp_path / "marker"))
        assert asked.get(timeout=60) == [story, 1, True]
        assert submitted(url) == before + 1
        found = record(tasks.client, request_id(celery_task.key_of(asked.id)))
        assert found is not None and found.deadline is not None and found.created is not None
        assert found.deadline - found.created == 60_000

        limited = tasks.celery_long.apply_async(soft_time_limit=3)
        ends_as(tasks.client, celery_task.key_of(limited.id), "cancelled")
        with contextlib.suppress(Exception):
            limited.get(timeout=60)
        assert limited.state == "FAILURE"

        revoked = tasks.celery_long.delay()
        name = request_id(celery_task.key_of(revoked.id))
        until(lambda: (found := record(tasks.client, name)) is not None and found.state == "running")
        revoked.revoke(terminate=True)
        ends_as(tasks.client, celery_task.key_of(revoked.id), "cancelled")

        # The pool's processes were forked from one that has used the client: each has connections of its own.
        where = [tasks.celery_where.delay() for _ in range(4)]
        texts, pids = zip(*(asked.get(timeout=60) for asked in where), strict=True)
        assert set(texts) == {story}
        assert {f"pagemill-client-{pid}" for pid in pids} <= names_of_clients(url)

        # What no queue would take is told to whoever asks for the result.
        with pytest.raises(Exception, match=r"1048576|too_large|body"):
            tasks.celery_too_large.delay().get(timeout=60)


@pytest.mark.parametrize("pool", ["threads", "gevent", "eventlet"])
def test_celery_pools_of_one_process(tasks: Any, url: str, story: str, tmp_path: Path, pool: str) -> None:
    if pool != "threads":
        pytest.importorskip(pool)
    before = submitted(url)
    with working(url, tmp_path, *celery_worker("-P", pool, "-c", "4")):
        asked = [tasks.celery_where.delay() for _ in range(4)]
        told = [item.get(timeout=60) for item in asked]
        assert {text for text, _ in told} == {story} and len({pid for _, pid in told}) == 1
        assert submitted(url) == before + 4
        if pool != "threads":  # threads cannot be terminated
            revoked = tasks.celery_long.delay()
            name = request_id(celery_task.key_of(revoked.id))
            until(lambda: (found := record(tasks.client, name)) is not None and found.state == "running")
            revoked.revoke(terminate=True)
            ends_as(tasks.client, celery_task.key_of(revoked.id), "cancelled")


def test_rq_in_forked_work_horses(tasks: Any, url: str, story: str, tmp_path: Path) -> None:
    """RQ forks a process for each job; what stops a job kills that process, and its callback cancels the request."""
    from rq import Callback, Queue
    from rq.command import send_stop_job_command

    work = (
        "import os, redis; from rq import Queue, Worker; from tests.adapters import job_tasks as tasks; "
        "tasks.use_client(); connection = redis.Redis.from_url(tasks.URL + '/5'); "
        "Worker([Queue(connection=connection)], connection=connection).work()"
    )
    with redis.Redis.from_url(f"{url}/5") as connection, working(url, tmp_path, "-c", work):
        queue = Queue(connection=connection)
        jobs = [queue.enqueue(tasks.rq_where, job_timeout=60) for _ in range(2)]
        until(lambda: all(job.get_status(refresh=True).value in ("finished", "failed") for job in jobs))
        told = [job.return_value() for job in jobs]
        assert {text for text, _ in told} == {story} and len({pid for _, pid in told}) == 2
        stopped = queue.enqueue(tasks.rq_long, job_timeout=60, on_stopped=Callback(tasks.rq_stopped))
        name = request_id(rq_job.key_of(stopped.id))
        until(lambda: (found := record(tasks.client, name)) is not None and found.state == "running")
        send_stop_job_command(connection, stopped.id)
        ends_as(tasks.client, rq_job.key_of(stopped.id), "cancelled")


def test_a_celery_task_that_is_called_directly_has_no_id(tasks: Any, url: str, story: str) -> None:
    before = submitted(url)
    texts = [celery_task.generate(tasks.celery_long, tasks.client, **tasks.SHORT).text for _ in range(2)]
    assert texts == [story, story] and submitted(url) == before + 2


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """A worker takes signals for itself, and RQ's keeps them; Ctrl-C in later tests is not its business."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_rq(tasks: Any, url: str, story: str, tmp_path: Path) -> None:
    from rq import Queue, Retry, SimpleWorker

    with redis.Redis.from_url(f"{url}/2") as connection:
        queue = Queue(connection=connection)
        before = submitted(url)
        job = queue.enqueue(tasks.rq_short, str(tmp_path / "marker"), retry=Retry(max=1), job_timeout=60)
        SimpleWorker([queue], connection=connection).work(burst=True)
        assert job.return_value() == story and submitted(url) == before + 1
        job.refresh()
        assert story.startswith(job.meta["generation"]["text"]) and job.meta["generation"]["tokens"] > 0

        late = queue.enqueue(tasks.rq_long, job_timeout=3)
        SimpleWorker([queue], connection=connection).work(burst=True)
        assert late.get_status(refresh=True).value == "failed"
        ends_as(tasks.client, rq_job.key_of(late.id), "cancelled")
    with pytest.raises(RuntimeError, match="no RQ job"):
        rq_job.generate(tasks.client, "x")


def test_dramatiq(tasks: Any, url: str, story: str, tmp_path: Path) -> None:
    import dramatiq
    from dramatiq.brokers.redis import RedisBroker
    from dramatiq.middleware import CurrentMessage

    broker = RedisBroker(url=f"{url}/3")
    broker.add_middleware(CurrentMessage())
    dramatiq.set_broker(broker)
    told: list[str] = []

    @dramatiq.actor(broker=broker, max_retries=1, min_backoff=1, time_limit=60_000)
    def short(marker: str) -> None:
        told.append(dramatiq_actor.generate(tasks.client, on_delta=tasks.fail_once(marker), **tasks.SHORT).text)

    @dramatiq.actor(broker=broker, max_retries=0, time_limit=3_000)
    def long() -> None:
        dramatiq_actor.generate(tasks.client, **tasks.LONG, ttl_ms=60_000)

    before = submitted(url)
    short.send(str(tmp_path / "marker"))
    late = long.send()
    broker.emit_after("process_boot")  # as dramatiq's command does: it starts the time limit's clock
    worker = dramatiq.Worker(broker, worker_threads=2, worker_timeout=50)
    worker.start()
    try:
        until(lambda: told)
        assert told == [story] and submitted(url) == before + 2
        ends_as(tasks.client, dramatiq_actor.key_of(late.message_id), "cancelled")
    finally:
        worker.stop()
        broker.close()
    with pytest.raises(RuntimeError, match="CurrentMessage"):
        dramatiq_actor.generate(tasks.client, "x")


def test_arq(tasks: Any, url: str, story: str, tmp_path: Path) -> None:
    from arq import Retry, create_pool, func
    from arq import Worker as ArqWorker
    from arq.connections import RedisSettings

    async def scenario() -> None:
        async with AsyncClient(redis_url=f"{url}/0", queue="jobs") as client:

            async def short(ctx: dict[str, Any], marker: str) -> str:
                try:
                    result = await arq_job.generate(
                        ctx, client, on_delta=tasks.fail_once(marker), timeout_s=60, **tasks.SHORT
                    )
                except tasks.FirstTryFails:
                    raise Retry(defer=0) from None
                return result.text

            async def long(ctx: dict[str, Any]) -> str:
                return (await arq_job.generate(ctx, client, **tasks.LONG)).text

            settings = RedisSettings.from_dsn(f"{url}/4")
            pool = await create_pool(settings)
            worker = ArqWorker(
                functions=[func(short, name="short"), func(long, name="long")],
                redis_settings=settings,
                allow_abort_jobs=True,
                poll_delay=0.05,
                handle_signals=False,
            )
            serving = asyncio.create_task(worker.async_run())
            before = submitted(url)
            job: Any = await pool.enqueue_job("short", str(tmp_path / "marker"))
            # `job.result` asks for result and queue one after the other, and may miss a job that ends in between.
            while (info := await job.result_info()) is None:
                await asyncio.sleep(0.05)
            assert info.result == story and info.job_try == 2
            assert submitted(url) == before + 1
            job = await pool.enqueue_job("long")
            name = request_id(arq_job.key_of(job.job_id))
            while (found := await client.record(name)) is None or found.state != "running":
                await asyncio.sleep(0.02)
            assert await job.abort(timeout=60, poll_delay=0.05)
            while (found := await client.record(name)) is None or not found.has_ended:
                await asyncio.sleep(0.02)
            assert found.state == "cancelled"
            await worker.close()
            await asyncio.gather(serving, return_exceptions=True)
            await pool.aclose()

    asyncio.run(asyncio.wait_for(scenario(), 240))


def test_deadlines_and_errors() -> None:
    assert with_deadline({"prompt": "x"}, 1.5) == {"prompt": "x", "ttl_ms": 1500}
    assert with_deadline({"prompt": "x", "ttl_ms": 7}, 1.5)["ttl_ms"] == 7
    for limit in (None, -1, 0, float("inf"), 10**9):
        assert "ttl_ms" not in with_deadline({"prompt": "x"}, limit)
    full = RequestFailed(refused_result("a", b'{"code":"queue_full","message":"no","retry_after_ms":250}'))
    again = pickle.loads(pickle.dumps(full))
    assert (again.code, again.retry_after_ms, again.result) == ("queue_full", 250, full.result) and is_retriable(again)
    wrong = RequestError("too_large", "no", param="body", retry_after_ms=7)
    assert vars(pickle.loads(pickle.dumps(wrong))) == vars(wrong)
    assert is_retriable(QueueUnavailableError("away")) and not is_retriable(ValueError())
    assert not is_retriable(RequestError("prompt_too_long", "x"))
    long_key = request_id("celery:" + "x" * 500, 99)
    assert len(long_key) < 128 and request_id("a") != request_id("b")


def test_the_examples_can_be_imported() -> None:
    names = [path.stem for path in (ROOT / "examples").glob("*_worker.py")]
    assert sorted(names) == ["arq_worker", "celery_worker", "dramatiq_worker", "rq_worker"]
    code = "; ".join(["import sys", *(f"import examples.{name}" for name in names), "print('torch' in sys.modules)"])
    environ = {**environment(), "PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=240
    )
    assert done.stdout == "False\n", done.stderr
