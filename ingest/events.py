"""The events of a request: their JSON, and folding them back into what was generated.

Event order within a request: `started` (once for each engine that ran it), `delta`..., `choice` for each choice,
`done`.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

State = Literal["completed", "cancelled", "failed", "expired", "rejected"]
TERMINAL_STATES: frozenset[str] = frozenset(("completed", "cancelled", "failed", "expired", "rejected"))
NO_CHAIN = "00000000"

_pack_one = struct.Struct("<I").pack


def extend_chain(chain: str, token_ids: Sequence[int]) -> str:
    """The running hash of a choice: CRC-32 over its token ids as little-endian 32-bit integers, 8 hex digits."""
    packed = _pack_one(*token_ids) if len(token_ids) == 1 else struct.pack(f"<{len(token_ids)}I", *token_ids)
    return f"{zlib.crc32(packed, int(chain, 16)):08x}"


def event(seq: int, attempt: int, kind: str, **fields: Any) -> bytes:
    """One event as JSON bytes, in the order that the protocol shows."""
    return orjson.dumps({"seq": seq, "attempt": attempt, "type": kind, **fields})


def live_payload(seq: int, data: bytes) -> bytes:
    """What the channel carries for an event."""
    return b"%d %s" % (seq, data)


def read_live_payload(payload: bytes) -> tuple[int, bytes] | None:
    """Sequence number and JSON of a channel message; None for what is no event."""
    digits, space, data = payload.partition(b" ")
    if not space or not digits.isdigit():
        return None
    return int(digits), data


def _json_list(entries: Sequence[bytes]) -> orjson.Fragment:
    return orjson.Fragment(b"[%s]" % b",".join(entries))


@dataclass(slots=True)
class ChoiceTranscript:
    """What one choice has generated so far. `cuts`: tokens and characters after each delta.

    `logprob_entries`: the JSON of one entry for each token, where they were asked for. As objects they would be
    dozens for each token, kept until the request ends, and each full collection of garbage walks over all of them.
    """

    token_ids: list[int] = field(default_factory=list)
    text_parts: list[str] = field(default_factory=list)
    text_length: int = 0
    chain: str = NO_CHAIN
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprob_entries: list[bytes] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    cuts: list[tuple[int, int]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.text_parts)

    @property
    def logprobs(self) -> list[dict[str, Any]] | None:
        """One entry for each token, where they were asked for; made anew at each call."""
        return None if self.logprob_entries is None else [orjson.loads(entry) for entry in self.logprob_entries]

    def extend(self, token_ids: Sequence[int], text: str, logprobs: Sequence[dict[str, Any]] | None = None) -> None:
        self.token_ids.extend(token_ids)
        if token_ids:
            self.chain = extend_chain(self.chain, token_ids)
        if text:
            self.text_parts.append(text)
            self.text_length += len(text)
        if logprobs is not None:
            if self.logprob_entries is None:
                self.logprob_entries = []
            self.logprob_entries.extend(map(orjson.dumps, logprobs))
        self.cuts.append((len(self.token_ids), self.text_length))

    def rewind(self, to_offset: int, to_text_offset: int | None = None) -> None:
        """Take back all tokens but the first `to_offset`, and the characters that came with them. Where it is not said
        how many characters stay, those of the deltas up to there do."""
        if to_text_offset is None:
            to_text_offset = max((chars for tokens, chars in self.cuts if tokens <= to_offset), default=0)
        del self.token_ids[to_offset:]
        self.text_parts = [self.text[:to_text_offset]]
        self.text_length = len(self.text_parts[0])
        self.chain = extend_chain(NO_CHAIN, self.token_ids)
        self.cuts = [cut for cut in self.cuts if cut[0] <= to_offset and cut[1] <= to_text_offset]
        if self.logprob_entries is not None:
            del self.logprob_entries[to_offset:]

    def continues(self, item: Mapping[str, Any]) -> bool:
        """Whether a delta goes on where this choice is, and its `chain` says that both have the same tokens."""
        if item["offset"] != len(self.token_ids):
            return False
        return item.get("chain") in (None, extend_chain(self.chain, item["token_ids"]))


@dataclass(slots=True)
class Transcript:
    """All that the events of a request say so far: the fold that client and resuming engine share."""

    seq: int = 0
    tool_parser: str | None = None  # how calls of tools stand in the texts, where the request has tools
    reasoning_parser: str | None = None  # how reasoning stands in front of the answers, where there may be some
    choices: dict[int, ChoiceTranscript] = field(default_factory=dict)
    done: Mapping[str, Any] | None = None

    @property
    def parsers(self) -> dict[str, str]:
        """How the texts are read, as far as there is something to read."""
        names = {"tool_parser": self.tool_parser, "reasoning_parser": self.reasoning_parser}
        return {field: name for field, name in names.items() if name is not None}

    def choice(self, index: int) -> ChoiceTranscript:
        found = self.choices.get(index)
        if found is None:
            found = self.choices[index] = ChoiceTranscript()
        return found

    def add(self, item: Mapping[str, Any]) -> None:
        """Take the next event in. Kinds that this version does not know change nothing."""
        self.seq = item["seq"]
        kind = item["type"]
        if kind == "started":
            self.tool_parser, self.reasoning_parser = item.get("tool_parser"), item.get("reasoning_parser")
        elif kind == "delta":
            choice = self.choice(item["index"])
            choice.extend(item["token_ids"], item["text"], item.get("logprobs"))
            choice.prompt_logprobs = item.get("prompt_logprobs", choice.prompt_logprobs)
        elif kind == "rewind":
            self.choice(item["index"]).rewind(item["to_offset"], item.get("to_text_offset"))
        elif kind == "choice":
            choice = self.choice(item["index"])
            choice.finish_reason = item["finish_reason"]
            choice.stop_reason = item["stop_reason"]
        elif kind == "done":
            self.done = item

    def take_if_next(self, data: bytes) -> bool:
        """Take a stored event in, if it is the one that follows and goes on where those before it end."""
        try:
            item = orjson.loads(data)
            if item["seq"] != self.seq + 1:
                return False
            if item["type"] == "delta" and not self.choice(item["index"]).continues(item):
                return False
            self.add(item)
        except (orjson.JSONDecodeError, LookupError, TypeError, ValueError, struct.error):
            return False
        return True

    @classmethod
    def of(cls, items: Iterable[Mapping[str, Any]]) -> Transcript:
        transcript = cls()
        for item in items:
            transcript.add(item)
        return transcript

    def result(self) -> list[dict[str, Any]]:
        """The choices, in order of their index."""
        return [
            {**told, "logprobs": self.choices[told["index"]].logprobs} if "logprobs" in told else told
            for told in self._result()
        ]

    def result_json(self) -> bytes:
        """The choices as the record keeps them."""
        return orjson.dumps(self._result())

    def _result(self) -> list[dict[str, Any]]:
        return [
            {
                "index": index,
                "text": choice.text,
                "token_ids": choice.token_ids,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                **({} if choice.logprob_entries is None else {"logprobs": _json_list(choice.logprob_entries)}),
                **self.parsers,
                **({} if choice.prompt_logprobs is None else {"prompt_logprobs": choice.prompt_logprobs}),
            }
            for index, choice in sorted(self.choices.items())
        ]
