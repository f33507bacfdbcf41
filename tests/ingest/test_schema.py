"""The request body and the fields around it, without a server."""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.engine.chat import CHAT_FIELDS, Chat
from pagemill.engine.errors import ConfigError, RequestError
from pagemill.engine.sampling_params import SAMPLING_FIELDS
from pagemill.ingest import schema
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.entries import UnreadableEntry, read_id, read_request
from pagemill.ingest.keys import QueueKeys, is_request_id
from pagemill.ingest.schema import RequestBody, UnreadableBody, encode_body, parse_body

MAX = 1 << 20


def test_a_full_body() -> None:
    body = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}],
                "name": "Ann",
            },
        ],
        "model": "m",
        "max_tokens": 3,
        "temperature": 0,
        "stop": "END",
        "stream": False,
        "flush_ms": 0,
        "tenant": "acme",
        "cache_salt": "s",
        "priority": 2,
        "ttl_ms": 1000,
        "max_attempts": 1,
        "metadata": {"k": "v"},
        "n": 1,
        "presence_penalty": 0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "logprobs": None,
        "response_format": {"type": "text"},
        "callback": None,
        "on_disconnect": "continue",
    }
    parsed = parse_body(orjson.dumps(body), MAX)
    assert parsed.chat == Chat(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello", "name": "Ann"}]
    )
    assert (parsed.params.max_tokens, parsed.params.temperature, parsed.params.stop) == (3, 0.0, ("END",))
    assert (parsed.stream, parsed.priority, parsed.tenant, parsed.metadata) == (False, 2, "acme", {"k": "v"})
    assert parsed.prompt is None and parsed.prompt_token_ids is None


def test_null_means_the_default() -> None:
    parsed = parse_body(b'{"prompt":"x","messages":null,"temperature":null,"stream":null,"ttl_ms":null}', MAX)
    assert parsed == RequestBody(prompt="x")


def test_the_protocol_page_names_every_field() -> None:
    page = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    body = page.split("### The body")[1].split("### Level 1")[0]
    named = {
        name for row in body.splitlines() if row.startswith("| `") for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    named |= {"prompt", "messages", "prompt_token_ids"}
    assert named == {*schema._PROMPTS, *CHAT_FIELDS, *schema._OPTIONS, *SAMPLING_FIELDS}


def test_limits() -> None:
    def refused(**fields: Any) -> str | None:
        with pytest.raises(RequestError) as caught:
            RequestBody.from_mapping({"prompt": "x", **fields})
        return caught.value.param

    assert refused(metadata={str(number): "" for number in range(17)}) == "metadata"
    assert refused(metadata={"k": "x" * 513}) == "metadata.k"
    assert refused(metadata={"k" * 65: ""}) == "metadata"
    assert refused(idempotency_key="") == "idempotency_key"
    assert refused(max_attempts=0) == "max_attempts"
    assert refused(flush_ms=-1) == "flush_ms"
    assert refused(ttl_ms=True) == "ttl_ms"
    assert refused(**{"x" * 1000: 1}) == "x" * 64 + "..."
    RequestBody.from_mapping({"prompt": "x", "metadata": {str(number): "x" * 512 for number in range(16)}})
    assert parse_body(b'{"prompt":"' + b"x" * (MAX - 13) + b'"}', MAX).prompt == "x" * (MAX - 13)
    with pytest.raises(RequestError) as caught:
        parse_body(b'{"prompt":"' + b"x" * (MAX - 12) + b'"}', MAX)
    assert caught.value.code == "too_large"


def test_unreadable_is_told_from_refused() -> None:
    for data in (b"", b"\xff", b"{", b'{"prompt":"x"} x', b'{"temperature":NaN}', b"[" * 5000):
        with pytest.raises(UnreadableBody):
            parse_body(data, MAX)
    for data in (b"[]", b'"x"', b"1", b"{}", b'{"prompt":' + b"[" * 40 + b"]" * 40 + b"}"):
        with pytest.raises(RequestError) as caught:
            parse_body(data, MAX)
        assert not isinstance(caught.value, UnreadableBody)
    with pytest.raises(RequestError, match="nested deeper than 32"):
        parse_body(b'{"metadata":' + b"[" * 40 + b"1" + b"]" * 40 + b"}", MAX)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3),
    max_leaves=8,
)
NAMES = ("prompt", "messages", "prompt_token_ids", "max_tokens", "temperature", "stop", "seed", "n", "metadata", "x")
names = st.sampled_from(NAMES)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(names, json_values, max_size=5))
def test_whatever_is_sent_is_parsed_or_refused_by_name(body: dict[str, Any]) -> None:
    try:
        data = encode_body(body, MAX)
    except RequestError as error:
        assert error.code in ("invalid_request", "too_large") and error.param
        return
    assert parse_body(data, MAX) == RequestBody.from_mapping(body)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40))
def test_whatever_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(RequestError):
        parse_body(data, MAX)


def test_fields_of_an_entry() -> None:
    good = {b"v": b"1", b"id": b"a.b-c_1", b"body": b"{}"}
    assert read_id(good) == "a.b-c_1"
    assert read_id({b"v": b"1", b"id": b"a", b"blob": b"1"}) == "a"
    bad: list[tuple[dict[bytes, bytes], str]] = [
        ({}, "unknown_version"),
        ({**good, b"v": b"01"}, "unknown_version"),
        ({b"v": b"1", b"body": b"{}"}, "no_id"),
        ({**good, b"id": b""}, "invalid_id"),
        ({**good, b"id": b"-a"}, "invalid_id"),
        ({**good, b"id": b"a\n"}, "invalid_id"),
        ({**good, b"id": "ä".encode()}, "invalid_id"),
        ({b"v": b"1", b"id": b"a", b"blob": b"0"}, "no_body"),
    ]
    for fields, reason in bad:
        with pytest.raises(UnreadableEntry) as caught:
            read_id(fields)
        assert caught.value.reason == reason
    body = read_request({b"tenant": b"t", b"ttl_ms": b"5"}, b'{"prompt":"x","tenant":"u","ttl_ms":9}', MAX)
    assert (body.tenant, body.ttl_ms) == ("t", 5)


def test_ids_name_their_shard() -> None:
    keys = QueueKeys("pm", "q", 50)
    seen = set()
    for _ in range(300):
        request_id = keys.new_id()
        assert is_request_id(request_id)
        shard = keys.shard_number(request_id)
        seen.add(shard)
        assert int(request_id[1:].partition("_")[0], 36) == shard
        assert keys.shard_of(request_id).record(request_id) == f"pm:{{q.{shard}}}:req:{request_id}"
    assert len(seen) > 40
    # Requests with one idempotency key meet on one shard, whatever their ids.
    assert len({keys.shard_number(keys.new_id("order-991")) for _ in range(20)}) == 1
    # A prefix that names a shard which is not there says nothing; nor do ids that only look similar.
    far = "rzz_" + keys.new_id().partition("_")[2]
    assert keys.shard_number(far) == zlib.crc32(far.encode()) % 50
    assert keys.shard_number("my-request-1") == zlib.crc32(b"my-request-1") % 50
    ids = [QueueKeys("pm", "q").new_id() for _ in range(100)]
    assert len(set(ids)) == 100 and all(request_id[15] == "7" for request_id in ids)


def test_queue_settings_are_checked() -> None:
    for bad in (
        {"redis_url": "localhost:6379"},
        {"key_prefix": ""},
        {"queue": "a b"},
        {"queue": "a}b"},
        {"shards": 0},
        {"shards": True},
        {"replay_ttl_s": 7200.0},
        {"heartbeat_timeout_s": float("nan")},
        {"max_body_bytes": 10},
    ):
        with pytest.raises(ConfigError) as caught:
            QueueConfig(**bad)  # type: ignore[arg-type]
        assert next(iter(bad)) in str(caught.value)
    assert all("help" in field.metadata for field in QueueConfig.__dataclass_fields__.values())


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"prompt": "a\ud800"}, "prompt"),
        ({"prompt": "a", "stop": ["\ud800"]}, "stop"),
        ({"prompt": "a", "cache_salt": "\ud800"}, "cache_salt"),
        ({"prompt": "a", "metadata": {"k": "\ud800"}}, "metadata"),
        ({"prompt": "a", "ttl_ms": 10**5000}, "ttl_ms"),
        ({"prompt": "a", "seed": -(10**5000)}, "seed"),
        ({"prompt_token_ids": [10**5000]}, "prompt_token_ids"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_has_no_json_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(RequestError) as caught:
        encode_body(fields, MAX)
    assert (caught.value.code, caught.value.param) == ("invalid_request", name)
    assert len(caught.value.message) < 300


def test_values_of_python_and_numpy_are_written_as_plain_json() -> None:
    body = {
        "prompt": "a",
        "max_tokens": np.int64(3),
        "temperature": np.float32(0.5),
        "priority": np.int32(2),
        "stop": {"b", "a"},
        "stop_token_ids": np.array([3, 5]),
    }
    assert orjson.loads(encode_body(body, MAX)) == {
        "prompt": "a",
        "max_tokens": 3,
        "temperature": 0.5,
        "priority": 2,
        "stop": ["a", "b"],
        "stop_token_ids": [3, 5],
    }


@pytest.mark.parametrize("value", [5, None, b"x", ["x"], "", "a b", "abc\n", "\u0661"])
def test_what_is_no_request_id(value: object) -> None:
    assert not is_request_id(value)
