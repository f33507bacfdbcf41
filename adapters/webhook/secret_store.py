"""The file with the signing secrets: {"default": [{"secret": "whsec_...", "until": null}, ...]}, mode 0600.

The first secret of a name is the current one. After a rotation the old one goes on signing beside it until `until`
(Unix seconds), so receivers have time to change. Secrets never go through Redis: requests only carry their names.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import structlog

from pagemill.adapters.webhook.signing import new_secret, read_secret
from pagemill.engine.errors import ConfigError
from pagemill.ingest.callback import is_secret_name

OVERLAP_S = 86_400.0

_log = structlog.get_logger(__name__)


def default_path() -> Path:
    return Path.home() / ".local" / "share" / "pagemill" / "webhook-secrets.json"


class SecretStore:
    """Secrets by name, read again when the file changes. Raises `ConfigError` where the file is there but no good."""

    def __init__(self, path: str | Path | None = None, clock: Callable[[], float] = time.time) -> None:
        self.path = Path(path) if path is not None else default_path()
        self._clock = clock
        self._stamp: tuple[int, int, int] | None = None
        self._secrets: dict[str, list[tuple[bytes, float | None]]] = {}
        self._refresh()

    @property
    def names(self) -> list[str]:
        return sorted(self._secrets)

    def keys(self, name: str) -> list[bytes]:
        """The keys that sign for `name` now, the current one first; none where the name is not known."""
        try:
            self._refresh()
        except ConfigError as error:
            _log.warning("webhook secrets cannot be read, the old ones stay", reason=str(error))
        now = self._clock()
        return [key for key, until in self._secrets.get(name, ()) if until is None or until > now]

    def rotate(self, name: str, overlap_s: float = OVERLAP_S) -> str:
        """Make a new current secret and return it; older ones sign for `overlap_s` more. Makes name and file."""
        if not is_secret_name(name):
            raise ConfigError("a secret's name may hold letters, digits and . _ - and at most 64 characters")
        secret, now = new_secret(), self._clock()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._locked():
                content = self._read() if self.path.exists() else {}
                old = [
                    {"secret": item["secret"], "until": now + overlap_s if item["until"] is None else item["until"]}
                    for item in content.get(name, [])
                ]
                kept = [item for item in old if item["until"] > now]
                content[name] = [{"secret": secret, "until": None}, *kept]
                self._write(content)
        except OSError as error:
            raise ConfigError(f"webhook_secrets {self.path} cannot be written: {error.strerror}") from error
        self._refresh()
        return secret

    def _refresh(self) -> None:
        try:
            status = self.path.stat()
        except FileNotFoundError:
            self._secrets, self._stamp = {}, None
            return
        except OSError as error:
            raise ConfigError(f"webhook_secrets {self.path} cannot be read: {error.strerror}") from error
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        if stamp == self._stamp:
            return
        self._secrets = {
            name: [(read_secret(item["secret"]), item["until"]) for item in items]
            for name, items in self._read().items()
        }
        self._stamp = stamp
        if status.st_mode & 0o077:
            _log.warning("others may read the webhook secrets: chmod 600", path=str(self.path))

    def _read(self) -> dict[str, list[dict[str, Any]]]:
        try:
            content = json.loads(self.path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"webhook_secrets {self.path} cannot be read: {type(error).__name__}") from None
        problem = _problem(content)
        if problem is not None:
            raise ConfigError(f"webhook_secrets {self.path}: {problem}")
        return {
            name: [{"secret": item["secret"], "until": item.get("until")} for item in items]
            for name, items in content.items()
        }

    def _write(self, content: dict[str, list[dict[str, Any]]]) -> None:
        handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=".secrets-")  # mode 0600
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(content, file, indent=2)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        except BaseException:
            os.unlink(temporary)
            raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with open(self.path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _problem(content: object) -> str | None:
    """What is wrong with the file, without its secrets; None: nothing."""
    if not isinstance(content, dict):
        return "it must hold an object, secrets by name"
    for name, items in content.items():
        if not is_secret_name(name) or not isinstance(items, list):
            return f"{name[:64]!r} must be a name with a list of secrets"
        for item in items:
            until = item.get("until") if isinstance(item, dict) else ""
            if until is not None and (isinstance(until, bool) or not isinstance(until, int | float)):
                return f'each of {name!r} must be {{"secret": "whsec_...", "until": seconds or null}}'
            try:
                read_secret(item.get("secret"))
            except ValueError as error:
                return f"{name!r}: {error}"
    return None
