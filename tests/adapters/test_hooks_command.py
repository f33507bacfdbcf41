"""`pagemill hooks` and `pagemill webhooks`, as their users start them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
from standardwebhooks import Webhook

from pagemill.adapters.cli.main import run as pagemill
from pagemill.adapters.webhook.secret_store import SecretStore
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.redis import connect_commands
from tests.adapters.processes import environment
from tests.adapters.webhook_receiver import put, receiving, until_state


def test_the_outbox_is_listed_and_what_was_given_up_is_sent_again(
    run: Any, queue_config: QueueConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secrets = tmp_path / "secrets.json"
    queue = ("--redis-url", queue_config.redis_url)

    def hooks(*words: str) -> tuple[int, str, str]:
        where = ("--webhook-secrets", str(secrets)) if words[0] == "rotate-secret" else queue
        status = pagemill(["hooks", *words, *where])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    status, secret, told = hooks("rotate-secret")
    assert status == 0 and secret.startswith("whsec_") and str(secrets) in told
    status, newer, told = hooks("rotate-secret", "default", "--keep-h", "2")
    assert newer != secret and "for 2 h" in told
    assert hooks("list") == (0, "", "no webhooks wait, none were given up\n")
    assert hooks("retry", "--all") == (0, "", "no webhooks were given up\n")
    assert hooks("retry", "--all", "--tenant", "a\x1bb") == (0, "", "no webhooks of a\\x1bb were given up\n")

    blocked = "https://10.0.0.1/hook"
    run(put(queue_config, blocked))
    status, out, _ = hooks("list")
    name = out.split()[0]
    assert status == 0 and name.startswith("msg_") and " waiting " in out and out.rstrip().endswith(blocked)
    row = orjson.loads(hooks("list", "--json")[1])
    assert (row["hook"], row["state"], row["request"], row["tries"]) == (name, "waiting", "r0", 0)
    assert row["tenant"] == "default" and hooks("list", "--tenant", "default")[1] == out
    assert hooks("list", "--json", "--tenant", "other") == (0, "", "")

    command = [sys.executable, "-m", "pagemill", "webhooks", *queue, "--webhook-secrets", str(secrets)]
    command += ["--webhook-allow", "127.0.0.1", "--webhook-poll-ms", "20"]
    sender = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    try:

        async def scenario() -> None:
            client = connect_commands(queue_config.redis_url, "test")
            async with receiving() as receiver:
                assert (await until_state(client, "r0", "blocked"))["error"]
                await put(queue_config, receiver.url, name="good")
                await receiver.wait_for(1)
                _, headers, body = receiver.seen[0]
                for key in (secret, newer):
                    Webhook(key.strip()).verify(body, headers)
            await client.aclose()

        run(scenario())
        _, out, _ = hooks("list")
        assert f"{name} blocked" in out and "not public" in out
        assert hooks("list", "--tenant", "other")[1] == "" and hooks("retry", "--all", "--tenant", "other")[1] == ""
        assert hooks("retry", name) == (0, f"{name}: is sent again\n", "")
        assert hooks("disable", blocked)[0] == 0
        deadline = time.monotonic() + 60
        while True:
            _, out, _ = hooks("list")
            # Sent again it is blocked again, or found disabled: given up either way.
            if out.count(name) == 1 and ("blocked" in out or "disabled" in out):
                break
            assert time.monotonic() < deadline, out
        assert "off since" in out and blocked in out
        assert hooks("enable", blocked)[0] == 0
        status, _, err = hooks("enable", blocked)
        assert status == 1 and "is not disabled" in err
        status, _, err = hooks("retry", "msg_unknown")
        assert status == 1 and "no such webhook" in err
    finally:
        sender.send_signal(signal.SIGTERM)
        told = sender.communicate(timeout=60)[1]
    assert sender.returncode == 0, told
    assert "webhooks are sent" in told and "whsec_" not in told


def test_a_payload_that_is_not_kept_any_more_cannot_be_sent_again(
    run: Any, queue_config: QueueConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        client = connect_commands(queue_config.redis_url, "test")
        fields = {
            "hook": "msg_x",
            "request": "r\x1b",
            "type": "request.failed",
            "url": "https://e.com",
            "reason": "dead",
        }
        await client.xadd("pm:{default.0}:hook:dead", {**fields, "tries": "8", "status": "500", "error": "no"})
        await client.aclose()

    run(scenario())
    assert pagemill(["hooks", "list", "--redis-url", queue_config.redis_url]) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert pagemill(["hooks", "retry", "--all", "--redis-url", queue_config.redis_url]) == 1
    assert "request_lost" in capsys.readouterr().err


def test_secrets_are_not_in_the_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "secrets.json"
    secret = SecretStore(path).rotate("default")
    assert pagemill(["config", "--webhook-secrets", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "webhook_timeout_s = 15" in shown and secret not in shown
