"""What the scripts of `ingest/lua` reply, typed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import orjson
from redis.exceptions import ResponseError

from pagemill.engine.errors import RequestError


@dataclass(frozen=True, slots=True)
class SubmitReply:
    """`request_id` is the id that answers: with "attached" and "conflict" that of the earlier request. `error`: with
    "refused", the error as JSON."""

    status: Literal["ok", "repeated", "attached", "conflict", "duplicate", "refused"]
    request_id: str
    state: str | None = None
    error: bytes | None = None

    @classmethod
    def read(cls, reply: list[bytes]) -> SubmitReply:
        status, request_id = reply[0].decode(), reply[1].decode()
        if status == "refused":
            return cls("refused", request_id, "rejected", reply[2])
        if status not in ("ok", "repeated", "attached", "conflict", "duplicate"):
            raise ResponseError(f"submit was answered {status[:64]!r}")
        return cls(status, request_id, reply[2].decode() if len(reply) > 2 else None)  # type: ignore[arg-type]

    def refusal(self) -> RequestError:
        """The error of a request that was "refused"."""
        return RequestError(**orjson.loads(self.error or b"{}"))


Refusal = Literal["lost", "duplicate", "ended", "suspect", "old suspect", "busy"]


@dataclass(frozen=True, slots=True)
class Offered:
    """The request was offered to engine `to`, which has computed the beginning of its prompt."""

    to: str


@dataclass(frozen=True, slots=True)
class BeginReply:
    """Where a request stands that this engine now owns. Times are ms of the server's clock. `alone`: nothing is to run
    beside it, until it has a token (1) or until its end (2). `told`: see `told.py`."""

    attempt: int
    released: int
    seq: int
    seed: int
    created: int
    deadline: int
    now: int
    cancelled: bool
    alone: int = 0
    told: str = ""

    @classmethod
    def read(cls, reply: list[bytes]) -> BeginReply | Refusal | Offered:
        if reply == [b"suspect", b"1"]:
            return "old suspect"
        if reply[0] == b"offered":
            return Offered(reply[1].decode())
        if reply[0] != b"ok":
            return reply[0].decode()  # type: ignore[return-value]
        attempt, released, seq, seed, created, deadline, now = (int(number) for number in reply[1:8])
        told = reply[10].decode(errors="replace")
        return cls(attempt, released, seq, seed, created, deadline, now, reply[8] == b"1", int(reply[9] or 0), told)


@dataclass(frozen=True, slots=True)
class WriteReply:
    """What `append` and `finish` say. `seq`: events that are there now; with "gap" fewer than the caller believes.

    Nearly always `append` says, for every token, that the events are there and nothing else: see `all_well`.
    """

    status: Literal["ok", "gap", "stale", "gone", "cancelled"]
    seq: int = 0
    cancel: bool = False
    expired: bool = False
    unwatched: bool = False

    @staticmethod
    def all_well(seq: int) -> bytes:
        """What `append` replies where `seq` events are there now and nothing else is to be said."""
        return b"ok %d 0 0 0" % seq

    @classmethod
    def read(cls, reply: bytes) -> WriteReply:
        status, *numbers = reply.decode().split()
        seq, cancel, expired, unwatched = (*(int(number) for number in numbers), 0, 0, 0, 0)[:4]
        return cls(status, seq, bool(cancel), bool(expired), bool(unwatched))  # type: ignore[arg-type]
