"""An engine started from the command line, and everything that talks to it: shell, examples, plain Redis."""

from __future__ import annotations

import http.server
import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis
from standardwebhooks import Webhook

from pagemill.adapters.cli.doctor import ports
from pagemill.adapters.cli.settings import load_settings
from pagemill.adapters.webhook.secret_store import SecretStore
from pagemill.ingest.embedded import EmbeddedServer
from tests.adapters.processes import SMALL, environment, pagemill

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Served:
    """A running `pagemill` role: its lines as they come, and where its queue is."""

    process: subprocess.Popen[str]
    url: str = ""
    secret: str = ""
    lines: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def start(*arguments: str, timeout: float = 90) -> Served:
    """Start a role and wait for the line in which it says that it serves."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pagemill", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    served, ready = Served(process), threading.Event()

    def read_output() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            served.lines.append(line)
            ready.set()
        ready.set()

    def read_errors() -> None:
        assert process.stderr is not None
        served.errors.extend(process.stderr)

    for target in (read_output, read_errors):
        threading.Thread(target=target, daemon=True).start()
    assert ready.wait(timeout) and served.lines, "".join(served.errors)
    served.url = served.lines[0].split()[-1]
    return served


def stop(served: Served, number: int = signal.SIGTERM) -> int:
    served.process.send_signal(number)
    try:
        return served.process.wait(timeout=90)
    finally:
        served.process.kill()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("queue")
    secrets = folder / "secrets.json"
    webhooks = ("--webhook-secrets", str(secrets), "--webhook-allow", "127.0.0.1", "--webhook-poll-ms", "50")
    served = start("serve", "--port", "0", "--http-port", "0", "--data-dir", str(folder), *webhooks, *SMALL)
    served.secret = SecretStore(secrets).rotate("default")
    yield served
    assert stop(served) == 0, "".join(served.errors)
    assert not any("Traceback" in line for line in served.errors)


def test_the_log_of_a_role_is_json_where_nobody_watches(served: Served) -> None:
    entries = [json.loads(line) for line in served.errors if line.startswith("{")]
    assert any(entry["event"] == "embedded server started" for entry in entries)
    assert all({"event", "level", "timestamp"} <= set(entry) for entry in entries)


def api(served: Served) -> str:
    """Where the gateway's OpenAI routes are."""
    until = time.monotonic() + 60
    while not (lines := [line for line in served.lines if line.startswith("OpenAI's API at http://127.0.0.1:")]):
        assert time.monotonic() < until, served.lines  # the thread that reads has the line before it only
        threading.Event().wait(0.01)
    (line,) = lines
    return line.split()[-1]


def test_serve_has_a_gateway(served: Served) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}).encode()
    asked = urllib.request.Request(f"{api(served)}/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 2


def test_serve_sends_webhooks(served: Served) -> None:
    arrived = threading.Event()
    seen: dict[str, Any] = {}

    class Receiver(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen["body"] = self.rfile.read(int(self.headers["Content-Length"]))
            seen["headers"] = dict(self.headers)
            self.send_response(204)
            self.end_headers()
            arrived.set()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        callback = {"url": f"http://127.0.0.1:{server.server_port}/hook"}
        body = json.dumps({"prompt": "Hi", "max_tokens": 2, "callback": callback}).encode()
        asked = urllib.request.Request(f"{api(served)}/requests", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            request_id = json.load(answer)["id"]
        assert arrived.wait(60), "".join(served.errors)
        server.shutdown()
    message = Webhook(served.secret).verify(seen["body"], seen["headers"])
    assert (message["type"], message["data"]["id"]) == ("request.completed", request_id)


def test_submit_prints_the_text_and_nothing_else(served: Served) -> None:
    options = ("--redis-url", served.url, "--temperature", "0", "--max-tokens", "8")
    ran = pagemill("submit", "The capital of France is", *options)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() and ran.stderr == ""
    again = pagemill("submit", "-", *options, "--json", stdin="The capital of France is\n")
    result = json.loads(again.stdout)
    assert result["choices"][0]["text"] == ran.stdout.removesuffix("\n")
    assert (result["state"], result["usage"]["completion_tokens"]) == ("completed", 8)


def test_submit_prints_one_choice_after_the_other(served: Served) -> None:
    options = ("--redis-url", served.url, "--n", "3", "--seed", "7", "--max-tokens", "6")
    ran = pagemill("submit", "My name is", *options)
    result = json.loads(pagemill("submit", "My name is", *options, "--json").stdout)
    first, second, third = (choice["text"] for choice in result["choices"])
    assert ran.stdout == f"{first}\n\n[2] {second}\n\n[3] {third}\n"


def test_settings_of_the_environment_reach_a_client(served: Served) -> None:
    ran = pagemill("submit", "--chat", "Hi", "--max-tokens", "4", PAGEMILL_REDIS_URL=served.url)
    assert ran.returncode == 0, ran.stderr


def test_detach_watch_and_cancel(served: Served) -> None:
    url = ("--redis-url", served.url)
    name = pagemill("submit", "One two", "--max-tokens", "4", "--detach", *url).stdout.strip()
    watched = pagemill("watch", name, "--json", *url)
    events = [json.loads(line) for line in watched.stdout.splitlines()]
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert (events[0]["type"], events[-1]["type"], events[-1]["state"]) == ("started", "done", "completed")
    assert pagemill("watch", name, *url).stdout.strip()
    assert "had ended before: completed" in pagemill("cancel", name, *url).stdout
    long = pagemill("submit", "Long", "--max-tokens", "1500", "--ignore-eos", "--detach", *url).stdout.strip()
    assert pagemill("cancel", long, *url).returncode == 0
    ended = pagemill("watch", long, *url)
    assert ended.returncode == 1
    assert "cancelled: the request was cancelled" in ended.stderr


def test_refusals_and_silence_have_their_own_status(served: Served) -> None:
    url = ("--redis-url", served.url)
    refused = pagemill("submit", "x", "--model", "gpt-none", *url)
    assert (refused.returncode, "unsupported_model" in refused.stderr) == (1, True)
    silent = pagemill("submit", "x", "--queue", "nobody", "--timeout", "1", *url)
    assert silent.returncode == 3
    assert "no answer in time" in silent.stderr


def test_doctor_looks_at_the_server(served: Served) -> None:
    healthy = pagemill("doctor", "--redis-url", served.url)
    assert healthy.returncode == 0, healthy.stdout
    assert "all checks passed" in healthy.stdout
    server = redis.Redis.from_url(served.url)
    try:
        server.config_set("maxmemory-policy", "allkeys-lru")
        sick = pagemill("doctor", "--redis-url", served.url)
    finally:
        server.config_set("maxmemory-policy", "noeviction")
        server.close()
    assert sick.returncode == 1
    assert "maxmemory-policy is allkeys-lru" in sick.stdout


def test_a_taken_port_is_named(served: Served, tmp_path: Path) -> None:
    port = served.url.rsplit(":", 1)[1].split("/")[0]
    ran = pagemill("serve", "--port", port, "--http-port", "0", "--data-dir", str(tmp_path), *SMALL)
    assert ran.returncode == 2
    assert f"port {port}" in ran.stderr and "taken" in ran.stderr
    (finding,) = ports(load_settings({"port": port}, {}))
    assert finding.verdict == "fail"
    assert f"{port} on 127.0.0.1 is taken" in finding.text


@pytest.mark.parametrize("name", ["producer.py", "raw_redis.py"])
def test_the_examples_run(served: Served, name: str) -> None:
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), served.url],
        capture_output=True,
        text=True,
        timeout=90,
        env=environment(),
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout) > 40


def test_an_interrupted_engine_lets_what_runs_finish() -> None:
    """The role `engine`, on a server that is there already and stays."""
    body = json.dumps({"prompt": "Go on", "max_tokens": 60, "ignore_eos": True})
    stream, events = "pm:{default.0}:in:1", "pm:{default.0}:ev:long"
    with EmbeddedServer() as own, redis.Redis.from_url(own.url, decode_responses=True) as server:
        engine = start("engine", "--redis-url", own.url, "--drain-timeout-s", "120", *SMALL)
        server.xadd(stream, {"v": "1", "id": "long", "body": body})
        assert server.xread({events: "0"}, block=60_000, count=1), "it runs"
        assert stop(engine, signal.SIGINT) == 0, "".join(engine.errors)
        *_, (_, last) = server.xrange(events)
        done = json.loads(last["e"])
        assert (done["type"], done["state"], done["attempt"]) == ("done", "completed", 1)
        assert done["usage"]["completion_tokens"] == 60
        assert server.xlen(stream) == 0
