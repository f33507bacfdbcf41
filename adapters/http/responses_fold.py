"""A response as an object and as a stream of OpenAI's events, both made of what the queue knows.

The events of a response are a fold of the request's own events from the first one on: the same input gives the same
output with the same numbers. So nothing is stored for a stream, and any gateway goes on where another has stopped, by
folding again and leaving out what the client has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagemill.ingest.records import Record
from pagemill.ingest.subscription import Event

ResponseEvent = dict[str, Any]
PREFIX = "resp_"


def response_id(request_id: str) -> str:
    return PREFIX + request_id


def request_id_of(name: str) -> str | None:
    return name.removeprefix(PREFIX) if name.startswith(PREFIX) else None


def response_object(request_id: str, note: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """The response of a request. `note`: what was kept of the body, with `model` and `created_at`."""
    return {
        "id": response_id(request_id),
        "object": "response",
        "status": "queued" if note["background"] else "in_progress",
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        **note,
        **changes,
    }


def response_of_record(record: Record, note: Mapping[str, Any]) -> dict[str, Any]:
    """A response as its record tells it. Output is there once it has ended."""
    if not record.has_ended:
        return response_object(record.request_id, note, status="queued" if record.state == "queued" else "in_progress")
    choice = next(iter(record.result or ()), None)
    end = {"state": record.state, "usage": record.usage, "error": record.error}
    finish_reason = None if choice is None else choice["finish_reason"]
    text = None if choice is None else choice["text"]
    return ended_response(record.request_id, note, end, text, finish_reason)


def ended_response(
    request_id: str, note: Mapping[str, Any], done: Mapping[str, Any], text: str | None, finish_reason: str | None
) -> dict[str, Any]:
    """The final response. `done` has state, usage and error as the event of that name."""
    state, usage, error = done["state"], done.get("usage") or {}, done.get("error") or {}
    changes: dict[str, Any] = {"status": {"completed": "completed", "cancelled": "cancelled"}.get(state, "failed")}
    if state == "completed" and finish_reason == "length":
        changes |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    elif changes["status"] == "failed":
        changes["error"] = {"code": "server_error", "message": error.get("message", f"the request ended as {state}")}
    if text is not None:
        is_whole = changes["status"] == "completed"
        changes["output"] = [_item(request_id, text, "completed" if is_whole else "incomplete")]
    prompt, completion = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    changes["usage"] = {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": usage.get("cached_tokens", 0), "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }
    return response_object(request_id, note, **changes)


def _item(request_id: str, text: str | None, status: str) -> dict[str, Any]:
    content = [] if text is None else [_part(text)]
    return {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "status": status, "content": content}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class ResponseFold:
    """Folds a request's events, from its first on, into a response's events."""

    def __init__(self, request_id: str, note: Mapping[str, Any]) -> None:
        self._id = request_id
        self._note = note
        self._number = 0
        self._has_begun = False
        self._has_item = False
        self._text: list[str] = []
        self._finish_reason: str | None = None

    def accepted(self) -> list[ResponseEvent]:
        """The events that are there before the request has begun."""
        response = response_object(self._id, self._note)
        events = [self._event("response.created", response=response)]
        if self._note["background"]:
            events.append(self._event("response.queued", response=response))
        return events

    def add(self, event: Event) -> list[ResponseEvent]:
        """The events that the next event of the request becomes."""
        kind = event["type"]
        found: list[ResponseEvent] = []
        if kind in ("started", "delta", "choice") and not self._has_begun:
            self._has_begun = True
            response = response_object(self._id, self._note, status="in_progress")
            found.append(self._event("response.in_progress", response=response))
        if kind in ("delta", "choice") and not self._has_item:
            self._has_item = True
            item = _item(self._id, None, "in_progress")
            found.append(self._event("response.output_item.added", output_index=0, item=item))
            found.append(self._in_part("response.content_part.added", part=_part("")))
        if kind == "delta" and event["text"]:
            self._text.append(event["text"])
            found.append(self._in_part("response.output_text.delta", delta=event["text"], logprobs=[]))
        elif kind == "choice" and self._finish_reason is None:
            self._finish_reason = event["finish_reason"]
            text, is_whole = "".join(self._text), event["finish_reason"] == "stop"
            found.append(self._in_part("response.output_text.done", text=text, logprobs=[]))
            found.append(self._in_part("response.content_part.done", part=_part(text)))
            item = _item(self._id, text, "completed" if is_whole else "incomplete")
            found.append(self._event("response.output_item.done", output_index=0, item=item))
        elif kind == "done":
            text_or_none = "".join(self._text) if self._has_item else None
            response = ended_response(self._id, self._note, event, text_or_none, self._finish_reason)
            # OpenAI has no event for a cancelled response; the response in it says so.
            ends = {"completed": "completed", "incomplete": "incomplete", "cancelled": "incomplete"}
            found.append(self._event(f"response.{ends.get(response['status'], 'failed')}", response=response))
        return found

    def _in_part(self, kind: str, **fields: Any) -> ResponseEvent:
        return self._event(kind, item_id=f"msg_{self._id}", output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}
