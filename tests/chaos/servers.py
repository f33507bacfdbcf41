"""Servers in company, on loopback: a Cluster of three, and a master with a replica and Sentinels."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import redis

from pagemill.ingest.embedded import EmbeddedServer, find_server, free_port

WAIT_S = 60.0


def wait_for(holds: Callable[[], Any], what: str) -> None:
    """Ask until it holds; errors of a server that is not there yet count as no."""
    deadline = time.monotonic() + WAIT_S
    while True:
        with contextlib.suppress(redis.RedisError, OSError):
            if holds():
                return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {WAIT_S:g} s")
        time.sleep(0.02)


def connect(port: int) -> redis.Redis:
    return redis.Redis(port=port, protocol=2, socket_timeout=60)


@contextlib.contextmanager
def cluster(count: int = 3) -> Iterator[list[EmbeddedServer]]:
    """Masters that share the slots evenly. What one has acknowledged outlives its process. One that answers late, as it
    may on a busy machine, is not taken for dead."""
    with contextlib.ExitStack() as stack:
        arguments = ["--cluster-enabled", "yes", "--cluster-node-timeout", "10000", "--appendfsync", "always"]
        servers = []
        for _ in range(count):
            # The bus listens 10,000 above the port, within what a port may be.
            port = next(port for port in iter(free_port, 0) if port < 55_000)
            servers.append(stack.enter_context(EmbeddedServer(port=port, arguments=arguments)))
        clients = [stack.enter_context(connect(server.port or 0)) for server in servers]
        for number, client in enumerate(clients):
            first, end = 16384 * number // count, 16384 * (number + 1) // count
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, end - 1)
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            if number:
                clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", servers[number].port)
        for client in clients:
            wait_for(lambda client=client: _is_whole(client, count), "the cluster")
        yield servers


def _is_whole(client: redis.Redis, count: int) -> bool:
    info = client.execute_command("CLUSTER INFO")
    text = info if isinstance(info, dict) else dict(line.split(":") for line in info.decode().split())
    return text["cluster_state"] == "ok" and int(text["cluster_known_nodes"]) == count


@contextlib.contextmanager
def sentinels(folder: Path, count: int = 1) -> Iterator[tuple[list[EmbeddedServer], list[int]]]:
    """A master, a replica, and Sentinels that watch `mymaster`. Yields both servers and the Sentinels' ports.

    Dead is who is silent for longer than a busy machine makes anybody wait: a failover that nobody asked for loses what
    a test has just written."""
    with contextlib.ExitStack() as stack:
        master = stack.enter_context(EmbeddedServer())
        follow = ["--replicaof", f"127.0.0.1 {master.port}", "--repl-diskless-sync-delay", "0"]
        replica = stack.enter_context(EmbeddedServer(arguments=follow))
        follower = stack.enter_context(connect(replica.port or 0))
        wait_for(lambda: follower.info("replication")["master_link_status"] == "up", "the replica")
        ports = [free_port() for _ in range(count)]
        for port in ports:
            config = folder / f"sentinel-{port}.conf"
            config.write_text(
                f"port {port}\nbind 127.0.0.1\ndir {folder}\n"
                f"sentinel monitor mymaster 127.0.0.1 {master.port} {count // 2 + 1}\n"
                "sentinel down-after-milliseconds mymaster 2500\nsentinel failover-timeout mymaster 3000\n"
            )
            command = [str(find_server()), str(config), "--sentinel"]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
        for port in ports:
            client = stack.enter_context(connect(port))
            # Else one that finds the machine slow once does nothing for half a minute.
            wait_for(lambda client=client: client.execute_command("SENTINEL", "DEBUG", "TILT-TRIGGER", 60_000), "one")
            wait_for(lambda client=client: client.sentinel_master("mymaster")["num-slaves"] == 1, "a Sentinel")
        yield [master, replica], ports


def slot_owner(nodes: Sequence[EmbeddedServer], key: str) -> EmbeddedServer:
    """The node that has a key's slot."""
    with connect(nodes[0].port or 0) as client:
        slot = client.execute_command("CLUSTER", "KEYSLOT", key)
        ranges: Any = client.execute_command("CLUSTER", "SLOTS")
    rows = ranges if isinstance(ranges, list) else [[*place, value["primary"]] for place, value in ranges.items()]
    (port,) = [int(row[2][1]) for row in rows if int(row[0]) <= slot <= int(row[1])]
    return next(node for node in nodes if node.port == port)


def move_slot(nodes: Sequence[EmbeddedServer], key: str, target: EmbeddedServer, pause_s: float = 0.0) -> int:
    """Move a key's slot to another node while it is in use, as `redis-cli --cluster reshard` does. `pause_s`: after
    each page of keys. Returns how many keys were moved."""
    source = slot_owner(nodes, key)
    if source is target:
        return 0
    moved = 0
    with contextlib.ExitStack() as stack:
        old, new = (stack.enter_context(connect(node.port or 0)) for node in (source, target))
        slot = old.execute_command("CLUSTER", "KEYSLOT", key)
        old_id, new_id = (client.execute_command("CLUSTER", "MYID") for client in (old, new))
        new.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", old_id)
        old.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", new_id)
        while keys := old.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 20):
            old.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "REPLACE", "KEYS", *keys)
            moved += len(keys)
            time.sleep(pause_s)
        for node in (target, source, *nodes):
            with connect(node.port or 0) as client:
                client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", new_id)
    return moved
