"""Tokenizers that are all in tokenizer.json, read without transformers.

transformers takes a second to import, a third of a start, and then does next to nothing for such a tokenizer: it looks
up some names. What it may do beyond that hangs on what lies in the folder, so a folder is read here only where all of
it is known to change nothing; any other goes to transformers (`read_plain` returns None).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

from pagemill.engine.template_renderer import TemplateRenderer

PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Names in tokenizer_config.json that say: tokenizer.json is all there is."""

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Fields of tokenizer_config.json that do not change what a tokenizer.json means: about padding, truncation and Python
# classes, or, like the last three, read for tokenizers without one only.
_HARMLESS = frozenset(
    (
        *("tokenizer_class", "backend", "is_local", "local_files_only", "name_or_path", "model_max_length"),
        *("model_input_names", "padding_side", "truncation_side"),
        *("clean_up_tokenization_spaces", "add_bos_token", "add_eos_token"),
    )
)
_READ_BELOW = frozenset((*_NAMED, "chat_template", "added_tokens_decoder"))
_MORE_TOKENS = ("special_tokens_map.json", "added_tokens.json")
_MORE_TEMPLATES = "additional_chat_templates"
_LARGE = 100_000  # entries from which on transformers looks whether a pre-tokenizer is one known to be wrong


class PlainTokenizer:
    """What the engine uses of a tokenizer of transformers, under the same names."""

    def __init__(
        self, backend: RustTokenizer, special_tokens: Mapping[str, str], chat_template: str | None, path: Path
    ) -> None:
        self.backend_tokenizer = backend
        self.special_tokens_map = dict(special_tokens)
        self.chat_template = chat_template
        self._path = path
        self._renderer: TemplateRenderer | None = None

    @property
    def eos_token_id(self) -> int | None:
        name = self.special_tokens_map.get("eos_token")
        return None if name is None else self.backend_tokenizer.token_to_id(name)

    def get_chat_template(self, chat_template: None, tools: object) -> str:
        """The template for a chat: here there is one for all."""
        if self.chat_template is None:
            raise ValueError("the tokenizer has no chat template")
        return self.chat_template

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tokenize: bool,
        **variables: Any,
    ) -> str:
        """The text of a conversation, which is not tokenised here. Raises whatever the template does."""
        assert not tokenize
        if self._renderer is None:
            self._renderer = TemplateRenderer(self.get_chat_template(None, tools))
        return self._renderer.render(
            messages,
            tools,
            {**self.special_tokens_map, **variables},
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )

    def as_transformers_reads_it(self) -> Any:
        """The same tokenizer as an object of transformers, for whoever asks for one."""
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(str(self._path), local_files_only=True)


def read_plain(path: Path) -> PlainTokenizer | None:
    """The tokenizer of a folder, or None where transformers has to read it, also for what is wrong with it."""
    try:
        config = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict) or config.get("tokenizer_class") not in PLAIN_CLASSES:
        return None
    if not config.keys() <= _HARMLESS | _READ_BELOW or (path / _MORE_TEMPLATES).exists():
        return None
    if "added_tokens_decoder" not in config and any((path / name).exists() for name in _MORE_TOKENS):
        return None
    template: object
    try:
        template = (path / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        template = config.get("chat_template")
    except (OSError, ValueError):
        return None
    special_tokens = {name: _content(config[name]) for name in _NAMED if config.get(name) is not None}
    if not isinstance(template, str | None) or None in special_tokens.values():
        return None
    try:
        backend = RustTokenizer.from_file(str(path / "tokenizer.json"))
    except Exception:  # the Rust library raises no other kind; transformers will say what is wrong
        return None
    if not _is_settled(backend) or not _are_known(config.get("added_tokens_decoder", {}), special_tokens, backend):
        return None
    return PlainTokenizer(backend, special_tokens, template, path)


def _content(token: object) -> Any:
    """The text of a special token, which is written as such or as an object; None where it is neither."""
    if isinstance(token, dict) and token.get("__type") == "AddedToken":
        token = token.get("content")
    return token if isinstance(token, str) else None


def _is_settled(backend: RustTokenizer) -> bool:
    """Whether transformers adds nothing for want of a part, nor takes another one for it."""
    return (
        backend.post_processor is not None
        and backend.padding is None
        and backend.truncation is None
        and not backend.encode_special_tokens
        and backend.get_vocab_size() <= _LARGE
    )


def _are_known(added: object, special_tokens: Mapping[str, str], backend: RustTokenizer) -> bool:
    """Whether all tokens that the configuration names are in tokenizer.json, as it describes them."""
    known = backend.get_added_tokens_decoder()
    if not {token.content for token in known.values()} >= set(special_tokens.values()):
        return False
    try:
        described = {int(token_id): AddedToken(**token) for token_id, token in dict(added).items()}  # type: ignore[call-overload]
    except (TypeError, ValueError):
        return False
    return all(token_id in known and repr(known[token_id]) == repr(token) for token_id, token in described.items())
