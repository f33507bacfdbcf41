"""The Lua scripts of `ingest/lua`, each as a typed call and a typed reply; `run` and `run_one` send calls."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from pagemill.ingest.config import QueueConfig
from pagemill.ingest.entries import Entry
from pagemill.ingest.keys import GROUP, ShardKeys
from pagemill.ingest.script_calls import Call as Call
from pagemill.ingest.script_calls import run as run
from pagemill.ingest.script_calls import run_one as run_one
from pagemill.ingest.script_calls import script as script
from pagemill.ingest.script_replies import BeginReply as BeginReply
from pagemill.ingest.script_replies import Offered as Offered
from pagemill.ingest.script_replies import SubmitReply as SubmitReply
from pagemill.ingest.script_replies import WriteReply as WriteReply

GRACE_MS = 3_600_000  # how long keys of a live request outlast its deadline
FROM_THE_FIRST = b"-"  # where to begin, as in XPENDING
RELEASE_PAGE = 100  # entries given back in one go


@dataclass(frozen=True, slots=True)
class Keeping:
    """How long answers are kept: the record with its result, and the events."""

    result_ttl_ms: int = 3_600_000
    replay_ttl_ms: int = 600_000

    @classmethod
    def of(cls, config: QueueConfig) -> Keeping:
        return cls(int(config.result_ttl_s * 1000), int(config.replay_ttl_s * 1000))


@dataclass(frozen=True, slots=True)
class Admission:
    """What a queue lets wait. `caps`: requests, prompt tokens, and the same of one tenant; None: no cap.

    `heartbeat_timeout_ms`: age of a heartbeat from which on an engine counts as dead. `needs_engine`: refuse while none
    is alive.
    """

    caps: tuple[int | None, ...] = (None, None, None, None)
    heartbeat_timeout_ms: int = 15_000
    needs_engine: bool = False

    @classmethod
    def of(cls, config: QueueConfig) -> Admission:
        return cls(config.caps, int(config.heartbeat_timeout_s * 1000), config.refuse_without_engine)

    @property
    def cap_args(self) -> tuple[int | str, ...]:
        return tuple(map(_or_empty, self.caps))


def _or_empty(value: int | None) -> int | str:
    return "" if value is None else value


def submit(
    shard: ShardKeys,
    request_id: str,
    body: bytes,
    *,
    priority: int,
    submission: str,
    ttl_ms: int,
    tenant: str,
    as_blob: bool,
    tokens: int = 0,
    watch_ms: int | None = None,
    traceparent: str | None = None,
    idempotency_key: str | None = None,
    idempotency_ttl_ms: int = 86_400_000,
    admission: Admission = Admission(),
    keeping: Keeping = Keeping(),
    callback: bytes = b"",
) -> Call:
    """Accept or refuse a request. `submission` is a fresh random word, the same when the call is repeated; `tokens` is
    about the length of its prompt, `watch_ms` for how long it may go on unwatched (None: for ever); `callback` as
    `Callback.stored` makes it."""
    keys = [shard.streams[priority], shard.record(request_id), shard.blob(request_id), shard.statistics]
    keys += [shard.waiting, shard.load]
    if idempotency_key is not None:
        keys.append(shard.idempotency(tenant, idempotency_key))
    body_hash = hashlib.sha256(body).hexdigest()
    blob = "1" if as_blob else "0"
    args = (request_id, priority, body, body_hash, submission, ttl_ms, GRACE_MS, tenant, blob, traceparent or "")
    place = (idempotency_ttl_ms, shard.base, GROUP, tokens, keeping.result_ttl_ms, keeping.replay_ttl_ms)
    rule = (admission.heartbeat_timeout_ms, "1" if admission.needs_engine else "0", *admission.cap_args)
    return Call("submit", tuple(keys), (*args, *place, *rule, _or_empty(watch_ms), callback))


def accept(
    entry: Entry,
    request_id: str,
    *,
    ttl_ms: int,
    tenant: str,
    tokens: int,
    admission: Admission,
    keeping: Keeping,
    watch_ms: int | None = None,
    error: bytes = b"",
    dead_letter: str = "",
    callback: bytes = b"",
) -> Call:
    """Give a raw entry that was not delivered yet its record, or answer it; `error`: the one to refuse it with.

    Replies b"ok", b"known", b"taken" (it was delivered), b"duplicate", or the state in which it has ended.
    """
    shard = entry.shard
    keys = (entry.stream_key, shard.record(request_id), shard.statistics, shard.waiting, shard.load, shard.dead_letters)
    what = (GROUP, entry.entry_id, request_id, entry.stream, ttl_ms, tenant, tokens, GRACE_MS, shard.base)
    how = (keeping.result_ttl_ms, keeping.replay_ttl_ms, admission.heartbeat_timeout_ms, error, dead_letter)
    return Call("accept", keys, (*what, *how, *admission.cap_args, _or_empty(watch_ms), callback))


def sweep(shard: ShardKeys, owner: str, *, first: int, count: int, keeping: Keeping) -> Call:
    """End waiting requests that are past their deadline or were cancelled by hand. Of those before their deadline,
    `count` are looked at from place `first` on. Replies [next place, [[stream, entry id, fields], ...], server ms]."""
    args = (GROUP, owner, shard.base, first, count, keeping.result_ttl_ms, keeping.replay_ttl_ms)
    return Call("sweep", (shard.waiting,), args)


def begin(
    entry: Entry,
    owner: str,
    request_id: str,
    *,
    ttl_ms: int,
    tenant: str,
    seed: int,
    tokens: int = 0,
    watch_ms: int | None = None,
    max_attempts: int = 3,
    alone: bool = False,
    tenant_cap: int | None = None,
    callback: bytes = b"",
    beginnings: Sequence[str] = (),
    running: int | None = None,
    avoided: Collection[str] = (),
) -> Call:
    """Become the owner of a delivered entry. `ttl_ms`, `tenant`, `tokens`, `watch_ms` and `callback` count for an entry
    without a record. `alone`: nothing will run beside it, so it may be one that has ended an engine. `tenant_cap`:
    requests of one tenant that may run at once. `beginnings`: names of the prompt's, the longest first. `running`:
    requests that run here, where it may be offered to an engine that has one of these and is not `avoided`; None: it
    may not."""
    shard = entry.shard
    return Call(
        "begin",
        (
            shard.record(request_id),
            shard.events(request_id),
            entry.stream_key,
            shard.dead_letters,
            shard.statistics,
            shard.waiting,
            shard.load,
        ),
        (
            *(GROUP, entry.entry_id, owner, request_id, ttl_ms, tenant, entry.stream, seed, GRACE_MS, tokens),
            *(max_attempts, "1" if alone else "0", _or_empty(tenant_cap), _or_empty(watch_ms), callback),
            *(" ".join(beginnings), _or_empty(running if beginnings else None), " ".join(avoided)),
            "" if entry.offer is None else entry.offer.owner,
        ),
    )


def append(
    shard: ShardKeys,
    request_id: str,
    owner: str,
    attempt: int,
    offset: int,
    events: Sequence[bytes],
    *,
    has_tokens: bool = False,
    started_hook: bytes = b"",
    told: str = "",
) -> Call:
    """Publish events number offset + 1, offset + 2 ... of a running request.

    `has_tokens`: something was generated; said until the server knows. `started_hook`: what a webhook that it has
    started says, as JSON. `told`: what its choices have told with these.
    """
    return Call(
        "append",
        (shard.record(request_id),),
        (attempt, offset, "1" if has_tokens else "0", started_hook, told, len(events), *events),
        has_tokens,
        shared=(owner, GRACE_MS, shard.base),
    )


def stand(shard: ShardKeys, request_id: str, owner: str, attempt: int) -> Call:
    """Look at a running request that has nothing to append: "ok", or why it is to run no longer."""
    return Call("stand", (shard.record(request_id),), (attempt,), shared=(owner, shard.base))


def rewind(shard: ShardKeys, request_id: str, owner: str, attempt: int, seq: int) -> Call:
    """Forget the events of a running request beyond number `seq`; replies b"ok" or b"stale"."""
    return Call("rewind", (shard.record(request_id), shard.events(request_id)), (owner, attempt, seq))


def finish(
    entry: Entry,
    request_id: str,
    owner: str,
    attempt: int,
    offset: int,
    events: Sequence[bytes],
    *,
    state: str,
    result: bytes,
    usage: bytes,
    metrics: bytes,
    error: bytes,
    num_tokens: int,
    result_ttl_ms: int,
    replay_ttl_ms: int,
    dead_letter: str = "",
    end_hook: bytes = b"",
    started_hook: bytes = b"",
) -> Call:
    """End a running request in `state`. `dead_letter`: a reason to keep the entry among the dead letters. `end_hook`,
    `started_hook`: what webhooks say, as JSON."""
    shard = entry.shard
    keys = (
        shard.record(request_id),
        shard.events(request_id),
        entry.stream_key,
        shard.dead_letters,
        shard.statistics,
        shard.blob(request_id),
    )
    fence = (GROUP, entry.entry_id, owner, attempt, offset, shard.channel(request_id), state)
    end = (result_ttl_ms, replay_ttl_ms, result, usage, metrics, error, num_tokens, dead_letter)
    return Call("finish", keys, (*fence, *end, end_hook, started_hook, *events))


def cancel(shard: ShardKeys, request_id: str, *, error: bytes, keeping: Keeping = Keeping()) -> Call:
    """Cancel a request; replies b"cancelled", b"requested", b"noted", or b"ended" and its state."""
    keys = (shard.record(request_id), shard.events(request_id), shard.statistics, shard.blob(request_id))
    args = (GROUP, shard.base, request_id, keeping.result_ttl_ms, keeping.replay_ttl_ms, error)
    return Call("cancel", (*keys, shard.waiting, shard.load, *shard.streams), args)


def release(shard: ShardKeys, stream: int, owner: str, first: bytes, *, running: bool) -> Call:
    """Give back what an engine that leaves holds of one stream and has not begun, and with `running` what it has: no
    attempt is burnt. It is brought nothing more. `first`: where to begin, `FROM_THE_FIRST` or the reply to the call
    before, which is b"" at the end."""
    keys = (shard.told(owner), shard.warm(owner), shard.delayed, shard.waiting, shard.load, shard.streams[stream])
    return Call("release", keys, (GROUP, owner, stream, first, RELEASE_PAGE, shard.base, "1" if running else "0"))


def renew(shard: ShardKeys, owner: str, description: bytes, beginnings: Sequence[str] = ()) -> Call:
    """Renew an engine's lease; replies [server ms, that of the heartbeat before or b""]. `beginnings`: names of those
    that it has computed."""
    keys = (shard.heartbeats, shard.engines, shard.warm(owner), shard.told(owner))
    return Call("renew", keys, (owner, description, *beginnings))


def open_streams(shard: ShardKeys, owner: str) -> Call:
    """Make the streams that an engine reads, with their groups."""
    return Call("open", (shard.told(owner), *shard.streams), (GROUP,))


def decline(entry: Entry, owner: str) -> Call:
    """Tell the engine that has offered an entry that `owner` does not want it."""
    assert entry.offer is not None
    return Call("tell", (entry.shard.told(entry.offer.owner),), (entry.stream, entry.entry_id, owner))


def reap(
    shard: ShardKeys,
    owner: str,
    *,
    timeout_ms: int,
    count: int,
    retry_delay_ms: int = 0,
    old_beats_count: bool = True,
) -> Call:
    """Take over entries of engines without a fresh heartbeat (if `owner` has one itself), and delayed ones that are
    due, `count` at most. Replies [[stream, entry id, fields], ...].

    `retry_delay_ms`: how long what may have ended its engine waits for its first retry. `old_beats_count`: whether a
    heartbeat that is old means death, or only one that is away.
    """
    keys = (shard.heartbeats, shard.delayed, *shard.streams)
    how = (retry_delay_ms, "1" if old_beats_count else "0")
    return Call("reap", keys, (GROUP, owner, timeout_ms, count, shard.base, *how))


def orphans(
    shard: ShardKeys,
    owner: str,
    places: Sequence[bytes],
    *,
    timeout_ms: int,
    count: int,
    old_beats_count: bool = True,
) -> Call:
    """Look at `count` entries of each engine that is dead or has left, and of those that were given back, from `places`
    on, one for each stream; at first `FROM_THE_FIRST`. Replies [entries that are `owner`'s now, to be ended, entries
    without a record, which are nobody's, the next places]; entries as in `reap`."""
    keys = (shard.heartbeats, shard.delayed, *shard.streams)
    how = ("1" if old_beats_count else "0", *places)
    return Call("orphans", keys, (GROUP, owner, timeout_ms, count, shard.base, *how))


def oldest(shard: ShardKeys) -> Call:
    """How many ms the oldest entry that nobody was given has waited, for each stream; 0 where nothing waits."""
    return Call("oldest", shard.streams, (GROUP,))


def read_given(shard: ShardKeys, reply: Sequence[Any]) -> list[Entry]:
    """The entries in a reply of `reap`, `orphans` or `sweep`."""
    return [
        Entry(shard, stream, entry_id, dict(zip(flat[::2], flat[1::2], strict=True)))
        for stream, entry_id, flat in reply
    ]


def retire(shard: ShardKeys, owner: str) -> Call:
    """Take a stopping engine off the lists."""
    keys = (shard.heartbeats, shard.engines, shard.warm(owner), shard.told(owner), *shard.streams)
    return Call("retire", keys, (GROUP, owner, shard.base))


def dead_letter(entry: Entry, owner: str, reason: str, message: str) -> Call:
    """Move an entry that cannot be answered to the dead letters. `owner`: whose it is, empty if nobody's yet."""
    shard = entry.shard
    return Call(
        "dead_letter",
        (entry.stream_key, shard.dead_letters, shard.statistics),
        (GROUP, entry.entry_id, owner, reason, message),
    )


def letters(shard: ShardKeys, first: str, last: str, count: int) -> Call:
    """Read dead letters; replies [[letter id, [name, value, ...]], ...]."""
    return Call("letters", (shard.dead_letters,), (first, last, count))
