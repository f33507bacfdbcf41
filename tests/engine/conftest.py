"""Tokenizers and grammar compilers that many tests read and none changes: made once, when first asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pagemill.engine.grammar import GrammarCompiler
    from pagemill.engine.tokenizer import Tokenizer
    from tests.engine.invented_schemas import Writer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """SmolLM2's."""
    from tests.engine.text_tokenizers import smollm

    return smollm()


@pytest.fixture(scope="session")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    from pagemill.engine.grammar import GrammarCompiler
    from tests.engine.grammars import EOS, VOCAB_SIZE

    return GrammarCompiler(tokenizer, VOCAB_SIZE, (EOS,))


@pytest.fixture(scope="session")
def writer(tokenizer: Tokenizer) -> Writer:
    from tests.engine.grammars import EOS, VOCAB_SIZE
    from tests.engine.invented_schemas import Writer

    return Writer(tokenizer, VOCAB_SIZE, EOS)


@pytest.fixture(scope="session")
def theirs() -> Any:
    """transformers' tokenizer with a chat template for tools."""
    from tests.engine.conversations import with_template

    return with_template()


@pytest.fixture(scope="session")
def tools(theirs: Any) -> Tokenizer:
    """`theirs`, as the engine reads it."""
    from pagemill.engine.tokenizer import Tokenizer

    return Tokenizer(theirs)
