"""From a conversation to token ids by the model's own template, in which what a user wrote stays text.

A template writes control tokens (`<|im_end|>`) around what users wrote, and both end in one string. So control tokens
in the users' part are marked before the template runs, and what is marked is encoded as ordinary text afterwards. Two
kinds of tokens are control tokens: special ones, wherever they come from, and in what users and tools wrote also others
that the template itself writes (`<tool_response>`). The model's own voice (system, assistant) may use the latter.

The marks are Unicode noncharacters, which are never part of interchanged text. transformers has the same idea
(`sanitize_control_tokens`), with private-use characters that a user may write, and for chats without prefilled answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from pagemill.engine.chat import Chat, map_strings, strings
from pagemill.engine.encoding import encode, encode_inner
from pagemill.engine.errors import invalid
from pagemill.engine.reasoning import ReasoningParserName, reasoning_parser_of
from pagemill.engine.tool_calls import ToolParserName, parser_of
from pagemill.engine.tool_prompt import knows_tools, with_tools

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_MARKS = str.maketrans("", "", _OPEN + _CLOSE)
_OWN_VOICE = ("system", "developer", "assistant")
_REASON = 300  # characters of what a template says about its refusal


class ChatTemplate:
    """A model's chat template. `encode` may be called from several threads at once.

    `transformers_tokenizer` renders, `backend` (its `tokenizers.Tokenizer`) encodes.
    """

    def __init__(self, transformers_tokenizer: Any, backend: Any) -> None:
        self._renderer = transformers_tokenizer
        self._backend = backend
        self._normalizer = backend.normalizer
        source = _source(transformers_tokenizer.chat_template)
        self._tool_parser = parser_of(source) if knows_tools(source) else "hermes"
        self._reasoning_parser = reasoning_parser_of(source)
        added = backend.get_added_tokens_decoder()
        special = {token.content: token_id for token_id, token in added.items() if token.special}
        written = {
            token.content: token_id
            for token_id, token in added.items()
            if token.content in source and token.content.strip() and not token.content.isalnum()
        }
        control = special | written
        self._special = _any_of(special)
        self._control = _any_of(control)
        self._control_ids = frozenset(control.values())
        self._normalizes = self._normalizer is not None and any(added[i].normalized for i in control.values())
        self._ordinary = written.keys() - special.keys()
        token = self._control.pattern
        # A template may cut a mark off (strip, split, slices) or write it as JSON in ASCII; what is left still counts.
        self._marked = re.compile(
            f"(?:{_OPEN}|\\\\ufdd0)({token})(?:{_CLOSE}|\\\\ufdd1)?|({token})(?:{_CLOSE}|\\\\ufdd1)|[{_OPEN}{_CLOSE}]"
        )

    @cached_property
    def _literal(self) -> Any:
        """Reads control tokens as text. Made for the first chat that holds one: copying a tokenizer takes a tenth of a
        second, which a start need not wait for."""
        return _without(self._backend, self._ordinary)

    @property
    def tool_parser(self) -> ToolParserName | None:
        """How the model writes calls of tools. One whose template knows no tools is told to write them as Hermes does.
        None: in a way that is not known here."""
        return self._tool_parser

    @property
    def reasoning_parser(self) -> ReasoningParserName | None:
        """How the model writes its reasoning; None: in a way that is not known here, or it has none."""
        return self._reasoning_parser

    @property
    def exists(self) -> bool:
        return bool(self._renderer.chat_template)

    def encode(self, chat: Chat) -> list[int]:
        """Token ids of a conversation. Raises `invalid_request` where the template does not take it."""
        if not self.exists:
            raise invalid("this model has no chat template; send prompt instead of messages", "messages")
        source = self._source_for(chat)
        kwargs = chat.chat_template_kwargs or {}
        for name in kwargs:
            if name in self._renderer.special_tokens_map:
                field = f"chat_template_kwargs.{name}"
                raise invalid(f"{field} is one of the model's own tokens, not a variable", field)
        tools = chat.tools if knows_tools(source) else None
        messages: Any = with_tools(chat.messages, None if tools else chat.tools, chat.choice, source)
        if "developer" not in source:
            # OpenAI's newer name. What a template makes of a role that it does not know, no model was trained on.
            messages = [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]
        written: Any = (messages, tools, kwargs)
        if self._normalizes:
            written = map_strings(written, self._normalized)
        messages, tools, kwargs = written
        marked = any(self._control.search(text) for text in strings(written))
        if marked:
            messages = [self._mark_message(message) for message in messages]
            tools, kwargs = map_strings([tools, kwargs], self._mark)
        rendered = self._render(chat, messages, tools, kwargs)
        return self._encode_marked(rendered) if marked else encode(self._backend, rendered, "messages")

    def _source_for(self, chat: Chat) -> str:
        """The template for this chat: some models have another one for chats with tools."""
        try:
            source: str = self._renderer.get_chat_template(None, chat.tools)
        except ValueError as error:
            raise invalid(f"this model has no default chat template: {_short(error)}", "messages") from error
        return source

    def _render(self, chat: Chat, messages: Any, tools: Any, kwargs: Any) -> str:
        try:
            rendered: str = self._renderer.apply_chat_template(
                messages,
                tools=tools,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                tokenize=False,
                **kwargs,
            )
        except Exception as error:
            # A template is a program: it may raise on purpose, and anything at all where it meets what it does not
            # expect. Only these messages are concerned.
            raise invalid(f"the chat template refuses these messages: {_short(error)}", "messages") from error
        return rendered

    def _normalized(self, text: str) -> str:
        """`text`, or what the tokenizer makes of it where only that holds a control token."""
        normalized: str = self._normalizer.normalize_str(text)
        return normalized if self._control.search(normalized) and not self._control.search(text) else text

    def _mark_message(self, message: dict[str, Any]) -> dict[str, Any]:
        own = message["role"] in _OWN_VOICE
        return {
            name: map_strings(item, self._mark_special if own and isinstance(item, str) else self._mark)
            for name, item in message.items()
        }

    def _mark(self, text: str) -> str:
        return self._control.sub(f"{_OPEN}\\g<0>{_CLOSE}", text.translate(_MARKS))

    def _mark_special(self, text: str) -> str:
        return self._special.sub(f"{_OPEN}\\g<0>{_CLOSE}", text.translate(_MARKS))

    def _encode_marked(self, rendered: str) -> list[int]:
        """Encode what is marked as ordinary text, the rest as the template wrote it. Lone marks only separate."""
        ids: list[int] = []
        at = 0
        for match in self._marked.finditer(rendered):
            ids += self._encode_piece(self._backend, rendered[at : match.start()], is_first=not ids)
            ids += self._encode_literal(match[1] or match[2] or "", is_first=not ids)
            at = match.end()
        return ids + self._encode_piece(self._backend, rendered[at:], is_first=not ids)

    def _encode_literal(self, piece: str, *, is_first: bool) -> list[int]:
        """A control token's name as text. Some vocabularies hold the name as a word too: then letter by letter."""
        ids = self._encode_piece(self._literal, piece, is_first=is_first)
        if self._control_ids.isdisjoint(ids):
            return ids
        if len(piece) == 1:
            raise invalid(f"{piece!r} is a control token of this model and cannot be sent as text", "messages")
        head = self._encode_literal(piece[:1], is_first=is_first)
        return head + self._encode_literal(piece[1:], is_first=False)

    def _encode_piece(self, backend: Any, piece: str, *, is_first: bool) -> list[int]:
        if not piece:
            return []
        return (encode if is_first else encode_inner)(backend, piece, "messages")


def _source(template: Any) -> str:
    """All that a template may write. Some models have several, by name."""
    return "\0".join(map(str, template.values())) if isinstance(template, dict) else template or ""


def _any_of(contents: Iterable[str]) -> re.Pattern[str]:
    """Matches the longest of these names. As a tree of their letters, since some models have thousands of them and a
    text may have a bracket at every turn."""
    tree: dict[str, Any] = {}
    for content in contents:
        node = tree
        for letter in content:
            node = node.setdefault(letter, {})
        node[""] = {}
    return re.compile(_branches(tree) if tree else "(?!)")


def _branches(node: dict[str, Any]) -> str:
    longer = [re.escape(letter) + _branches(child) for letter, child in node.items() if letter]
    if not longer:
        return ""
    return f"(?:{'|'.join(longer)})" + ("?" if "" in node else "")


def _without(backend: Any, names: Iterable[str]) -> Any:
    """A copy that reads special tokens, and added tokens of these names, in its input as ordinary text."""
    state = backend.to_str()
    if names:
        parsed = json.loads(state)
        for token in parsed["added_tokens"]:
            token["special"] = token["special"] or token["content"] in names
        state = json.dumps(parsed)
    copy = type(backend).from_str(state)
    copy.encode_special_tokens = True
    return copy


def _short(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if len(text) <= _REASON else f"{text[:_REASON]}..."
