"""Tokenizers read without transformers against transformers' own reading, and which folders are left to it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from pagemill.engine.chat import Chat
from pagemill.engine.loader import resolve_model
from pagemill.engine.plain_tokenizer import PlainTokenizer, read_plain
from pagemill.engine.tokenizer import Tokenizer

TEMPLATES = {
    "trims": "{{ bos_token }}\n  {% for m in messages %}\n  [{{ m.role }}] {{ m.content | trim }}\n  {% endfor %}\nend",
    "whole": "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}",
    "blocks": "{% for m in messages %}{% for p in m.content %}{{ p.type }}={{ p.text }};{% endfor %}{% endfor %}",
    "json": "{{ messages | tojson }}{{ tools | tojson(indent=2) }}{{ messages[0] | tojson(ensure_ascii=True) }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% set x = 1 %}{% endgeneration %}{{ x }}"
    "{% endfor %}",
    "controls": "{% for m in messages %}{% if loop.index == 3 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "reasons": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }}\n{% endfor %}",
    "null": "{% for m in messages %}{{ 'content' in m }}{{ m.tool_calls is defined }}{{ m.name }}{% endfor %}",
    "namespace": "{% set n = namespace(a=0) %}{% for m in messages %}{% set n.a = n.a + 1 %}{% endfor %}{{ n.a }}"
    "{{ dict(b=2) }}",
    "hidden": "{% set n = namespace() %}{% set n.__class__ = 3 %}{{ n }}",
    "escapes": "{{ messages.__class__.__mro__ }}",
    "changes": "{{ messages.append(1) }}",
    "raises": "{{ raise_exception('only users here') }}",
    "unknown": "{{ nothing }}{{ documents is none }}{{ enable_thinking }}",
    "missing": "{{ nothing.at.all }}",
    "broken": "{% for %}",
    "prompts": "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<go>{% endif %}",
    "silent": "nobody's words",
}
CHATS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [{"role": "user", "content": " <b>Grüße</b> & 'x' \n"}]},
    "turns": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "1 + 1"},
            {"role": "assistant", "content": None, "reasoning_content": "easy", "refusal": None, "tool_calls": []},
            {"role": "assistant", "content": "2  "},
        ],
        "continue_final_message": True,
    },
    "parts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b "}]}],
        "continue_final_message": True,
    },
    "tools": {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "chat_template_kwargs": {"enable_thinking": False},
        "add_generation_prompt": False,
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("plain") / "model"
    shutil.copytree(resolve_model("smollm2-135m").path, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    return copy


@pytest.fixture(scope="module")
def both(folder: Path) -> tuple[PlainTokenizer, Any]:
    plain = read_plain(folder)
    assert plain is not None
    return plain, PreTrainedTokenizerFast.from_pretrained(folder)


def answer(tokenizer: Any, template: str, chat: Chat) -> Any:
    """The text of a chat, or that it is refused."""
    tokenizer.chat_template = template
    try:
        return tokenizer.apply_chat_template(
            chat.messages,
            tools=chat.tools,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            tokenize=False,
            **(chat.chat_template_kwargs or {}),
        )
    except Exception:
        return None


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name: str, chat: str, both: tuple[PlainTokenizer, Any]) -> None:
    plain, theirs = both
    plain = PlainTokenizer(plain.backend_tokenizer, plain.special_tokens_map, None, Path())
    conversation = Chat(**CHATS[chat])
    assert answer(plain, TEMPLATES[name], conversation) == answer(theirs, TEMPLATES[name], conversation)
    if name in ("hidden", "escapes", "changes", "raises", "missing", "broken"):
        assert answer(plain, TEMPLATES[name], conversation) is None


def test_what_the_engine_reads_is_what_transformers_reads(both: tuple[PlainTokenizer, Any], folder: Path) -> None:
    plain, theirs = both
    assert plain.special_tokens_map == theirs.special_tokens_map
    assert plain.eos_token_id == theirs.eos_token_id
    assert plain.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert (folder / "chat_template.jinja").read_text() == Tokenizer.from_folder(
        folder
    ).transformers_tokenizer.chat_template


@pytest.mark.parametrize(
    ("changes", "file", "is_plain"),
    [
        ({}, None, True),
        ({"tokenizer_class": "GPT2Tokenizer"}, None, False),
        ({"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": True}, None, True),
        ({"chat_template": "{{ 1 }}"}, None, True),
        ({"chat_template": [{"name": "default", "template": "{{ 1 }}"}]}, None, False),
        ({"bos_token": {"__type": "AddedToken", "content": "<|im_start|>"}}, None, True),
        ({"bos_token": {"content": "<|im_start|>"}}, None, False),
        ({"bos_token": {"__type": "AddedToken"}}, None, False),
        ({"bos_token": "<unheard-of>"}, None, False),
        ({"bos_token": 3}, None, False),
        ({"image_token": "<|im_start|>"}, None, False),
        ({"extra_special_tokens": ["<x>"]}, None, False),
        ({"split_special_tokens": True}, None, False),
        ({"fix_mistral_regex": True}, None, False),
        ({"added_tokens_decoder": {"2": {"content": "<|im_end|>", "special": True, "normalized": False}}}, None, True),
        ({"added_tokens_decoder": {"2": {"content": "<|im_end|>", "special": False}}}, None, False),
        ({"added_tokens_decoder": {"x": {"content": "<|im_end|>"}}}, None, False),
        ({"added_tokens_decoder": {"2": "<|im_end|>"}}, None, False),
        ({"added_tokens_decoder": 7}, None, False),
        ({}, ("special_tokens_map.json", "{}"), False),
        ({}, ("added_tokens.json", "{}"), False),
        ({}, ("additional_chat_templates", None), False),
        ({}, ("tokenizer.json", "{"), False),
        ({}, ("tokenizer_config.json", "[]"), False),
        ({}, ("chat_template.jinja", b"\xff"), False),
    ],
)
def test_only_what_is_known_to_change_nothing_is_read_here(
    changes: dict[str, Any], file: tuple[str, str | bytes | None] | None, is_plain: bool, folder: Path, tmp_path: Path
) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    copy = tmp_path / "copy"
    shutil.copytree(
        folder, copy, ignore=shutil.ignore_patterns("chat_template.jinja" if "chat_template" in changes else "")
    )
    (copy / "tokenizer_config.json").write_text(json.dumps(config | changes))
    if file is not None and file[1] is None:
        (copy / file[0]).mkdir()
    elif file is not None:
        (copy / file[0]).write_bytes(file[1] if isinstance(file[1], bytes) else str(file[1]).encode())
    plain = read_plain(copy)
    assert (plain is not None) is is_plain
    if plain is not None:
        theirs = PreTrainedTokenizerFast.from_pretrained(copy)
        assert plain.special_tokens_map == theirs.special_tokens_map
        assert plain.chat_template == theirs.chat_template
        assert plain.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()


@pytest.mark.parametrize("part", ["truncation", "post_processor", "large"])
def test_a_tokenizer_that_transformers_would_change_is_left_to_it(part: str, folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    rust = RustTokenizer.from_file(str(folder / "tokenizer.json"))
    if part == "truncation":
        rust.enable_truncation(8)
    elif part == "large":
        rust.add_tokens([f"<extra-{number}>" for number in range(100_001 - rust.get_vocab_size())])
    text = rust.to_str()
    if part == "post_processor":
        text = json.dumps(json.loads(text) | {"post_processor": None})
    (copy / "tokenizer.json").write_text(text)
    assert read_plain(copy) is None


def test_a_final_message_is_gone_on_with(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    chat = Chat([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y "}], continue_final_message=True)
    assert tokenizer.decode(tokenizer.apply_chat(chat), skip_special_tokens=False).endswith("assistant\ny ")


def test_a_chat_needs_no_transformers(folder: Path) -> None:
    program = f"""if True:
        import sys
        from pagemill.engine.chat import Chat
        from pagemill.engine.tokenizer import Tokenizer

        tokenizer = Tokenizer.from_folder({str(folder)!r})
        assert tokenizer.apply_chat(Chat([{{"role": "user", "content": "x"}}]))
        assert "transformers" not in sys.modules and "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240)
