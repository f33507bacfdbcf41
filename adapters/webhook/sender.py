"""One try: a signed POST within a total time, and what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import aiohttp

import pagemill
from pagemill.adapters.webhook.config import WebhookConfig
from pagemill.adapters.webhook.guard import AllowList, Blocked, Guard, GuardedResolver, Lookup
from pagemill.adapters.webhook.schedule import read_retry_after
from pagemill.adapters.webhook.signing import sign

MAX_ANSWER_BYTES = 16_384
GONE = 410


@dataclass(frozen=True, slots=True)
class Try:
    """How a try ended: with a `status`, or an `error` instead of one. `blocked`: nothing was connected to. `put_off`:
    it was none, since its owner's other look-ups took all the time."""

    status: int | None = None
    error: str = ""
    retry_after_s: float | None = None
    blocked: bool = False
    put_off: bool = False

    @property
    def is_delivered(self) -> bool:
        return self.status is not None and 200 <= self.status < 300

    @property
    def is_overload(self) -> bool:
        """Whether the receiver is to be spared: it did not answer, or said that it cannot take more now."""
        return not (self.blocked or self.put_off) and (self.status is None or self.status == 429 or self.status >= 500)


class Sender:
    """Sends webhooks; use it as an async context manager. `lookup`: see `Guard`."""

    def __init__(self, config: WebhookConfig, *, lookup: Lookup | None = None) -> None:
        self._proxy = config.webhook_proxy
        self._timeout_s = config.webhook_timeout_s
        self._guard = Guard(
            AllowList.parse(config.webhook_allow),
            config.ports,
            lookup=lookup,
            owner_lookups=config.webhook_tenant_lookups,
            has_proxy=self._proxy is not None,
        )
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # A connection that was idle may be dead by the next try, and each one is to be looked at: none is kept.
        connector = aiohttp.TCPConnector(
            resolver=GuardedResolver(self._guard),
            socket_factory=self._guard.socket,
            use_dns_cache=False,
            force_close=True,
            limit=0,
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            trust_env=False,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            headers={"user-agent": f"pagemill/{pagemill.__version__}", "content-type": "application/json"},
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
        self._guard.close()

    async def send(self, url: str, message_id: str, body: bytes, keys: Sequence[bytes], owner: str = "") -> Try:
        """POST `body` to `url`, signed with each of `keys`. `owner`: whose look-ups are counted together. Never raises
        for what the other side does."""
        assert self._session is not None
        headers = sign(keys, message_id, int(time.time()), body)
        try:
            async with asyncio.timeout(self._timeout_s):
                target = self._guard.enter(url, owner)
                async with self._session.post(
                    target, data=body, headers=headers, allow_redirects=False, proxy=self._proxy
                ) as answer:
                    status = answer.status
                    retry_after_s = read_retry_after(answer.headers.get("retry-after"))
                    text = await _beginning(answer)
        except Blocked as error:
            return Try(error=str(error), blocked=True)
        except TimeoutError:
            if self._guard.is_queued():
                return Try(error="too many names are looked up", put_off=True)
            return Try(error=f"no answer within {self._timeout_s:g} s")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if (why := self._guard.why_blocked()) is not None:
                return Try(error=why, blocked=True)
            return Try(error=f"{type(error).__name__}: {error}"[:300])
        if 300 <= status < 400:
            return Try(status, "redirects are not followed")
        error_text = "" if 200 <= status < 300 else text
        return Try(status, error_text, retry_after_s)


async def _beginning(answer: aiohttp.ClientResponse) -> str:
    """The first bytes of an answer, for the record. Its status counts whether the rest comes or not."""
    received = b""
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with asyncio.timeout(1.0):
            while len(received) < MAX_ANSWER_BYTES and (chunk := await answer.content.read(4096)):
                received += chunk
    return received[:200].decode(errors="replace")
