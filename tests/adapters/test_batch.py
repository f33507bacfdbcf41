"""`pagemill batch`: files of both kinds, bad lines, and runs that are interrupted."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis

from pagemill.adapters.cli.main import run as pagemill
from pagemill.adapters.jobs.batch_file import BatchFile, BatchState, read_work, write_lines
from pagemill.engine.errors import ConfigError, RequestError
from pagemill.ingest.embedded import EmbeddedServer
from tests.adapters.job_engine import engine_at_work
from tests.adapters.processes import environment

GREEDY: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
CALLING = b'{"url":"/v1/chat/completions","body":{"messages":[{"role":"user","content":"x"}],"tools":['
CALLING += b'{"type":"function","function":{"name":"f"}}],"tool_choice":'


def chat(name: str, text: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "smollm2-135m", "messages": [{"role": "user", "content": text}], **GREEDY, **fields}
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


def write(path: Path, *lines: Any) -> Path:
    texts = [line if isinstance(line, bytes) else orjson.dumps(line) for line in lines]
    path.write_bytes(b"\n".join(texts) + b"\n")
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


@pytest.fixture(scope="module")
def queue(valkey: EmbeddedServer) -> Iterator[tuple[str, ...]]:
    """The flags of a queue that an engine serves."""
    with engine_at_work(valkey, "batch") as base:
        yield ("--redis-url", f"{base}/0", "--queue", "batch")


def submitted(queue: tuple[str, ...]) -> int:
    with redis.Redis.from_url(queue[1]) as client:
        return int(client.hget("pm:{batch.0}:stat", "submitted") or 0)  # type: ignore[arg-type]


def test_answers_come_in_order_and_bad_lines_apart(queue: tuple[str, ...], tmp_path: Path) -> None:
    lines = [
        chat("long", "Count to ten.", max_tokens=40),
        chat("short", "Hello"),
        {"prompt": "Once upon a time", **GREEDY, "metadata": {"k": "v"}},
        b"",
        b"{not json",
        chat("stream", "Hello", stream=True, stream_options={"include_usage": True}),
        chat("short", "Another line with a name that is taken"),
        chat("hot", "Hello", temperature=-1),
        {**chat("where", "x"), "url": "/v1/embeddings"},
        {"custom_id": "two", "url": "/v1/completions", "body": {"prompt": ["One", "Two"], **GREEDY}},
        chat("other", "Hello", model="gpt-5"),
        chat("n", "Hello", n=2, seed=1, temperature=1),
        {"prompt": "Once upon a time", **GREEDY, "metadata": {"k": "v"}},
        [1],
    ]
    source = write(tmp_path / "in.jsonl", *lines)
    source.write_bytes(b"\xef\xbb\xbf" + source.read_bytes().replace(b"\n", b"\r\n"))
    before = submitted(queue)
    assert pagemill(["batch", str(source), *queue, "--window", "8"]) == 1
    good, bad = rows(tmp_path / "in.out.jsonl"), rows(tmp_path / "in.errors.jsonl")
    assert [row["id"] for row in good] == [f"line-{number}" for number in (1, 2, 3, 6, 10, 12, 13)]
    assert [row["custom_id"] for row in good] == ["long", "short", None, "stream", "two", "n", None]
    by_name = {row["custom_id"]: row["response"]["body"] for row in good if row["custom_id"]}
    assert by_name["long"]["usage"]["completion_tokens"] == 40 and by_name["long"]["object"] == "chat.completion"
    assert by_name["short"]["choices"] == by_name["stream"]["choices"]
    assert [choice["index"] for choice in by_name["two"]["choices"]] == [0, 1] and len(by_name["n"]["choices"]) == 2
    assert good[2]["response"]["body"]["metadata"] == {"k": "v"} and good[2]["response"]["status_code"] == 200
    # Equal lines are requests of their own, all the same.
    assert good[2]["response"]["request_id"] != good[-1]["response"]["request_id"]
    assert {row["custom_id"]: (row["error"]["code"], row["error"]["param"]) for row in bad} == {
        None: ("invalid_request", "line"),
        "short": ("invalid_request", "custom_id"),
        "hot": ("invalid_request", "temperature"),
        "where": ("invalid_request", "url"),
        "other": ("unsupported_model", "model"),
    }
    assert len(bad) == 6
    count = submitted(queue) - before
    # Once more: only the line that an engine refused is asked again.
    assert pagemill(["batch", str(source), *queue]) == 1
    assert submitted(queue) - before == count + 1 and rows(tmp_path / "in.out.jsonl") == good
    # Mended, the file is done, and so is the state.
    write(source, *(line for number, line in enumerate(lines) if number in (0, 1, 2, 5, 9, 11, 12)))
    assert pagemill(["batch", str(source), *queue]) == 0
    assert submitted(queue) - before == count + 1
    assert [row["response"] for row in rows(tmp_path / "in.out.jsonl")] == [row["response"] for row in good]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "in.out.jsonl"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_goes_on(queue: tuple[str, ...], tmp_path: Path, how: signal.Signals) -> None:
    lines = [chat(f"c{number}", f"Say {number} {how.name}", max_tokens=6) for number in range(12)]
    source = write(tmp_path / "in.jsonl", *lines)
    before = submitted(queue)
    process = subprocess.Popen(
        [sys.executable, "-m", "pagemill", "batch", str(source), *queue, "--window", "3"],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    state = tmp_path / "in.state.jsonl"
    deadline = time.monotonic() + 60
    while not state.exists() or state.read_bytes().count(b"\n") < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(how)
    told = process.communicate(timeout=60)[1]
    if how == signal.SIGINT:
        assert process.returncode == 130 and "goes on where this was" in told
    done = state.read_bytes().count(b"\n")
    assert 2 <= done < 12 and not (tmp_path / "in.out.jsonl").exists()
    with state.open("ab") as file:
        file.write(b'{"key":"cut in the mid')
    assert pagemill(["batch", str(source), *queue]) == 0
    assert [row["custom_id"] for row in rows(tmp_path / "in.out.jsonl")] == [f"c{number}" for number in range(12)]
    assert submitted(queue) == before + 12, "what ran when it was interrupted was found again"


def test_one_run_at_a_time_and_files_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", chat("a", "x"))
    with BatchState(tmp_path / "in.state.jsonl"), pytest.raises(ConfigError, match="runs already"):
        BatchState(tmp_path / "in.state.jsonl").__enter__()
    (tmp_path / "in.state.jsonl").unlink()
    (tmp_path / "empty.jsonl").write_bytes(b"\n \n")
    for arguments, message in (
        (["batch", str(tmp_path / "no.jsonl")], "cannot read"),
        (["batch", str(tmp_path)], "cannot read"),
        (["batch", str(tmp_path / "empty.jsonl")], "holds no requests"),
        (["batch", str(source), "--output", str(source)], "three files"),
        (["batch", str(source), "--window", "0"], "--window"),
    ):
        assert pagemill(arguments) == 2
        assert message in capsys.readouterr().err
    assert pagemill(["batch", str(source), "--redis-url", "redis://127.0.0.1:1/0"]) == 3


def test_state_survives_what_crashes_do_to_it(tmp_path: Path) -> None:
    file = BatchFile(write(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": "a"}, {"prompt": "b"}))
    keys = [line.key for line in file.lines]
    assert len(set(keys)) == 3 and [file.read(line) for line in file.lines][2] == b'{"prompt":"b"}'
    path = tmp_path / "state"
    with BatchState(path) as state:
        state.add(keys[2], {"id": "", "error": None})
        state.add(keys[0], {"id": "", "error": {"code": "engine_error"}})
    for tail in (b"", b'{"key":', b"null\n", b'{"key":"x"}\n', b"\0" * 50):
        with path.open("ab") as raw:
            raw.write(tail)
        with BatchState(path) as state:
            assert [state.is_done(key) for key in keys] == [False, False, True]
            assert list(state.outputs(file.lines, good=True)) == [b'{"id":"line-3","error":null}\n']
    assert write_lines(tmp_path / "out", iter([b"1\n", b"2\n"])) == 2
    assert write_lines(tmp_path / "out", iter(())) == 0 and not (tmp_path / "out").exists()
    file.close()


@pytest.mark.parametrize(
    ("line", "param"),
    [
        (b"\xff", "line"),
        (b'"x"', "line"),
        (b'{"custom_id":7,"prompt":"x"}', "custom_id"),
        (b'{"custom_id":"a","body":{"messages":[]},"url":"/v1/chat/completions","mthod":"POST"}', "mthod"),
        (b'{"body":{},"url":"/v1/chat/completions","method":"GET"}', "method"),
        (b'{"body":{"messages":[]},"url":7}', "url"),
        (b'{"body":[],"url":"/v1/completions"}', "body"),
        (b'{"url":"/v1/completions"}', "body"),
        (b'{"prompt":"x","idempotency_key":"mine"}', "idempotency_key"),
        (b'{"prompt":"' + b"x" * 2000 + b'"}', "body"),
        (CALLING + b"[" * 1000 + b"]" * 1000 + b"}}", "tool_choice"),  # Python refuses to print it
    ],
)
def test_a_bad_line_is_told_by_its_field(line: bytes, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_work(line, model=None, max_bytes=1024)
    assert caught.value.param == param
