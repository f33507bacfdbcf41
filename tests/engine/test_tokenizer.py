"""The tokenizer against transformers, and a chat that its users cannot break out of."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as RustTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pagemill.engine.chat import Chat
from pagemill.engine.errors import ConfigError, RequestError
from pagemill.engine.llm import LLM
from pagemill.engine.loader import resolve_model
from pagemill.engine.tokenizer import Tokenizer
from tests.chaos.model import make_model
from tests.engine.tiny_models import CONFIGS, save_model

TEXTS = (
    "Hello world",
    "",
    " leading",
    "tabs\tand\r\nlines",
    "客单价 🌶 e\u0301",
    "<|im_start|>user",
    "1234567890 a+b=c",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model("smollm2-135m").path


def test_encode_and_decode_agree_with_transformers(tokenizer: Tokenizer, folder: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == theirs(text).input_ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.eos_token_id == theirs.eos_token_id
    assert tokenizer.vocab_size == len(theirs)


def test_every_way_to_load_gives_the_same_tokenizer(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy", ignore=shutil.ignore_patterns("*.safetensors"))
    config = tmp_path / "copy" / "tokenizer_config.json"
    plain = Tokenizer.from_folder(tmp_path / "copy")
    config.write_text(json.dumps({**json.loads(config.read_text()), "tokenizer_class": "GPT2Tokenizer"}))
    automatic = Tokenizer.from_folder(tmp_path / "copy")
    for text in TEXTS:
        assert plain.encode(text) == automatic.encode(text)
    chat = Chat([{"role": "user", "content": "x"}])
    assert plain.apply_chat(chat) == automatic.apply_chat(chat)


def test_a_lone_surrogate_in_a_prompt_is_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError) as caught:
        tokenizer.encode("half \ud83c pair")
    assert caught.value.param == "prompt"


def test_many_threads_encode_at_once(tokenizer: Tokenizer) -> None:
    chat = Chat([{"role": "user", "content": "thread <|im_end|> " * 50}])
    texts = [f"{number} " * 200 for number in range(40)]
    expected = [tokenizer.encode(text) for text in texts], tokenizer.apply_chat(chat)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            chats = [pool.submit(tokenizer.apply_chat, chat) for _ in range(20)]
            assert list(pool.map(tokenizer.encode, texts)) == expected[0]
            assert all(future.result() == expected[1] for future in chats)


def test_every_token_has_the_bytes_that_decode_gives_it(tokenizer: Tokenizer) -> None:
    for token_id in range(tokenizer.vocab_size):
        alone = tokenizer.decode([token_id], skip_special_tokens=False)
        assert tokenizer.token_bytes[token_id].decode(errors="replace") == alone


def test_a_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read a tokenizer"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", {"version": "9", "added_tokens": [], "model": {"type": "BPE", "vocab": 1}}),
        ("tokenizer.json", {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": -1}}}),
        ("tokenizer_config.json", []),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": 5}),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": 5}),
    ],
)
def test_a_damaged_tokenizer_is_named(name: str, content: object, tmp_path: Path) -> None:
    make_model(tmp_path)
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"cannot read a tokenizer from {tmp_path}: ."):
        Tokenizer.from_folder(tmp_path)


def test_a_decoder_that_is_not_understood_is_named() -> None:
    rust = RustTokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    rust.decoder = decoders.CTC()
    with pytest.raises(ConfigError, match="CTC"):
        Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust))


def test_the_end_of_the_tokenizer_ends_a_text_too(tmp_path: Path) -> None:
    """A model that was taught to chat keeps the end of the model it came from in config.json."""
    folder = save_model(CONFIGS["llama-gqa"](), tmp_path)
    rust = RustTokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    rust.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<|im_end|>").save_pretrained(folder)
    settings: dict[str, Any] = {"threads": 1, "num_blocks_override": 8, "dtype": "float32"}
    assert LLM(str(folder), **settings).info.eos_token_ids == (2,)
    assert LLM(str(folder), skip_tokenizer_init=True, **settings).info.eos_token_ids == ()
