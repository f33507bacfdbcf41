"""What a request may say about the form of its text, in vLLM's words and in OpenAI's."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from pagemill.engine.errors import RequestError
from pagemill.engine.structured_outputs import StructuredOutputs

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def test_vllm_words() -> None:
    form = StructuredOutputs.from_vllm({"json": SCHEMA, "regex": None, "disable_any_whitespace": True})
    assert json.loads(str(form.json)) == SCHEMA and form.disable_any_whitespace
    assert form == StructuredOutputs.from_vllm({"json": json.dumps(SCHEMA), "disable_any_whitespace": True})
    assert StructuredOutputs.from_vllm({"choice": ["a", "b", "a"]}).choice == ("a", "b")
    assert StructuredOutputs.from_vllm({"json_object": True}).kind == "json_object"
    assert StructuredOutputs.from_vllm({"json": False}).kind == "json"
    dumped = {
        "regex": "a",
        "structural_tag": None,
        "disable_fallback": False,
        "whitespace_pattern": None,
        "choice": None,
    }
    assert StructuredOutputs.from_vllm(dumped) == StructuredOutputs(regex="a")
    assert StructuredOutputs.from_vllm(form) is form
    assert len({form, StructuredOutputs(regex="a"), StructuredOutputs(regex="a")}) == 2


def test_openai_words() -> None:
    def read(**fields: Any) -> StructuredOutputs | None:
        return StructuredOutputs.from_response_format(fields)

    assert read(type="text") is None
    assert read(type="json_object") == StructuredOutputs(json_object=True, param="response_format")
    described = {"name": "x", "description": "y", "strict": True, "schema": SCHEMA}
    assert read(type="json_schema", json_schema=described) == StructuredOutputs(json=SCHEMA, param="response_format")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("json", "structured_outputs must be an object, got str"),
        ({}, "exactly one of json, json_object, regex, choice, grammar; got none of them"),
        ({"json_object": False}, "got none of them"),
        ({"regex": "a", "choice": ["a"]}, "got regex and choice together"),
        ({"json": False, "regex": "a"}, "got json and regex together"),
        ({"structural_tag": "{}"}, "structured_outputs.structural_tag is not supported"),
        ({"jason": {}}, "unknown field 'jason'"),
        ({"param": "prompt", "regex": "a"}, "unknown field 'param'"),
        ({5: 5}, "unknown field 5"),
        ({"json": ""}, "structured_outputs.json is not valid JSON"),
        ({"json": "{"}, "structured_outputs.json is not valid JSON"),
        ({"json": "[" * 30_000}, "structured_outputs.json is not valid JSON"),
        ({"json": '{"minimum": NaN}'}, "NaN is not a JSON number"),
        ({"json": {"minimum": float("inf")}}, "structured_outputs.json is not JSON"),
        ({"json": {"a": {1, 2}}}, "structured_outputs.json is not JSON"),
        ({"json": [1]}, "must be a JSON schema, an object or a boolean"),
        ({"json": 5}, "must be a JSON schema, an object or a boolean"),
        ({"json": {"enum": ["x" * 65_536]}}, "at most 65536 bytes"),
        ({"json": '{"enum":["' + "é" * 40_000 + '"]}'}, "at most 65536 bytes"),
        ({"json": "[" * 200 + "]" * 200}, "must be a JSON schema"),
        ({"json": {"enum": [json.loads("[" * 70 + "]" * 70)]}}, "nested deeper than 64 levels"),
        ({"json_object": "yes"}, "structured_outputs.json_object must be true or false"),
        ({"regex": ""}, "structured_outputs.regex may not be empty"),
        ({"regex": 5}, "structured_outputs.regex must be a string, got int"),
        ({"regex": "a" * 8193}, "structured_outputs.regex may have at most 8192 characters, got 8193"),
        ({"regex": "\ud800"}, "structured_outputs.regex is not valid Unicode text"),
        ({"choice": []}, "structured_outputs.choice must be a list with at least one string"),
        ({"choice": "ab"}, "structured_outputs.choice must be a list"),
        ({"choice": {"a": 1}}, "structured_outputs.choice must be a list"),
        ({"choice": ["a", ""]}, r"structured_outputs.choice\[1\] may not be empty"),
        ({"choice": ["a", 5]}, r"structured_outputs.choice\[1\] must be a string, got int"),
        ({"choice": ["a"] * 4097}, "at most 4096 strings, got 4097"),
        ({"choice": ["a" * 4097]}, "at most 4096 characters, got 4097"),
        ({"choice": ["a" * 4000 + str(number) for number in range(20)]}, "at most 65536 characters in all"),
        ({"grammar": "x" * 65_537}, "structured_outputs.grammar may have at most 65536 characters"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern means nothing with regex"),
        ({"json_object": True, "disable_additional_properties": True}, "means nothing with json_object"),
        ({"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}, "cannot be combined"),
        ({"json": {}, "whitespace_pattern": "x*"}, "line feed and carriage return only .* got 'x.'"),
        ({"json": {}, "whitespace_pattern": "[^a]"}, "carriage return only"),
        ({"json": {}, "whitespace_pattern": "\\S"}, "carriage return only"),
        ({"json": {}, "whitespace_pattern": "5"}, "carriage return only"),
        ({"json": {}, "whitespace_pattern": " " * 257}, "whitespace_pattern may have at most 256 characters"),
        ({"json": {}, "disable_any_whitespace": 1}, "disable_any_whitespace must be true or false, got 1"),
    ],
)
def test_bad_forms_are_refused_by_field_value_and_limit(fields: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as refusal:
        StructuredOutputs.from_vllm(fields)
    assert (refusal.value.code, refusal.value.param) == ("invalid_request", "structured_outputs")
    assert len(refusal.value.message) < 300


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("json", "response_format must be an object, got str"),
        ({}, "response_format.type must be one of text, json_object, json_schema; got None"),
        ({"type": "xml"}, "got 'xml'"),
        ({"type": ["text"]}, "response_format.type must be one of"),
        ({"type": "json_object", "schema": {}}, "unknown field 'schema' for type json_object"),
        ({"type": "json_schema"}, "response_format.json_schema must be an object"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "response_format.json_schema.schema must be an object"),
        ({"type": "json_schema", "json_schema": {"schema": "{}"}}, "json_schema.schema must be an object, got '{}'"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}, "strict must be true or false"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "name": 5}}, "name must be a string"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "nmae": "x"}}, "unknown field 'nmae'"),
        ({"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 65_536]}}}, "json_schema.schema may have"),
    ],
)
def test_bad_response_formats_are_refused(fields: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as refusal:
        StructuredOutputs.from_response_format(fields)
    assert (refusal.value.code, refusal.value.param) == ("invalid_request", "response_format")


def test_forms_are_read_without_the_engine() -> None:
    code = "import sys, pagemill.engine.structured_outputs; print({'torch', 'llguidance', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
