"""What a `redis_url` says: one server, the masters that Sentinels know, or a Cluster.

    redis://user:password@host:6379/0                     rediss:// for TLS
    unix:///path/of/socket
    redis+sentinel://user:password@host:26379,host:26379/service/0    rediss+sentinel://
    redis+cluster://user:password@host:7000,host:7001     rediss+cluster://

Behind `?` stand redis-py's options, such as `ssl_ca_certs=/path` and `ssl_cert_reqs=none`; for Sentinels of their own
user, `sentinel_username` and `sentinel_password`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from pagemill.engine.errors import ConfigError

SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
_SENTINEL_OPTIONS = ("sentinel_username", "sentinel_password")
_DEFAULT_PORTS = {"single": 6379, "sentinel": 26379, "cluster": 6379}


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """`url` is what redis-py takes for one server, with the first of `hosts`; it holds user, database and options.

    `sentinel_options`: user and password of the Sentinels themselves.
    """

    kind: Literal["single", "sentinel", "cluster"]
    url: str = field(repr=False)
    hosts: tuple[tuple[str, int], ...]
    service: str = ""
    sentinel_options: tuple[tuple[str, str], ...] = field(default=(), repr=False)


def parse_address(url: object) -> ServerAddress:
    """Read a `redis_url`. Raises `ConfigError`, which does not repeat the URL: it may hold a password."""
    scheme, separator, _ = url.partition("://") if isinstance(url, str) else ("", "", "")
    if not isinstance(url, str) or not separator or scheme not in SCHEMES:
        shown = repr(url[:40]) if isinstance(url, str) and "@" not in url else "something else"
        names = ", ".join(f"{name}://" for name in SCHEMES)
        raise ConfigError(f"redis_url must start with one of {names}, got {shown}")
    if scheme == "unix":
        return ServerAddress("single", url, ())
    kind = _kind(scheme)
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise _unusable() from error
    credentials, _, netloc = parts.netloc.rpartition("@")
    hosts = tuple(_host(item, _DEFAULT_PORTS[kind]) for item in netloc.split(","))
    if kind == "single" and len(hosts) > 1:
        raise ConfigError("redis_url has several hosts, which only redis+sentinel:// and redis+cluster:// may have")
    service, database = "", parts.path.removeprefix("/")
    if kind == "sentinel":
        service, _, database = database.partition("/")
        if not service:
            raise ConfigError("redis_url must name the service, as in redis+sentinel://host:26379/mymaster/0")
    if database and not database.isdecimal():
        raise ConfigError("redis_url must end with the host's port or a database number, as in redis://host:6379/0")
    if kind == "cluster" and int(database or 0):
        raise ConfigError(f"redis_url names database {int(database)}, and a Cluster has only database 0")
    options = parse_qsl(parts.query)
    query = urlencode([pair for pair in options if pair[0] not in _SENTINEL_OPTIONS])
    host, port = hosts[0]
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    place = f"{credentials}@{place}" if credentials else place
    plain = urlunsplit((scheme.partition("+")[0], place, f"/{database}" if database else "", query, ""))
    asked = tuple((name.removeprefix("sentinel_"), value) for name, value in options if name in _SENTINEL_OPTIONS)
    return ServerAddress(kind, plain, hosts, service, asked)


def _kind(scheme: str) -> Literal["single", "sentinel", "cluster"]:
    if scheme.endswith("+sentinel"):
        return "sentinel"
    return "cluster" if scheme.endswith("+cluster") else "single"


def _host(item: str, default_port: int) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{item}")
        port = parts.port
    except ValueError as error:
        raise _unusable() from error
    if port == 0 or (not parts.hostname and item):
        raise _unusable()
    return parts.hostname or "localhost", default_port if port is None else port


def _unusable() -> ConfigError:
    return ConfigError("redis_url has no usable host and port; in a password @ : / ? # are written %40 %3A %2F %3F %23")
