"""The gateway's settings. The metadata of a field is its help text on the command line."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from typing import Any

from pagemill.engine.errors import ConfigError
from pagemill.engine.values import as_text, shown

_QUEUE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}")


def _setting(default: Any, help_text: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": help_text, **more})


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Where the gateway listens, whom it lets in and what it bears. Raises `ConfigError`, naming the setting.

    Names that end in `_s` are seconds, in `_bytes` bytes.
    """

    http_host: str = _setting("127.0.0.1", "address that the gateway listens on; needs API keys unless loopback")
    http_port: int = _setting(8000, "port of the gateway; 0 finds a free one")
    api_keys: str | None = _setting(
        None, "API keys as tenant=key, with commas between; in a variable rather than a flag", secret=True
    )
    api_keys_file: str | None = _setting(None, "file with a line 'tenant key' or 'tenant sha256:HEX' for each API key")
    models: str | None = _setting(None, "model names and their queues as name=queue, with commas between")
    cors_origins: str | None = _setting(None, "web origins that may call from a browser, with commas between; * is all")
    http_max_body_bytes: int = _setting(2 << 20, "largest HTTP request body, unpacked")
    http_max_file_bytes: int = _setting(64 << 20, "largest uploaded file; files are kept in Redis")
    http_file_ttl_s: float = _setting(172_800.0, "how long files and batches are kept after the last change")
    http_batch_requests: int = _setting(32, "requests of one batch that are in the queue at once")
    http_read_timeout_s: float = _setting(30.0, "how long a request's body may take to arrive")
    http_write_timeout_s: float = _setting(30.0, "how long a client may read nothing before it is cut")
    http_idle_timeout_s: float = _setting(75.0, "how long a connection may take to send a request's head")
    http_ping_s: float = _setting(10.0, "silence on a stream after which a comment is sent to keep it open")
    http_drain_timeout_s: float = _setting(20.0, "how long requests may go on after SIGTERM")
    http_tenant_requests_per_minute: int | None = _setting(None, "generations that a tenant may start in a minute")
    http_tenant_requests: int | None = _setting(None, "generations that a tenant may have open at once")

    def __post_init__(self) -> None:
        for name in ("api_keys", "api_keys_file", "models", "cors_origins"):
            if getattr(self, name) is not None and as_text(getattr(self, name)) is None:
                raise ConfigError(f"{name} must be text, valid in Unicode")
        whole: dict[str, tuple[int, int]] = {"http_port": (0, 65535), "http_max_body_bytes": (1024, 256 << 20)}
        whole |= {"http_max_file_bytes": (1024, 1 << 30), "http_batch_requests": (1, 4096)}
        for name in ("http_tenant_requests_per_minute", "http_tenant_requests"):
            if getattr(self, name) is not None:
                whole[name] = (1, 2**31)
        for name, (low, high) in whole.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ConfigError(f"{name} must be an integer in [{low}, {high}], got {shown(value)}")
        for name in ("read_timeout", "write_timeout", "idle_timeout", "ping", "drain_timeout", "file_ttl"):
            value = getattr(self, f"http_{name}_s")
            least = 0 if name == "drain_timeout" else 0.05
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= 2_592_000:
                raise ConfigError(f"http_{name}_s must be a number in [{least}, 2592000], got {shown(value)}")
        if not as_text(self.http_host):
            raise ConfigError(f"http_host must be an address to listen on, got {shown(self.http_host)}")
        if not is_loopback(self.http_host) and self.api_keys is None and self.api_keys_file is None:
            raise ConfigError(
                f"http_host {shown(self.http_host)} can be reached from other machines: set api_keys or api_keys_file, "
                "or listen on 127.0.0.1"
            )
        for model, queue in self.queues.items():
            if not model or not _QUEUE.fullmatch(queue):
                raise ConfigError(f"models must be name=queue pairs with commas between, got {shown(self.models)}")
        for origin in self.origins:
            if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
                raise ConfigError(f"cors_origins must be origins such as https://app.example.org, got {shown(origin)}")

    @property
    def queues(self) -> dict[str, str]:
        """Model name -> queue, in the order given; empty where the queue's own setting decides."""
        return dict(_pair(item) for item in _items(self.models))

    @property
    def origins(self) -> tuple[str, ...]:
        return tuple(_items(self.cors_origins))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host.lower().rstrip(".") == "localhost" or host.lower().endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return False


def _items(text: str | None) -> list[str]:
    return [item.strip() for item in (text or "").split(",") if item.strip()]


def _pair(item: str) -> tuple[str, str]:
    name, _, value = item.rpartition("=")
    return name.strip(), value.strip()
