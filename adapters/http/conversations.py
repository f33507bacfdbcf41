"""The conversations of stored responses, in which each turn lies once, however many responses go on from it.

A response's note names the turns of its conversation, oldest first. A turn is what its request added: the output of the
response before it, and its own input. So a long conversation takes as much room as it has text, and not its square, and
a response can be gone on from when those before it were deleted or have expired: whoever goes on from a turn renews it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from pagemill.ingest.shelf import Shelf

TURNS = "turns"  # of a note: the names of a conversation's turns
MARGIN_S = 60.0  # by which turns outlive the notes that name them
_MESSAGES = "messages"

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class History:
    """A conversation to go on from. `turns` are kept and hold the messages `told`; `latest` are not kept yet."""

    turns: Sequence[str] = ()
    told: Messages = field(default_factory=list)
    latest: Messages = field(default_factory=list)

    @property
    def messages(self) -> Messages:
        return [*self.told, *self.latest]


async def recall(shelf: Shelf, turns: Sequence[str]) -> Messages | None:
    """The messages of all turns. None: some are not there any more. Raises redis-py's errors."""
    found = await shelf.read_each([_name(turn) for turn in turns], _MESSAGES)
    if None in found:
        return None
    return [message for kept in found if kept is not None for message in orjson.loads(kept)]


async def keep(shelf: Shelf, history: History, turn: str, messages: Messages, *, ttl_s: float) -> list[str]:
    """Keep a turn with the messages that follow `history`, and with it all turns before. The names of all."""
    await shelf.renew([_name(each) for each in history.turns], ttl_s=ttl_s + MARGIN_S)
    told = orjson.dumps([*history.latest, *messages])
    await shelf.write(_name(turn), {_MESSAGES: told}, ttl_s=ttl_s + MARGIN_S)
    return [*history.turns, turn]


def _name(turn: str) -> str:
    return f"turn:{turn}"
