"""What a matcher allows, and whether a text is of a form; the vocabulary is SmolLM2's."""

from __future__ import annotations

from typing import Any

import numpy as np

from pagemill.engine.grammar import GrammarCompiler, Matcher
from pagemill.engine.structured_outputs import StructuredOutputs
from pagemill.engine.tokenizer import Tokenizer

VOCAB_SIZE = 49_152
EOS = 2
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def allowed(matcher: Matcher, vocab_size: int = VOCAB_SIZE) -> set[int]:
    mask = np.full(-(-vocab_size // 32), 0xFFFFFFFF, np.uint32)
    matcher.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def accepts(compiler: GrammarCompiler, tokenizer: Tokenizer, text: str, **fields: Any) -> bool:
    """Whether `text` is a whole text of the form."""
    matcher = compiler.compile(StructuredOutputs(**fields)).matcher()
    return all(matcher.accept(token_id) for token_id in tokenizer.encode(text)) and matcher.is_complete
