"""Random JSON schemas, random texts: whatever ends is valid, whatever is cut could have gone on.

python -m pytest tests/engine/test_grammar_schemas.py --schemas 1000
"""

from __future__ import annotations

import json
import random

import pytest
from jsonschema import Draft202012Validator, FormatChecker

from pagemill.engine.errors import RequestError
from pagemill.engine.grammar import GrammarCompiler
from pagemill.engine.structured_outputs import StructuredOutputs
from tests.engine.invented_schemas import SchemaMaker, Writer

# The 29th of February is allowed in every year, so dates are not checked.
FORMATS = FormatChecker(formats=["email", "ipv4", "ipv6", "uuid", "idn-email"])


def test_texts_of_random_schemas_are_valid(
    request: pytest.FixtureRequest, compiler: GrammarCompiler, writer: Writer
) -> None:
    count = request.config.getoption("--schemas")
    refused, cut = [], 0
    for seed in range(count):
        rng = random.Random(seed)
        schema = SchemaMaker(rng).make()
        Draft202012Validator.check_schema(schema)
        try:
            grammar = compiler.compile(StructuredOutputs(json=schema))
        except RequestError as error:
            refused.append(error.message)
            continue
        tokens, ended = writer.write(grammar.matcher(), rng, budget=60, limit=300)
        if ended:
            text = writer.text(tokens)
            errors = list(Draft202012Validator(schema, format_checker=FORMATS).iter_errors(json.loads(text)))
            assert not errors, (seed, schema, text, errors[0].message)
            continue
        cut += 1
        replayed = grammar.matcher()
        assert all(replayed.accept(token_id) for token_id in tokens), seed
        assert writer.allowed(replayed).size > 0
    print(f"{count} schemas: {count - len(refused) - cut} valid, {cut} cut, {len(refused)} refused")
    assert len(refused) <= 0.05 * count, sorted(set(refused))
    assert cut <= 0.05 * count
