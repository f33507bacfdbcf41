"""Looking at running requests that have nothing to append: cancels, deadlines, watch leases, and who owns them.

`append` says all that in its reply; this is for requests that make no tokens, or are not told as they come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from redis.exceptions import RedisError

from pagemill.ingest import scripts
from pagemill.ingest.live_request import LiveRequest
from pagemill.ingest.redis import Client, may_pass
from pagemill.ingest.rounds import Rounds


class Patrol:
    """Looks every `poll_s`, in `rounds`, at what `owner` has of `lives()`.

    on_cancel: it is to end, being "cancelled", "expired" or "unwatched". on_loss: another engine has it, or it is gone.
    """

    def __init__(
        self,
        client: Client,
        owner: str,
        poll_s: float,
        rounds: Rounds,
        lives: Callable[[], Iterable[LiveRequest]],
        *,
        on_cancel: Callable[[LiveRequest, str], None],
        on_loss: Callable[[LiveRequest, str], None],
    ) -> None:
        self._client = client
        self._owner = owner
        self._poll_s = poll_s
        self._rounds = rounds
        self._lives = lives
        self._on_cancel = on_cancel
        self._on_loss = on_loss

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self._rounds.wait(self._poll_s)
            now = time.monotonic()
            lives = [live for live in self._lives() if live.ending is None and not live.detached]
            for live in lives:
                if now >= live.expires_at:
                    self._on_cancel(live, "expired")
            quiet = [live for live in lives if live.stopping is None and now - live.flushed_at >= self._poll_s]
            if not quiet:
                continue
            try:
                await self._look_at(quiet)
            except (RedisError, OSError) as error:
                if not may_pass(error):
                    raise

    async def _look_at(self, quiet: list[LiveRequest]) -> None:
        calls = [scripts.stand(live.entry.shard, live.request_id, self._owner, live.begun.attempt) for live in quiet]
        for live, reply in zip(quiet, await scripts.run(self._client, calls), strict=True):
            if isinstance(reply, BaseException):
                continue
            if reply in (b"taken over", b"gone"):
                self._on_loss(live, reply.decode())
            elif reply == b"cancelled":
                self._on_cancel(live, "cancelled")
            elif live.is_abandoned(reply == b"unwatched", time.monotonic()):
                self._on_cancel(live, "unwatched")
