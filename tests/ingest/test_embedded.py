"""The embedded server: starts, tells apart what can be taken, keeps its data, ends with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from pagemill.engine.errors import ConfigError
from pagemill.ingest.embedded import EmbeddedServer, free_port


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until_dead(pid: int) -> None:
    deadline = time.monotonic() + 60
    while alive(pid):
        assert time.monotonic() < deadline, "the server outlives its parent"
        time.sleep(0.01)


def test_settings_that_keep_requests(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url, protocol=2, decode_responses=True) as client:
        for name, value in {"appendonly": "yes", "maxmemory-policy": "noeviction", "bind": "127.0.0.1"}.items():
            assert client.config_get(name) == {name: value}


def test_data_survives_a_crash_and_a_restart(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "data")
    with server.start(), redis.Redis.from_url(server.url) as client:
        client.set("k", "v")
        server.kill()
        server.start()
        assert client.get("k") == b"v"
        pid = server.pid
    assert pid is not None and not alive(pid)
    with EmbeddedServer(tmp_path / "data") as server, redis.Redis.from_url(server.url) as client:
        assert client.get("k") == b"v"


def test_a_unix_socket_without_a_port(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with EmbeddedServer(port=None, unix_socket=path) as server:
        assert server.url == f"unix://{path}"
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
        assert path.stat().st_mode & 0o077 == 0
        with pytest.raises(ConfigError, match="socket"):
            EmbeddedServer(port=None, unix_socket=path).start()
    assert not path.exists()


def test_what_is_taken_is_named(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as server:
        with pytest.raises(ConfigError, match=rf"port {server.port} .* is taken"):
            EmbeddedServer(port=server.port).start()
        with pytest.raises(ConfigError, match=r"data folder .* is in use"):
            EmbeddedServer(tmp_path).start()
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()


def test_what_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="port or a unix_socket"):
        EmbeddedServer(port=None)
    with pytest.raises(ConfigError, match=r"(?s)ended at once.*no-such-option"):
        EmbeddedServer(arguments=["--no-such-option", "1"]).start()
    (tmp_path / "appendonlydir").mkdir()
    (tmp_path / "appendonlydir" / "appendonly.aof.manifest").write_text("nonsense")
    with pytest.raises(ConfigError, match="ended at once"):
        EmbeddedServer(tmp_path).start()
    with pytest.raises(ConfigError, match="100 bytes"):
        EmbeddedServer(unix_socket="/tmp/" + "x" * 100)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, None])
def test_the_server_ends_with_its_parent(tmp_path: Path, how: signal.Signals | None) -> None:
    script = """
import sys, threading, time
from pagemill.ingest.embedded import EmbeddedServer
server = EmbeddedServer(sys.argv[1])
starter = threading.Thread(target=server.start)
starter.start(); starter.join()  # the end of the thread that asked for it is not the end of the server
time.sleep(0.1)
print(server.pid, flush=True)
sys.stdin.readline()
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdin is not None and parent.stdout is not None
    line = ""
    while not line.strip().isdigit():  # log lines come first
        line = parent.stdout.readline()
    pid = int(line)
    assert alive(pid)
    # The server itself holds the lock of its folder, also when its parent is gone.
    assert str(tmp_path / "lock") in {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()}
    if how is None:
        parent.stdin.close()
    else:
        os.kill(parent.pid, how)
    parent.wait(60)
    wait_until_dead(pid)
    # And the data folder is free again.
    EmbeddedServer(tmp_path, port=free_port()).start().stop()
