"""Structured output with SmolLM2's tokenizer: what is allowed, what is refused, and what a matcher's state is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagemill.engine.errors import RequestError
from pagemill.engine.grammar import GrammarCompiler, Matcher
from pagemill.engine.loader import resolve_model
from pagemill.engine.structured_outputs import StructuredOutputs
from pagemill.engine.tokenizer import Tokenizer

VOCAB_SIZE = 49_152


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(resolve_model("smollm2-135m").path)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB_SIZE, (2,))


def allowed(matcher: Matcher) -> set[int]:
    mask = np.full(VOCAB_SIZE // 32, 0xFFFFFFFF, np.uint32)
    matcher.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def test_a_matcher_walks_a_text_to_its_end(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(StructuredOutputs(choice=["yes", "yes sir", "no"])).matcher()
    first = {token for token in range(VOCAB_SIZE) if tokenizer.token_bytes[token] in (b"y", b"ye", b"yes", b"n", b"no")}
    assert allowed(matcher) == first
    (yes,) = tokenizer.encode("yes")
    assert not matcher.accept(tokenizer.encode("maybe")[0])
    assert matcher.accept(yes)
    assert matcher.is_complete and not matcher.is_finished
    assert 2 in allowed(matcher)
    fork = matcher.fork()
    assert fork.accept(2) and fork.is_finished
    assert matcher.accept(tokenizer.encode(" sir")[0]) and matcher.is_finished
    assert allowed(matcher) == {2}


@pytest.mark.parametrize(
    "fields", [{"json": False}, {"json": {"$ref": "#"}}, {"regex": "(("}, {"grammar": "start: start"}]
)
def test_what_cannot_be_compiled_is_refused_by_name(compiler: GrammarCompiler, fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"structured_outputs.{next(iter(fields))} cannot be used") as error:
        compiler.compile(StructuredOutputs(**fields))
    assert (error.value.code, error.value.param) == ("invalid_request", "structured_outputs")
