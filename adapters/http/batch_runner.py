"""Working off batches: every gateway looks for open ones, and one at a time has each by a lease.

A line's request has an id made of the batch's and the line's number, so whoever goes on after a crash finds what was
asked for already and asks for nothing twice; results are fields named by the line. Two runners at once would do no harm
either: the lease only saves work. Lines go to the queue's lowest priority, a bounded number at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson
import structlog
from redis.exceptions import RedisError

from pagemill.adapters.http.batches import FINAL, OPEN, Batches
from pagemill.adapters.http.errors import as_api_error, internal_error
from pagemill.adapters.http.files import Files, LineTooLongError
from pagemill.adapters.http.gateway import Gateway
from pagemill.adapters.http.openai_answers import Answer, ChatAnswer, CompletionAnswer
from pagemill.adapters.http.openai_fields import Asked, read_chat, read_completion
from pagemill.adapters.http.queues import Model
from pagemill.adapters.http.responses_body import read_response
from pagemill.adapters.http.responses_fold import whole_response
from pagemill.engine.errors import RequestError, invalid
from pagemill.ingest.async_client import AsyncClient, AsyncHandle, QueueUnavailableError
from pagemill.ingest.keys import uuid7_hex
from pagemill.ingest.redis import is_unavailable
from pagemill.ingest.results import Result

LOOK_EVERY_S = 2.0
LEASE_MS = 10_000
BEAT_S = 1.0  # between looks at the lease and at a wish to cancel, and notes of progress
MAX_LINES = 50_000
MAX_ERRORS = 100  # told of a file that cannot be used
BREATH = 200  # lines checked before others may run
GROUP = 200  # results read at once
PRIORITY = 2
RETRIED = ("queue_full", "no_engine", "deadline_unreachable")

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Job:
    """One batch being worked on. `ended` is why no more lines are begun: "cancelled" or "expired"."""

    tenant: str
    batch: dict[str, Any]
    file_id: str
    pieces: int
    total: int = 0
    done: dict[int, str] = field(default_factory=dict)  # line -> "o" or "e"
    ended: str | None = None

    @property
    def id(self) -> str:
        return str(self.batch["id"])

    @property
    def results(self) -> str:
        return f"lines:{self.id}"

    @property
    def counts(self) -> dict[str, int]:
        completed = sum(kind == "o" for kind in self.done.values())
        return {"total": self.total, "completed": completed, "failed": len(self.done) - completed}


class BatchRunner:
    """Works off batches while the gateway runs. `stop` leaves them as they are for the next one."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._batches = Batches(gateway)
        self._shelf = gateway.queues.shelf
        self._ttl_s = gateway.config.http_file_ttl_s
        self._owner = uuid7_hex()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._looking = asyncio.get_running_loop().create_task(self._look())

    async def stop(self) -> None:
        tasks = [*self._tasks.values(), *([self._looking] if self._looking else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self) -> None:
        """Take up what is open and nobody's."""
        while True:
            self._gateway.batch_wanted.clear()
            try:
                for batch_id in await self._shelf.listed(OPEN):
                    if batch_id not in self._tasks and await self._claim(batch_id):
                        task = asyncio.create_task(self._work(batch_id))
                        self._tasks[batch_id] = task
                        task.add_done_callback(lambda _, name=batch_id: self._tasks.pop(name, None))  # type: ignore[misc]
            except (RedisError, OSError) as error:
                if not is_unavailable(error):
                    raise
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._gateway.batch_wanted.wait()

    async def _claim(self, batch_id: str) -> bool:
        return await self._shelf.claim(f"lease:{batch_id}", self._owner, ttl_ms=LEASE_MS)

    async def _work(self, batch_id: str) -> None:
        structlog.contextvars.bind_contextvars(batch=batch_id)
        try:
            loaded = await self._batches.load(batch_id)
            if loaded is None:
                await self._shelf.unlist(OPEN, batch_id)
            elif loaded[1]["status"] in FINAL:
                await self._batches.save(loaded[1])
            else:
                await self._run(*loaded)
        except (QueueUnavailableError, RedisError, OSError) as error:
            _log.warning("batch interrupted", reason=str(error))  # it is still open, and goes on when Redis is back
        except asyncio.CancelledError:
            with contextlib.suppress(RedisError, OSError):
                await self._shelf.delete(f"lease:{batch_id}")
            raise
        except Exception:
            _log.exception("a batch failed")
            loaded = await self._batches.load(batch_id)
            if loaded is not None:
                await self._fail(loaded[1], [{"code": "internal_error", "message": "the batch could not be run"}])

    async def _run(self, tenant: str, batch: dict[str, Any]) -> None:
        meta = await Files(self._gateway, tenant).meta(batch["input_file_id"])
        if meta is None:
            await self._fail(batch, [{"code": "file_not_found", "message": "the input file is gone"}])
            return
        job = _Job(tenant, batch, batch["input_file_id"], meta["pieces"])
        if job.batch["status"] == "cancelling":
            job.ended = "cancelled"
        errors = await self._check(job)
        if errors:
            await self._fail(batch, errors)
            return
        if batch["in_progress_at"] is None:
            batch |= {"status": "in_progress", "in_progress_at": int(time.time())}
        job.done = {int(name[1:]): name[0] for name in await self._shelf.fields(job.results)}
        await self._save(job)
        working = asyncio.create_task(self._lines(job))
        keeping = asyncio.create_task(self._keep(job, working))
        try:
            await asyncio.wait({working, keeping}, return_when=asyncio.FIRST_COMPLETED)
            if keeping.done():
                keeping.result()  # the lease is lost, which the other gateway goes on with
                if job.ended is None:
                    return
            await asyncio.gather(working, return_exceptions=job.ended is not None)
        finally:
            for task in (working, keeping):
                task.cancel()
            await asyncio.gather(working, keeping, return_exceptions=True)
        await self._finish(job)

    async def _keep(self, job: _Job, working: asyncio.Task[None]) -> None:
        """Keep the lease, note progress, and end the work where it is cancelled or its day is over."""
        seen = job.counts
        while True:
            if not await self._claim(job.id):
                return
            loaded = await self._batches.load(job.id)
            if loaded is None or loaded[1]["status"] == "cancelling":
                job.ended = "cancelled"
            elif time.time() >= job.batch["expires_at"]:
                job.ended = "expired"
            if job.ended is not None:
                working.cancel()
                return
            if job.counts != seen:
                seen = job.counts
                await self._save(job)
            await asyncio.sleep(BEAT_S)

    async def _save(self, job: _Job) -> None:
        job.batch["request_counts"] = job.counts
        await self._batches.save(job.batch)

    async def _fail(self, batch: dict[str, Any], errors: list[dict[str, Any]]) -> None:
        blank = {"code": None, "line": None, "message": None, "param": None}
        data = [{**blank, **error} for error in errors]
        batch |= {"status": "failed", "failed_at": int(time.time()), "errors": {"object": "list", "data": data}}
        await self._batches.save(batch)

    async def _input(self, job: _Job) -> AsyncGenerator[tuple[int, bytes], None]:
        number = 0
        async for line in Files(self._gateway, job.tenant).lines(job.file_id, job.pieces):
            if line.strip():
                yield number, line
                number += 1

    async def _check(self, job: _Job) -> list[dict[str, Any]]:
        """What is wrong with the file as such; what is wrong with a request is its own error."""
        errors: list[dict[str, Any]] = []
        names: set[str] = set()
        try:
            async for number, line in self._input(job):
                job.total = number + 1
                if job.total > MAX_LINES:
                    return [{"code": "too_many_lines", "message": f"a batch may have at most {MAX_LINES} lines"}]
                problem = _problem(line, job.batch["endpoint"], names)
                if problem is not None:
                    errors.append({"line": number + 1, **problem})
                    if len(errors) == MAX_ERRORS:
                        break
                if number % BREATH == 0:
                    await asyncio.sleep(0)
        except LineTooLongError as error:
            return [*errors, {"line": job.total + 1, **_wrong("line_too_long", str(error))}]
        if not job.total:
            errors.append({"code": "empty_file", "message": "the file has no lines"})
        return errors

    async def _lines(self, job: _Job) -> None:
        """Run every line that has no result yet."""
        room = asyncio.Semaphore(self._gateway.config.http_batch_requests)
        async with asyncio.TaskGroup() as group:
            async for number, line in self._input(job):
                if job.ended is not None:
                    return
                if number not in job.done:
                    await room.acquire()
                    task = group.create_task(self._line(job, number, line))
                    task.add_done_callback(lambda _: room.release())

    async def _line(self, job: _Job, number: int, line: bytes) -> None:
        """Run a line, again from the start for as long as Redis is away."""
        while True:
            try:
                await self._run_line(job, number, line)
                return
            except (QueueUnavailableError, RedisError, OSError) as error:
                if not isinstance(error, QueueUnavailableError) and not is_unavailable(error):
                    raise
            await asyncio.sleep(BEAT_S)

    async def _run_line(self, job: _Job, number: int, line: bytes) -> None:
        item = orjson.loads(line)
        name = f"{job.id}.{number}"
        try:
            status, body = 200, await self._answer(job, name, item["body"])
        except Exception as error:
            known = as_api_error(error, job.batch["endpoint"])
            if known is not None and known.code == "queue_unavailable":
                raise
            if known is None:
                _log.exception("a line of a batch failed", line=number)
                known = internal_error()
            status, body = known.status, known.body()
        response = {"status_code": status, "request_id": name, "body": body}
        shown = {"id": f"batch_req_{name}", "custom_id": item["custom_id"], "response": response, "error": None}
        kind = "o" if status == 200 else "e"
        await self._shelf.write(job.results, {f"{kind}{number}": orjson.dumps(shown)}, ttl_s=self._ttl_s)
        job.done[number] = kind

    async def _answer(self, job: _Job, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        if job.batch["endpoint"] == "/v1/responses":
            return await self._response(job, name, body)
        is_chat = job.batch["endpoint"].endswith("/chat/completions")
        asked: Asked = read_chat(body) if is_chat else read_completion(body)
        if asked.stream:
            raise invalid("stream cannot be true in a batch", "stream")
        shape: type[Answer] = ChatAnswer if is_chat else CompletionAnswer
        model = await self._gateway.queues.find(asked.model)
        bodies = [{"priority": PRIORITY, **fields, **self._common(job, model)} for fields in asked.bodies]
        names = [name] if len(bodies) == 1 else [f"{name}.{part}" for part in range(len(bodies))]
        pairs = zip(names, bodies, strict=True)
        results = await asyncio.gather(*(self._result(job, model.client, *pair) for pair in pairs))
        return shape(asked, name, int(time.time() * 1000)).whole(results, model.name)

    async def _response(self, job: _Job, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        asked = read_response(body)
        for flag, given in (("stream", asked.stream), ("background", asked.background)):
            if given:
                raise invalid(f"{flag} cannot be true in a batch", flag)
        if asked.previous is not None:
            raise invalid("previous_response_id cannot be used in a batch", "previous_response_id")
        model = await self._gateway.queues.find(asked.model)
        fields = {"priority": PRIORITY, **asked.request([]), **self._common(job, model)}
        result = await self._result(job, model.client, name, fields)
        note = {**asked.shown, "model": asked.model or model.name, "created_at": int(time.time())}
        end = {"state": result.state, "usage": result.usage, "error": result.error}
        return whole_response(name, note, end, asdict(result.choices[0]))

    def _common(self, job: _Job, model: Model) -> dict[str, Any]:
        """What every request of a batch has."""
        named = {} if model.queue_model is None else {"model": model.queue_model}
        left_ms = max(1, int((job.batch["expires_at"] - time.time()) * 1000))
        return {**named, "tenant": job.tenant, "ttl_ms": left_ms}

    async def _result(self, job: _Job, client: AsyncClient, name: str, body: dict[str, Any]) -> Result:
        """The result of a request, which is submitted unless it was before; cancelled if its batch has come to an end,
        and left to whoever goes on with the batch otherwise."""
        try:
            lost = 0
            while True:
                try:
                    return await (await self._submitted(client, name, body)).result()
                except RequestError as error:
                    if error.code != "request_lost" or lost == 2:
                        raise
                    lost += 1  # it ended so long ago that its result has expired
        except asyncio.CancelledError:
            if job.ended is not None:
                self._gateway.in_background(client.cancel(name))
            raise

    async def _submitted(self, client: AsyncClient, name: str, body: dict[str, Any]) -> AsyncHandle:
        """Raises what is final; what is not is tried again until it succeeds."""
        while True:
            try:
                return await client.submit(**body, id=name)
            except RequestError as error:
                if error.code == "duplicate_id":
                    return client.attach(name)
                if error.code not in RETRIED:
                    raise
                wait_ms = error.retry_after_ms or 1000
            await asyncio.sleep(min(60.0, wait_ms / 1000))

    async def _finish(self, job: _Job) -> None:
        """Make the files, in the order of the lines, and say how it ended."""
        batch = job.batch
        batch |= {"status": "finalizing", "finalizing_at": int(time.time())}
        await self._save(job)
        files = Files(self._gateway, job.tenant)
        if batch["output_file_id"] is None and job.counts["completed"]:
            made = await files.create(f"{job.id}_output.jsonl", "batch_output", self._outputs(job))
            batch["output_file_id"] = made["id"]
        if batch["error_file_id"] is None and job.counts["completed"] < job.total:
            made = await files.create(f"{job.id}_errors.jsonl", "batch_output", self._errors(job))
            batch["error_file_id"] = made["id"]
        status = job.ended or "completed"
        batch |= {"status": status, f"{status}_at": int(time.time())}
        if job.ended is not None:
            counts = job.counts
            batch["request_counts"] = {**counts, "failed": job.total - counts["completed"]}
            await self._batches.save(batch)
        else:
            await self._save(job)
        await self._shelf.delete(job.results)

    async def _outputs(self, job: _Job) -> AsyncGenerator[bytes, None]:
        numbers = sorted(number for number, kind in job.done.items() if kind == "o")
        for first in range(0, len(numbers), GROUP):
            names = [f"o{number}" for number in numbers[first : first + GROUP]]
            for line in await self._shelf.read(job.results, *names):
                if line is not None:
                    yield line + b"\n"

    async def _errors(self, job: _Job) -> AsyncGenerator[bytes, None]:
        """Lines that failed, and those that were not run any more."""
        async for number, line in self._input(job):
            if number not in job.done:
                error = {"code": f"batch_{job.ended}", "message": f"the batch was {job.ended} before this line was run"}
                named = {"id": f"batch_req_{job.id}.{number}", "custom_id": orjson.loads(line)["custom_id"]}
                yield orjson.dumps({**named, "response": None, "error": error}) + b"\n"
            elif job.done[number] == "e":
                (known,) = await self._shelf.read(job.results, f"e{number}")
                if known is not None:
                    yield known + b"\n"


def _problem(line: bytes, endpoint: str, names: set[str]) -> dict[str, Any] | None:
    try:
        item = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return _wrong("invalid_json_line", f"the line is not JSON: {error}")
    if not isinstance(item, dict):
        return _wrong("invalid_json_line", "the line must be a JSON object")
    name = item.get("custom_id")
    if not isinstance(name, str) or not 1 <= len(name) <= 512:
        return _wrong("invalid_custom_id", "custom_id must be a text of 1 to 512 characters", "custom_id")
    if name in names:
        return _wrong("duplicate_custom_id", f"custom_id {name[:64]!r} is there twice", "custom_id")
    names.add(name)
    if item.get("method") != "POST":
        return _wrong("invalid_method", "method must be POST", "method")
    if item.get("url") != endpoint:
        return _wrong("invalid_url", f"url must be {endpoint}, as the batch's endpoint", "url")
    if not isinstance(item.get("body"), dict):
        return _wrong("invalid_request", "body must be an object", "body")
    return None


def _wrong(code: str, message: str, param: str | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": param}
