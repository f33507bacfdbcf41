"""Text to token ids and back: a thin face over the Rust tokenizer, with transformers' chat templates."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from pagemill.engine.errors import ConfigError, invalid
from pagemill.engine.token_bytes import TokenBytes

_PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
_MAX_DEPTH = 32
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")

# Unicode noncharacters: never part of interchanged text, so they can mark what a user wrote in a rendered chat.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"


class Tokenizer:
    """A model's tokenizer. `encode` and `apply_chat` may be called from several threads at once.

    `backend` is the `tokenizers.Tokenizer` that does the work; nothing changes it after the start, since the Rust
    object refuses to be changed while another thread encodes with it.
    """

    def __init__(self, transformers_tokenizer: Any) -> None:
        backend = getattr(transformers_tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(
                f"{type(transformers_tokenizer).__name__} has no fast (tokenizer.json) form; convert it, or set "
                "skip_tokenizer_init and send prompt_token_ids"
            )
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.token_bytes = TokenBytes(backend)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.eos_token_id: int | None = transformers_tokenizer.eos_token_id
        self._templates = transformers_tokenizer
        self._literal = _without_special_tokens(backend)
        contents = sorted((token.content for token in _special_tokens(backend)), key=len, reverse=True)
        control = "|".join(map(re.escape, contents)) or "(?!)"
        self._control = re.compile(control)
        self._marked = re.compile(f"{_OPEN}({control}){_CLOSE}|[{_OPEN}{_CLOSE}]")

    @classmethod
    def from_folder(cls, path: str | PathLike[str]) -> Tokenizer:
        """Read the tokenizer of a model folder. Nothing is downloaded. Raises `ConfigError`."""
        try:
            loaded = _loader(Path(path)).from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ConfigError(f"cannot read a tokenizer from {path}: {error}") from error
        return cls(loaded)

    @property
    def transformers_tokenizer(self) -> Any:
        """The tokenizer as transformers made it, for whoever wants to encode or render on their own."""
        return self._templates

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates.chat_template)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with what the model wants in front (a BOS token, say). Raises `invalid_request`."""
        return self._encode(self.backend, text, "prompt", add_special_tokens=True)

    def spellings(self, text: str, param: str) -> list[list[int]]:
        """How a text may be written in tokens in the middle of others: by itself, after a space, glued to what stands
        before. Raises `invalid_request` about `param`."""
        bare = text.lstrip(" ") or text
        alone, spaced = (
            self._encode(self.backend, form, param, add_special_tokens=False) for form in (bare, f" {bare}")
        )
        forms = (alone, spaced, self._encode_inner(self.backend, bare))
        return [list(form) for form in dict.fromkeys(map(tuple, forms))]

    def apply_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer. Raises `invalid_request`.

        Each message has `role` and `content` (text, or a list of `{"type": "text", "text": ...}`); other fields reach
        the template as they are. Control tokens written by a user (`<|im_end|>`) are encoded as ordinary text, so that
        a message cannot end its own turn.
        """
        if not self.has_chat_template:
            raise invalid("this model has no chat template; send prompt instead of messages", "messages")
        conversation = _check_messages(messages)
        if any(self._control.search(text) for text in _strings(conversation)):
            return self._encode_marked(self._render(_map_strings(conversation, self._mark)))
        return self._encode_chat(self.backend, self._render(conversation))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole list of ids. For text that grows there is `Detokenizer`."""
        text: str = self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def _encode(self, backend: Any, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        try:
            ids: list[int] = backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError) as error:  # a lone surrogate, which has no UTF-8
            raise invalid(f"{param} is not valid Unicode text", param) from error
        return ids

    def _render(self, conversation: list[dict[str, Any]]) -> str:
        from jinja2 import TemplateError

        try:
            rendered: str = self._templates.apply_chat_template(
                conversation, add_generation_prompt=True, tokenize=False
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise invalid(f"the chat template refuses these messages: {error}", "messages") from error
        return rendered

    def _mark(self, text: str) -> str:
        text = text.replace(_OPEN, "").replace(_CLOSE, "")
        return self._control.sub(lambda match: f"{_OPEN}{match[0]}{_CLOSE}", text)

    def _encode_marked(self, rendered: str) -> list[int]:
        """Encode what is marked as ordinary text, the rest as the template wrote it. Lone marks only separate."""
        ids: list[int] = []
        for index, piece in enumerate(self._marked.split(rendered)):
            if piece:
                backend = self._literal if index % 2 else self.backend
                ids += self._encode_inner(backend, piece) if ids else self._encode_chat(backend, piece)
        return ids

    def _encode_inner(self, backend: Any, piece: str) -> list[int]:
        """Encode a piece from the middle of a text, without the space that SentencePiece puts in front of a text."""
        lead = self._encode_chat(backend, "\n")
        ids = self._encode_chat(backend, "\n" + piece)
        return ids[len(lead) :] if ids[: len(lead)] == lead else self._encode_chat(backend, piece)

    def _encode_chat(self, backend: Any, text: str) -> list[int]:
        return self._encode(backend, text, "messages", add_special_tokens=False)


def _loader(path: Path) -> Any:
    """The class that reads this folder. Where the folder says that tokenizer.json is all there is to it, that is what
    transformers would use too after importing the model's configuration, which takes a second."""
    try:
        config = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    if isinstance(config, dict) and config.get("tokenizer_class") in _PLAIN_CLASSES:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _special_tokens(backend: Any) -> list[Any]:
    return [token for token in backend.get_added_tokens_decoder().values() if token.special]


def _without_special_tokens(backend: Any) -> Any:
    """A copy that reads special tokens in its input as ordinary text."""
    copy = type(backend).from_str(backend.to_str())
    copy.encode_special_tokens = True
    return copy


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise invalid("messages must be a list with at least one message", "messages")
    conversation = []
    for position, message in enumerate(messages):
        where = f"messages[{position}]"
        if not isinstance(message, Mapping):
            raise invalid(f"{where} must be an object with role and content", "messages")
        role = message.get("role")
        if not isinstance(role, str) or not _ROLE.fullmatch(role):
            raise invalid(f"{where}.role must be a name such as system, user or assistant", "messages")
        _check_depth(message)
        conversation.append({**message, "content": _content(message.get("content"), where)})
    return conversation


def _content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        texts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
        strings = [text for text in texts if isinstance(text, str)]
        if len(strings) == len(content):
            return "".join(strings)
    raise invalid(f"{where}.content must be text or a list of text parts", "messages")


def _check_depth(value: object, depth: int = 0) -> None:
    """What walks over messages goes down by recursion, here and in the template."""
    if depth > _MAX_DEPTH:
        raise invalid(f"messages are nested deeper than {_MAX_DEPTH} levels", "messages")
    if isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            _check_depth(item, depth + 1)


def _strings(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for item in value.values() for text in _strings(item)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in _strings(item)]
    return []


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, change) for item in value]
    return value
