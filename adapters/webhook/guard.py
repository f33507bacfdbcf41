"""The address guard: which URLs and addresses a webhook may go to, checked again at the moment of connecting.

Whoever may set a callback URL decides where this process connects to, from inside the operator's network. So only
public addresses are dialled, unless the operator has allowed others. The URL is checked first (scheme, port, user,
literals); then every address that its name resolves to; then, in the socket factory, the address that is dialled: the
name is looked up once for each connection and that answer is used, so a name that changes between check and use gains
nothing. Redirects are not followed, connections are not kept, proxies of the environment are not used.

Kinds of addresses that carry an IPv4 address inside an IPv6 one (mapped, compatible, 6to4, Teredo, NAT64) are refused
as a whole: where they lead depends on a translator that this process does not know.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from pagemill.adapters.webhook.lookups import Lookups
from pagemill.engine.errors import ConfigError

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Lookup = Callable[[str, int], Awaitable[Sequence[str]]]

_UNICAST = ipaddress.ip_network("2000::/3")
_DENIED: tuple[_Network, ...] = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8",
        "100.64.0.0/10",  # carrier-grade NAT; a cloud's metadata service lives here too
        "168.63.129.16/32",  # a cloud's internal service at a public-looking address
        "192.0.0.0/24",
        "192.88.99.0/24",
        "2001::/23",  # Teredo and other special purposes
        "2002::/16",
        "3fff::/20",  # documentation (RFC 9637), which Python before 3.13 takes for public
    )
)
# A host whose last label is a number is an IPv4 address to one parser or the other: 2130706433, 0x7f.1, 0177.0.0.1.
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,254}")
_NUMBER = re.compile(r"(\d+|0x[0-9a-f]*)\.?", re.IGNORECASE)


class Blocked(OSError):
    """A webhook may not go there. The message says why, for the delivery's record."""


def is_public(text: str) -> bool:
    """Whether an address may be dialled by anybody's wish."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if not address.is_global or address.is_multicast or any(address in network for network in _DENIED):
        return False
    return address.version == 4 or (address.scope_id is None and address in _UNICAST)


@dataclass(frozen=True, slots=True)
class AllowList:
    """What the operator has allowed: networks and names, each at one port or all."""

    networks: tuple[tuple[_Network, int | None], ...] = ()
    hosts: tuple[tuple[str, int | None], ...] = ()

    @classmethod
    def parse(cls, text: str) -> AllowList:
        """Read `webhook_allow`: `10.0.0.0/8`, `127.0.0.1:8000`, `[::1]:8000`, `hooks.internal`, `hooks.internal:8080`.
        Raises `ConfigError`."""
        networks: list[tuple[_Network, int | None]] = []
        hosts: list[tuple[str, int | None]] = []
        for entry in filter(None, (part.strip() for part in text.split(","))):
            try:
                networks.append((ipaddress.ip_network(entry), None))
                continue
            except ValueError:
                pass
            found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(\d{1,5}))?", entry)
            if found is None:
                raise ConfigError(f"webhook_allow: {entry[:80]!r} is no network, address or host, with or without port")
            host, port = found[1].strip("[]"), int(found[2]) if found[2] else None
            try:
                networks.append((ipaddress.ip_network(host), port))
            except ValueError:
                hosts.append((host.lower().rstrip("."), port))
        return cls(tuple(networks), tuple(hosts))

    def has_host(self, host: str, port: int) -> bool:
        name = host.lower().rstrip(".")
        return any(name == known and at in (None, port) for known, at in self.hosts)

    def has_address(self, text: str, port: int) -> bool:
        try:
            address: _Address = ipaddress.ip_address(text)
        except ValueError:
            return False
        return any(
            address.version == network.version and address in network and at in (None, port)
            for network, at in self.networks
        )


@dataclass(slots=True)
class _Target:
    host: str
    port: int
    is_named: bool  # its name is allowed, wherever that leads
    owner: str
    blocked: list[str] = field(default_factory=list)
    is_queued: bool = False  # it waits for a look-up of its owner's to end


_target: ContextVar[_Target | None] = ContextVar("webhook_target", default=None)


class Guard:
    """Decides for one sender. `lookup(host, port)` gives the addresses of a name; default: the system's, at most
    `owner_lookups` at one time for one owner."""

    def __init__(
        self,
        allow: AllowList,
        ports: frozenset[int],
        *,
        lookup: Lookup | None = None,
        owner_lookups: int | None = None,
        has_proxy: bool = False,
    ) -> None:
        self._allow = allow
        self._ports = ports
        self._has_proxy = has_proxy
        self._lookups = Lookups(owner_lookups)
        self._lookup = self._system_lookup if lookup is None else lookup

    def enter(self, text: str, owner: str = "") -> URL:
        """Check a URL and remember it as the current task's target, wanted by `owner`. Returns what is to be requested,
        as it was checked. Raises `Blocked`."""
        if any(character <= " " or character == "\x7f" for character in text):
            raise Blocked("blank or control character in the URL")
        try:
            url = URL(text)
            host, port = url.raw_host, url.port
        except (ValueError, TypeError) as error:
            raise Blocked(f"no usable URL: {str(error)[:100]}") from None
        if not host or not port or url.scheme not in ("http", "https"):
            raise Blocked("no http or https URL with a host and a port")
        if url.raw_user is not None or url.raw_password is not None:
            raise Blocked("user and password in the URL")
        is_literal = _is_address(host)
        if not is_literal and _NAME.fullmatch(host) is None:
            raise Blocked("no name of a host")
        if not is_literal and _NUMBER.fullmatch(host.rpartition(".")[2] or host.rstrip(".").rpartition(".")[2]):
            raise Blocked("a number for a host name")
        is_named = not is_literal and self._allow.has_host(host, port)
        is_allowed = is_named or (is_literal and self._allow.has_address(host, port))
        if url.scheme == "http" and not is_allowed:
            raise Blocked("plain http to a host that is not allowed it")
        if port not in self._ports and not is_allowed:
            raise Blocked(f"port {port}")
        if is_literal and not is_allowed and not is_public(host):
            raise Blocked(f"address {host} is not public")
        _target.set(_Target(host, port, is_named, owner))
        return url

    def why_blocked(self) -> str | None:
        """Why the current task's target was refused while it was connected to; None: it was not."""
        target = _target.get()
        return target.blocked[0] if target is not None and target.blocked else None

    def is_queued(self) -> bool:
        """Whether the current task's target still waits for other look-ups of its owner."""
        target = _target.get()
        return target is not None and target.is_queued

    def socket(self, info: Any) -> socket.socket:
        """The connector's socket factory: the last look, at the address that is dialled."""
        family, kind, proto, _, place = info
        # With a proxy it is the proxy that is dialled, and the proxy that looks at addresses.
        if not self._has_proxy:
            self._check(place[0])
        return socket.socket(family, kind, proto)

    async def addresses(self, host: str, port: int) -> Sequence[str]:
        """Every address of a name. Raises `Blocked` if one of them may not be dialled."""
        found = await self._lookup(host, port)
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, f"{host} has no address")
        if not self._has_proxy:
            for address in found:
                self._check(address)
        return found

    def close(self) -> None:
        self._lookups.close()

    def _check(self, address: str) -> None:
        target = _target.get()
        if target is None:
            raise Blocked("nobody has checked this target")
        if not (target.is_named or is_public(address) or self._allow.has_address(address, target.port)):
            target.blocked.append(f"{target.host} is at {address}, which is not public")
            raise Blocked(target.blocked[-1])

    async def _system_lookup(self, host: str, port: int) -> Sequence[str]:
        target = _target.get()
        if target is None:
            raise Blocked("nobody has checked this target")
        target.is_queued = True
        await self._lookups.begin(target.owner)
        target.is_queued = False
        return await self._lookups.find(target.owner, host, port)


class GuardedResolver(AbstractResolver):
    """aiohttp's resolver, by way of the guard."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in await self._guard.addresses(host, port)
        ]

    async def close(self) -> None:
        self._guard.close()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
