"""Tool calls out of an answer's text: every form, every way to cut it, and what only looks like a call."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from pagemill.engine.tool_calls import MARKERS, ToolCallReader, call_id, parser_of
from pagemill.engine.tool_pieces import gathered

TOOLS: dict[str, dict[str, Any]] = {"get_weather": {}, "add": {}}
ULM = '{"town": "Ulm", "note": "a } \\" ] { b", "days": [1, {"x": {}}]}'


def hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


ONE = f'{{"name": "get_weather", "arguments": {ULM}}}'
TWO = '{"name": "add", "arguments": {"a": 1}}'
BOTH = [("get_weather", ULM), ("add", '{"a": 1}')]
# Form, text, the text that is left, the calls.
CALLS: list[tuple[Any, str, str, list[tuple[str, str]]]] = [
    ("hermes", hermes(ONE, TWO), "", BOTH),
    ("hermes", f"Let me look.\n\n{hermes(ONE)}\n", "Let me look.", BOTH[:1]),
    ("hermes", f"<tool_call>[{ONE}, {TWO}]</tool_call>", "", BOTH),
    ("hermes", f"<tool_call>{ONE}", "", BOTH[:1]),
    ("hermes", f"<tool_call>{ONE}</tool_c", "", BOTH[:1]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", BOTH[1:]),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", BOTH[1:]),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
    ("hermes", f"{hermes(ONE)} and {hermes(TWO)} so", "and  so", BOTH),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1', "", [("add", '{"a": 1')]),
    ("llama3_json", f"<|python_tag|>{ONE}; {TWO}", "", BOTH),
    ("llama3_json", ONE.replace("arguments", "parameters"), "", BOTH[:1]),
    ("llama3_json", '\n{"type": "function", "name": "add", "parameters": {"a": 1}}', "", BOTH[1:]),
    ("llama3_json", '{"type": "function", "function": {"name": "add", "parameters": {"a": 1}}}', "", BOTH[1:]),
    ("mistral", f"[TOOL_CALLS] [{ONE}, {TWO}]", "", BOTH),
    ("mistral", f'Well.[TOOL_CALLS][{TWO[:-1]}, "id": "abcdefgh1"}}]', "Well.", BOTH[1:]),
    ("mistral", f'[TOOL_CALLS]get_weather[ARGS]{ULM}[TOOL_CALLS]add[CALL_ID]x1[ARGS]{{"a": 1}}', "", BOTH),
    ("mistral", '[TOOL_CALLS]add{"a": 1}', "", BOTH[1:]),
    ("json", f"[{ONE}, {TWO}]", "", BOTH),
    ("json", '[{"name": "add", "arguments": {"a": 1}', "", BOTH[1:]),
    ("json", '[{"name": "ad', "", []),
]
# What stays text, and as which.
TEXTS: list[tuple[Any, str, str]] = [
    ("hermes", "Use <tool_call> tags.", "Use <tool_call> tags."),
    ("hermes", "<tool_call>{not json}</tool_call>", "<tool_call>{not json}</tool_call>"),
    ("hermes", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', ""),
    ("hermes", "  a < b <tool  ", ""),
    ("hermes", "ends in <tool_cal", ""),
    ("hermes", '{"name": "add", "arguments": {"a": 1}}', ""),
    ("hermes", "<tool_call>\n", ""),
    ("hermes", '<tool_call>\n{"name": "add", "argum', ""),
    ("hermes", "</tool_call> alone", ""),
    ("hermes", '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "add"}</tool_call>', ""),
    ("hermes", '<tool_call>{"arguments": {"a": 1e999}, "name": "add"}</tool_call>', ""),
    ("llama3_json", '{"name": "Bob", "parameters": {}}', ""),
    ("llama3_json", '{"answer": {"name": "add", "parameters": {}}}', ""),
    ("llama3_json", '{"name": "add"}', ""),
    ("llama3_json", 'Call {"name": "add", "parameters": {"a": 1}}', ""),
    ("llama3_json", '<|python_tag|>print("hi")', 'print("hi")'),
    ("mistral", "[TOOL_CALLS] are what?", " are what?"),
    ("mistral", "[TOOL_CALLS]rm[ARGS]{}", "rm{}"),
    ("mistral", "a list [1, 2] and [TOOL", ""),
]


def pieces_of(text: str, seed: int) -> list[str]:
    if seed == 0:
        return list(text)
    source = random.Random(seed)
    cuts = sorted(source.sample(range(1, len(text)), min(len(text) - 1, source.randrange(1, 6))))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def streamed(parser: Any, parts: list[str], **options: Any) -> tuple[str, list[tuple[str, str]]]:
    reader = ToolCallReader(parser, TOOLS, **options)
    text, calls = gathered([piece for part in parts for piece in reader.feed(part)] + reader.finish())
    return text, [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize(("parser", "text", "left", "calls"), CALLS)
def test_calls_are_found_however_the_text_is_cut(parser: Any, text: str, left: str, calls: Any) -> None:
    assert streamed(parser, [text]) == (left, calls)
    for seed in range(40):
        assert streamed(parser, pieces_of(text, seed)) == (left, calls), pieces_of(text, seed)


@pytest.mark.parametrize(("parser", "text", "shown"), TEXTS)
def test_what_only_looks_like_a_call_is_text(parser: Any, text: str, shown: str) -> None:
    """To the letter, but for markers that are special tokens: those are not part of any answer."""
    for seed in range(40):
        assert streamed(parser, pieces_of(text, seed)) == (shown or text, []), pieces_of(text, seed)


def test_only_the_first_call_is_told_where_one_is_allowed() -> None:
    for parser, text in (("hermes", hermes(ONE, TWO)), ("json", f"[{ONE}, {TWO}]")):
        for seed in range(10):
            assert streamed(parser, pieces_of(text, seed), parallel=False) == ("", BOTH[:1])


def test_arguments_are_passed_on_as_they_are_written() -> None:
    """A client sees the name before the arguments are there, and no part of a marker ever."""
    reader = ToolCallReader("hermes", TOOLS)
    told = [reader.feed(character) for character in hermes(ONE)]
    first = next(number for number, pieces in enumerate(told) if pieces)
    begin, opened = told[first]
    assert (begin.name, begin.index, begin.text) == ("get_weather", 0, "") and opened.text == "{"
    assert first == hermes(ONE).index('{"town"'), "as soon as the arguments have begun"
    rest = [piece for pieces in told[first + 1 :] for piece in pieces]
    assert all(len(piece.text) == 1 for piece in rest) and len(rest) == len(ULM) - 1
    assert not reader.finish() and reader.has_calls


def test_ordinary_text_is_not_held_back() -> None:
    reader = ToolCallReader("hermes", TOOLS)
    assert [piece.text for piece in reader.feed("if a <")] == ["if a"]
    assert [piece.text for piece in reader.feed("b: ")] == [" <b:"]
    json_answer = ToolCallReader("llama3_json", TOOLS)
    assert [piece.text for piece in json_answer.feed('{"answer": ')] == ['{"answer":']


@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "mistral", "json"])
def test_no_text_is_lost_or_breaks_it(parser: Any) -> None:
    """Random soups of what forms are made of: any cut gives the same, and without a call the text is whole."""
    source = random.Random(7)
    bits = [*MARKERS[parser], ONE, TWO, "{", "}", "[", "]", '"', "\\", ", ", "; ", " ", "\n", "add", "name", ":", "é"]
    for _ in range(300):
        parts = [source.choice(bits) for _ in range(source.randrange(1, 12))]
        text = "".join(parts)
        whole = streamed(parser, [text])
        letters = [piece for part in parts for piece in ([part] if part in MARKERS[parser] else part)]
        assert streamed(parser, parts) == whole, text
        assert streamed(parser, letters) == whole, text  # a marker is one token where it is a special one
        if not whole[1] and parser == "hermes":
            assert whole[0] == text


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("{% if tools %}<tools>...<tool_call>{{ x }}</tool_call>", "hermes"),
        ("<tool_call>\n<function=name>\n<parameter=x>", "qwen3_coder"),
        ("<|start_header_id|>ipython ... <|python_tag|>", "llama3_json"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>", "deepseek_v3"),
        ("ipython [func_name1(params_name1=params_value1)]", "pythonic"),
        ("functools[{}]", "phi4_mini_json"),
        ("<tool_call>{{ name }}<arg_key>", None),
        ("{{ message.content }}", None),
    ],
)
def test_the_form_is_known_from_the_template(template: str, parser: Any) -> None:
    assert parser_of(template) == parser


def test_ids_are_the_same_whenever_they_are_read() -> None:
    ids = {call_id("hermes", request, choice, index) for request in ("a", "b") for choice in (0, 1) for index in (0, 1)}
    assert len(ids) == 8 and ids == {call_id("hermes", r, c, i) for r in ("a", "b") for c in (0, 1) for i in (0, 1)}
    short = call_id("mistral", "a", 0, 0)
    assert len(short) == 9 and short.isalnum(), "its templates refuse others"
    assert json.dumps(short)
