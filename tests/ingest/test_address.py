"""The forms of `redis_url`."""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio.connection import Connection

from pagemill.engine.errors import ConfigError
from pagemill.ingest.address import parse_address
from pagemill.ingest.redis import connect_commands


def test_a_single_server() -> None:
    address = parse_address("redis://user:p%40ss@example.org:6380/3")
    assert (address.kind, address.hosts) == ("single", (("example.org", 6380),))
    assert address.url == "redis://user:p%40ss@example.org:6380/3"
    assert parse_address("redis://[::1]:6380").hosts == (("::1", 6380),)
    assert parse_address("rediss://example.org").hosts == (("example.org", 6379),)
    assert parse_address("unix:///run/redis.sock?db=2").url == "unix:///run/redis.sock?db=2"


def test_sentinels() -> None:
    url = "rediss+sentinel://user:secret@one:1,two/main/4?sentinel_password=other&ssl_ca_certs=/x.pem"
    address = parse_address(url)
    assert (address.kind, address.service) == ("sentinel", "main")
    assert address.hosts == (("one", 1), ("two", 26379))
    assert address.url == "rediss://user:secret@one:1/4?ssl_ca_certs=%2Fx.pem"
    assert address.sentinel_options == (("password", "other"),)
    assert "secret" not in repr(address) and "other" not in repr(address)


def test_a_cluster() -> None:
    address = parse_address("redis+cluster://one:7000,[::1]:7001")
    assert (address.kind, address.hosts) == ("cluster", (("one", 7000), ("::1", 7001)))
    assert address.url == "redis://one:7000"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://one", "must start with one of"),
        ("redis+cluster//one", "must start with one of"),
        (7, "must start with one of"),
        ("redis://one:port", "no usable host and port"),
        ("redis://user:pass@word@one:0", "no usable host and port"),
        ("redis+sentinel://one:99999/main", "no usable host and port"),
        ("redis://one,two", "only redis\\+sentinel"),
        ("redis+sentinel://one:26379", "must name the service"),
        ("redis+sentinel://one:26379/main/db", "database number"),
        ("redis://one/main", "database number"),
        ("redis+cluster://one/1", "only database 0"),
    ],
)
def test_what_cannot_be_used_is_refused_without_its_password(url: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        parse_address(url)
    assert "pass" not in str(refused.value).replace("password", "")


def test_commands_are_written_as_redis_py_writes_them() -> None:
    """By hiredis, which takes arguments in the same forms."""
    pytest.importorskip("hiredis")
    commands: list[tuple[Any, ...]] = [
        ("XADD", "é", b"\xff\x00", 7, 2.5, ""),
        ("SCRIPT LOAD", "x" * 100_000),
        ("PING",),
    ]
    client = connect_commands("redis://127.0.0.1:1/0", "test")
    made: Any = client.connection_pool.make_connection()
    assert type(made) is not Connection and isinstance(made, Connection)
    plain = Connection()
    for command in commands:
        assert b"".join(made.pack_command(*command)) == b"".join(plain.pack_command(*command))
    assert b"".join(made.pack_commands(commands)) == b"".join(plain.pack_commands(commands))
