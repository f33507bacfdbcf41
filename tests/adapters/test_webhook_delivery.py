"""Deliveries from the outbox to receivers that behave, fail, drip, go away; and senders that die."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from openai import OpenAI
from standardwebhooks import Webhook, WebhookVerificationError

from pagemill.adapters.webhook import dispatcher as dispatcher_module
from pagemill.adapters.webhook import endpoint as endpoint_module
from pagemill.adapters.webhook.endpoint import Endpoint
from pagemill.adapters.webhook.schedule import next_delay_s, read_retry_after
from pagemill.adapters.webhook.secret_store import SecretStore
from pagemill.adapters.webhook.signing import new_secret, read_secret
from pagemill.engine.errors import ConfigError
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.redis import connect_commands
from tests.adapters.test_docker import load_healthcheck
from tests.adapters.webhook_receiver import (
    TAG,
    Receiver,
    dispatching,
    put,
    receiving,
    record,
    settings,
    until_state,
)
from tests.adapters.webhook_storm import storm


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    path = tmp_path / "secrets.json"
    SecretStore(path).rotate("default")
    return path


def test_deliveries_verify_with_every_active_secret(run: Any, queue_config: QueueConfig, secrets: Path) -> None:
    store = SecretStore(secrets)
    old = orjson.loads(secrets.read_bytes())["default"][0]["secret"]
    new = store.rotate("default")
    other = store.rotate("shop")

    async def scenario() -> None:
        async with receiving() as receiver, dispatching(queue_config, settings(), secrets):
            await put(queue_config, receiver.url)
            await put(queue_config, receiver.url, secret="shop", name="shop")
            await receiver.wait_for(2)
        by_request = {orjson.loads(body)["data"]["id"]: (headers, body) for _, headers, body in receiver.seen}
        headers, body = by_request["r0"]
        for secret in (old, new):
            message = Webhook(secret).verify(body, headers)
            OpenAI(api_key="-").webhooks.verify_signature(body, headers, secret=secret)
        assert message["type"] == "request.cancelled" and message["data"]["metadata"] == {"n": "0"}
        at = datetime.fromisoformat(message["timestamp"])
        assert abs((at - datetime.now(UTC)).total_seconds()) < 60
        assert headers["webhook-id"].startswith("msg_") and "." not in headers["webhook-id"]
        assert headers["content-type"] == "application/json"
        for wrong_body, wrong_secret in ((body + b" ", new), (body, other)):
            with pytest.raises(WebhookVerificationError):
                Webhook(wrong_secret).verify(wrong_body, headers)
        Webhook(other).verify(by_request["shop0"][1], by_request["shop0"][0])

    run(scenario())


def test_a_failed_try_is_repeated_with_the_same_bytes_until_it_is_given_up(
    run: Any, queue_config: QueueConfig, secrets: Path
) -> None:
    async def twice_busy(receiver: Receiver, request: web.Request) -> web.StreamResponse:
        return web.Response(status=503 if len(receiver.seen) < 3 else 200, text="busy")

    async def never(receiver: Receiver, request: web.Request) -> web.StreamResponse:
        return web.Response(status=400, text="no \x1b[31m thanks")

    async def scenario() -> None:
        client = connect_commands(queue_config.redis_url, "test")
        async with (
            receiving(twice_busy) as busy,
            receiving(never) as refusing,
            dispatching(queue_config, settings(), secrets) as dispatcher,
        ):
            await put(queue_config, busy.url, name="busy")
            await put(queue_config, refusing.url, name="no")
            found = await until_state(client, "busy0", "delivered")
            assert (found["tries"], found["status"], "data" in found) == ("3", "200", False)
            found = await until_state(client, "no0", "dead")
            assert dispatcher.delivered == 1
        assert (found["tries"], found["status"], found["error"]) == ("3", "400", "no \x1b[31m thanks")
        for receiver in (busy, refusing):
            assert len(receiver.seen) == 3
            assert len({body for _, _, body in receiver.seen}) == 1
            assert len({headers["webhook-id"] for _, headers, _ in receiver.seen}) == 1
        (letter,) = await client.xrange(f"{TAG}:hook:dead")
        assert letter[1][b"request"] == b"no0" and letter[1][b"reason"] == b"dead"
        assert await client.zcard(f"{TAG}:hook:due") == 0
        await client.aclose()

    run(scenario())


def test_redirects_are_not_followed_and_gone_turns_a_url_off(
    run: Any, queue_config: QueueConfig, secrets: Path
) -> None:
    async def scenario() -> None:
        client = connect_commands(queue_config.redis_url, "test")
        async with receiving() as target:

            async def redirect(receiver: Receiver, request: web.Request) -> web.StreamResponse:
                raise web.HTTPTemporaryRedirect(target.url)

            async def gone(receiver: Receiver, request: web.Request) -> web.StreamResponse:
                return web.Response(status=410)

            async with (
                receiving(redirect) as first,
                receiving(gone) as second,
                dispatching(queue_config, settings(webhook_delays_s="0"), secrets),
            ):
                await put(queue_config, first.url, name="redirect")
                found = await until_state(client, "redirect0", "dead")
                assert (found["status"], found["error"]) == ("307", "redirects are not followed")
                await put(queue_config, second.url, name="gone")
                found = await until_state(client, "gone0", "dead")
                assert found["tries"] == "1"
                await put(queue_config, second.url, name="later")
                found = await until_state(client, "later0", "disabled")
                assert "410 gone" in found["error"] and found["tries"] == "0"
            assert target.seen == [] and len(second.seen) == 1
        await client.aclose()

    run(scenario())


def test_what_may_not_be_reached_is_recorded_as_blocked(run: Any, queue_config: QueueConfig, secrets: Path) -> None:
    async def scenario() -> None:
        client = connect_commands(queue_config.redis_url, "test")
        async with receiving() as receiver:
            async with dispatching(queue_config, settings(webhook_allow=""), secrets):
                await put(queue_config, receiver.url.replace("http:", "https:"), name="a")
                await put(queue_config, "https://169.254.169.254/latest/", name="b")
                for name in ("a0", "b0"):
                    found = await until_state(client, name, "blocked")
                    assert found["tries"] == "0" and found["error"]
            assert receiver.seen == []
        reasons = [fields[b"reason"] for _, fields in await client.xrange(f"{TAG}:hook:dead")]
        assert reasons == [b"blocked", b"blocked"]
        await client.aclose()

    run(scenario())


def test_a_missing_secret_waits_for_its_configuration(run: Any, queue_config: QueueConfig, secrets: Path) -> None:
    async def scenario() -> None:
        client = connect_commands(queue_config.redis_url, "test")
        config = settings(webhook_delays_s=",".join(["0.2"] * 40))
        async with receiving() as receiver, dispatching(queue_config, config, secrets):
            await put(queue_config, receiver.url, count=8, secret="late", name="late")
            found = await until_state(client, "late7", "retrying")
            assert "'late'" in found["error"]
            # Nobody's fault but the operator's: the receiver's other deliveries are not held up.
            await put(queue_config, receiver.url, name="other")
            await receiver.wait_for(1)
            secret = SecretStore(secrets).rotate("late")
            await receiver.wait_for(9)
        _, headers, body = receiver.seen[-1]
        Webhook(secret).verify(body, headers)
        await client.aclose()

    run(scenario())


def test_the_deliveries_of_a_dead_sender_are_taken_over(run: Any, queue_config: QueueConfig, secrets: Path) -> None:
    async def scenario() -> None:
        client = connect_commands(queue_config.redis_url, "test")
        release = asyncio.Event()

        async def hang_first(receiver: Receiver, request: web.Request) -> web.StreamResponse:
            if not release.is_set():
                await asyncio.sleep(60)
            return web.Response()

        config = settings(webhook_timeout_s=2.0)  # so leases last 5 s
        async with receiving(hang_first) as receiver:
            async with dispatching(queue_config, config, secrets) as dying:
                await put(queue_config, receiver.url, count=3)
                await receiver.wait_for(3)
                for task in list(dying._running):  # as a kill would: nothing is settled
                    task.cancel()
            assert (await record(client, "r0"))["tries"] == "0"
            release.set()
            async with dispatching(queue_config, config, secrets):
                for number in range(3):
                    await until_state(client, f"r{number}", "delivered")
        assert len({headers["webhook-id"] for _, headers, _ in receiver.seen}) == 3
        await client.aclose()

    run(scenario())


def test_several_senders_share_the_work(run: Any, queue_config: QueueConfig, secrets: Path) -> None:
    async def scenario() -> None:
        config = settings(webhook_endpoint_concurrency=8)
        await_all = 60
        queue = queue_config.replace(shards=3)
        async with receiving() as receiver:
            await put(queue, receiver.url, count=await_all)
            async with (
                dispatching(queue, config, secrets) as first,
                dispatching(queue, config, secrets) as second,
            ):
                await receiver.wait_for(await_all)
            assert len({headers["webhook-id"] for _, headers, _ in receiver.seen}) == len(receiver.seen) == await_all
            assert first.delivered + second.delivered == await_all and min(first.delivered, second.delivered) > 0

    run(scenario())


def test_a_sender_says_that_it_gets_on_only_while_it_can_take_work(
    run: Any, queue_config: QueueConfig, secrets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher_module, "BEAT_S", 0.0)
    check = load_healthcheck()

    released = asyncio.Event()

    async def hang(receiver: Receiver, request: web.Request) -> web.StreamResponse:
        await released.wait()
        return web.Response()

    async def scenario() -> None:
        client = connect_commands(queue_config.redis_url, "test")
        key = f"{TAG}:hook:at:{socket.gethostname()[:32]}"
        place = (queue_config.redis_url, "pm", "default")
        one = settings(webhook_concurrency=1)
        async with receiving(hang) as receiver, dispatching(queue_config, one, secrets), asyncio.timeout(60):
            while not await client.exists(key):
                await asyncio.sleep(0.01)
            assert 0 < await client.pttl(key) < 120_000
            await asyncio.to_thread(check.check_webhooks, *place)
            await put(queue_config, receiver.url)
            await receiver.wait_for(1)
            await client.delete(key)  # as if it had expired: its only place is taken by a try that does not end
            with pytest.raises(RuntimeError, match="no sender"):
                await asyncio.to_thread(check.check_webhooks, *place)
            released.set()
            while not await client.exists(key):
                await asyncio.sleep(0.01)
        await client.aclose()

    run(scenario())


def test_redis_away_is_waited_out(run: Any, queue_config: QueueConfig, secrets: Path) -> None:
    async def scenario() -> None:
        client = connect_commands(queue_config.redis_url, "test")
        async with receiving() as receiver, dispatching(queue_config, settings(), secrets):
            await put(queue_config, receiver.url)
            await receiver.wait_for(1)
            await until_state(client, "r0", "delivered")
            for _ in range(3):
                await client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            await client.script_flush()
            await put(queue_config, receiver.url, name="after")
            await until_state(client, "after0", "delivered")
        await client.aclose()

    run(scenario())


def test_slow_and_failing_receivers_do_not_slow_the_others(run: Any, queue_config: QueueConfig, secrets: Path) -> None:
    """How little, `make bench-webhooks` tells. Here no try at the slow one ends before all others have been served."""
    figures = run(storm(queue_config, secrets, healthy=12, each=3, per_bad=30, timeout_s=100.0))
    assert figures["healthy_delivered"] == 36 and figures["dripping_ended"] == 0
    assert 0 < figures["most_at_once_to_dripping"] <= 4


def test_a_tenant_with_many_dead_receivers_slows_only_itself(
    run: Any, queue_config: QueueConfig, secrets: Path
) -> None:
    """Each of them is a receiver of its own, so only what is counted by tenant holds them back."""

    async def hang(receiver: Receiver, request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        return web.Response()

    async def here(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    dead = 150
    names = ",".join(f"dead{number}.example" for number in range(dead))
    config = settings(
        webhook_allow=f"127.0.0.1,{names}",
        webhook_concurrency=32,
        webhook_tenant_concurrency=8,
        webhook_timeout_s=100.0,
    )

    async def scenario() -> None:
        async with receiving(hang) as hanging, receiving() as healthy:
            port = hanging.url.rpartition(":")[2]
            await put(queue_config, f"http://dead{{}}.example:{port}", dead, name="dead", tenant="bad")
            await put(queue_config, healthy.url, 20, name="ok", tenant="good")
            async with dispatching(queue_config, config, secrets, here) as dispatcher:
                await healthy.wait_for(20)  # no dead try has ended by then
                await hanging.wait_for(8)
                assert len(hanging.seen) == 8
                for task in list(dispatcher._running):
                    task.cancel()
        client = connect_commands(queue_config.redis_url, "test")
        waiting = await record(client, "dead149")
        assert (waiting["tenant"], waiting["tries"], waiting["state"]) == ("bad", "0", "waiting")
        await client.aclose()

    run(scenario())


def test_a_tenant_whose_names_are_never_found_slows_only_itself(
    run: Any, queue_config: QueueConfig, secrets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()
    asked: list[str] = []

    def silent(host: str, port: int, **_: Any) -> Any:
        asked.append(host)
        if host.startswith("dead"):
            answered.wait(120)
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    config = settings(
        webhook_allow="127.0.0.1,ok.example", webhook_tenant_lookups=4, webhook_timeout_s=1.0, webhook_delays_s="60"
    )

    async def scenario() -> None:
        client = connect_commands(queue_config.redis_url, "test")
        async with receiving() as healthy:
            await put(queue_config, "https://dead{}.example/", 40, name="dead", tenant="bad")
            url = healthy.url.replace("127.0.0.1", "ok.example")
            await put(queue_config, url, 5, name="ok", tenant="good")
            async with dispatching(queue_config, config, secrets):
                await healthy.wait_for(5)
                hung = [host.removesuffix(".example") for host in asked if host.startswith("dead")]
                assert len(hung) == 4, "their threads hang, and take no others"
                # Those whose look-up hung have failed; the others were not tried at all.
                for name in hung:
                    await until_state(client, name, "retrying")
                other = next(name for number in range(40) if (name := f"dead{number}") not in hung)
                waiting = await record(client, other)
                assert (waiting["tries"], waiting["state"]) == ("0", "waiting")
                answered.set()
                await until_state(client, other, "retrying")
        await client.aclose()

    run(scenario())


def test_retry_after() -> None:
    now = datetime(2026, 11, 29, 12, tzinfo=UTC)
    assert read_retry_after("120") == 120
    assert read_retry_after(" 7 ") == 7
    assert read_retry_after("9" * 400) == 21_600
    assert read_retry_after("Sun, 29 Nov 2026 12:01:00 GMT", now) == 60
    assert read_retry_after("Sun, 29 Nov 2020 12:01:00 GMT", now) == 0
    assert read_retry_after("Sun, 29 Nov 9999 12:01:00 GMT", now) == 21_600
    for nothing in (None, "", "soon", "-5", "1.5", "\u0661"):
        assert read_retry_after(nothing) is None
    delays = (5.0, 300.0)
    assert 4 <= (next_delay_s(delays, 1) or 0) <= 6
    assert next_delay_s(delays, 1, 60) == 60
    assert 240 <= (next_delay_s(delays, 2, 60) or 0) <= 360
    assert next_delay_s(delays, 3) is None


def test_the_default_schedule_is_eight_tries_over_28_hours() -> None:
    delays = settings(webhook_delays_s="5,300,1800,7200,18000,36000,36000").delays
    assert len(delays) == 7 and 27 < sum(delays) / 3600 < 28


def test_an_endpoint_limits_breaks_and_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "random", random.Random(1))
    endpoint = Endpoint(2)
    assert [endpoint.ask(0.0), endpoint.ask(0.0)] == [0.0, 0.0]
    waits = [endpoint.ask(0.0) for _ in range(100)]
    assert all(0 < wait <= 60 for wait in waits) and waits == sorted(waits) and waits[-1] > 2
    endpoint.end(1.0, 1.0, failed=True)
    endpoint.end(1.0, 1.0, failed=True)
    for _ in range(3):
        assert endpoint.ask(1.0) == 0.0
        endpoint.end(1.0, 0.1, failed=True)
    assert endpoint.ask(1.0) >= 10.0 and not endpoint.is_idle
    assert endpoint.ask(11.5) == 0.0  # the probe
    assert endpoint.ask(11.5) > 0.0
    endpoint.end(12.0, 0.5, failed=True)
    assert endpoint.ask(21.0) > 9.0  # the pause has doubled
    assert endpoint.ask(40.0) == 0.0
    endpoint.end(40.1, 0.1, failed=False)
    assert endpoint.is_idle and [endpoint.ask(41.0), endpoint.ask(41.0)] == [0.0, 0.0]


def test_the_secrets_file(tmp_path: Path) -> None:
    now = [1000.0]
    path = tmp_path / "more" / "secrets.json"
    store = SecretStore(path, clock=lambda: now[0])
    assert store.keys("default") == [] and store.names == []
    first = store.rotate("default", 100)
    second = store.rotate("default", 100)
    assert [read_secret(text) for text in (second, first)] == store.keys("default")
    assert path.stat().st_mode & 0o077 == 0
    now[0] = 1101.0
    assert store.keys("default") == [read_secret(second)]
    third = store.rotate("default", 0)
    assert SecretStore(path, clock=lambda: now[0]).keys("default") == [read_secret(third)]
    assert len(orjson.loads(path.read_bytes())["default"]) == 1
    path.write_text("{")
    assert store.keys("default") == [read_secret(third)], "a broken file is told, and the old secrets stay"
    bad: list[Any] = ["[]", '{"default":"x"}', '{"default":[{"secret":"hunter2"}]}', '{"a":[{"secret":1}]}', "{"]
    bad.append(orjson.dumps({"default": [{"secret": new_secret(), "until": "tomorrow"}]}).decode())
    for content in bad:
        path.write_text(content)
        with pytest.raises(ConfigError, match="webhook_secrets") as caught:
            SecretStore(path)
        assert "hunter2" not in str(caught.value)
    for text in ("whsec_", "whsec_!!", "whsec_QUJD", "QUJD", None):
        with pytest.raises(ValueError, match=r"secret|base64"):
            read_secret(text)
