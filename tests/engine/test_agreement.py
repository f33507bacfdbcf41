"""Exactness on a real model: what the engine writes in bfloat16, read by transformers in float32.

A slice of `make bench-agreement`, with bounds as wide as so few tokens need: one token more or less is 0.4 %.
"""

from __future__ import annotations

import pytest
from bench.agreement import compare, exact_model, questions, write

MODEL = "smollm2-135m"
ANSWERS, TOKENS = 8, 32


@pytest.mark.parametrize(("dtype", "least", "largest_gap"), [("float32", 1.0, 1e-3), ("bfloat16", 0.98, 0.1)])
def test_the_engine_writes_what_float32_would(dtype: str, least: float, largest_gap: float) -> None:
    rows = [(prompt, TOKENS) for prompt, _ in questions(MODEL)[:ANSWERS]]
    written = write(rows, model=MODEL, dtype=dtype, threads=1, num_blocks_override=256, skip_tokenizer_init=True)
    found = compare(exact_model(MODEL, rounded=dtype == "bfloat16"), written)
    assert found.tokens == ANSWERS * TOKENS
    assert found.share >= least, found
    assert found.worst_gap <= largest_gap, found
