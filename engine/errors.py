"""Errors with a name that a caller can act on.

Every refusal carries one of the protocol's error codes, the field it is about and, where waiting helps, for how long.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

ErrorCode = Literal[
    "invalid_request",
    "unsupported_model",
    "prompt_too_long",
    "never_fits",
    "queue_full",
    "no_engine",
    "deadline_unreachable",
    "deadline_exceeded",
    "cancelled",
    "duplicate_id",
    "idempotency_conflict",
    "too_large",
    "poison",
    "request_lost",
    "engine_error",
]


class PagemillError(Exception):
    """Root of every error that Pagemill raises on purpose."""


class RequestError(PagemillError):
    """One request cannot be served; its neighbours are not concerned.

    `code` is one of the protocol's error codes, `param` the offending field, `retry_after_ms` a hint in milliseconds.
    """

    def __init__(
        self, code: ErrorCode, message: str, *, param: str | None = None, retry_after_ms: int | None = None
    ) -> None:
        super().__init__(message)
        self.code: ErrorCode = code
        self.message = message
        self.param = param
        self.retry_after_ms = retry_after_ms

    def to_dict(self) -> dict[str, Any]:
        """The protocol's `error` object: code and message, then param and retry_after_ms where they say something."""
        error: dict[str, Any] = {"code": self.code, "message": self.message}
        if self.param is not None:
            error["param"] = self.param
        if self.retry_after_ms is not None:
            error["retry_after_ms"] = self.retry_after_ms
        return error

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Job queues and process pools pickle exceptions."""
        return partial(type(self), param=self.param, retry_after_ms=self.retry_after_ms), (self.code, self.message)

    def __repr__(self) -> str:
        return f"RequestError({self.code!r}, {self.message!r}, param={self.param!r})"


class ConfigError(PagemillError):
    """A setting, a model or this machine does not allow what was asked; the message says what would."""


class EngineDeadError(PagemillError):
    """The device failed and the engine has stopped; its unfinished requests are still in the stream."""


def invalid(message: str, param: str) -> RequestError:
    """An `invalid_request` error about one field."""
    return RequestError("invalid_request", message, param=param)
