"""Which tools an answer may call, must call, and how a call is forced.

OpenAI's `tool_choice` and `parallel_tool_calls`. A call that is forced is written under a grammar: a JSON list of
objects with `name` and `arguments`, where the arguments follow the schema of the tool that is named. That is vLLM's
form of "required", and it needs no template that knows tools. An object that lists its properties has no others, unless
its schema says so.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagemill.engine.errors import RequestError, invalid
from pagemill.engine.structured_outputs import StructuredOutputs
from pagemill.engine.values import shown

FIELD = "tool_choice"
WORDS = ("none", "auto", "required")
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What may be done with a request's tools.

    names: the tools that may be called. is_forced: the answer is a call, or several. parallel: whether it may be
    several.
    """

    names: tuple[str, ...]
    is_forced: bool = False
    parallel: bool = True
    schemas: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def parameters(self) -> Mapping[str, Mapping[str, Any]]:
        """The schemas of the arguments, by the tools that may be called."""
        return {name: self.schemas.get(name, {}) for name in self.names}

    @classmethod
    def read(cls, tools: Tools | None, choice: object, parallel: bool) -> ToolChoice | None:
        """What `tool_choice` says about `tools`, which have passed their checks. None: there is nothing to call.

        Raises `RequestError("invalid_request")` naming the field.
        """
        chosen = cls._read(tools, choice, parallel)
        if chosen is None:
            return None
        schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools or ()}
        return dataclasses.replace(chosen, schemas=schemas)

    @classmethod
    def _read(cls, tools: Tools | None, choice: object, parallel: bool) -> ToolChoice | None:
        known = tuple(tool["function"]["name"] for tool in tools or ())
        if choice in (None, "auto", "none"):
            return cls(known, parallel=parallel) if known and choice != "none" else None
        if not known:
            raise invalid(f"{FIELD} needs tools to choose from, got {shown(choice)} and no tools", FIELD)
        if choice == "required":
            return cls(known, is_forced=True, parallel=parallel)
        if not isinstance(choice, Mapping):
            raise invalid(f"{FIELD} must be one of {', '.join(WORDS)}, or an object; got {shown(choice)}", FIELD)
        if choice.get("type") == "function":
            return cls((_name(FIELD, choice, known),), is_forced=True, parallel=False)
        if choice.get("type") == "allowed_tools":
            return _allowed(choice, known, parallel)
        raise invalid(f"{FIELD}.type must be function or allowed_tools, got {shown(choice.get('type'))}", FIELD)

    def structure(self, tools: Tools) -> StructuredOutputs | None:
        """The form of an answer that has to be a call; None where it may be text. Raises `invalid_request`."""
        if not self.is_forced:
            return None
        chosen = [tool["function"] for tool in tools if tool["function"]["name"] in self.names]
        heads = [
            _literal(f'{{"name": {json.dumps(tool["name"], ensure_ascii=False)}, "arguments": ') for tool in chosen
        ]
        calls = " | ".join(f'{head} arguments_{number} "}}"' for number, head in enumerate(heads))
        more = '(", " call)*' if self.parallel else ""
        rules = [f'start: "[" call {more} "]"', f"call: {calls}"]
        rules += [f"arguments_{number}: %json {_schema(tool)}" for number, tool in enumerate(chosen)]
        try:
            # Closed, since models in want of an end make properties up; but the parts of an allOf name each other's.
            closed = not any('"allOf"' in rule for rule in rules)
            return StructuredOutputs(grammar="\n".join(rules), disable_additional_properties=closed, param="tools")
        except RequestError as error:
            raise invalid(f"tools cannot be kept to by {FIELD}: {error.message}", "tools") from error


def _allowed(choice: Mapping[str, Any], known: Sequence[str], parallel: bool) -> ToolChoice:
    """OpenAI's `allowed_tools`: all tools are described, and some of them may be called."""
    field = f"{FIELD}.allowed_tools"
    given: Any = choice.get("allowed_tools", choice)  # the Responses API has it flat
    if not isinstance(given, Mapping) or given.get("mode") not in ("auto", "required"):
        raise invalid(f"{field}.mode must be auto or required", field)
    listed = given.get("tools")
    if not isinstance(listed, list | tuple) or not listed:
        raise invalid(f"{field}.tools must be a list with at least one tool", field)
    names = tuple(dict.fromkeys(_name(f"{field}.tools[{number}]", tool, known) for number, tool in enumerate(listed)))
    return ToolChoice(names, is_forced=given["mode"] == "required", parallel=parallel)


def _name(where: str, value: object, known: Sequence[str]) -> str:
    """The tool that an object of `tool_choice` names, in the shape of either API."""
    name: Any = None
    if isinstance(value, Mapping):
        function = value.get("function", value)
        name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise invalid(f"{where} must name a function", FIELD)
    if name not in known:
        raise invalid(f"{where} names {shown(name)}, which is not among tools", FIELD)
    return name


def _schema(tool: Mapping[str, Any]) -> str:
    """The schema of a tool's arguments, which are an object whatever it says. Without parameters there are none."""
    schema: dict[str, Any] = dict(tool.get("parameters") or {})
    if not schema:
        schema = {"properties": {}, "additionalProperties": False}
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise invalid(f"parameters of the tool {tool['name']} must be those of an object, got {shown(kind)}", "tools")
    if not {"$ref", "anyOf", "allOf", "oneOf"} & schema.keys():
        schema["type"] = "object"
    return json.dumps(schema, ensure_ascii=False)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
