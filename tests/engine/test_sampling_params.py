"""Decoding parameters are checked when they are made, and every refusal names its field."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from pagemill.engine.errors import RequestError
from pagemill.engine.sampling_params import SAMPLING_FIELDS, SamplingParams

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", NAN),
        ("temperature", INF),
        ("temperature", -0.1),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", 10**400),
        ("stop_token_ids", {3: 1}),
        ("stop", {"a": 1}),
        ("early_stopping", np.array([1, 2])),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", NAN),
        ("presence_penalty", False),
        ("presence_penalty", 2.01),
        ("frequency_penalty", -2.01),
        ("frequency_penalty", "1"),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", 1.0),
        ("prompt_logprobs", "all"),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": NAN}),
        ("logit_bias", {"5": True}),
        ("logit_bias", {"five": 1}),
        ("logit_bias", {"-5": 1}),
        ("logit_bias", {" 5": 1}),
        ("logit_bias", {"\u0665": 1}),
        ("logit_bias", {"5": 1, 5: 1}),
        ("logit_bias", {2**31: 1}),
        ("logit_bias", {"1" * 5000: 1}),
        ("logit_bias", [5]),
        ("logit_bias", dict.fromkeys(range(1025), 1)),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", "5"),
        ("bad_words", [""]),
        ("bad_words", 5),
        ("bad_words", ["x"] * 257),
        ("bad_words", "x" * 257),
        ("bad_words", "\ud83d"),
        ("stop", "\ud83d"),
        ("structured_outputs", {"regex": 5}),
        ("structured_outputs", {"regex": "a", "json": {}}),
        ("structured_outputs", "json"),
        ("response_format", {"type": "yaml"}),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", NAN),
        ("min_p", -1e-9),
        ("min_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", 2**31),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.0),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("seed", 2**64),
        ("seed", 1.5),
        ("seed", "7"),
        ("stop", ""),
        ("stop", [""]),
        ("stop", ["ok", 3]),
        ("stop", 3),
        ("stop", ["x"] * 17),
        ("stop", "x" * 1025),
        ("stop", b"bytes"),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1.5]),
        ("stop_token_ids", ["1"]),
        ("stop_token_ids", "12"),
        ("stop_token_ids", 5),
        ("stop_token_ids", [2**31]),
        ("stop_token_ids", list(range(129))),
        ("ignore_eos", 1),
        ("skip_special_tokens", "yes"),
        ("include_stop_str_in_output", 0),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert (caught.value.code, caught.value.param) == ("invalid_request", name)
    assert name in caught.value.message


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 2},
        {"top_p": 1},
        {"top_k": -1},
        {"min_p": 1},
        {"seed": -1},
        {"seed": 2**64 - 1},
        {"stop": None},
        {"stop": "x"},
        {"stop": ["x"] * 16},
        {"stop": "x" * 1024},
        {"stop_token_ids": None},
        {"stop_token_ids": ()},
        {"max_tokens": 5, "min_tokens": 5},
        {"presence_penalty": 2, "frequency_penalty": -2, "repetition_penalty": 100},
        {"logit_bias": dict.fromkeys(range(1024), -100)},
        {"logit_bias": {"5": 100, 6: np.float32(-1.5)}},
        {"logprobs": 20, "prompt_logprobs": 0},
        {"logprobs": True},
        {"allowed_token_ids": np.array([3])},
        {"bad_words": "x" * 256},
        {"response_format": {"type": "text"}},
    ],
)
def test_the_edges_of_what_is_allowed(fields: dict[str, Any]) -> None:
    SamplingParams(**fields)


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens must be at most max_tokens"):
        SamplingParams(max_tokens=4, min_tokens=5)


def test_values_are_brought_into_one_form() -> None:
    assert SamplingParams(stop="x").stop == ("x",)
    assert SamplingParams(stop=["b", "a", "b"]).stop == ("b", "a")
    assert SamplingParams(stop_token_ids=[3, 3, 1]).stop_token_ids == (3, 1)
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(seed=-1).seed == 2**64 - 1
    params = SamplingParams(logit_bias={"7": 1, 5: -2}, logprobs=True, structured_outputs={"regex": "a+"})
    assert (params.logit_bias, params.logprobs) == (((5, -2.0), (7, 1.0)), 0)
    assert dataclasses.replace(params, max_tokens=4).logit_bias == params.logit_bias
    assert SamplingParams(response_format={"type": "json_object"}).structure is not None
    assert SamplingParams(response_format={"type": "text"}) == SamplingParams()


def test_a_body_is_read_field_by_field() -> None:
    params = SamplingParams.from_mapping({"temperature": 0.5, "stop": ["x"], "seed": None})
    assert (params.temperature, params.stop, params.seed) == (0.5, ("x",), None)
    with pytest.raises(RequestError) as caught:
        SamplingParams.from_mapping({"temperture": 0.5})
    assert caught.value.param == "temperture"
    assert set(SAMPLING_FIELDS) >= {"temperature", "top_p", "stop", "max_tokens"}


@pytest.mark.parametrize(
    ("name", "value"),
    [("stop_token_ids", [99, 100]), ("allowed_token_ids", [100, 3]), ("logit_bias", {"100": 1, "3": 1})],
)
def test_token_ids_are_checked_against_the_vocabulary(name: str, value: Any) -> None:
    params = SamplingParams(**{name: value})
    params.check_vocabulary(101)
    with pytest.raises(RequestError, match="below the vocabulary size 100, got 100") as caught:
        params.check_vocabulary(100)
    assert caught.value.param == name


def test_numbers_of_numpy_are_numbers() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5), max_tokens=np.int64(3), seed=np.uint64(2**64 - 1), stop_token_ids=np.array([3])
    )
    assert (params.temperature, params.max_tokens, params.seed, params.stop_token_ids) == (0.5, 3, 2**64 - 1, (3,))
    assert type(params.max_tokens) is int


def test_what_vllm_has_besides_is_accepted_where_it_changes_nothing() -> None:
    params = SamplingParams(
        max_tokens=3, presence_penalty=0.0, repetition_penalty=1, logprobs=False, logit_bias={}, detokenize=True
    )
    assert params == SamplingParams(max_tokens=3)
    assert dataclasses.replace(params, max_tokens=4) == SamplingParams(max_tokens=4)


def test_a_temperature_that_would_overflow_is_greedy() -> None:
    assert SamplingParams(temperature=1e-45).is_greedy and SamplingParams(temperature=1e-300).is_greedy
    assert not SamplingParams(temperature=1e-5).is_greedy


@pytest.mark.parametrize("name", ["temperature", "max_tokens", "seed", "top_k", "n", "stop_token_ids"])
def test_a_number_too_long_to_print_is_refused_by_name(name: str) -> None:
    huge = 10**5000
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: [huge] if name == "stop_token_ids" else huge})
    assert caught.value.param == name
    assert len(caught.value.message) < 200
