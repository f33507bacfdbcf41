"""Going on with a reader whose events were rewritten: what it was told against what is true now.

A server that fails over may lose the last events of a request. The engine that ran it sends them again; if that is gone
too, another one goes on from what is left, and generates what was lost a second time. The tokens are normally the same
(noise depends on the position alone), but the events' numbers and cuts are not, and nothing promises the tokens. So a
reader that was told more than there is reads the stream from its start: what agrees is passed over in silence, and
where it does not, a `rewind` says to which token of a choice what was told is taken back. Never silently different.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from pagemill.ingest.events import ChoiceTranscript, Transcript

Event = Mapping[str, Any]


class Replay:
    """Turns the events of a stream, from its first one on, into those that a reader of `told` has yet to see.

    `told` is the reader's transcript; it is kept up to date with what comes out. `truth`: what the stream says so far.
    """

    def __init__(self, told: Transcript) -> None:
        self._told = told
        self.truth = Transcript()

    def feed(self, item: Event) -> list[Event]:
        """What the reader is to be told now that `item` comes next in the stream."""
        self.truth.add(item)
        if item["type"] in ("delta", "rewind"):
            news = self._catch_up(item, item["index"], final=False)
        elif item["type"] == "choice":
            news = [*self._catch_up(item, item["index"], final=True), item]
        else:
            news = [item]
        for event in news:
            self._told.add(event)
        return news

    def _catch_up(self, item: Event, index: int, *, final: bool) -> list[Event]:
        told, truth = self._told.choice(index), self.truth.choice(index)
        same = _agree(told.token_ids, truth.token_ids)
        told_text, true_text = told.text, truth.text
        news: list[Event] = []
        offset, text_offset = len(told.token_ids), told.text_length
        is_ahead = same == offset and true_text.startswith(told_text)
        is_behind = same == len(truth.token_ids) and told_text.startswith(true_text)
        if is_behind and not is_ahead and not final:
            return []
        common = {"seq": item["seq"], "attempt": item["attempt"]}
        if not is_ahead:
            offset, text_offset = _common_cut(told, same, told_text, true_text)
            place = {"index": index, "to_offset": offset, "to_text_offset": text_offset}
            news.append({**common, "type": "rewind", **place})
        token_ids, text = truth.token_ids[offset:], true_text[text_offset:]
        if token_ids or text:
            logprobs = None if truth.logprobs is None else truth.logprobs[offset:]
            news.append(
                {
                    **common,
                    "type": "delta",
                    "index": index,
                    "offset": offset,
                    "count": len(token_ids),
                    "token_ids": token_ids,
                    "text": text,
                    "text_offset": text_offset,
                    "logprobs": logprobs,
                    "chain": truth.chain,
                }
            )
        return news


def _agree(first: list[int], second: list[int]) -> int:
    """Length of the longest common beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _common_cut(told: ChoiceTranscript, same: int, told_text: str, true_text: str) -> tuple[int, int]:
    """The last place between two deltas that were told, up to which tokens and text are still true."""
    for offset, text_offset in reversed(told.cuts):
        if offset <= same and told_text[:text_offset] == true_text[:text_offset]:
            return offset, text_offset
    return 0, 0
