"""Answers in OpenAI's shapes: whole, or as the chunks of a stream that is folded from the queue's events.

A stream's first chunk of a chat choice has the role. `finish_reason` is set once for each choice, to "stop", "length"
or "tool_calls": a choice that was cancelled or failed has no proper end, and the stream then ends with an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagemill.adapters.http.openai_fields import Asked
from pagemill.adapters.http.openai_logprobs import CompletionLogprobs, chat_content, joined
from pagemill.adapters.http.openai_messages import MessageReader
from pagemill.engine.errors import RequestError
from pagemill.engine.reasoning import ReasoningParserName
from pagemill.engine.tool_calls import ToolParserName
from pagemill.ingest.results import Choice, Result
from pagemill.ingest.subscription import Event

Chunk = dict[str, Any]


def usage_of(usages: Sequence[Mapping[str, int]], *, no_tokens: bool = False) -> dict[str, Any]:
    """OpenAI's usage of several requests together."""
    names = ("prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens")
    prompt, completion, cached, reasoning = (sum(usage.get(name, 0) for usage in usages) for name in names)
    completion = 0 if no_tokens else completion
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


class Answer:
    """What chat and completions have in common. One object answers one HTTP request.

    `created_ms`: when the request was accepted, as far as known before it has begun. Indexes of choices count through
    all prompts.
    """

    prefix = ""
    kind = ""
    chunk_kind = ""

    def __init__(self, asked: Asked, request_id: str, created_ms: int) -> None:
        self.asked = asked
        self._request_id = request_id
        self._id = f"{self.prefix}-{request_id}"
        self._created = created_ms // 1000
        self._model = asked.model or ""
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self._usages: dict[int, Mapping[str, int]] = {}

    def whole(self, results: Sequence[Result], model: str | None) -> dict[str, Any]:
        """The answer that is not streamed."""
        choices = [
            self._choice(number, number * self.asked.n + choice.index, choice, result)
            for number, result in enumerate(results)
            for choice in result.choices
        ]
        usage = usage_of([result.usage for result in results], no_tokens=self.asked.no_tokens)
        head = {"id": self._id, "object": self.kind, "created": self._created, "model": self._model or model or ""}
        return {**head, "choices": choices, "usage": usage}

    def chunks(self, number: int, event: Event) -> list[Chunk]:
        """The chunks that an event of request `number` becomes. Raises `RequestError` where it did not complete, or
        where what was sent does not hold any more."""
        kind = event["type"]
        if kind == "started":
            return self._start(number, event)
        if kind == "delta":
            return self._delta(number, number * self.asked.n + event["index"], event)
        if kind == "choice":
            index = number * self.asked.n + event["index"]
            # Told a second time where the stream was read anew after a server's failover.
            if event["finish_reason"] not in ("stop", "length") or index in self._ended:
                return []
            self._ended.add(index)
            return self._end(index, event)
        if kind == "rewind":
            raise RequestError("engine_error", "after an engine failed, the text could not be continued as it was sent")
        if kind == "done":
            if event["state"] != "completed":
                error = event.get("error") or {}
                raise RequestError(
                    error.get("code", "engine_error"),
                    error.get("message", f"the request ended as {event['state']}"),
                    param=error.get("param"),
                    retry_after_ms=error.get("retry_after_ms"),
                )
            self._usages[number] = event["usage"]
        return []

    def last_chunk(self) -> Chunk | None:
        """The chunk after the choices: usage, where it was asked for."""
        if not self.asked.include_usage:
            return None
        usage = usage_of(list(self._usages.values()), no_tokens=self.asked.no_tokens)
        return {**self._head(), "choices": [], "usage": usage}

    def _start(self, number: int, event: Event) -> list[Chunk]:
        if not self._begun:
            self._created = event["created"] // 1000
            self._model = self._model or event["model"]
        if number in self._begun:
            return []  # another engine goes on with it
        self._begun.add(number)
        return self._first(number)

    def _head(self) -> Chunk:
        return {"id": self._id, "object": self.chunk_kind, "created": self._created, "model": self._model}

    def _chunk(self, choice: dict[str, Any]) -> Chunk:
        usage = {"usage": None} if self.asked.include_usage else {}
        return {**self._head(), "choices": [choice], **usage}

    def _extras(self, source: Mapping[str, Any], *, is_end: bool = True) -> dict[str, Any]:
        """What vLLM shows beside OpenAI's fields."""
        extras: dict[str, Any] = {}
        if is_end and source.get("stop_reason") is not None:
            extras["stop_reason"] = source["stop_reason"]
        if self.asked.token_ids and source.get("token_ids") is not None:
            extras["token_ids"] = source["token_ids"]
        if self.asked.prompt_logprobs and source.get("prompt_logprobs") is not None:
            extras["prompt_logprobs"] = source["prompt_logprobs"]
        return extras

    def _first(self, number: int) -> list[Chunk]:
        return []

    def _delta(self, number: int, index: int, event: Event) -> list[Chunk]:
        raise NotImplementedError

    def _end(self, index: int, event: Event) -> list[Chunk]:
        raise NotImplementedError

    def _choice(self, number: int, index: int, choice: Choice, result: Result) -> dict[str, Any]:
        raise NotImplementedError


class ChatAnswer(Answer):
    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, asked: Asked, request_id: str, created_ms: int) -> None:
        super().__init__(asked, request_id, created_ms)
        self._readers: dict[int, MessageReader] = {}

    def _start(self, number: int, event: Event) -> list[Chunk]:
        reasoning, tools = event.get("reasoning_parser"), event.get("tool_parser")
        if not self._readers and (reasoning is not None or (tools is not None and self.asked.tool_choice is not None)):
            self._readers = {index: self._reader(reasoning, tools, index) for index in range(self.asked.n)}
        return super()._start(number, event)

    def _reader(self, reasoning: ReasoningParserName | None, tools: ToolParserName | None, index: int) -> MessageReader:
        return MessageReader(
            reasoning,
            tools,
            self.asked.tool_choice,
            shows_reasoning=self.asked.include_reasoning,
            request_id=self._request_id,
            index=index,
        )

    def _first(self, number: int) -> list[Chunk]:
        choice = self.asked.tool_choice
        first = {"role": "assistant", "content": None if choice is not None and choice.is_forced else ""}
        return [self._chunk(self._part(index, first)) for index in range(self.asked.n)]

    def _part(self, index: int, delta: dict[str, Any], logprobs: Any = None, end: str | None = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": end}

    def _delta(self, number: int, index: int, event: Event) -> list[Chunk]:
        entries = event.get("logprobs") if self.asked.logprobs else None
        extras = self._extras(event, is_end=False)
        reader = self._readers.get(index)
        deltas = [{"content": event["text"]}] if reader is None else reader.feed(event["text"])
        if not (event["text"] and deltas) and not entries and not extras:
            return []
        logprobs = {"content": chat_content(entries), "refusal": None} if entries else None
        first, *others = deltas or [{"content": ""}]
        parts = [{**self._part(index, first, logprobs), **extras}, *(self._part(index, delta) for delta in others)]
        return [self._chunk(part) for part in parts]

    def _end(self, index: int, event: Event) -> list[Chunk]:
        reader, end = self._readers.get(index), event["finish_reason"]
        rest = [] if reader is None else reader.finish()
        if reader is not None and reader.has_calls and end == "stop":
            end = "tool_calls"
        last = {**self._part(index, {}, end=end), **self._extras(event)}
        return [self._chunk(part) for part in (*(self._part(index, delta) for delta in rest), last)]

    def _choice(self, number: int, index: int, choice: Choice, result: Result) -> dict[str, Any]:
        logprobs = {"content": chat_content(choice.logprobs or ()), "refusal": None} if self.asked.logprobs else None
        said = self._reader(choice.reasoning_parser, choice.tool_parser, index).message(choice.text)
        return {
            "index": index,
            "message": {"role": "assistant", "refusal": None, **said},
            "logprobs": logprobs,
            "finish_reason": "tool_calls"
            if "tool_calls" in said and choice.finish_reason == "stop"
            else choice.finish_reason,
            **self._extras(_fields(choice)),
        }


class CompletionAnswer(Answer):
    prefix = "cmpl"
    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, asked: Asked, request_id: str, created_ms: int) -> None:
        super().__init__(asked, request_id, created_ms)
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._held: dict[int, list[tuple[int, Event]]] = {}  # by prompt, until its own log-probabilities are known
        self._echoed: set[int] = set()

    @property
    def _echoes_logprobs(self) -> bool:
        return self.asked.echoed is not None and self.asked.logprobs

    def _part(self, index: int, text: str, logprobs: Any = None, end: str | None = None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": end}

    def _first(self, number: int) -> list[Chunk]:
        if self.asked.echoed is None or self.asked.logprobs:
            return []
        return self._echo(number, None)

    def _echo(self, number: int, entries: Sequence[Any] | None) -> list[Chunk]:
        assert self.asked.echoed is not None
        prompt = self.asked.echoed[number]
        indexes = range(number * self.asked.n, (number + 1) * self.asked.n)
        parts = [None if entries is None else self._shape(index).part(entries, prompt) for index in indexes]
        return [self._chunk(self._part(index, prompt, part)) for index, part in zip(indexes, parts, strict=True)]

    def _shape(self, index: int) -> CompletionLogprobs:
        return self._logprobs.setdefault(index, CompletionLogprobs())

    def _delta(self, number: int, index: int, event: Event) -> list[Chunk]:
        chunks: list[Chunk] = []
        if self._echoes_logprobs and number not in self._echoed:
            if event.get("prompt_logprobs") is None:
                self._held.setdefault(number, []).append((index, event))
                return []
            self._echoed.add(number)
            chunks = self._echo(number, event["prompt_logprobs"])
            for held_index, held in self._held.pop(number, ()):
                chunks += self._text(held_index, held)
        return chunks + self._text(index, event)

    def _text(self, index: int, event: Event) -> list[Chunk]:
        entries = event.get("logprobs") if self.asked.logprobs else None
        extras = self._extras(event, is_end=False)
        if self.asked.no_tokens or not (event["text"] or entries or extras):
            return []
        logprobs = self._shape(index).part(entries) if entries else None
        return [self._chunk({**self._part(index, event["text"], logprobs), **extras})]

    def _end(self, index: int, event: Event) -> list[Chunk]:
        end = "length" if self.asked.no_tokens else event["finish_reason"]
        return [
            self._chunk({**self._part(index, "", end=end), **({} if self.asked.no_tokens else self._extras(event))})
        ]

    def _choice(self, number: int, index: int, choice: Choice, result: Result) -> dict[str, Any]:
        text = "" if self.asked.no_tokens else choice.text
        parts = []
        if self.asked.echoed is not None:
            text = self.asked.echoed[number] + text
            if self.asked.logprobs:
                known = result.choices[0].prompt_logprobs or []
                parts.append(self._shape(index).part(known, self.asked.echoed[number]))
        if self.asked.logprobs and not self.asked.no_tokens:
            parts.append(self._shape(index).part(choice.logprobs or ()))
        return {
            **self._part(index, text, joined(parts) if parts else None),
            "finish_reason": "length" if self.asked.no_tokens else choice.finish_reason,
            **({} if self.asked.no_tokens else self._extras(_fields(choice))),
        }


def _fields(choice: Choice) -> dict[str, Any]:
    return {
        "stop_reason": choice.stop_reason,
        "token_ids": choice.token_ids,
        "prompt_logprobs": choice.prompt_logprobs,
    }
