"""The queue's settings. The metadata of a field is its help text on the command line."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from pagemill.engine.errors import ConfigError
from pagemill.engine.values import shown
from pagemill.ingest.address import parse_address
from pagemill.ingest.keys import is_queue_name

CAPS = (
    "max_queued_requests",
    "max_queued_prompt_tokens",
    "max_tenant_queued_requests",
    "max_tenant_queued_prompt_tokens",
)


def _setting(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueConfig:
    """Where the queue is and how long it keeps things. Raises `ConfigError`, naming the setting, on a bad value.

    Names that end in `_s` are seconds, in `_ms` milliseconds, in `_bytes` bytes.
    """

    redis_url: str = _setting(
        "redis://127.0.0.1:6379/0",
        "Redis or Valkey: redis://, rediss://, unix://, redis+sentinel:// or redis+cluster:// URL",
    )
    key_prefix: str = _setting("pm", "first part of every key and channel; carries the environment")
    queue: str = _setting("default", "name of the queue; one queue serves one model")
    shards: int = _setting(1, "independent parts of the queue, each in one slot of a cluster; the same for everybody")
    default_ttl_ms: int = _setting(600_000, "deadline of a request that does not say, from acceptance")
    result_ttl_s: float = _setting(3600.0, "how long a finished request's record and result are kept")
    replay_ttl_s: float = _setting(600.0, "how long a finished request's events can be read again")
    idempotency_ttl_s: float = _setting(86_400.0, "how long an idempotency key is remembered")
    max_body_bytes: int = _setting(1 << 20, "largest request body")
    blob_bytes: int = _setting(64 << 10, "bodies above this size travel in a key of their own")
    max_attempts: int = _setting(3, "engines that may take a request, one after a crash of the other")
    retry_delay_ms: int = _setting(500, "wait before a request that may have ended its engine runs again; doubles")
    max_queued_requests: int | None = _setting(None, "requests that may wait in the queue; more are refused")
    max_queued_prompt_tokens: int | None = _setting(None, "prompt tokens that may wait in the queue")
    max_tenant_queued_requests: int | None = _setting(None, "requests of one tenant that may wait in the queue")
    max_tenant_queued_prompt_tokens: int | None = _setting(None, "prompt tokens of one tenant that may wait")
    max_tenant_running_requests: int | None = _setting(None, "requests of one tenant that may run at once")
    refuse_without_engine: bool = _setting(False, "refuse requests while no engine is alive, instead of keeping them")
    drain_timeout_s: float = _setting(30.0, "how long running requests may go on after SIGTERM")
    heartbeat_timeout_s: float = _setting(15.0, "an engine silent for this long is dead: others take its requests")
    head_start_ms: int = _setting(
        50, "how long a request is left to the engine that has computed its prompt's beginning; 0: whoever reads it"
    )
    poll_ms: int = _setting(250, "how often an engine looks for cancellations of requests that make no tokens")
    block_ms: int = _setting(1000, "how long one blocking read of the stream lasts")

    def __post_init__(self) -> None:
        parse_address(self.redis_url)
        for name in ("key_prefix", "queue"):
            if not is_queue_name(getattr(self, name)):
                raise ConfigError(
                    f"{name} may hold letters, digits and . _ : - and at most 64 characters, "
                    f"got {shown(getattr(self, name))}"
                )
        whole = {"shards": (1, 1024), "default_ttl_ms": (1, 604_800_000), "max_body_bytes": (1024, 64 << 20)}
        whole |= {"blob_bytes": (0, 64 << 20), "max_attempts": (1, 100), "poll_ms": (10, 60_000)}
        whole |= {"block_ms": (10, 60_000), "retry_delay_ms": (0, 30_000), "head_start_ms": (0, 1000)}
        for name, (low, high) in whole.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ConfigError(f"{name} must be an integer in [{low}, {high}], got {shown(value)}")
        for name in (*CAPS, "max_tenant_running_requests"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**53):
                raise ConfigError(f"{name} must be an integer of at least 1, got {shown(value)}")
        if not isinstance(self.refuse_without_engine, bool):
            raise ConfigError(f"refuse_without_engine must be true or false, got {shown(self.refuse_without_engine)}")
        seconds = {"result_ttl_s": 1.0, "replay_ttl_s": 1.0, "idempotency_ttl_s": 1.0, "heartbeat_timeout_s": 0.2}
        for name, least in (seconds | {"drain_timeout_s": 0.0}).items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= 31_536_000:
                raise ConfigError(f"{name} must be a number of seconds in [{least:g}, 31536000], got {shown(value)}")
        if self.replay_ttl_s > self.result_ttl_s:
            raise ConfigError("replay_ttl_s must be at most result_ttl_s: the record must outlive the events")

    @property
    def caps(self) -> tuple[int | None, ...]:
        """What may wait on one shard: requests, prompt tokens, and the same of one tenant. A cap is divided among the
        shards, since no script sees more than one."""
        return tuple(self._part(getattr(self, name)) for name in CAPS)

    @property
    def tenant_cap(self) -> int | None:
        """Requests of one tenant that may run at once on one shard."""
        return self._part(self.max_tenant_running_requests)

    def _part(self, cap: int | None) -> int | None:
        return None if cap is None else -(-cap // self.shards)

    def replace(self, **changes: Any) -> QueueConfig:
        return dataclasses.replace(self, **changes)
