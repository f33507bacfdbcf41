"""Items of earlier answers that a client names instead of sending them back (`item_reference`).

Clients that trust a server to store responses do so by default (Vercel's AI SDK). An item's id has the request's in it,
so it is found without a directory of items.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

from pagemill.engine.errors import invalid

MAX_REFERENCES = 256
_ID = re.compile(r"(?:msg|fc|rs)_(?P<request>.+)")
_NUMBERED = re.compile(r"_\d+\Z")

Output = list[dict[str, Any]]


async def with_references(value: Any, output_of: Callable[[str], Awaitable[Output]]) -> Any:
    """`input` with the items that it names in their places. `output_of`: the items of a request, none where it is not
    there. Raises `RequestError` naming the item that is not."""
    if not isinstance(value, list):
        return value
    places = [number for number, item in enumerate(value) if _is_reference(item)]
    if len(places) > MAX_REFERENCES:
        raise invalid(f"input may name at most {MAX_REFERENCES} items, got {len(places)}", "input")
    outputs: dict[str, Output] = {}
    items = list(value)
    for number in places:
        items[number] = await _item(f"input[{number}].id", value[number].get("id"), output_of, outputs)
    return items


def _is_reference(item: Any) -> bool:
    """OpenAI lets the type be left out, where nothing else is there."""
    if not isinstance(item, dict):
        return False
    return item.get("type") == "item_reference" or (item.get("type") is None and set(item) - {"type"} == {"id"})


async def _item(
    where: str, name: Any, output_of: Callable[[str], Awaitable[Output]], outputs: dict[str, Output]
) -> dict[str, Any]:
    known = _ID.fullmatch(name) if isinstance(name, str) and len(name) <= 256 else None
    # The first item of its kind has no number behind the request's id, which may itself end like one.
    for request_id in () if known is None else (known["request"], _NUMBERED.sub("", known["request"])):
        if request_id not in outputs:
            outputs[request_id] = await output_of(request_id)
        for item in outputs[request_id]:
            if item["id"] == name:
                return item
    raise invalid(f"{where} names an item that is not stored here", where)
