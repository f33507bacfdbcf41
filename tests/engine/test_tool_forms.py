"""Tool calls in the forms of Qwen3-Coder, Python, DeepSeek, Granite and Phi: every cut of the text gives the same, and
arguments are JSON or the text is told as text."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from pagemill.engine.tool_calls import ToolCallReader
from pagemill.engine.tool_pieces import gathered

TOOLS: dict[str, dict[str, Any]] = {
    "write": {
        "properties": {
            "path": {"type": "string"},
            "count": {"type": "integer"},
            "share": {"type": "number"},
            "force": {"type": "boolean"},
            "lines": {"type": "array"},
            "more": {"anyOf": [{"type": "object"}, {"type": "null"}]},
        }
    },
    "now": {},
}


def xml(name: str, **values: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


COUNT, PATH = '{"count": 1}', '{"path": "é"}'
NOW: tuple[str, Any] = ("now", {})
TAGS = "</tool_call>\n<a></parameter> x </function> x"
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
# Form, text, the text that is left, the calls.
CALLS: list[tuple[Any, str, str, list[tuple[str, Any]]]] = [
    (
        "qwen3_coder",
        xml("write", path="é \"a\" 'b'", count="42"),
        "",
        [("write", {"path": "é \"a\" 'b'", "count": 42})],
    ),
    ("qwen3_coder", f"Look.\n{xml('now')}\n{xml('now')}\n", "Look.", [NOW, NOW]),
    ("qwen3_coder", xml("write", share="1e3", force="True"), "", [("write", {"share": 1000.0, "force": True})]),
    (
        "qwen3_coder",
        xml("write", lines="['a', True]", more="null"),
        "",
        [("write", {"lines": ["a", True], "more": None})],
    ),
    (
        "qwen3_coder",
        xml("write", more='{"x": [1]}', count="many"),
        "",
        [("write", {"more": {"x": [1]}, "count": "many"})],
    ),
    ("qwen3_coder", xml("write", path=TAGS), "", [("write", {"path": TAGS})]),
    ("qwen3_coder", xml("write", path="two\n\nlines\n"), "", [("write", {"path": "two\n\nlines\n"})]),
    ("qwen3_coder", "<function=now>\n</function>", "", [NOW]),
    ("qwen3_coder", "<tool_call><function=now></tool_call>", "", [NOW]),
    (
        "qwen3_coder",
        "<tool_call><function=write><parameter=path>\na\n<parameter=count>\n3\n</parameter></function></tool_call>",
        "",
        [("write", {"path": "a", "count": 3})],
    ),
    (
        "pythonic",
        "[write(path='a \\'b\\' \"c\"', count=-1), now()]",
        "",
        [("write", {"path": "a 'b' \"c\"", "count": -1}), NOW],
    ),
    ("pythonic", "Well:\n[now( )]", "Well:", [NOW]),
    ("pythonic", "<|python_start|>[now()]<|python_end|>", "", [NOW]),
    (
        "pythonic",
        "[write(more={'x': [None, true], 'y': 1.5}, lines=[])]",
        "",
        [("write", {"more": {"x": [None, True], "y": 1.5}, "lines": []})],
    ),
    (
        "pythonic",
        "[write(path='''two\nlines'''), write(path='raw\nbreak ](')]",
        "",
        [("write", {"path": "two\nlines"}), ("write", {"path": "raw\nbreak ]("})],
    ),
    ("pythonic", "[write(path=b'z'), now()]", "write(path=b'z')", [NOW]),
    (
        "deepseek_v3",
        f"Hm.<｜tool▁calls▁begin｜>{V3.format('now', '{}')}\n{V3.format('write', COUNT)}<｜tool▁calls▁end｜>",
        "Hm.",
        [NOW, ("write", {"count": 1})],
    ),
    (
        "deepseek_v31",
        f"<｜tool▁calls▁begin｜>{V31.format('write', PATH)}{V31.format('now', '{}')}<｜tool▁calls▁end｜>",
        "",
        [("write", {"path": "é"}), NOW],
    ),
    ("granite", '<|tool_call|>[{"name": "now", "arguments": {}}]', "", [NOW]),
    (
        "phi4_mini_json",
        'functools[{"name": "now", "arguments": {}}, {"name": "write", "arguments": {"count": 1}}]',
        "",
        [NOW, ("write", {"count": 1})],
    ),
    (
        "hermes",
        '<tool_call>{"name": "write", "arguments": {"path": "a\nb\\d"}}</tool_call>',
        "",
        [("write", {"path": "a\nb\\d"})],
    ),
]
TEXTS: list[tuple[Any, str]] = [
    ("qwen3_coder", "Use <tool_call> and <function=x> tags."),
    ("qwen3_coder", xml("rm", path="/")),
    ("qwen3_coder", xml("write", path="a")[:-40]),
    ("qwen3_coder", "<tool_call>\n<function=now>\nWhat now?"),
    ("qwen3_coder", "a <tool_ca"),
    ("pythonic", "[1, 2] and [now] or (now())"),
    ("pythonic", "See [now()] there"),
    ("pythonic", "[now()](link)"),
    ("pythonic", "[write(path='cut"),
    ("pythonic", "[write(count=1e999)]"),
    ("pythonic", "[rm(path='/')]"),
    ("pythonic", "[write(x=1])]"),
    ("phi4_mini_json", "functools.partial is in functools"),
]


def pieces_of(text: str, seed: int) -> list[str]:
    if seed == 0:
        return list(text)
    source = random.Random(seed)
    cuts = sorted(source.sample(range(1, len(text)), min(len(text) - 1, source.randrange(1, 9))))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def read(parser: Any, parts: list[str]) -> tuple[str, list[tuple[str, Any]]]:
    reader = ToolCallReader(parser, TOOLS)
    text, calls = gathered([piece for part in parts for piece in reader.feed(part)] + reader.finish())
    return text, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize(("parser", "text", "left", "calls"), CALLS)
def test_calls_are_found_however_the_text_is_cut(parser: Any, text: str, left: str, calls: Any) -> None:
    assert read(parser, [text]) == (left, calls)
    for seed in range(40):
        assert read(parser, pieces_of(text, seed)) == (left, calls), pieces_of(text, seed)


@pytest.mark.parametrize(("parser", "text"), TEXTS)
def test_what_only_looks_like_a_call_is_text_to_the_letter(parser: Any, text: str) -> None:
    for seed in range(40):
        assert read(parser, pieces_of(text, seed)) == (text, []), pieces_of(text, seed)


@pytest.mark.parametrize("parser", ["qwen3_coder", "pythonic", "deepseek_v3", "granite", "phi4_mini_json"])
def test_random_soups_never_raise_and_every_cut_gives_the_same(parser: Any) -> None:
    source = random.Random(11)
    whole = [text for name, text, _, _ in CALLS if name == parser]
    bits = [part for text in whole for part in (text, text[: len(text) // 2], text[len(text) // 3 :])]
    bits += ["<tool_call>", "</tool_call>", "<function=write>", "<parameter=path>", "</parameter>", "</function>"]
    bits += ["[", "]", "(", ")", "'", '"', "\\", "now(", "path=", "\n", " ", "{", "}", ",", "x", "é", "'''"]
    for _ in range(300):
        text = "".join(source.choice(bits) for _ in range(source.randrange(1, 9)))
        reader = ToolCallReader(parser, TOOLS)
        expected = gathered([*reader.feed(text), *reader.finish()])
        for seed in (0, 1, 2):
            if len(text) > 1:
                reader = ToolCallReader(parser, TOOLS)
                parts = pieces_of(text, seed)
                again = gathered([piece for part in parts for piece in reader.feed(part)] + reader.finish())
                assert again == expected, parts
        if parser in ("qwen3_coder", "pythonic"):
            for call in expected[1]:
                json.loads(call.arguments)
