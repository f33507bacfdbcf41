"""Text to token ids and back: a thin face over the Rust tokenizer, with transformers' chat templates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from pagemill.engine.chat import Chat
from pagemill.engine.chat_template import ChatTemplate
from pagemill.engine.encoding import encode, encode_inner
from pagemill.engine.errors import ConfigError
from pagemill.engine.plain_tokenizer import PLAIN_CLASSES, PlainTokenizer, read_plain
from pagemill.engine.reasoning import FORMS, ReasoningParserName
from pagemill.engine.token_bytes import TokenBytes
from pagemill.engine.tool_calls import MARKERS, ToolParserName


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
        self.special_token_ids: dict[str, int] = {
            token.content: token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        }
        self._transformers = transformers_tokenizer
        self._template = ChatTemplate(transformers_tokenizer, backend)

    @classmethod
    def from_folder(cls, path: str | PathLike[str]) -> Tokenizer:
        """Read the tokenizer of a model folder. Nothing is downloaded. Raises `ConfigError`."""
        try:
            return cls(read_plain(Path(path)) or _through_transformers(Path(path)))
        except ConfigError:
            raise
        except Exception as error:  # the Rust library raises no other kind, transformers whatever it trips over
            raise ConfigError(f"cannot read a tokenizer from {path}: {error}") from error

    @property
    def transformers_tokenizer(self) -> Any:
        """The tokenizer as transformers makes it, for whoever wants to encode or render on their own."""
        if isinstance(self._transformers, PlainTokenizer):
            self._transformers = self._transformers.as_transformers_reads_it()
        return self._transformers

    @property
    def tool_parser(self) -> ToolParserName | None:
        """How this model writes calls of tools, by its template; None where it is not one of the known ways."""
        return self._template.tool_parser

    @property
    def reasoning_parser(self) -> ReasoningParserName | None:
        """How this model writes its reasoning, by its template; None where it is not one of the known ways."""
        return self._template.reasoning_parser

    def marker_ids(self, tools: ToolParserName | None, reasoning: ReasoningParserName | None) -> frozenset[int]:
        """Special tokens that mark a call of a tool, or reasoning."""
        markers = () if tools is None else MARKERS[tools]
        if reasoning is not None:
            markers += FORMS[reasoning].markers
        return frozenset(self.special_token_ids[name] for name in markers if name in self.special_token_ids)

    @property
    def has_chat_template(self) -> bool:
        return self._template.exists

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with what the model wants in front (a BOS token, say). Raises `invalid_request`."""
        return encode(self.backend, text, "prompt", add_special_tokens=True)

    def spellings(self, text: str, param: str) -> list[list[int]]:
        """How a text may be written in tokens in the middle of others: by itself, after a space, glued to what stands
        before. Raises `invalid_request` about `param`."""
        bare = text.lstrip(" ") or text
        alone, spaced = (encode(self.backend, form, param) for form in (bare, f" {bare}"))
        forms = (alone, spaced, encode_inner(self.backend, bare, param))
        return [list(form) for form in dict.fromkeys(map(tuple, forms))]

    def apply_chat(self, chat: Chat) -> list[int]:
        """Token ids of a conversation, as the model's template writes it. Raises `invalid_request`.

        Control tokens written by a user (`<|im_end|>`) are encoded as ordinary text, so that a message cannot end its
        own turn.
        """
        return self._template.encode(chat)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole list of ids. For text that grows there is `Detokenizer`."""
        text: str = self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text


def _through_transformers(path: Path) -> Any:
    return _loader(path).from_pretrained(str(path), local_files_only=True, trust_remote_code=False)


def _loader(path: Path) -> Any:
    """The class that reads this folder. Where the folder says that tokenizer.json is all there is to it, that is what
    transformers would use too after importing the model's configuration, which takes a second."""
    try:
        config = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    if isinstance(config, dict) and config.get("tokenizer_class") in PLAIN_CLASSES:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer
