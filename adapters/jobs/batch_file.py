"""Batch files: lines of requests, what each asks for, and what is known of them already.

A line is known by its content and by how many equal ones are before it, so a file may grow between two runs. The state
file beside the output is a log of finished lines, one JSON object each, in the order in which they ended; a last line
that a crash has cut is dropped. The output is written from it at the end, in the order of the requests.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import orjson

from pagemill.adapters.http.openai_answers import Answer, ChatAnswer, CompletionAnswer
from pagemill.adapters.http.openai_fields import Asked, read_chat, read_completion
from pagemill.engine.errors import ConfigError, RequestError, invalid
from pagemill.ingest.client import Result
from pagemill.ingest.schema import encode_body

TTL_MS = 86_400_000  # of a line that does not say
PRIORITY = 2
MAX_CUSTOM_ID = 512  # characters

_READERS: dict[str, tuple[Callable[[dict[str, Any]], Asked], type[Answer]]] = {
    "/v1/chat/completions": (read_chat, ChatAnswer),
    "/v1/completions": (read_completion, CompletionAnswer),
}


@dataclass(frozen=True, slots=True)
class Line:
    """Where a line is in its file. `number` counts from 1, `key` is what its requests are found by."""

    number: int
    offset: int
    size: int
    key: str


@dataclass(frozen=True, slots=True)
class Work:
    """What a line asks for: one request for each prompt, and how their results become an answer."""

    bodies: list[dict[str, Any]]
    answer: Callable[[Sequence[Result]], dict[str, Any]]


class BatchFile:
    """The lines of a file. Raises `ConfigError` where it cannot be read or has none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        try:
            self.lines = list(self._scan())
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        if not self.lines:
            raise ConfigError(f"{path} holds no requests")

    def read(self, line: Line) -> bytes:
        self._file.seek(line.offset)
        return self._file.read(line.size)

    def close(self) -> None:
        self._file.close()

    def _scan(self) -> Iterator[Line]:
        seen: Counter[bytes] = Counter()
        offset = 0
        for number, raw in enumerate(self._file, 1):
            text = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            stripped = text.strip()
            if stripped:
                digest = hashlib.sha256(stripped).digest()
                yield Line(
                    number,
                    offset + raw.index(stripped),
                    len(stripped),
                    f"batch:{digest.hex()[:40]}:{seen[digest]}",
                )
                seen[digest] += 1
            offset += len(raw)


def read_custom_id(raw: bytes) -> str | None:
    """The `custom_id` of a line, as far as it has one."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    custom_id = value.get("custom_id") if isinstance(value, dict) else None
    return custom_id if isinstance(custom_id, str) else None


def read_work(raw: bytes, *, model: str | None, max_bytes: int) -> Work:
    """What a line asks for. `model` stands in for the line's own. Raises `RequestError`, naming the field."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise invalid(f"the line is not JSON: {error}", "line") from None
    if not isinstance(value, dict):
        raise invalid("the line must be a JSON object", "line")
    custom_id = value.get("custom_id")
    if custom_id is not None and (not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID):
        raise invalid(f"custom_id must be a string of 1 to {MAX_CUSTOM_ID} characters", "custom_id")
    if "body" in value or "url" in value:
        work = _openai(value, model)
    else:
        fields = {name: item for name, item in value.items() if name != "custom_id"}
        work = Work([fields if model is None else {**fields, "model": model}], _native)
    defaults = {"priority": PRIORITY, "ttl_ms": TTL_MS}
    bodies = [
        {**body, "stream": False, **{name: item for name, item in defaults.items() if body.get(name) is None}}
        for body in work.bodies
    ]
    for body in bodies:
        if body.get("idempotency_key") is not None:
            raise invalid("a batch gives its own idempotency keys", "idempotency_key")
        encode_body(body, max_bytes)
    return Work(bodies, work.answer)


def _openai(value: dict[str, Any], model: str | None) -> Work:
    for name in value:
        if name not in ("custom_id", "method", "url", "body"):
            raise invalid(f"unknown field {name[:64]!r}; a line has custom_id, method, url and body", name[:64])
    if value.get("method", "POST") != "POST":
        raise invalid("method must be POST", "method")
    url, body = value.get("url"), value.get("body")
    if not isinstance(url, str) or url not in _READERS:
        raise invalid(f"url must be one of {', '.join(_READERS)}", "url")
    if not isinstance(body, dict):
        raise invalid("body must be an object", "body")
    read, shape = _READERS[url]
    asked = read({**body, "stream": None, "stream_options": None})
    named = model or asked.model
    bodies = [fields if named is None else {**fields, "model": named} for fields in asked.bodies]

    def answer(results: Sequence[Result]) -> dict[str, Any]:
        return shape(asked, results[0].request_id, time.time_ns() // 1_000_000).whole(results, named)

    return Work(bodies, answer)


def _native(results: Sequence[Result]) -> dict[str, Any]:
    (result,) = results
    return {
        "id": result.request_id,
        "state": result.state,
        "choices": [
            {"index": item.index, "text": item.text, "finish_reason": item.finish_reason} for item in result.choices
        ],
        "usage": result.usage,
        "metrics": result.metrics,
        "metadata": result.metadata,
    }


def answered(custom_id: str | None, line: Line, request_id: str, body: dict[str, Any]) -> dict[str, Any]:
    """A line of the output."""
    response = {"status_code": 200, "request_id": request_id, "body": body}
    return {"id": f"line-{line.number}", "custom_id": custom_id, "response": response, "error": None}


def failed(custom_id: str | None, line: Line, error: RequestError) -> dict[str, Any]:
    """A line of the errors file."""
    return {"id": f"line-{line.number}", "custom_id": custom_id, "response": None, "error": error.to_dict()}


class BatchState:
    """The log of finished lines; a context manager that holds it against other runs.

    Raises `ConfigError` where another run has it, or it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places: dict[str, tuple[int, int, bool]] = {}

    def __enter__(self) -> Self:
        try:
            self._file = self.path.open("a+b")
        except OSError as error:
            raise ConfigError(f"cannot write {self.path}: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ConfigError(f"{self.path} is in use: this batch runs already") from None
        self._load()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def is_done(self, key: str) -> bool:
        """Whether a line has its answer. One that failed is tried again by the next run."""
        place = self._places.get(key)
        return place is not None and place[2]

    def add(self, key: str, output: dict[str, Any]) -> None:
        """Note how a line ended; it is on its way to the disk when this returns."""
        data = orjson.dumps({"key": key, "output": output}) + b"\n"
        offset = self._file.seek(0, os.SEEK_END)
        self._file.write(data)
        self._file.flush()
        self._places[key] = (offset, len(data), output["error"] is None)

    def outputs(self, lines: Sequence[Line], *, good: bool) -> Iterator[bytes]:
        """What is known of `lines`, in their order: the answers, or the errors."""
        for line in lines:
            place = self._places.get(line.key)
            if place is not None and place[2] == good:
                self._file.seek(place[0])
                output = orjson.loads(self._file.read(place[1]))["output"]
                yield orjson.dumps({**output, "id": f"line-{line.number}"}) + b"\n"

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def _load(self) -> None:
        self._file.seek(0)
        offset = 0
        for raw in self._file:
            if not raw.endswith(b"\n"):
                break
            try:
                entry = orjson.loads(raw)
                key, is_good = entry["key"], entry["output"]["error"] is None
            except (orjson.JSONDecodeError, KeyError, TypeError):
                break
            self._places[key] = (offset, len(raw), is_good)
            offset += len(raw)
        self._file.truncate(offset)


def write_lines(path: Path, lines: Iterator[bytes]) -> int:
    """Write a file whole or not at all; with no lines there is none. Returns how many there were."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    count = 0
    try:
        with os.fdopen(handle, "wb") as file:
            for line in lines:
                file.write(line)
                count += 1
        if count:
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        else:
            os.unlink(temporary)
            path.unlink(missing_ok=True)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return count
