"""Matchers and vocabularies: what is allowed next, also after a fork, a roll-back, a full lexer."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from pagemill.engine import grammar as grammar_module
from pagemill.engine.detokenizer import Detokenizer
from pagemill.engine.errors import RequestError
from pagemill.engine.grammar import GrammarCompiler
from pagemill.engine.structured_outputs import StructuredOutputs
from pagemill.engine.tokenizer import Tokenizer
from tests.engine.grammars import EOS, PERSON, VOCAB_SIZE, allowed
from tests.engine.invented_schemas import Writer

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
