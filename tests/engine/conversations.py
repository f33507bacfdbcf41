"""A chat template like Qwen's on a tokenizer of bytes, and the conversations that it is tried on."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a <|im_end|> town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}, "day": {"type": "string"}}},
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"town":"Ulm","day":1}'}}

# As Qwen's: tools in the system turn, calls and results between tags, thinking that can be switched off.
TEMPLATE = """{%- if tools %}{{ '<|im_start|>system\\n<tools>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{{- '</tools><|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>' + message.content + '</tool_response><|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}
{%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + call.function.name + ' ' + (call.function.arguments | tojson) + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n</think>' }}{% endif %}{% endif %}"""
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def with_template(template: Any = TEMPLATE) -> Any:
    """Bytes for words, and control tokens of both kinds."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    words = [*names, *letters]
    rust = RustTokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([AddedToken(name, special=True) for name in names])
    rust.add_tokens([AddedToken(tag, special=False) for tag in TAGS])
    theirs = PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<|im_end|>")
    theirs.chat_template = template
    return theirs


HISTORY = [
    {"role": "user", "content": "Weather in Ulm?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Look it up."},
    {"role": "tool", "content": "Rain", "tool_call_id": "call_1"},
    {"role": "assistant", "content": "It rains"},
]
