"""`pagemill dlq` against a real server: what is shown, sent again and thrown away."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
import redis

from pagemill.adapters.cli.main import run
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.dead_letters import DeadLetters
from pagemill.ingest.redis import connect_commands

TAG = "pm:{default.0}"
BODY = b'{"max_tokens":2,"prompt":"Hello"}'


def letter(client: Any, **fields: Any) -> str:
    own = {"reason": "poison", "error": "3 engines ended", "attempts": "3", "stream": f"{TAG}:in:2", "entry": "1-0"}
    flat = [part for pair in [*own.items(), *fields.items()] for part in pair]
    made: bytes = client.execute_command("XADD", f"{TAG}:dlq", "*", *flat)
    return made.decode()


@pytest.fixture
def client(redis_url: str) -> Any:
    with redis.Redis.from_url(redis_url, protocol=2) as made:
        yield made


def test_letters_are_listed_shown_sent_again_and_removed(
    client: Any, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def dlq(*words: str) -> tuple[int, str, str]:
        status = run(["dlq", *words, "--redis-url", redis_url])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    for words in (("list",), ("retry", "--all")):
        assert dlq(*words) == (0, "", "no dead letters\n")
    good = letter(client, v="1", id="a", body=BODY, tenant="acme")
    # A producer may call its fields as it likes, and send any bytes.
    strange = letter(client, reason="mine", id=b"\xff\x1b[31m", v="9")
    client.set(f"{TAG}:blob:b", BODY, ex=60)
    with_blob = letter(client, v="1", id="b", blob="1")
    gone = letter(client, v="1", id="c", blob="1")
    cut = letter(client, v="1", id="d", body=b" " * 65536)
    status, out, _ = dlq("list")
    lines = out.splitlines()
    assert status == 0 and len(lines) == 6
    assert lines[1].startswith(good) and "poison" in lines[1] and " a " in lines[1] and "\x1b" not in out
    assert lines[2].split()[3:5] == ["poison", "3"]
    status, out, _ = dlq("list", "--json")
    assert [orjson.loads(line)["letter"] for line in out.splitlines()] == [good, strange, with_blob, gone, cut]
    status, out, _ = dlq("show", good)
    assert f"body: {BODY.decode()}\n" in out and "tenant: acme\n" in out and "error: 3 engines ended\n" in out
    assert orjson.loads(dlq("show", strange, "--json")[1])["fields"]["reason"] == "mine"
    assert dlq("show", "1-0")[2].startswith("pagemill: invalid_request: there is no dead letter")
    assert dlq("show", "good")[0] == 1

    status, out, err = dlq("retry", "--all")
    assert status == 1 and len(out.splitlines()) == 2
    assert f"{strange}: invalid_request" in err and f"{gone}: request_lost" in err and f"{cut}: request_lost" in err
    entries = client.xrange(f"{TAG}:in:2")
    assert [fields[b"body"] for _, fields in entries] == [BODY, BODY]
    ids = [line.split()[-1] for line in out.splitlines()]
    assert [fields[b"id"].decode() for _, fields in entries] == ids
    assert client.hget(f"{TAG}:req:{ids[0]}", "tenant") == b"acme"

    assert dlq("purge", cut) == (0, "1 removed\n", "")
    assert dlq("purge", "--all") == (0, "2 removed\n", "")
    assert dlq("list")[2] == "no dead letters\n"


def test_sending_a_letter_again_twice_makes_one_request(client: Any, redis_url: str, run: Any) -> None:
    letter(client, v="1", id="a", body=BODY)

    async def scenario() -> None:
        commands = connect_commands(redis_url, "test")
        letters = DeadLetters(commands, QueueConfig(redis_url=redis_url))
        (found,) = [item async for item in letters.letters()]
        assert await letters.retry(found) == await letters.retry(found)
        await commands.aclose()

    run(scenario())
    assert client.xlen(f"{TAG}:in:2") == 1 and client.xlen(f"{TAG}:dlq") == 0
