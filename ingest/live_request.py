"""A request that this engine owns: what it has generated, which events say so, and how many of them are out.

Pure state, no I/O: the worker feeds it, the outbox sends what it composes. Events are numbered here and nowhere else;
they are kept until the end, so that a server that lost some in a failover can be given them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from pagemill.engine.errors import RequestError
from pagemill.engine.outputs import FinishReason, RequestMetrics, SequenceOutput
from pagemill.ingest import scripts
from pagemill.ingest.callback import STARTED, Callback, end_event
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.entries import Entry
from pagemill.ingest.events import ChoiceTranscript, State, Transcript, event, extend_chain
from pagemill.ingest.placement import Beginning
from pagemill.ingest.schema import DEFAULT_TENANT, RequestBody
from pagemill.ingest.told import Told, read_told, write_told

UNWATCHED_S = 1.0
MAX_HOOK_TEXT = 65_536  # characters of text that a webhook carries; the result has all

_STATES: dict[FinishReason, State] = {
    "stop": "completed",
    "length": "completed",
    "cancelled": "cancelled",
    "error": "failed",
}


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ends. `dead_letter`: a reason to keep its entry among the dead letters, or empty."""

    state: State
    error: RequestError | None = None
    metrics: RequestMetrics | None = None
    dead_letter: str = ""


@dataclass(slots=True)
class _News:
    """What a choice has generated since its last delta."""

    token_ids: list[int]
    text: str
    logprobs: list[dict[str, Any]] | None


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One owned request. `body` is None where it could not be read; such a request is only refused.

    `callback`: who hears of its end by webhook. `beginnings`: those of its prompt, by which it is placed. `stopping`:
    how it will end once the engine has let it go. `detached`: what the engine still says does not count any more.
    `published`: events that the server has; `has_tokens`: one has been generated, here or before; `has_told_tokens`: it
    knows that. `recalled`: events of earlier engines as they were stored, for a server that loses some of those
    too. `expires_at`, `flushed_at`: seconds of the monotonic clock.
    """

    entry: Entry
    request_id: str
    owner: str
    begun: scripts.BeginReply
    body: RequestBody | None
    model: str
    callback: Callback | None = None
    beginnings: Sequence[Beginning] = ()
    ending: Ending | None = None
    stopping: Ending | None = None
    detached: bool = False
    has_told_tokens: bool = False
    prompt_tokens: int = 0
    expires_at: float = float("inf")
    transcript: Transcript = field(default_factory=Transcript)
    recalled: list[bytes] = field(default_factory=list)

    published: int = field(init=False)
    has_tokens: bool = field(default=False, init=False)
    unwatched_since: float | None = field(default=None, init=False)
    flushed_at: float = field(default=0.0, init=False)
    _events: list[bytes] = field(default_factory=list, init=False)
    _started: bool = field(default=False, init=False)
    _ran: bool = field(default=False, init=False)
    _news: dict[int, _News] = field(default_factory=dict, init=False)
    _prompt_logprobs: list[dict[str, Any] | None] | None = field(default=None, init=False)
    _reasoning_tokens: dict[int, int] = field(default_factory=dict, init=False)
    _untold: dict[int, Told] = field(default_factory=dict, init=False)
    _final_events: int = field(default=0, init=False)
    _started_seq: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.published = self.begun.seq
        self._ran = self.begun.seq > 0

    @property
    def names(self) -> dict[str, str]:
        """What every log line that concerns it has."""
        return {"request_id": self.request_id, "tenant": DEFAULT_TENANT if self.body is None else self.body.tenant}

    @property
    def outcome(self) -> dict[str, Any]:
        """How it ended and what it took, for the log."""
        assert self.ending is not None
        usage, metrics = self._usage(), self._metrics()
        bill = {name: metrics[name] for name in ("ttft_ms", "total_ms", "attempts", "preemptions")}
        return {"state": self.ending.state, **usage, **bill}

    @property
    def choices(self) -> list[ChoiceTranscript]:
        """What was made events of each choice, in order of their index."""
        count = 1 if self.body is None else self.body.params.n
        return [self.transcript.choice(index) for index in range(count)]

    def recall(self, transcript: Transcript, events: list[bytes]) -> None:
        """Go on from these events of earlier engines. If there were more, their readers may have them: what is
        generated anew is only told when it is known to be the same, or with a `rewind`."""
        self.transcript, self.recalled = transcript, events
        self.has_tokens = any(choice.token_ids for choice in self.choices)
        self.begun = replace(self.begun, seq=len(events))
        self.published = len(events)
        for index, told in enumerate(read_told(self.begun.told)[: len(self.choices)]):
            if told.count > len(self.choices[index].token_ids):
                self._untold[index] = told

    @property
    def streams(self) -> bool:
        return self.body is None or self.body.stream

    @property
    def flush_s(self) -> float:
        return 0.0 if self.body is None else self.body.flush_ms / 1000

    def is_abandoned(self, unwatched: bool, now: float) -> bool:
        """Whether nobody watches it any more. Found twice, `UNWATCHED_S` apart: after an outage of the server those who
        watch need a moment to say so again."""
        if not unwatched:
            self.unwatched_since = None
        elif self.unwatched_since is None:
            self.unwatched_since = now
        return self.unwatched_since is not None and now - self.unwatched_since >= UNWATCHED_S

    def take(self, output: SequenceOutput) -> None:
        """Take an increment of the engine in."""
        if output.started:
            self._started = self._ran = True
        if output.token_ids or output.text:
            logprobs = None if output.logprobs is None else [position.to_dict() for position in output.logprobs]
            news = self._news.get(output.index)
            if news is None:
                self._news[output.index] = _News([*output.token_ids], output.text, logprobs)
            else:
                news.token_ids += output.token_ids
                news.text += output.text
                if logprobs is not None:
                    news.logprobs = (news.logprobs or []) + logprobs
            if output.token_ids:
                self.has_tokens = True
        if output.prompt_logprobs is not None:
            told = output.prompt_logprobs
            self._prompt_logprobs = [None if position is None else position.to_dict() for position in told]
        if output.reasoning_tokens:
            self._reasoning_tokens[output.index] = output.reasoning_tokens
        if output.finish_reason is None:
            return
        choice = self.transcript.choice(output.index)
        choice.finish_reason, choice.stop_reason = output.finish_reason, output.stop_reason
        stopped = self.stopping is not None and output.finish_reason in ("cancelled", "error")
        if stopped:
            choice.finish_reason = "cancelled"
        if not output.final:
            return
        if stopped:
            assert self.stopping is not None
            self.ending = Ending(self.stopping.state, self.stopping.error, output.metrics)
        else:
            error = output.error
            if error is None and output.finish_reason == "cancelled":
                error = cancelled_error()
            self.ending = Ending(_STATES[output.finish_reason], error, output.metrics)

    def compose(self) -> None:
        """Make events of what has come in since the last call, the final ones if the request has ended."""
        if self._final_events:
            return
        if self._started:
            self._started = False
            self._add("started", model=self.model, created=self.begun.created, **self.transcript.parsers)
            self._started_seq = self.composed
        if self.streams or self.ending is not None:
            for index in sorted({*self._news, *self._untold}) if self._untold or len(self._news) > 1 else [*self._news]:
                if index not in self._untold or self._is_comparable(index):
                    self._add_delta(index, self._news.pop(index))
        if self.ending is not None:
            self._add_final(self.ending)

    def _is_comparable(self, index: int) -> bool:
        """Whether a choice may tell what it has. A `rewind` goes before it where readers were told something else."""
        told, choice = self._untold[index], self.transcript.choice(index)
        new = self._news[index].token_ids if index in self._news else []
        missing = told.count - len(choice.token_ids)
        if len(new) < missing and self.ending is None and choice.finish_reason is None:
            return False
        del self._untold[index]
        if len(new) < missing or extend_chain(choice.chain, new[:missing]) != told.chain:
            self._add("rewind", index=index, to_offset=len(choice.token_ids), to_text_offset=choice.text_length)
        return index in self._news

    def _add_delta(self, index: int, news: _News) -> None:
        choice = self.transcript.choice(index)
        offset, text_offset = len(choice.token_ids), choice.text_length
        choice.extend(news.token_ids, news.text, news.logprobs)
        delta = {
            "seq": self.composed + 1,
            "attempt": self.begun.attempt,
            "type": "delta",
            "index": index,
            "offset": offset,
            "count": len(news.token_ids),
            "token_ids": news.token_ids,
            "text": news.text,
            "text_offset": text_offset,
            "logprobs": news.logprobs,
            "chain": choice.chain,
        }
        if index == 0 and self._prompt_logprobs is not None:
            choice.prompt_logprobs = delta["prompt_logprobs"] = self._prompt_logprobs
            self._prompt_logprobs = None
        self._events.append(
            orjson.dumps(delta)
        )  # without `event`: for every token, its arguments would cost thrice that

    def turn_cancelled(self) -> None:
        """Replace an unpublished end by "cancelled": a cancel was acknowledged before it could be written."""
        assert self.ending is not None
        del self._events[-self._final_events :]
        self._final_events = 0
        for choice in self.choices:
            choice.finish_reason, choice.stop_reason = "cancelled", None
        self.ending = Ending("cancelled", cancelled_error(), self.ending.metrics)
        self._add_final(self.ending)

    def rewind_published(self, seq: int) -> bool:
        """Believe the server that only `seq` events are there. False where those before are not known here."""
        if seq < self.begun.seq - len(self.recalled):
            return False
        self.published = seq
        self.has_told_tokens = False  # went with the events
        return True

    @property
    def composed(self) -> int:
        """Events so far, told or not."""
        return self.begun.seq + len(self._events)

    def call(self, config: QueueConfig) -> scripts.Call | None:
        """The script call that brings the server up to date; None where it is."""
        events = self._events[max(0, self.published - self.begun.seq) :]
        if self.published < self.begun.seq:
            events = [*self.recalled[self.published - self.begun.seq :], *events]
        if self.ending is None:
            if not events and (self.has_told_tokens or not self.has_tokens):
                return None
            return scripts.append(
                self.entry.shard,
                self.request_id,
                self.owner,
                self.begun.attempt,
                self.published,
                events,
                has_tokens=self.has_tokens and not self.has_told_tokens,
                started_hook=self._started_hook(),
                told=write_told(self.choices, self._untold),
            )
        return scripts.finish(
            self.entry,
            self.request_id,
            self.owner,
            self.begun.attempt,
            self.published,
            events,
            state=self.ending.state,
            result=self.transcript.result_json() if self._ran else b"[]",
            usage=orjson.dumps(self._usage()),
            metrics=orjson.dumps(self._metrics()),
            error=b"" if self.ending.error is None else orjson.dumps(self.ending.error.to_dict()),
            num_tokens=self._num_tokens,
            result_ttl_ms=int(config.result_ttl_s * 1000),
            replay_ttl_ms=int(config.replay_ttl_s * 1000),
            dead_letter=self.ending.dead_letter,
            end_hook=self._end_hook(self.ending),
            started_hook=self._started_hook(),
        )

    def _started_hook(self) -> bytes:
        """What a webhook says with the `started` event; empty where nobody asked for it, or the event is out."""
        if self.callback is None or STARTED not in self.callback.events or self.published >= self._started_seq:
            return b""
        return orjson.dumps({**self._hook_head("running"), "metadata": self._metadata})

    def _end_hook(self, ending: Ending) -> bytes:
        if self.callback is None or end_event(ending.state) not in self.callback.events:
            return b""
        names = ("text", "finish_reason", "stop_reason")
        choices: list[dict[str, Any]] = [
            {"index": index, **{name: getattr(choice, name) for name in names}}
            for index, choice in (sorted(self.transcript.choices.items()) if self._ran else ())
        ]
        head = self._hook_head(ending.state)
        if sum(len(choice["text"]) for choice in choices) > MAX_HOOK_TEXT:
            head["truncated"] = True
            choices = [{**choice, "text": choice["text"][: MAX_HOOK_TEXT // len(choices)]} for choice in choices]
        error = None if ending.error is None else ending.error.to_dict()
        bill = {"usage": self._usage(), "metrics": self._metrics(), "error": error, "metadata": self._metadata}
        return orjson.dumps({**head, "choices": choices, **bill})

    def _hook_head(self, state: str) -> dict[str, Any]:
        return {"id": self.request_id, "state": state, "model": self.model, "created": self.begun.created}

    @property
    def _metadata(self) -> dict[str, str]:
        return {} if self.body is None else self.body.metadata or {}

    def _add(self, kind: str, **fields: Any) -> None:
        self._events.append(event(self.composed + 1, self.begun.attempt, kind, **fields))

    def _add_final(self, ending: Ending) -> None:
        before = len(self._events)
        for index, choice in enumerate(self.choices if self._ran else []):
            if choice.finish_reason is None:
                choice.finish_reason = "error" if ending.state == "failed" else "cancelled"
            self._add("choice", index=index, finish_reason=choice.finish_reason, stop_reason=choice.stop_reason)
        fields: dict[str, Any] = {"state": ending.state, "usage": self._usage(), "metrics": self._metrics()}
        if ending.error is not None:
            fields["error"] = ending.error.to_dict()
        if self.body is not None and self.body.metadata:
            fields["metadata"] = self.body.metadata
        self._add("done", **fields)
        self._final_events = len(self._events) - before

    @property
    def _num_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)

    def _usage(self) -> dict[str, int]:
        metrics = self.ending.metrics if self.ending is not None else None
        usage = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self._num_tokens,
            "cached_tokens": 0 if metrics is None else metrics.cached_tokens,
        }
        if self.transcript.reasoning_parser is not None:
            usage["reasoning_tokens"] = sum(self._reasoning_tokens.values())
        return usage

    def _metrics(self) -> dict[str, Any]:
        """The engine's bill, its times counted from acceptance: the wait in the stream is part of them."""
        metrics = self.ending.metrics if self.ending is not None else None
        bill = (metrics or RequestMetrics()).to_dict()
        waited_ms = self.begun.now - self.begun.created
        for name in ("queue_ms", "ttft_ms", "total_ms"):
            if bill[name] is not None:
                bill[name] = round(bill[name] + waited_ms, 3)
        return {**bill, "attempts": self.begun.attempt}


def cancelled_error() -> RequestError:
    return RequestError("cancelled", "the request was cancelled")


def unwatched_error() -> RequestError:
    return RequestError("cancelled", "nobody watches the request any more")


def expired_error() -> RequestError:
    return RequestError("deadline_exceeded", "the deadline has passed", param="ttl_ms")
