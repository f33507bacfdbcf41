"""Who is asking: bearer keys, each of which belongs to a tenant.

Only digests of keys are kept, and all of them are compared, in constant time, so that neither memory nor timing gives a
key away. Without keys everybody is the tenant "default", and then only this machine may ask: the gateway listens on
loopback, and refuses requests that a web page made through a name of its own for this address (DNS rebinding).
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web

from pagemill.adapters.http.config import GatewayConfig, is_loopback
from pagemill.adapters.http.errors import ApiError
from pagemill.engine.errors import ConfigError, RequestError
from pagemill.ingest.schema import check_tenant

DEFAULT_TENANT = "default"
_HASHED = re.compile(r"sha256:([0-9a-fA-F]{64})")


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """SHA-256 digests of keys with their tenants. Empty: no key is asked for."""

    digests: tuple[tuple[bytes, str], ...] = ()

    @classmethod
    def of(cls, config: GatewayConfig) -> ApiKeys:
        """The keys of the settings and of the keys file. Raises `ConfigError`; its messages hold no key."""
        found: list[tuple[bytes, str]] = []
        for number, item in enumerate(filter(None, map(str.strip, (config.api_keys or "").split(","))), start=1):
            tenant, given, key = item.partition("=")
            found.append(_entry(tenant if given else DEFAULT_TENANT, key if given else item, f"api_keys, {number}"))
        if config.api_keys_file is not None:
            found += _read_file(Path(config.api_keys_file).expanduser())
        if not found and (config.api_keys is not None or config.api_keys_file is not None):
            raise ConfigError("api_keys and api_keys_file hold no key: nobody could come in")
        return cls(tuple(found))

    def tenant_of(self, key: str) -> str | None:
        """The tenant whose key this is."""
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        tenant = None
        for known, owner in self.digests:
            if hmac.compare_digest(known, digest):
                tenant = owner
        return tenant

    def identify(self, request: web.BaseRequest) -> str:
        """The tenant who sends a request. Raises `ApiError`."""
        if not self.digests:
            _check_local(request)
            return DEFAULT_TENANT
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthorised("an API key is needed: Authorization: Bearer KEY")
        tenant = self.tenant_of(key.strip())
        if tenant is None:
            raise _unauthorised("the API key is not known")
        return tenant


def _unauthorised(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _check_local(request: web.BaseRequest) -> None:
    try:
        host = urlsplit(f"//{request.headers.get('Host', '')}").hostname or ""
    except ValueError:  # half of an IPv6 address
        host = ""
    if not is_loopback(host):
        raise ApiError(403, "without API keys only localhost is served", code="forbidden_host")


def _entry(tenant: str, key: str, place: str) -> tuple[bytes, str]:
    tenant, key = tenant.strip(), key.strip()
    try:
        check_tenant(tenant)
    except RequestError as error:
        raise ConfigError(f"{place}: {error.message}") from None
    if not key or key.split() != [key]:
        raise ConfigError(f"{place}: a key must be one word")
    hashed = _HASHED.fullmatch(key)
    return (bytes.fromhex(hashed[1]) if hashed else hashlib.sha256(key.encode()).digest()), tenant


def _read_file(path: Path) -> list[tuple[bytes, str]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_keys_file {path} cannot be read: {error}") from error
    found = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if words:
            if len(words) != 2:
                raise ConfigError(f"{path}, line {number}: a line is 'tenant key' or 'tenant sha256:HEX'")
            found.append(_entry(words[0], words[1], f"{path}, line {number}"))
    return found
