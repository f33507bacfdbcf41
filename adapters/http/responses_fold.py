"""A response as an object and as a stream of OpenAI's events, both made of what the queue knows.

The events of a response are a fold of the request's own events from the first one on: the same input gives the same
output with the same numbers. So nothing is stored for a stream, and any gateway goes on where another has stopped, by
folding again and leaving out what the client has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagemill.adapters.http.conversations import TURNS
from pagemill.adapters.http.responses_items import OutputItems, output_of, tool_choice_of
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
        **{name: item for name, item in note.items() if name != TURNS},
        **changes,
    }


def response_of_record(record: Record, note: Mapping[str, Any]) -> dict[str, Any]:
    """A response as its record tells it. Output is there once it has ended."""
    if not record.has_ended:
        return response_object(record.request_id, note, status="queued" if record.state == "queued" else "in_progress")
    choice = next(iter(record.result or ()), None)
    end = {"state": record.state, "usage": record.usage, "error": record.error}
    return whole_response(record.request_id, note, end, choice)


def whole_response(
    request_id: str, note: Mapping[str, Any], end: Mapping[str, Any], choice: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The response of an ended request. `end` has state, usage and error, `choice` its only choice."""
    output = None if choice is None else output_of(request_id, note, choice)
    return ended_response(request_id, note, end, output, None if choice is None else choice["finish_reason"])


def ended_response(
    request_id: str,
    note: Mapping[str, Any],
    done: Mapping[str, Any],
    output: list[dict[str, Any]] | None,
    finish_reason: str | None,
) -> dict[str, Any]:
    """The final response. `done` has state, usage and error as the event of that name."""
    state, usage, error = done["state"], done.get("usage") or {}, done.get("error") or {}
    changes: dict[str, Any] = {"status": {"completed": "completed", "cancelled": "cancelled"}.get(state, "failed")}
    if state == "completed" and finish_reason == "length":
        changes |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    elif changes["status"] == "failed":
        changes["error"] = {"code": "server_error", "message": error.get("message", f"the request ended as {state}")}
    if output is not None:
        changes["output"] = output
    prompt, completion = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    changes["usage"] = {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": usage.get("cached_tokens", 0), "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": usage.get("reasoning_tokens", 0)},
        "total_tokens": prompt + completion,
    }
    return response_object(request_id, note, **changes)


class ResponseFold:
    """Folds a request's events, from its first on, into a response's events."""

    def __init__(self, request_id: str, note: Mapping[str, Any]) -> None:
        self._id = request_id
        self._note = note
        self._number = 0
        self._has_begun = False
        self._items: OutputItems | None = None
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
            parsers = event.get("reasoning_parser"), event.get("tool_parser")
            self._items = OutputItems(self._id, *parsers, tool_choice_of(self._note))
        if kind == "delta" and self._items is not None:
            found += [self._event(**item) for item in self._items.add(event["text"])]
        elif kind == "choice" and self._items is not None and self._finish_reason is None:
            self._finish_reason = event["finish_reason"]
            found += [self._event(**item) for item in self._items.end(event["finish_reason"])]
        elif kind == "done":
            output = self._items.items if self._items is not None and self._items.items else None
            response = ended_response(self._id, self._note, event, output, self._finish_reason)
            # OpenAI has no event for a cancelled response; the response in it says so.
            ends = {"completed": "completed", "incomplete": "incomplete", "cancelled": "incomplete"}
            found.append(self._event(f"response.{ends.get(response['status'], 'failed')}", response=response))
        return found

    def _event(self, type: str, **fields: Any) -> ResponseEvent:
        self._number += 1
        return {"type": type, "sequence_number": self._number - 1, **fields}
