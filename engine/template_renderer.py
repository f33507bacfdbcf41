"""Chat templates as transformers renders them, without transformers, whose import takes longer than loading a model.

A template is a program from a stranger: it runs in Jinja's sandbox, where nothing can be changed, and sees plain JSON
only. Around it stands what transformers promises to templates and their authors: blocks trimmed, JSON with its
characters as they are, `raise_exception`, `strftime_now`, `break` and `continue`, `{% generation %}`; no field that is
null; reasoning under each of its names. The tests compare the two.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

_REASONING = ("reasoning_content", "thinking", "reasoning")
_END_OF_FINAL = "CONTINUE_FINAL_MESSAGE_TAG "  # with a space, which shows whether the template strips


class TemplateRenderer:
    """One template, compiled. `render` may be called from several threads at once. Raises `jinja2.TemplateError`."""

    def __init__(self, source: str) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": _raise,
            "strftime_now": _strftime_now,
            "dict": _Dict(),
            "namespace": _Namespace,
        }
        self._source = source
        self._template = environment.from_string(source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> str:
        """The text of a conversation of plain JSON. `variables`: what else the template may read.

        continue_final_message: up to the end of the last message, to go on in it; ValueError where the template does
        not write that message as it is. Raises whatever the template does.
        """
        chat = [_with_reasoning({name: item for name, item in each.items() if item is not None}) for each in messages]
        final = _mark_end(chat, self._source) if continue_final_message else None
        rendered = self._template.render(
            **{"documents": None, **variables},
            messages=chat,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
        )
        return rendered if final is None else _cut(rendered, final)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Templates read an answer's reasoning under one name, clients send it under another."""
    for name in _REASONING:
        if name in message:
            return {"thinking": message[name], **message, "reasoning_content": message[name]}
    return message


def _mark_end(chat: list[dict[str, Any]], source: str) -> str:
    """Mark where the last message's text ends; returns that text."""
    content = chat[-1].get("content")
    if content is None:
        raise ValueError("continue_final_message is set, and the last message has no content")
    if "content" not in source:
        raise ValueError("continue_final_message is set, and the chat template reads no content")
    if isinstance(content, str):
        chat[-1]["content"] = content + _END_OF_FINAL
        return content
    for index in reversed(range(len(content))):
        if "text" in content[index]:
            text: str = content[index]["text"]
            marked = {**content[index], "text": text + _END_OF_FINAL}
            chat[-1]["content"] = [*content[:index], marked, *content[index + 1 :]]
            return text
    raise ValueError("continue_final_message is set, and the last message has no text")


def _cut(rendered: str, final: str) -> str:
    """What was rendered up to the mark. A template that strips its messages took the mark's space too."""
    at = rendered.rfind(_END_OF_FINAL.strip())
    if at < 0 or final.strip() not in rendered:
        raise ValueError(
            "continue_final_message is set, and the chat template does not write the last message as it is"
        )
    before = rendered[:at]
    return before if rendered.startswith(_END_OF_FINAL, at) else before.rstrip()


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: marks for training what an assistant wrote; here it is text like any other."""

    tags = {"generation"}  # noqa: RUF012  as Jinja declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Dict:
    """`dict` for templates: an instance, since a class has attributes that lead out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that Python keeps for itself."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # "self" is a name that templates may use
        self, *given = args
        names = dict(*given, **kwargs)
        for name in names:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace takes no name that begins with an underscore, got {name!r}")
