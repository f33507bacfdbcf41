"""Structured output: what matchers allow, what is refused, and what hostile grammars may cost."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from pagemill.engine import grammar as grammar_module
from pagemill.engine import grammar_trial
from pagemill.engine.detokenizer import Detokenizer
from pagemill.engine.errors import RequestError
from pagemill.engine.grammar import GrammarCompiler, Matcher
from pagemill.engine.loader import resolve_model
from pagemill.engine.structured_outputs import StructuredOutputs
from pagemill.engine.tokenizer import Tokenizer
from tests.engine.invented_schemas import Writer

VOCAB_SIZE = 49_152
EOS = 2
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(resolve_model("smollm2-135m").path)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB_SIZE, (EOS,))


@pytest.fixture(scope="module")
def writer(tokenizer: Tokenizer) -> Writer:
    return Writer(tokenizer, VOCAB_SIZE, EOS)


def allowed(matcher: Matcher, vocab_size: int = VOCAB_SIZE) -> set[int]:
    mask = np.full(-(-vocab_size // 32), 0xFFFFFFFF, np.uint32)
    matcher.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def accepts(compiler: GrammarCompiler, tokenizer: Tokenizer, text: str, **fields: Any) -> bool:
    """Whether `text` is a whole text of the form."""
    matcher = compiler.compile(StructuredOutputs(**fields)).matcher()
    return all(matcher.accept(token_id) for token_id in tokenizer.encode(text)) and matcher.is_complete


# Matchers


def test_a_matcher_walks_a_text_to_its_end(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(StructuredOutputs(choice=["yes", "yes sir", "no"])).matcher()
    starts = (b"y", b"ye", b"yes", b"n", b"no")
    assert allowed(matcher) == {token for token in range(VOCAB_SIZE) if tokenizer.token_bytes[token] in starts}
    assert matcher.accept(tokenizer.encode("yes")[0])
    assert matcher.is_complete and not matcher.is_finished
    assert EOS in allowed(matcher) and len(allowed(matcher)) > 1
    assert matcher.accept(tokenizer.encode(" sir")[0])
    assert matcher.is_finished and allowed(matcher) == {EOS}


def test_a_refused_token_changes_nothing(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(StructuredOutputs(json=PERSON)).matcher()
    for token_id in tokenizer.encode('{"name": "Bo'):
        before = allowed(matcher)
        refused = [EOS, 0, 1, -1, VOCAB_SIZE, VOCAB_SIZE - 1 if VOCAB_SIZE - 1 not in before else EOS]
        refused += random.Random(0).sample(sorted(set(range(VOCAB_SIZE)) - before), 20)
        assert not any(matcher.accept(bad) for bad in refused)
        assert allowed(matcher) == before
        assert matcher.accept(token_id)


def test_the_end_is_accepted_where_the_text_is_complete_and_only_ends_follow(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    matcher = compiler.compile(StructuredOutputs(regex="a+")).matcher()
    (letter,) = tokenizer.encode("a")
    assert not matcher.accept(EOS)
    assert matcher.accept(letter) and matcher.accept(EOS) and matcher.is_finished
    assert allowed(matcher) == {EOS}
    assert not matcher.accept(letter) and matcher.accept(EOS)
    matcher.rollback(2)
    assert matcher.accept(letter) and not matcher.is_finished
    matcher.rollback(2)
    assert not matcher.is_complete and EOS not in allowed(matcher)


def test_a_fork_goes_its_own_way(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(StructuredOutputs(json=PERSON)).matcher()
    for token_id in tokenizer.encode('{"name":'):
        assert matcher.accept(token_id)
    before = allowed(matcher)
    fork = matcher.fork()
    for token_id in tokenizer.encode('"Bo", "age": 7}'):
        assert fork.accept(token_id)
    assert fork.is_finished and not matcher.is_complete
    assert allowed(matcher) == before


def test_replayed_tokens_give_the_same_state(compiler: GrammarCompiler, writer: Writer) -> None:
    grammar = compiler.compile(StructuredOutputs(json_object=True))
    tokens, _ = writer.write(grammar.matcher(), random.Random(3), budget=40, limit=60)
    masks = []
    filled = grammar.matcher()
    for token_id in tokens:
        masks.append(allowed(filled))
        filled.accept(token_id)
    replayed = grammar.matcher()
    assert all(replayed.accept(token_id) for token_id in tokens)
    assert allowed(replayed) == allowed(filled) and replayed.is_finished == filled.is_finished
    for mask in reversed(masks):
        replayed.rollback(1)
        assert allowed(replayed) == mask


def test_a_lexer_that_is_full_is_replaced_for_all_that_share_it(
    tokenizer: Tokenizer, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = StructuredOutputs(regex="(\\w{1,200} ){50}")
    roomy = GrammarCompiler(tokenizer, VOCAB_SIZE, (EOS,)).compile(form)
    monkeypatch.setitem(grammar_module.LIMITS, "max_lexer_states", 1500)
    grammar = GrammarCompiler(tokenizer, VOCAB_SIZE, (EOS,)).compile(form)
    rng = random.Random(0)
    waiting = grammar.matcher()
    matchers = [grammar.matcher(), grammar.matcher()]
    twins = [roomy.matcher(), roomy.matcher()]
    for _ in range(60):
        for matcher, twin in zip(matchers, twins, strict=True):
            ids = writer.allowed(matcher)
            assert np.array_equal(ids, writer.allowed(twin))
            token_id = int(rng.choice(ids))
            assert matcher.accept(token_id) and twin.accept(token_id)
    assert grammar._generation > 2 and roomy._generation == 0
    assert allowed(waiting) == allowed(roomy.matcher())


def test_a_new_lexer_knows_of_no_token_that_was_taken_back(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(StructuredOutputs(json=PERSON)).matcher()
    for token_id in tokenizer.encode('{"name"'):
        assert matcher.accept(token_id)
    before = allowed(matcher)
    for token_id in tokenizer.encode(': "Bo'):
        assert matcher.accept(token_id)
    matcher.rollback(len(tokenizer.encode(': "Bo')))
    assert matcher._renew() and allowed(matcher) == before


def test_a_matcher_that_fails_says_so_and_stays_so(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(StructuredOutputs(grammar='start: e\ne: e e e | e e | "a" | "b"'))
    matcher = grammar.matcher()
    (letter,) = tokenizer.encode("a")
    while matcher.accept(letter):
        pass
    assert matcher.failure is not None and matcher.failure.param == "structured_outputs"
    for failed in (matcher, matcher.fork()):
        with pytest.raises(RequestError, match="Current row has"):
            allowed(failed)
        assert not failed.is_finished and not failed.accept(EOS) and not failed.accept(letter)
    assert allowed(grammar.matcher())


# Vocabularies


def test_special_tokens_and_padded_rows_are_never_allowed(tokenizer: Tokenizer) -> None:
    padded = VOCAB_SIZE + 40
    compiler = GrammarCompiler(tokenizer, padded, (EOS, 0, padded + 5))
    matcher = compiler.compile(StructuredOutputs(regex="(?s).*")).matcher()
    special = {token for token in range(VOCAB_SIZE) if tokenizer.token_bytes.is_special(token)}
    ids = allowed(matcher, padded)
    assert ids & special == {EOS, 0} and max(ids) < VOCAB_SIZE and len(ids) > 40_000
    assert matcher.accept(0) and matcher.is_finished
    inside = compiler.compile(StructuredOutputs(json={"type": "string"})).matcher()
    assert inside.accept(tokenizer.encode('"')[0])
    assert not allowed(inside, padded) & special


def test_fewer_logits_than_tokens(tokenizer: Tokenizer) -> None:
    matcher = GrammarCompiler(tokenizer, 1000, (EOS,)).compile(StructuredOutputs(regex="[a-z ]+")).matcher()
    assert max(allowed(matcher, 1000)) < 1000
    assert not matcher.accept(tokenizer.encode(" hello")[0])


def test_a_model_without_an_end_of_sequence(tokenizer: Tokenizer) -> None:
    matcher = GrammarCompiler(tokenizer, VOCAB_SIZE, ()).compile(StructuredOutputs(choice=["ab", "a"])).matcher()
    assert matcher.accept(tokenizer.encode("a")[0])
    assert matcher.is_complete and {tokenizer.token_bytes[token] for token in allowed(matcher)} == {b"b"}
    assert matcher.accept(tokenizer.encode("b")[0])
    assert matcher.is_finished and allowed(matcher) == set()


def _sentencepiece(words: Sequence[str]) -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    rust = RustTokenizer(
        models.BPE({word: index for index, word in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>")
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    rust.decoder = decoders.Sequence(steps)  # type: ignore[assignment]
    rust.add_special_tokens([AddedToken(word, special=True) for word in ("<unk>", "<s>", "</s>")])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust, bos_token="<s>", eos_token="</s>"))


def test_sentencepiece_with_byte_fallback_writes_whole_characters() -> None:
    words = ["{", "}", '"', "▁", "a", "b", "▁a", "é", ":", '"}', '{"', "▁" * 16, "x" * 5000]
    tokenizer = _sentencepiece(words)
    compiler = GrammarCompiler(tokenizer, 300, (EOS,))
    form = StructuredOutputs(json={"properties": {"é 日": {"type": "string", "maxLength": 4}}, "required": ["é 日"]})
    for seed in range(20):
        matcher = compiler.compile(form).matcher()
        tokens, ended = Writer(tokenizer, 300, EOS).write(matcher, random.Random(seed), budget=60, limit=200)
        detokenizer = Detokenizer(tokenizer, (5,))
        text = "".join([*map(detokenizer.append, tokens), detokenizer.flush()])
        value = json.loads(text)
        assert ended and (not isinstance(value, dict) or len(value["é 日"]) <= 4)
    assert not any(matcher.accept(token_id) for token_id in (0, 1, 299, len(words) + 258))


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


# Cost


HOSTILE: dict[str, dict[str, Any]] = {
    "intersections": {"json": {"allOf": [{"type": "string", "pattern": f"a{number}.*"} for number in range(40)]}},
    "automaton": {"json": {"type": "integer", "multipleOf": 12345.678}},
    "inline": {"grammar": 'start: %json {"type": "integer", "multipleOf": 1000003}'},
    "rules": {
        "grammar": "".join(f'r{number} ::= "a" r{number + 1}\n' for number in range(2800))
        + 'root ::= r0\nr2800 ::= "x"'
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_grammar_that_would_never_be_ready_is_refused_alone(
    tokenizer: Tokenizer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_trial, "CPU_SECONDS", 0.3)
    compiler = GrammarCompiler(tokenizer, 1000, (EOS,))
    refusals: list[RequestError] = []

    def compile_hostile() -> None:
        try:
            compiler.compile(StructuredOutputs(**HOSTILE[name]))
        except RequestError as error:
            refusals.append(error)

    neighbours = [StructuredOutputs(json={"const": number}) for number in range(3)]
    compiler.compile(neighbours[0])
    thread = threading.Thread(target=compile_hostile)
    thread.start()
    for form in neighbours:
        assert compiler.compile(form).matcher().fork()
    thread.join(60)
    assert [(error.code, "more than 0.3 s" in error.message) for error in refusals] == [("invalid_request", True)]
    assert compiler.compile(StructuredOutputs(json={"const": 4}))


def test_a_lost_helper_is_replaced(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, 1000, (EOS,))
    compiler.compile(StructuredOutputs(regex="a"))
    assert compiler._vocabulary is not None
    first = compiler._vocabulary.trial._process
    assert first is not None
    first.kill()
    first.wait(60)
    assert compiler.compile(StructuredOutputs(regex="b"))
    second = compiler._vocabulary.trial._process
    assert second is not None and second is not first
    del compiler
    second.wait(60)


def test_a_helper_that_cannot_work_is_the_engines_error(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    for executable, reason in (("/nowhere/python", "cannot be started"), ("/bin/false", "exited with status 1")):
        monkeypatch.setattr(grammar_trial.sys, "executable", executable)
        compiler = GrammarCompiler(tokenizer, 1000, (EOS,))
        with pytest.raises(RequestError, match=reason) as error:
            compiler.compile(StructuredOutputs(regex="a"))
        assert error.value.code == "engine_error"
        assert compiler.compile(StructuredOutputs(choice=["a"]))
        monkeypatch.undo()
        assert compiler.compile(StructuredOutputs(regex="a"))


@pytest.mark.parametrize("grammar", ['start: e\ne: e e e | e e | "a" | "b"', 'start: start start | "a" | '])
def test_an_ambiguous_grammar_ends_its_request_before_its_steps_get_long(
    compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: str
) -> None:
    matcher = compiler.compile(StructuredOutputs(grammar=grammar)).matcher()
    (letter,) = tokenizer.encode("a")
    with pytest.raises(RequestError, match=r"grammar cannot be used: .*items"):
        for _ in range(2000):
            allowed(matcher)
            if not matcher.accept(letter) and matcher.failure:
                raise matcher.failure


@pytest.mark.parametrize(
    "text", ["\n" * 60_000, '"' * 60_000, '"\\' * 30_000, "/" * 60_000, "a " * 30_000, "%json " * 9000]
)
def test_reading_a_grammar_takes_no_longer_for_being_odd(compiler: GrammarCompiler, text: str) -> None:
    started = time.thread_time()
    with pytest.raises(RequestError):
        compiler.compile(StructuredOutputs(grammar=text + "\nstart: ("))
    assert time.thread_time() - started < 1.0


def test_grammars_are_kept_and_the_least_used_are_dropped(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, 1000, (EOS,))
    first = compiler.compile(StructuredOutputs(choice=["a", "b"]))
    assert compiler.compile(StructuredOutputs(choice=["a", "b", "a"])) is first
    for number in range(20):
        compiler.compile(StructuredOutputs(choice=[f"{number}-{item:011d}" for item in range(4096)]))
    assert compiler._kept_source <= 1 << 20
    assert compiler.compile(StructuredOutputs(choice=["a", "b"])) is not first


def test_several_threads_compile_at_once(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, (EOS,))
    sizes: list[int] = []

    def work(seed: int) -> None:
        for number in range(6):
            form = StructuredOutputs(json={"type": "string", "maxLength": 1 + (seed * number) % 5})
            sizes.append(len(allowed(compiler.compile(form).matcher())))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(sizes) == 36 and min(sizes) > 0
