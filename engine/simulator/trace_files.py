"""Reading trace files. The format is told by the content, not by the file's name.

| format | a line | prompts alike |
|---|---|---|
| Azure LLM inference | CSV `TIMESTAMP,ContextTokens,GeneratedTokens` as published, | never |
| | or `arrival_ms,prompt_tokens,output_tokens` | |
| BurstGPT | CSV `Timestamp` (s), `Request tokens`, `Response tokens`; 0, 0: a failed request | never |
| Mooncake | JSON `timestamp` (ms), `input_length`, `output_length`, `hash_ids` of 512-token blocks | equal ids |
| token chains | JSON `input_length`, `output_length`, `token_chain_rle`, `session`, `timestamp`? (ms) | equal ids |
| conversations | JSON `turns`: [["h" or "g" or "s", tokens], ...] | within a conversation |
| ServeGen clients | JSON `arrivals`: fitted gaps by window, `input_tokens`, `output_tokens`: quantiles | never |

Every file may be gzipped.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TextIO

from pagemill.engine.errors import ConfigError
from pagemill.engine.simulator.servegen import sample_clients
from pagemill.engine.simulator.tokens import VOCABULARY, Run, cut_runs, join_runs
from pagemill.engine.simulator.trace import Trace, TraceRequest

Turns = Literal["first", "all"]

MOONCAKE_BLOCK = 512  # tokens behind one hash id
LEAST_TURN = 4  # a conversation's turn shorter than this is a cut-off, as in vLLM's own ShareGPT benchmark

_Reader = Callable[[Iterable[tuple[int, Any]]], list[TraceRequest]]


class _Ids:
    """Hands out stretches of token ids that nobody else has."""

    def __init__(self, first: int = 1) -> None:
        self._next = first

    def take(self, count: int) -> int:
        first = self._next
        self._next += count
        if self._next > VOCABULARY:
            raise ConfigError(f"the trace has more than {VOCABULARY} distinct tokens; read fewer rows (--limit)")
        return first


def read_trace(
    path: Path,
    *,
    turns: Turns = "first",
    limit: int | None = None,
    clients: str | None = None,
    seed: int = 0,
    from_s: float = 0.0,
) -> Trace:
    """Read a trace file. Raises `ConfigError`, naming the line, on what is not a trace.

    turns: of conversations, the first turn of each, or all as one session. clients: model whose ServeGen clients to
    sample (default: the first in the file), `limit` requests with `seed`. limit is a hint for formats that generate;
    other files are read whole. from_s: leave out what came in the first so many seconds of the trace.
    """
    try:
        with _open(path) as file:
            rows = _rows(path, file)
            first = next(rows, None)
            if first is None:
                raise ConfigError(f"trace {path} is empty")
            rows = itertools.chain([first], rows)
            read, name = _choose(path, first[1], turns, limit, clients, seed, from_s)
            counted = _Counted(rows)
            requests = _guarded(path, read, counted)
    except OSError as error:
        raise ConfigError(f"cannot read trace {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, EOFError, zlib.error) as error:
        raise ConfigError(f"trace {path} is not text: {error}") from error
    if not requests and not from_s:
        raise ConfigError(f"trace {path} holds no request")
    dropped = counted.count - len(requests) if name != "conversations" and name != "clients" else 0
    trace = Trace(_stem(path), tuple(requests), dropped)
    if from_s and name != "clients":
        if not trace.has_times:
            raise ConfigError(f"trace {trace.name} has no times, so nothing in it comes after {from_s:g} s")
        trace = trace.later(from_s)
    if not trace.requests:
        raise ConfigError(f"no request of {path} comes after {from_s:g} s")
    return trace


class _Counted:
    """Rows, counted, with the number of the line last read."""

    def __init__(self, rows: Iterable[tuple[int, Any]]) -> None:
        self._rows = rows
        self.count = 0
        self.line = 0

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        for line, row in self._rows:
            self.count += 1
            self.line = line
            yield line, row


def _guarded(path: Path, read: _Reader, rows: _Counted) -> list[TraceRequest]:
    try:
        return read(rows)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, csv.Error) as error:
        raise ConfigError(f"{path}:{rows.line} is not a row of this trace: {error!r}") from error


def _stem(path: Path) -> str:
    name = path.name.removesuffix(".gz")
    return name.rsplit(".", 1)[0]


def _open(path: Path) -> TextIO:
    with path.open("rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rt", encoding="utf-8-sig") if zipped else path.open(encoding="utf-8-sig", newline="")


def _rows(path: Path, file: TextIO) -> Iterator[tuple[int, Any]]:
    """Line number and content: a dict by column for CSV, the object for JSON lines."""
    line = next((text for text in file if text.strip()), "")
    if not line:
        return
    if line.lstrip().startswith("{"):
        for number, text in enumerate(itertools.chain([line], file), start=1):
            if text.strip():
                try:
                    yield number, json.loads(text)
                except ValueError as error:
                    raise ConfigError(f"{path}:{number} is not JSON: {error}") from error
        return
    names = [name.strip() for name in next(csv.reader([line]))]
    for number, row in enumerate(csv.reader(file), start=2):
        if row:
            yield number, dict(zip(names, row, strict=True)) if len(row) == len(names) else _ragged(path, number)


def _ragged(path: Path, number: int) -> Any:
    raise ConfigError(f"{path}:{number} has another number of columns than the header")


def _choose(
    path: Path, row: Any, turns: Turns, limit: int | None, clients: str | None, seed: int, from_s: float
) -> tuple[_Reader, str]:
    names = set(row) if isinstance(row, dict) else set()
    if {"arrival_ms", "prompt_tokens", "output_tokens"} <= names:
        return lambda rows: _lengths(rows, "arrival_ms", "prompt_tokens", "output_tokens", 1e-3), "lengths"
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= names:
        return lambda rows: _lengths(rows, "TIMESTAMP", "ContextTokens", "GeneratedTokens", 1.0), "lengths"
    if {"Timestamp", "Request tokens", "Response tokens"} <= names:
        return lambda rows: _lengths(rows, "Timestamp", "Request tokens", "Response tokens", 1.0), "lengths"
    if "hash_ids" in names:
        return _mooncake, "hashes"
    if "token_chain_rle" in names:
        return _chains, "chains"
    if "turns" in names:
        return _first_turns if turns == "first" else _all_turns, "conversations"
    if {"arrivals", "input_tokens", "output_tokens"} <= names:
        return lambda rows: _clients(rows, limit, clients, seed, from_s), "clients"
    raise ConfigError(f"{path} is none of the traces that can be read (columns or fields: {', '.join(sorted(names))})")


def _count(value: Any) -> int:
    number = int(value)
    if number < 0:
        raise ValueError(f"a negative number of tokens: {number}")
    return number


def _seconds(value: Any, unit: float) -> float:
    try:
        time = float(value) * unit
    except ValueError:
        time = datetime.fromisoformat(value).replace(tzinfo=UTC).timestamp()
    if not 0 <= time < 1e11:
        raise ValueError(f"a time of {time} s")
    return time


def _lengths(rows: Iterable[tuple[int, Any]], when: str, asked: str, got: str, unit: float) -> list[TraceRequest]:
    ids = _Ids()
    requests = []
    for _, row in rows:
        prompt, output = _count(row[asked]), _count(row[got])
        time = _seconds(row[when], unit)
        if prompt and output:
            first = ids.take(prompt + output)
            requests.append(_request([(first, prompt)], [(first + prompt, output)], time))
    return _from_zero(requests)


def _mooncake(rows: Iterable[tuple[int, Any]]) -> list[TraceRequest]:
    parsed = []
    for _, row in rows:
        prompt, output, hashes = _count(row["input_length"]), _count(row["output_length"]), row["hash_ids"]
        if len(hashes) != -(-prompt // MOONCAKE_BLOCK):
            raise ValueError(f"{len(hashes)} hash_ids for {prompt} tokens in blocks of {MOONCAKE_BLOCK}")
        if prompt and output:
            parsed.append((_seconds(row["timestamp"], 1e-3), prompt, output, [_count(name) for name in hashes]))
    ids = _Ids(1 + MOONCAKE_BLOCK * (1 + max((max(hashes) for _, _, _, hashes in parsed), default=0)))
    requests = []
    for time, prompt, output, hashes in parsed:
        runs = [(1 + name * MOONCAKE_BLOCK, MOONCAKE_BLOCK) for name in hashes]
        requests.append(_request(cut_runs(runs, 0, prompt), [(ids.take(output), output)], time))
    return _from_zero(requests)


def _chains(rows: Iterable[tuple[int, Any]]) -> list[TraceRequest]:
    requests: list[TraceRequest] = []
    last_call: dict[str, int] = {}
    for _, row in rows:
        prompt, output = _count(row["input_length"]), _count(row["output_length"])
        runs = join_runs((1 + _count(first), _count(count)) for first, count in row["token_chain_rle"])
        if sum(count for _, count in runs) != prompt + output:
            raise ValueError("token_chain_rle covers another number of tokens than input_length + output_length")
        if max(first + count for first, count in runs) > VOCABULARY:
            raise ValueError("a chain id beyond 2^31")
        if not (prompt and output):
            continue
        session = str(row.get("session", len(requests)))
        time = _seconds(row["timestamp"], 1e-3) if "timestamp" in row else None
        request = _request(
            cut_runs(runs, 0, prompt), cut_runs(runs, prompt, prompt + output), time, last_call.get(session)
        )
        last_call[session] = len(requests)
        requests.append(request)
    return _from_zero(requests)


def _first_turns(rows: Iterable[tuple[int, Any]]) -> list[TraceRequest]:
    ids = _Ids()
    requests = []
    for _, row in rows:
        turns = [(str(who), _count(tokens)) for who, tokens in row["turns"]]
        for (who, prompt), (other, output) in itertools.pairwise(turns):
            if who == "h" and other == "g":
                if min(prompt, output) >= LEAST_TURN:
                    first = ids.take(prompt + output)
                    requests.append(_request([(first, prompt)], [(first + prompt, output)], None))
                break
    return requests


def _all_turns(rows: Iterable[tuple[int, Any]]) -> list[TraceRequest]:
    """Every answer of a model, to everything said before it, from the first words of the human on."""
    ids = _Ids()
    requests: list[TraceRequest] = []
    for _, row in rows:
        turns = [(str(who), _count(tokens)) for who, tokens in row["turns"]]
        turns = list(itertools.dropwhile(lambda turn: turn[0] != "h", turns))
        first = ids.take(sum(tokens for _, tokens in turns))
        said = 0
        previous = None
        for who, tokens in turns:
            if who == "g" and said and tokens:
                requests.append(_request([(first, said)], [(first + said, tokens)], None, previous))
                previous = len(requests) - 1
            said += tokens
    return requests


def _clients(
    rows: Iterable[tuple[int, Any]], limit: int | None, model: str | None, seed: int, from_s: float
) -> list[TraceRequest]:
    ids = _Ids()
    requests = []
    for time, client, prompt, output in sample_clients([row for _, row in rows], model, limit, seed, from_s):
        first = ids.take(prompt + output)
        requests.append(_request([(first, prompt)], [(first + prompt, output)], time, tenant=client))
    return _from_zero(requests)


def _request(
    prompt: Iterable[Run],
    output: Iterable[Run],
    time: float | None,
    previous: int | None = None,
    tenant: str = "default",
) -> TraceRequest:
    asked, got = tuple(prompt), tuple(output)
    return TraceRequest(
        prompt=asked,
        output=got,
        prompt_tokens=sum(count for _, count in asked),
        output_tokens=sum(count for _, count in got),
        arrival_s=time,
        tenant=tenant,
        previous=previous,
    )


def _from_zero(requests: list[TraceRequest]) -> list[TraceRequest]:
    """Sorted by arrival, the first at 0 s. Traces without times stay as they are."""
    times = [request.arrival_s for request in requests]
    known = [time for time in times if time is not None]
    if not known or len(known) < len(requests):
        return requests
    order = sorted(range(len(requests)), key=lambda index: known[index])
    start = known[order[0]]
    trace = Trace("", tuple(requests)).arriving(time - start for time in known)
    return list(trace._with([(index, trace.requests[index]) for index in order]).requests)
