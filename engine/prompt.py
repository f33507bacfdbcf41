"""From what a caller sends to a checked request: text, chat messages or token ids."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pagemill.engine.admission import Limits, check_prompt, check_request, resolve_max_tokens
from pagemill.engine.errors import invalid
from pagemill.engine.request import Request
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.tokenizer import Tokenizer
from pagemill.engine.values import as_integer


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A prompt that is tokens already."""

    token_ids: Sequence[int]


Messages = Sequence[Mapping[str, Any]]
Prompt = str | TokenIds | Messages


def tokenize(prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    """Token ids of a prompt. Raises `invalid_request` on wrong types, and on text without a tokenizer."""
    if isinstance(prompt, TokenIds):
        return _token_ids(prompt.token_ids)
    field = "prompt" if isinstance(prompt, str) else "messages"
    if tokenizer is None:
        raise invalid(f"this engine runs without a tokenizer: send prompt_token_ids instead of {field}", field)
    return tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.apply_chat(prompt)


def _token_ids(given: object) -> list[int]:
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        raise invalid(f"prompt_token_ids must be a list of integers, got {type(given).__name__}", "prompt_token_ids")
    token_ids = list(given)
    if all(type(token_id) is int for token_id in token_ids):
        return token_ids
    integers = [as_integer(token_id) for token_id in token_ids]
    if None in integers:
        raise invalid("prompt_token_ids must be a list of integers", "prompt_token_ids")
    return cast("list[int]", integers)


def make_request(
    request_id: str,
    prompt: Prompt,
    params: SamplingParams,
    limits: Limits,
    tokenizer: Tokenizer | None,
    *,
    tenant: str = "default",
    cache_salt: str = "",
    priority: int = 1,
    seed: int | None = None,
) -> Request:
    """Tokenise, check and number a request. Raises `RequestError` for whatever this engine cannot serve.

    `seed`: the one kept in the request's record, if it ran before; else the parameters', else a new one.
    """
    if params.stop and tokenizer is None:
        raise invalid("stop strings need a tokenizer, and this engine runs without one", "stop")
    token_ids = tokenize(prompt, tokenizer)
    check_prompt(token_ids, limits.vocab_size)
    if seed is None:
        seed = params.seed if params.seed is not None else secrets.randbits(64)
    request = Request(
        request_id=request_id,
        prompt_token_ids=token_ids,
        params=params,
        seed=seed,
        max_tokens=resolve_max_tokens(len(token_ids), params, limits),
        tenant=tenant,
        cache_salt=cache_salt,
        priority=priority,
    )
    check_request(request, limits)
    return request
