"""A whole batch of 50,000 lines, killed in the middle: `python -m bench.batch_run [--lines N] [--only cli|http]`

`cli`: `pagemill batch` is killed when two fifths are done and started again. `http`: a file is uploaded and made a
batch; the gateway that works on it is killed at two fifths, and another one goes on. The engine's model is tiny and
random, each line asks for one token, and every thousandth line is wrong. Told are seconds, lines a second, and the most
memory that the client or gateway had; checked are order, completeness, the errors file, and that nothing was generated
twice.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import redis
from tests.chaos.model import make_model

from pagemill.ingest.embedded import EmbeddedServer

ENDPOINT = "/v1/completions"
WRONG_EVERY = 1000
KILL_AT = 0.4


def begun(*command: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", *command], text=True, **options)


def write_lines(path: Path, count: int) -> None:
    with path.open("w") as file:
        for number in range(count):
            body = {"prompt": f"a queue is number {number}", "max_tokens": 0 if number % WRONG_EVERY == 7 else 1}
            line = {"custom_id": f"line {number}", "method": "POST", "url": ENDPOINT, "body": body}
            file.write(json.dumps(line) + "\n")


def check(output: list[dict[str, Any]], errors: list[dict[str, Any]], count: int) -> None:
    wrong = [f"line {number}" for number in range(7, count, WRONG_EVERY)]
    assert [line["custom_id"] for line in errors] == wrong
    good = [f"line {number}" for number in range(count) if number % WRONG_EVERY != 7]
    assert [line["custom_id"] for line in output] == good, "every answer once, in the order of the lines"
    assert all(line["response"]["status_code"] == 200 for line in output)


class Watch:
    """A process's memory and what it has done, looked at until a condition holds."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.peak_mb = 0.0

    def until(self, condition: Callable[[], bool]) -> None:
        watched = psutil.Process(self.process.pid)
        while not condition():
            if self.process.poll() is not None:
                return
            self.peak_mb = max(self.peak_mb, watched.memory_info().rss / 1e6)
            time.sleep(0.1)


class Grown:
    """Counts the lines of a file that grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = self._lines = 0

    def count(self) -> int:
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
            self._read += len(data)
            self._lines += data.count(b"\n")
        return self._lines


def submitted(url: str) -> int:
    with redis.Redis.from_url(url, protocol=2) as client:
        found: Any = client.hget("pm:{default.0}:stat", "submitted")
        return int(found or 0)


def by_cli(args: argparse.Namespace, url: str, folder: Path) -> dict[str, Any]:
    source, state = folder / "in.jsonl", folder / "in.state.jsonl"
    command = ("pagemill", "batch", str(source), "--redis-url", url, "--window", str(args.window))
    before, started = submitted(url), time.perf_counter()
    first = Watch(begun(*command, stderr=subprocess.DEVNULL))
    lines = Grown(state)
    first.until(lambda: lines.count() > KILL_AT * args.lines)
    first.process.kill()
    first.process.wait()
    done = state.read_bytes().count(b"\n")
    killed = time.perf_counter()
    second = Watch(begun(*command, stderr=subprocess.PIPE))
    second.until(lambda: False)
    assert second.process.stderr is not None
    told = second.process.stderr.read().splitlines()
    ended = time.perf_counter()
    assert second.process.returncode == 1, told[-3:]  # some lines failed
    read = [[json.loads(line) for line in (folder / f"in.{name}.jsonl").open()] for name in ("out", "errors")]
    check(*read, args.lines)
    return {
        "way": "pagemill batch",
        "lines": args.lines,
        "done_when_killed": done,
        "seconds": round(ended - started, 1),
        "lines_s": round(args.lines / (ended - started)),
        "lines_s_after_kill": round((args.lines - done) / (ended - killed)),
        "peak_mb": [round(first.peak_mb), round(second.peak_mb)],
        "submitted": submitted(url) - before,
        "last_words": told[-2:],
    }


def ask(url: str, data: bytes | None = None, kind: str = "application/json") -> bytes:
    asked = urllib.request.Request(url, data, {"Content-Type": kind})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        found: bytes = answer.read()
        return found


def by_http(args: argparse.Namespace, url: str, folder: Path) -> dict[str, Any]:
    command = ("pagemill", "gateway", "--redis-url", url, "--http-port", "0", "--log-level", "warning")
    options = ("--http-batch-requests", str(args.window))
    gateways = [Watch(begun(*command, *options, stdout=subprocess.PIPE)) for _ in range(2)]
    try:
        first, second = (re.findall(r"http\S+", watch.process.stdout.readline())[0] for watch in gateways)  # type: ignore[union-attr]
        data = (folder / "in.jsonl").read_bytes()
        mark = b"--x\r\nContent-Disposition: form-data; name="
        form = mark + b'"purpose"\r\n\r\nbatch\r\n' + mark + b'"file"; filename="in"\r\n\r\n' + data + b"\r\n--x--\r\n"
        before, started = submitted(url), time.perf_counter()
        file = json.loads(ask(f"{first}/v1/files", form, "multipart/form-data; boundary=x"))
        uploaded = time.perf_counter()
        wanted = {"input_file_id": file["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
        # The first gateway takes it up: it was made there.
        batch = json.loads(ask(f"{first}/v1/batches", json.dumps(wanted).encode()))
        seen: list[int] = []

        def state(base: str) -> dict[str, Any]:
            found: dict[str, Any] = json.loads(ask(f"{base}/v1/batches/{batch['id']}"))
            seen.append(found["request_counts"]["completed"])
            return found

        gateways[0].until(lambda: state(second)["request_counts"]["completed"] > KILL_AT * args.lines)
        gateways[0].process.kill()
        killed, done = time.perf_counter(), seen[-1]
        gateways[1].until(lambda: state(second)["status"] not in ("validating", "in_progress", "finalizing"))
        ended = time.perf_counter()
        final = state(second)
        assert final["status"] == "completed" and seen == sorted(seen), "progress goes forward"
        names = ("output_file_id", "error_file_id")
        read = [
            [json.loads(line) for line in ask(f"{second}/v1/files/{final[name]}/content").splitlines()]
            for name in names
        ]
        check(*read, args.lines)
        return {
            "way": "/v1/batches",
            "lines": args.lines,
            "upload_s": round(uploaded - started, 1),
            "done_when_killed": done,
            "seconds": round(ended - started, 1),
            "lines_s": round(args.lines / (ended - started)),
            "seconds_after_kill": round(ended - killed, 1),
            "peak_mb": [round(watch.peak_mb) for watch in gateways],
            "submitted": submitted(url) - before,
        }
    finally:
        for watch in gateways:
            watch.process.kill()
            watch.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="a batch of many lines, killed in the middle")
    parser.add_argument("--lines", type=int, default=50_000)
    parser.add_argument("--window", type=int, default=256, help="lines in the queue at once")
    parser.add_argument("--only", choices=("cli", "http"))
    args = parser.parse_args()
    for name, way in (("cli", by_cli), ("http", by_http)):
        if args.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory() as place, EmbeddedServer() as server:
            folder = Path(place)
            make_model(folder / "model")
            write_lines(folder / "in.jsonl", args.lines)
            engine = begun(
                *("tests.adapters.crowd_engine", server.url, str(folder / "model"), "0"),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            try:
                assert engine.stdout is not None and engine.stdout.readline() == "ready\n"
                result = way(args, server.url, folder)
            finally:
                engine.kill()
                engine.wait()
            with redis.Redis.from_url(server.url, protocol=2) as client:
                memory: Any = client.info("memory")
                print(json.dumps({**result, "redis_peak_mb": round(memory["used_memory_peak"] / 1e6)}), flush=True)


if __name__ == "__main__":
    main()
