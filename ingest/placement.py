"""Placement by prefix: an engine that has computed the beginning of a prompt gets the request first.

The idea. Whoever reads an entry asks, in the script that would begin it, whether another living engine has more of its
prompt's beginning. If so that engine is told and has `head_start_ms` to begin the request itself. It declines if it has
much more to do than who asks, and hears nothing while it has no room. Then, or when the time is over, the engine that
was given the entry begins it.

Invariants. An offer changes nobody's ownership: the entry stays with the engine that was given it until either of them
begins it, which is one step on the server. So an engine that is dead, full or slow costs a request its head start and
nothing else, and an engine that dies while it offers leaves its entries to be reaped like all others.

Beginnings have names that need no tokenizer: hashes of the first bytes of the prompt as it was sent. They are hints. An
engine tells of those whose last full block it still has, and a wrong hint costs what a cache miss costs.

Rejected: placing at `submit`, since who has room is known later and raw entries pass it by; leaving an entry to others
by waiting before the read, since a consumer group gives each entry to whoever asks first.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import orjson

from pagemill.engine.request import Request
from pagemill.ingest.entries import Entry, Offer
from pagemill.ingest.schema import RequestBody

LEVELS = (256, 1024, 4096, 16384)  # bytes; a token id counts as four
SLACK = (2, 4, 8, 16)  # requests that an engine may run more than who offers, for a beginning of that length
MAX_HELD = 256  # beginnings that an engine tells of
UNSEEN_S = 60.0  # how long the blocks of a beginning may take to be computed
MAX_OFFERS = 16  # at one time
DECLINED_S = 0.25  # after an engine has declined it is offered nothing
SILENT_S = 3.0  # the same, where it has not even said so

Place = tuple[str, bytes]


@dataclass(frozen=True, slots=True)
class Beginning:
    """One beginning of a prompt. `share`: how much of the prompt it is."""

    name: str
    share: float


def beginnings_of(body: RequestBody) -> list[Beginning]:
    """The beginnings of a prompt, the longest first."""
    if body.prompt_token_ids is not None:
        kind, data = b"i", struct.pack(f"<{len(body.prompt_token_ids)}I", *body.prompt_token_ids)
    elif body.chat is not None:
        # What stands in front in a template stands in front here: tools, then the messages.
        kind, data = b"c", orjson.dumps([body.chat.chat_template_kwargs, body.chat.tools, body.chat.messages])
    else:
        kind, data = b"t", (body.prompt or "").encode(errors="replace")
    head = hashlib.blake2b(kind + body.cache_salt.encode(errors="replace"), digest_size=16).digest()
    return [
        Beginning(f"{level}{hashlib.blake2b(data[:size], key=head, digest_size=8).hexdigest()}", size / len(data))
        for level, size in reversed(list(enumerate(LEVELS)))
        if size <= len(data)
    ]


def is_wanted(offer: Offer, running: int) -> bool:
    """Whether an engine on which `running` requests run should take what it is offered."""
    return running <= offer.running + SLACK[min(offer.level, len(SLACK) - 1)]


@dataclass(slots=True)
class _Held:
    """`block`: name of the last full block of a beginning, once it is known; `seen`: it has been there."""

    since: float
    share: float
    request: Request | None = None
    block: bytes | None = None
    seen: bool = False


class HeldPrefixes:
    """The beginnings that this engine has, or is about to compute. `is_cached(block)`: whether the pool has it."""

    def __init__(
        self, is_cached: Callable[[bytes], bool], block_size: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._is_cached = is_cached
        self._block_size = block_size
        self._clock = clock
        self._held: OrderedDict[str, _Held] = OrderedDict()

    def expect(self, beginnings: Sequence[Beginning]) -> None:
        """A request with these is about to begin here."""
        for beginning in beginnings:
            self._held.setdefault(beginning.name, _Held(self._clock(), beginning.share))
            self._held.move_to_end(beginning.name)
        while len(self._held) > MAX_HELD:
            self._held.popitem(last=False)

    def learn(self, beginnings: Sequence[Beginning], request: Request) -> None:
        """It has become this request of the engine."""
        for beginning in beginnings:
            held = self._held.get(beginning.name)
            if held is not None and not held.seen:
                held.request, held.block, held.since, held.share = request, None, self._clock(), beginning.share

    def names(self) -> list[str]:
        """Those that are there now, or will be."""
        for name in [name for name, held in self._held.items() if not self._is_there(held)]:
            del self._held[name]
        return list(self._held)

    def _is_there(self, held: _Held) -> bool:
        if held.block is None and held.request is not None:
            last = int(len(held.request.prompt_token_ids) * held.share) // self._block_size - 1
            if last < 0:
                return False
            if last < len(held.request.block_hashes):
                held.block, held.request = held.request.block_hashes[last], None
        if held.block is not None and self._is_cached(held.block):
            held.seen = True
            return True
        return not held.seen and self._clock() - held.since < UNSEEN_S


class Offers:
    """What this engine has offered to others and not begun itself yet."""

    def __init__(self, head_start_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._head_start_s = head_start_s
        self._clock = clock
        self._waiting: dict[Place, asyncio.Event] = {}
        self._avoided: dict[str, float] = {}

    @property
    def may_offer(self) -> bool:
        return self._head_start_s > 0 and len(self._waiting) < MAX_OFFERS

    @property
    def avoided(self) -> list[str]:
        """Engines to which nothing is offered now."""
        now = self._clock()
        self._avoided = {engine: until for engine, until in self._avoided.items() if until > now}
        return list(self._avoided)

    async def wait(self, entry: Entry) -> bool:
        """Give another engine its head start. Whether it has declined."""
        declined = self._waiting[entry.stream_key, entry.entry_id] = asyncio.Event()
        try:
            async with asyncio.timeout(self._head_start_s):
                await declined.wait()
        except TimeoutError:
            return False
        finally:
            del self._waiting[entry.stream_key, entry.entry_id]
        return True

    def decline(self, place: Place) -> None:
        """An engine does not want what it was offered."""
        if (declined := self._waiting.get(place)) is not None:
            declined.set()

    def avoid(self, engine: str, *, silent: bool) -> None:
        """An engine has not taken what it was offered. `silent`: it has not declined either."""
        self._avoided[engine] = self._clock() + (SILENT_S if silent else DECLINED_S)
