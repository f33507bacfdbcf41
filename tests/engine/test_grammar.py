"""Structured output: what each form lets be written, and what is refused."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from pagemill.engine.errors import RequestError
from pagemill.engine.grammar import GrammarCompiler
from pagemill.engine.structured_outputs import StructuredOutputs
from pagemill.engine.tokenizer import Tokenizer
from tests.engine.grammars import accepts
from tests.engine.invented_schemas import Writer

# Forms


@pytest.mark.parametrize(
    "pattern",
    [
        "[a-c]{2,5}",
        "(foo|bar|ba)+",
        "-?[0-9]{1,3}(\\.[0-9]+)?",
        "é日?/\\n",
        "(?i)yes|no",
        "^abc$",
        "a.c",
        "[^a]{3}",
        "x|",
    ],
)
def test_what_a_regex_writes_matches_it_as_a_whole(compiler: GrammarCompiler, writer: Writer, pattern: str) -> None:
    grammar = compiler.compile(StructuredOutputs(regex=pattern))
    for seed in range(15):
        tokens, ended = writer.write(grammar.matcher(), random.Random(seed), budget=8, limit=40)
        text = writer.text(tokens)
        assert re.fullmatch(pattern, text) if ended else tokens, text


def test_a_choice_is_written_exactly_and_each_can_be(compiler: GrammarCompiler, writer: Writer) -> None:
    choices = [
        "yes",
        "yes sir",
        "no",
        'q"u\\o/te',
        "a|b",
        "(x)*",
        "tab\t\n",
        " lead",
        "日本",
        "🌶️",
        "<|im_end|>",
        "\\x41",
    ]
    grammar = compiler.compile(StructuredOutputs(choice=choices))
    written = set()
    for seed in range(120):
        tokens, ended = writer.write(grammar.matcher(), random.Random(seed), budget=100, limit=100)
        assert ended
        written.add(writer.text(tokens))
    assert written == set(choices)


def test_thousands_of_choices(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    choices = tuple(f"choice {number}" for number in range(4000))
    for text, expected in (("choice 3999", True), ("choice 40", True), ("choice 4000", False), ("choice ", False)):
        assert accepts(compiler, tokenizer, text, choice=choices) is expected


def test_json_mode_writes_objects(compiler: GrammarCompiler, writer: Writer) -> None:
    grammar = compiler.compile(StructuredOutputs(json_object=True))
    for seed in range(30):
        tokens, ended = writer.write(grammar.matcher(), random.Random(seed), budget=30, limit=400)
        assert ended and isinstance(json.loads(writer.text(tokens)), dict)


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('root ::= "a" | "b" root', "bba", "bb"),
        ('# GBNF\nroot ::= item ("," item)*\nitem ::= [0-9]+', "1,22,3", "1,"),
        ('start: "SELECT " /[a-z]+/ " FROM " ("t1" | "t2")', "SELECT x FROM t2", "SELECT x FROM t3"),
        ('?start: sum\n?sum: NUM | sum "+" NUM\nNUM: /[0-9]+/\n%ignore " "', "1 + 2+3", "1 +"),
        ('start: "<|im_start|>" /<b>/ // <x>\n', "<|im_start|><b>", "<b>"),
        ('start: "x" %json {"type": "integer", "minimum": 10}', "x10", "x9"),
    ],
)
def test_grammars(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: str, good: str, bad: str) -> None:
    matcher = compiler.compile(StructuredOutputs(grammar=grammar)).matcher()
    literal = [token_id for letter in good for token_id in tokenizer.encode(letter)]
    assert all(matcher.accept(token_id) for token_id in literal) and matcher.is_complete
    assert not accepts(compiler, tokenizer, bad, grammar=grammar)


def test_white_space_is_bounded(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    def spaced(space: str, **options: Any) -> bool:
        return accepts(compiler, tokenizer, f"[{space}1{space},{space}2{space}]", json={"type": "array"}, **options)

    assert [spaced(space) for space in ("", " ", "\n", "\r\n\t\t", "\n" + " " * 40)] == [True] * 5
    assert not any(spaced(space) for space in ("  ", "\n\n", "\t", "\n" + " " * 41))
    assert spaced("", disable_any_whitespace=True) and not spaced(" ", disable_any_whitespace=True)
    assert spaced("\n\t ", whitespace_pattern="[\\s]{0,3}") and not spaced("\u00a0", whitespace_pattern="\\s*")
    assert spaced("\t\t", whitespace_pattern="\\t{2}") and not spaced("\t", whitespace_pattern="\\t{2}")


# JSON schemas


LIST = {
    "type": "object",
    "properties": {"next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
    "required": ["next"],
}
SCORE = {"properties": {"score": {"multipleOf": 5}}, "patternProperties": {"^score$": {"type": "integer"}}}
VALUE = [1, {"minimum": True}]


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer", "minimum": 2**53 + 1}, [2**53 + 2], [2**53]),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [0, 10**18, -(10**18)], [2**63]),
        ({"type": "number", "minimum": -1e300, "maximum": 1e300}, [0.5], [2e18]),
        (
            {"type": "object", "properties": {"a": {"$id": "#/properties/a", "type": "integer"}}},
            [{"a": 1}],
            [1, {"a": {}}],
        ),
        ({"type": "array", "items": {"$id": "#", "type": "integer"}, "$id": "https://a.b/c"}, [[1]], [1, [[1]]]),
        ({"enum": [10**22, 2**53 - 1, 0.1]}, [10**22, 2**53 - 1, 0.1], [2**53]),
        ({"type": "integer", "multipleOf": 60}, [0, 120, -60], [30]),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, [[1, 1]], [["a"]]),
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, [{"a": 1, "b": 2}], [{"a": "x"}]),
        ({"$ref": "#/definitions/a~1b", "definitions": {"a/b": {"const": VALUE}}}, [VALUE], [1]),
        (
            {"type": "object", **SCORE, "required": ["score"], "additionalProperties": False},
            [{"score": 10}],
            [{"score": 11}, {}],
        ),
        ({"$ref": "#/$defs/n", "$defs": {"n": LIST}}, [{"next": {"next": None}}], [{}, {"next": 1}]),
        ({"type": "object", "properties": {"x": {"$ref": "#/properties/x"}}}, [{}], [{"x": 1}]),
        ({"anyOf": [{"$ref": "#/anyOf/0"}, {"type": "null"}]}, [None], [1]),
    ],
)
def test_schemas(compiler: GrammarCompiler, tokenizer: Tokenizer, schema: Any, good: list[Any], bad: list[Any]) -> None:
    def valid(value: Any) -> bool:
        return accepts(compiler, tokenizer, json.dumps(value, separators=(",", ":")), json=schema)

    assert all(map(valid, good)) and not any(map(valid, bad))


def test_no_second_name_for_a_property(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert accepts(compiler, tokenizer, '{"a":1,"b":"x\\n\\""}', json=schema)
    assert not accepts(compiler, tokenizer, '{"a":1,"a":"x"}', json=schema)
    assert not accepts(compiler, tokenizer, '{"a":1,"\\u0061":"x"}', json=schema)


def test_closed_objects(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "object", "properties": {"b": {}}}, "c": {"type": "object"}},
    }
    text = '{"a":{"z":1}}'
    assert accepts(compiler, tokenizer, text, json=schema)
    assert not accepts(compiler, tokenizer, text, json=schema, disable_additional_properties=True)
    assert accepts(compiler, tokenizer, '{"c":{"z":1}}', json=schema, disable_additional_properties=True)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json": False}, "no text satisfies"),
    ({"json": {"type": "foo"}}, "Invalid type"),
    ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum .5. is greater than maximum"),
    ({"json": {"enum": []}}, "empty"),
    ({"json": {"not": {"type": "string"}}}, 'these keywords are not supported: ."not".'),
    ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ({"json": {"if": {}, "then": {}}}, "if"),
    ({"json": {"type": "string", "format": "sonnet"}}, "Unknown format: sonnet"),
    ({"json": {"type": "string", "pattern": "^(?!x)"}}, "look-around"),
    ({"json": {"$ref": "https://example.com/schema.json"}}, "https://example.com/schema.json"),
    ({"json": {"$ref": "file:///etc/passwd"}}, "file:///etc/passwd"),
    ({"json": {"$ref": "#/nowhere"}}, "nowhere"),
    ({"json": {"$ref": "#"}}, "without end"),
    ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}}, "without end"),
    ({"json": {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}}, "without end"),
    ({"json": {"type": "array", "items": {"$ref": "#"}, "minItems": 1}}, "without end"),
    ({"json": {"properties": {"a": {"const": 2**53 + 1}}}}, "at #/properties/a: const may not hold 9007199254740993"),
    ({"json": {"enum": [[-(2**70)]]}}, "enum may not hold -1180591620717411303424"),
    ({"json": {"const": 1e300}}, r"const may not hold 1e\+300"),
    ({"json": {"enum": ["a\x00b"]}}, "control character"),
    ({"json": {"items": {"$id": "https://a.b/c"}}}, "at #/items: .id is supported at the root"),
    ({"json": {"minimum": 3, "exclusiveMinimum": True}}, "exclusiveMinimum must be a number"),
    ({"json": {"type": "object", "minProperties": 3, "required": ["a"]}}, "minProperties 3"),
    ({"json": {"type": "integer", "minimum": 10**400}}, "larger than any"),
    ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "use anyOf"),
    ({"json": {"type": "object", "patternProperties": {"a": {}, "b": {}}}}, "not disjoint"),
    ({"regex": "(("}, "unclosed group"),
    ({"regex": "a(?=b)"}, "look-around"),
    ({"regex": "(a)\\1"}, "backreferences are not supported"),
    ({"regex": "[^\\x00-\\x{10FFFF}]"}, "no token of this model can go on"),
    ({"json": {"type": "object"}, "whitespace_pattern": "("}, "unclosed group"),
    ({"json": {"type": "object"}, "whitespace_pattern": "( {0,9}){9,1}"}, "invalid repetition"),
    ({"grammar": "start: start"}, "no token of this model can go on"),
    ({"grammar": "start: other"}, "unknown name"),
    ({"grammar": 'root ::= ("a"'}, "cannot be read as GBNF"),
    ({"grammar": "start: <|im_end|>"}, "special tokens"),
    ({"grammar": 'start: "a" <[2]>'}, "special tokens"),
    ({"grammar": 'start: "a"\n%llguidance {"no_forcing": false}'}, "%llguidance"),
    ({"grammar": 'start: %json {"const": 9007199254740993}'}, "9007199254740993"),
    ({"grammar": "start: %json nothing"}, "%json is not followed by a schema"),
    ({"grammar": "start: " + "(" * 3000 + '"a"' + ")" * 3000}, "too deeply nested"),
    ({"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000}, "cannot be read as GBNF"),
]


@pytest.mark.parametrize(("fields", "reason"), REFUSED)
def test_what_cannot_be_kept_is_refused_by_name(compiler: GrammarCompiler, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as refusal:
        compiler.compile(StructuredOutputs(**fields))
    assert (refusal.value.code, refusal.value.param) == ("invalid_request", "structured_outputs")
    assert refusal.value.message.startswith(f"structured_outputs.{next(iter(fields))} cannot be used: ")
    assert len(refusal.value.message) < 400 and "panic" not in refusal.value.message


def test_the_refusal_names_the_field_of_the_request(compiler: GrammarCompiler) -> None:
    form = StructuredOutputs.from_response_format({"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}})
    assert form is not None
    with pytest.raises(RequestError, match=r"^response_format\.json_schema\.schema cannot be used") as refusal:
        compiler.compile(form)
    assert refusal.value.param == "response_format"
