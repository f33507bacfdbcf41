"""Settings of the webhook sender. The metadata of a field is its help text on the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pagemill.engine.errors import ConfigError
from pagemill.engine.values import as_text, shown


def _setting(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookConfig:
    """How webhooks are sent. Raises `ConfigError`, naming the setting, on a bad value.

    Names that end in `_s` are seconds, in `_ms` milliseconds.
    """

    webhook_secrets: str | None = _setting(
        None, "file with the signing secrets; default ~/.local/share/pagemill/webhook-secrets.json"
    )
    webhook_allow: str = _setting(
        "", "addresses (10.0.0.0/8), hosts and host:port that may be private and plain http, with commas between"
    )
    webhook_ports: str = _setting("80,443,8443", "ports that webhooks may go to, with commas between")
    webhook_proxy: str | None = _setting(None, "http:// proxy that all webhooks go through; it checks the addresses")
    webhook_timeout_s: float = _setting(15.0, "one try, from the name look-up to the end of the answer")
    webhook_delays_s: str = _setting(
        "5,300,1800,7200,18000,36000,36000", "waits between tries; the last try is the last"
    )
    webhook_concurrency: int = _setting(256, "tries at one time")
    webhook_endpoint_concurrency: int = _setting(4, "tries at one time to one host and port")
    webhook_tenant_concurrency: int | None = _setting(32, "tries at one time of one tenant; none is no limit")
    webhook_tenant_lookups: int | None = _setting(16, "names looked up at one time for one tenant; none is no limit")
    webhook_poll_ms: int = _setting(200, "how often the outbox is looked at")

    def __post_init__(self) -> None:
        for name in ("webhook_secrets", "webhook_allow", "webhook_ports", "webhook_proxy", "webhook_delays_s"):
            value = getattr(self, name)
            if as_text(value) is None and (value is not None or name not in ("webhook_secrets", "webhook_proxy")):
                raise ConfigError(f"{name} must be text, valid in Unicode, got {shown(value)}")
        whole = {"webhook_concurrency": (1, 4096), "webhook_endpoint_concurrency": (1, 4096)}
        for name in ("webhook_tenant_concurrency", "webhook_tenant_lookups"):
            if getattr(self, name) is not None:
                whole[name] = (1, 4096)
        for name, (low, high) in (whole | {"webhook_poll_ms": (10, 60_000)}).items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ConfigError(f"{name} must be an integer in [{low}, {high}], got {shown(value)}")
        timeout = self.webhook_timeout_s
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0.1 <= timeout <= 300:
            raise ConfigError(f"webhook_timeout_s must be a number of seconds in [0.1, 300], got {shown(timeout)}")
        if self.webhook_proxy is not None and not self.webhook_proxy.startswith("http://"):
            raise ConfigError("webhook_proxy must start with http://")
        _ = self.delays, self.ports

    @property
    def delays(self) -> tuple[float, ...]:
        """Seconds before the second try, the third, and so on."""
        try:
            delays = tuple(float(part) for part in self.webhook_delays_s.split(",") if part.strip())
        except ValueError:
            delays = (-1.0,)
        if len(delays) > 50 or not all(0 <= delay <= 172_800 for delay in delays):
            raise ConfigError(
                f"webhook_delays_s must be up to 50 numbers in [0, 172800] with commas between, "
                f"got {shown(self.webhook_delays_s)}"
            )
        return delays

    @property
    def ports(self) -> frozenset[int]:
        try:
            ports = frozenset(int(part) for part in self.webhook_ports.split(",") if part.strip())
        except ValueError:
            ports = frozenset((0,))
        if not all(0 < port < 65536 for port in ports):
            raise ConfigError(f"webhook_ports must be ports with commas between, got {shown(self.webhook_ports)}")
        return ports
