"""The address guard: hostile URLs, of which none reaches a server that would answer."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.adapters.webhook.config import WebhookConfig
from pagemill.adapters.webhook.guard import AllowList, Blocked, Guard, is_public
from pagemill.adapters.webhook.sender import Sender
from pagemill.engine.errors import ConfigError

NAMES = {
    "internal.example": ["10.0.0.5"],
    "metadata.google.internal": ["169.254.169.254"],
    "localhost": ["127.0.0.1", "::1"],
    "localhost.": ["127.0.0.1"],
    "127.0.0.1.nip.example": ["127.0.0.1"],
    "mixed.example": ["93.184.216.34", "127.0.0.1"],
    "mapped.example": ["::ffff:127.0.0.1"],
    "nat64.example": ["64:ff9b::7f00:1"],
    "six.example": ["::1"],
    "scoped.example": ["fe80::1%lo"],
    "zero.example": ["0.0.0.0"],
    "garbage.example": ["not-an-address"],
    # Names that lead inside: of hosts files, of clouds, of resolvers that answer with what the name says, in capitals.
    "localhost.localdomain": ["127.0.0.1"],
    "ip6-localhost": ["::1"],
    "ip6-loopback": ["::1"],
    "LOCALHOST": ["127.0.0.1"],
    "metadata": ["169.254.169.254"],
    "metadata.google.internal.": ["fd20:ce::254"],
    "instance-data": ["169.254.169.254"],
    "instance-data.ec2.internal": ["169.254.169.254"],
    "kubernetes.default.svc": ["10.96.0.1"],
    "host.docker.internal": ["192.168.65.2"],
    "a9fea9fe.rebind.example": ["169.254.169.254"],
    "127-0-0-1.sslip.example": ["127.0.0.1"],
    "0--1.sslip.example": ["::1"],
    "teredo.example": ["2001:0:53aa:64c:0:fbff:80ff:fffe"],
    "translated.example": ["::ffff:0:7f00:1"],
    "local-nat64.example": ["64:ff9b:1:fffe::7f00:1"],
    "six-to-four.example": ["2002:a9fe:a9fe::1"],
    "site.example": ["fec0::1"],
    "srv6.example": ["5f00::1"],
    "discard.example": ["100::1"],
    "documentation.example": ["3fff::1"],
    "dummy.example": ["192.0.0.8"],
    "first-public.example": ["93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946", "fd00::1"],
}
# {P}: the port of a server that listens on every loopback address.
HOSTILE = [
    "https://127.0.0.1:{P}/",
    "https://127.1.2.3:{P}/",
    "https://127.1:{P}/",
    "https://127.0.1:{P}/",
    "https://2130706433:{P}/",
    "https://0x7f000001:{P}/",
    "https://0x7f.0.0.1:{P}/",
    "https://0177.0.0.1:{P}/",
    "https://017700000001:{P}/",
    "https://127.0.0.1.:{P}/",
    "https://0:{P}/",
    "https://0.0.0.0:{P}/",
    "https://[::1]:{P}/",
    "https://[0:0:0:0:0:0:0:1]:{P}/",
    "https://[::]:{P}/",
    "https://[::ffff:127.0.0.1]:{P}/",
    "https://[::ffff:7f00:1]:{P}/",
    "https://[::127.0.0.1]:{P}/",
    "https://[64:ff9b::127.0.0.1]:{P}/",
    "https://[64:ff9b:1::7f00:1]:{P}/",
    "https://[2002:7f00:1::]:{P}/",
    "https://[2001:0:7f00:1::]:{P}/",
    "https://[fe80::1]:{P}/",
    "https://[fe80::1%25lo]:{P}/",
    "https://[fc00::1]:{P}/",
    "https://[fd00:ec2::254]:{P}/",
    "https://[ff02::1]:{P}/",
    "https://[fec0::1]:{P}/",
    "https://[2001:db8::1]:{P}/",
    "https://10.1.2.3/",
    "https://172.16.0.1/",
    "https://192.168.1.1/",
    "https://169.254.169.254/latest/meta-data/",
    "https://169.254.170.2/v2/credentials",
    "https://100.100.100.200/",
    "https://100.64.0.1/",
    "https://168.63.129.16/",
    "https://192.0.0.192/",
    "https://192.88.99.1/",
    "https://198.18.0.1/",
    "https://224.0.0.1/",
    "https://240.0.0.1/",
    "https://255.255.255.255/",
    "https://\u2460\u2461\u2466.0.0.1:{P}/",
    "https://127\u30020\u30020\u30021:{P}/",
    "https://\uff11\uff12\uff17.0.0.1:{P}/",
    "https://user:password@127.0.0.1:{P}/",
    "https://example.com@127.0.0.1:{P}/",
    "https://user@example.com/",
    "https://example.com:22/",
    "https://example.com:6379/",
    "http://example.com/",
    "http://127.0.0.1:{P}/",
    "ftp://127.0.0.1:{P}/",
    "file:///etc/passwd",
    "gopher://127.0.0.1:{P}/",
    "//127.0.0.1:{P}/",
    "https://",
    "https:///path",
    "https://[::1/",
    "",
    # Numbers as resolvers and browsers read them: short, octal, hexadecimal, mixed, padded, too large.
    "https://0x7f.1:{P}/",
    "https://0177.1:{P}/",
    "https://0x7F.0x0.0x0.0x1:{P}/",
    "https://0x7f.0.1:{P}/",
    "https://127.000.000.001:{P}/",
    "https://00000177.00000000.00000000.00000001:{P}/",
    "https://0000.0000.0000.0000:{P}/",
    "https://0x00000000007f000001:{P}/",
    "https://4294967297:{P}/",
    "https://6425673729:{P}/",
    "https://2852039166/",
    "https://0xa9fea9fe/",
    "https://0xa9.254.0251.254/",
    "https://0251.0376.0251.0376/",
    "https://425.510.425.510/",
    "https://169.254.43518/",
    "https://0300.0250.0.1/",
    "https://3232235777/",
    "https://127.0.0.1.1/",
    "https://1.1.1.1.127/",
    "https://127.0.0.1..:{P}/",
    "https://127.1.:{P}/",
    # IPv6: longer and shorter spellings, carried IPv4, zones, metadata.
    "https://[0000:0000:0000:0000:0000:0000:0000:0001]:{P}/",
    "https://[::0001]:{P}/",
    "https://[::ffff:127.0.0.1%25lo]:{P}/",
    "https://[::1%25lo]:{P}/",
    "https://[::1%lo]:{P}/",
    "https://[fe80::a9fe:a9fe%25eth0]/",
    "https://[::ffff:a9fe:a9fe]/",
    "https://[::ffff:0:7f00:1]:{P}/",
    "https://[::ffff:0:127.0.0.1]:{P}/",
    "https://[64:ff9b::a9fe:a9fe]/",
    "https://[64:ff9b::10.0.0.1]/",
    "https://[2002:a9fe:a9fe::]/",
    "https://[2002:0a00:0001::]/",
    "https://[2001:0:53aa:64c:0:fbff:80ff:fffe]/",
    "https://[fd20:ce::254]/",
    "https://[fdff:ffff::1]/",
    "https://[febf::1]/",
    "https://[ff05::1:3]/",
    "https://[100::1]/",
    "https://[5f00::1]/",
    "https://[3fff::1]/",
    "https://[2001:10::1]/",
    "https://[2001:20::1]/",
    "https://[4000::1]/",
    "https://[::7f00:1]:{P}/",
    "https://[127.0.0.1]:{P}/",
    "https://[localhost]:{P}/",
    "https://::1:{P}/",
    # Special networks and services.
    "https://169.254.42.42/",
    "https://169.254.170.23/v1/credentials",
    "https://100.127.255.254/",
    "https://172.31.255.254/",
    "https://192.0.2.1/",
    "https://198.19.255.254/",
    "https://198.51.100.1/",
    "https://203.0.113.1/",
    "https://192.0.0.8/",
    "https://192.0.0.170/",
    "https://0.1.2.3/",
    "https://239.255.255.250/",
    "https://255.255.255.254/",
    # Other letters and dots for the same host.
    "https://127\uff610\uff610\uff611:{P}/",
    "https://127\uff0e0\uff0e0\uff0e1:{P}/",
    "https://169\u3002254\u3002169\u3002254/",
    "https://\u24db\u24de\u24d2\u24d0\u24db\u24d7\u24de\u24e2\u24e3:{P}/",
    "https://\u2488\u2488\u2488\u2474:{P}/",
    "https://\u06f1\u06f2\u06f7.0.0.1:{P}/",
    "https://127.0.0.\U0001d7cf:{P}/",
    "https://l\u00adocalhost:{P}/",
    "https://%6c%6f%63%61%6c%68%6f%73%74:{P}/",
    "https://%31%32%37.0.0.1:{P}/",
    "https://127%2e0%2e0%2e1:{P}/",
    "https://127.0.0.1%00.example.com:{P}/",
    "https://127.0.0.1%2f.example.com:{P}/",
    # Users, and places where two readers see two hosts.
    "https://127.0.0.1:{P}@example.com/",
    "https://example.com:443@127.0.0.1:{P}/",
    "https://example.com%40127.0.0.1:{P}/",
    "https://@127.0.0.1:{P}/",
    "https://:@127.0.0.1:{P}/",
    "https://example.com\\@127.0.0.1:{P}/",
    "https://127.0.0.1:{P}\\@example.com/",
    "https://127.0.0.1\\.example.com:{P}/",
    "https:\\\\127.0.0.1:{P}/",
    "https://\\127.0.0.1:{P}/",
    "https:/127.0.0.1:{P}/",
    "https:127.0.0.1:{P}/",
    "https:///127.0.0.1:{P}/",
    "https://127.0.0.1:{P}#@example.com/",
    "https://127.0.0.1:{P}?@example.com/",
    "https://127.0.0.1:{P};@example.com/",
    "https://127.0.0.1:{P}&@example.com/",
    # Lines, blanks and NULs.
    "https://127.0.0.1:{P}/\r\nHost: example.com",
    "https://127.0.0.1\r\n:{P}/",
    "https://exa\r\nmple.com/",
    "https://exa mple.com/",
    "https://127.0.0.1\t:{P}/",
    "https://127.0.0.1\x00.example.com/",
    " https://127.0.0.1:{P}/",
    "https:// 127.0.0.1:{P}/",
    # Ports and schemes.
    "https://example.com:0/",
    "https://example.com:-1/",
    "https://example.com:65536/",
    "https://example.com:99999999999/",
    "https://example.com:443abc/",
    "https://example.com:25/",
    "https://example.com:11211/",
    "HTTPS://127.0.0.1:{P}/",
    "HTTP://example.com/",
    "ws://127.0.0.1:{P}/",
    "dict://127.0.0.1:{P}/",
    "ldap://127.0.0.1:{P}/",
    "jar:https://127.0.0.1:{P}/!/",
    "data:text/plain,x",
    "javascript:fetch('https://127.0.0.1:{P}/')",
    "unix:///var/run/docker.sock",
    "httpss://127.0.0.1:{P}/",
    "127.0.0.1:{P}",
    "localhost",
    *(f"https://{name}:{{P}}/" for name in NAMES),
]


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[int, list[Any]]]:
    """A port on which something accepts on all of 127.0.0.0/8 and ::1, and the connections that came."""
    reached: list[Any] = []

    def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.append(writer.get_extra_info("sockname"))
        writer.close()

    # Not 0.0.0.0: nobody else on the network is to be able to connect.
    first = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = first.sockets[0].getsockname()[1]
    servers = [first, await asyncio.start_server(accept, "127.0.0.2", port)]
    if socket.has_ipv6:
        with contextlib.suppress(OSError):  # no IPv6 in this container
            servers.append(await asyncio.start_server(accept, "::1", port))
    try:
        yield port, reached
    finally:
        for server in servers:
            server.close()
            await server.wait_closed()


async def known(host: str, port: int) -> Sequence[str]:
    return NAMES.get(host) or NAMES[host.lower()]


async def nowhere(host: str, port: int) -> Sequence[str]:
    return []


def test_no_hostile_url_is_reached(run: Any) -> None:
    async def scenario() -> None:
        async with listening() as (port, reached):
            config = WebhookConfig(webhook_timeout_s=60.0, webhook_ports=f"443,{port}")
            async with Sender(config, lookup=known) as sender:
                for url in HOSTILE:
                    outcome = await sender.send(url.format(P=port), "msg_1", b"{}", [b"k" * 32])
                    assert outcome.blocked and outcome.error, (url, outcome)
            async with Sender(config) as sender:  # with the system's own look-up
                assert (await sender.send(f"https://localhost:{port}/", "msg_1", b"{}", [b"k" * 32])).blocked
            async with Sender(config, lookup=nowhere) as sender:
                outcome = await sender.send("https://nowhere.example/", "msg_1", b"{}", [b"k" * 32])
                assert "has no address" in outcome.error and not outcome.blocked
            assert reached == []
            # The same server with its address allowed: the listener would have noticed.
            allowed = WebhookConfig(webhook_timeout_s=60.0, webhook_allow="127.0.0.0/8")
            async with Sender(allowed, lookup=known) as sender:
                outcome = await sender.send(f"https://127.0.0.1:{port}/", "msg_1", b"{}", [b"k" * 32])
                assert not outcome.blocked and len(reached) == 1

    run(scenario())


def test_a_name_that_changes_its_mind_gains_nothing(run: Any) -> None:
    answers = [["127.0.0.2"], ["127.0.0.1"], ["127.0.0.2", "127.0.0.1"], ["127.0.0.2"]]
    asked: list[str] = []

    async def rebinding(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return answers[len(asked) - 1]

    async def scenario() -> None:
        async with listening() as (port, reached):
            # 127.0.0.2 stands for a public address here, since tests stay on this machine.
            config = WebhookConfig(webhook_timeout_s=60.0, webhook_allow="127.0.0.2", webhook_ports=str(port))
            async with Sender(config, lookup=rebinding) as sender:
                blocked = [
                    (await sender.send(f"https://rebind.example:{port}/", "msg_1", b"{}", [b"k" * 32])).blocked
                    for _ in answers
                ]
            assert blocked == [False, True, True, False]
            assert len(asked) == len(answers), "one look-up for each connection, none between check and use"
            assert [place[0] for place in reached] == ["127.0.0.2", "127.0.0.2"]

    run(scenario())


def test_the_socket_factory_is_the_last_look(run: Any) -> None:
    def factory(guard: Guard, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        guard.socket((family, socket.SOCK_STREAM, 6, "", (address, 443))).close()

    async def scenario() -> None:
        guard = Guard(AllowList.parse("named.example"), frozenset((443,)))
        with pytest.raises(Blocked):
            factory(guard, "93.184.216.34")  # nobody has checked a URL in this task
        guard.enter("https://example.com/")
        factory(guard, "93.184.216.34")
        for address in ("127.0.0.1", "::1", "::ffff:127.0.0.1", "169.254.169.254", "fe80::1%lo"):
            with pytest.raises(Blocked):
                factory(guard, address)
        assert guard.why_blocked() is not None
        guard.enter("http://named.example:8080/")
        factory(guard, "127.0.0.1")
        guard.close()

    run(scenario())


@given(st.ip_addresses())
def test_whatever_python_calls_private_is_not_public(address: Any) -> None:
    if is_public(str(address)):
        assert address.is_global and not address.is_multicast
        assert address.version == 4 or address in ipaddress.ip_network("2000::/3")


def test_public_addresses_are_public() -> None:
    for text in ("93.184.216.34", "1.1.1.1", "2606:2800:220:1:248:1893:25c8:1946", "2a00:1450:4001:80b::200e"):
        assert is_public(text)


def test_allow_list() -> None:
    allow = AllowList.parse("10.0.0.0/8, 127.0.0.1:8000 ,[::1]:9000, fd00::/8, hooks.internal, Other.Example:8080")
    assert allow.has_address("10.9.9.9", 1) and allow.has_address("fd00::1", 443)
    assert allow.has_address("127.0.0.1", 8000) and not allow.has_address("127.0.0.1", 8001)
    assert allow.has_address("::1", 9000) and not allow.has_address("::1", 8000)
    assert allow.has_host("hooks.internal.", 7) and allow.has_host("other.example", 8080)
    assert not allow.has_host("other.example", 80) and not allow.has_host("x.hooks.internal", 80)
    assert not allow.has_address("no address", 80)
    for bad in ("10.0.0.1/8", "a b", "http://x", "x:port"):
        with pytest.raises(ConfigError, match="webhook_allow"):
            AllowList.parse(bad)
