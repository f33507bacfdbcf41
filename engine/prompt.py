"""From what a caller sends to a checked request: text, chat messages or token ids."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from pagemill.engine.admission import Limits, check_prompt, check_request, resolve_max_tokens
from pagemill.engine.chat import Chat
from pagemill.engine.errors import RequestError, invalid
from pagemill.engine.grammar import Grammar, GrammarCompiler
from pagemill.engine.logit_rules import LogitRules
from pagemill.engine.reasoning import FORMS, ReasoningParserName, in_prompt
from pagemill.engine.reasoning_gate import GatedGrammar, ReasoningGate
from pagemill.engine.request import Request
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.structured_outputs import StructuredOutputs
from pagemill.engine.tokenizer import Tokenizer
from pagemill.engine.tool_calls import ToolParserName
from pagemill.engine.values import as_integer


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A prompt that is tokens already."""

    token_ids: Sequence[int]


_CHARACTERS = 16  # for each token of the context: the text that is counted before the rest
_LAST_TOKENS = 32  # of a prompt, in which the beginning of an answer is looked for
Prompt = str | TokenIds | Chat


def tokenize(prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    """Token ids of a prompt. Raises `invalid_request` on wrong types, and on text without a tokenizer."""
    if isinstance(prompt, TokenIds):
        return _token_ids(prompt.token_ids)
    field = "prompt" if isinstance(prompt, str) else "messages"
    if tokenizer is None:
        raise invalid(f"this engine runs without a tokenizer: send prompt_token_ids instead of {field}", field)
    return tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.apply_chat(prompt)


def _check_beginning(prompt: str | Chat, tokenizer: Tokenizer, limits: Limits) -> None:
    """Raise `prompt_too_long` where the beginning of a text has twice the tokens that fit: to count those of a
    megabyte takes a second, and a refusal should come at once."""
    text = prompt if isinstance(prompt, str) else prompt.text
    beginning = text[: _CHARACTERS * limits.max_model_len]
    if len(beginning) < len(text) and len(tokenizer.encode(beginning)) >= 2 * limits.max_model_len:
        raise RequestError(
            "prompt_too_long",
            f"the prompt has {len(text)} characters, the first {len(beginning)} of which are too many tokens already; "
            f"with at least one to generate, at most {limits.max_model_len - 1} tokens fit max_model_len "
            f"{limits.max_model_len}",
            param="prompt",
        )


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
    compiler: GrammarCompiler | None = None,
) -> Request:
    """Tokenise, check and number a request. Raises `RequestError` for whatever this engine cannot serve. Takes as long
    as its text and its grammar do, so it is called off the step loop.

    `seed`: the one kept in the request's record, if it ran before; else the parameters', else a new one.
    """
    if params.stop and tokenizer is None:
        raise invalid("stop strings need a tokenizer, and this engine runs without one", "stop")
    if tokenizer is not None and not isinstance(prompt, TokenIds):
        _check_beginning(prompt, tokenizer, limits)
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
    structure = params.structure
    if isinstance(prompt, Chat) and tokenizer is not None:
        request.reasoning_parser = _reasoning_parser(prompt, token_ids, tokenizer, limits)
    if isinstance(prompt, Chat) and prompt.choice is not None and tokenizer is not None:
        request.tool_parser = _tool_parser(tokenizer, limits)
        forced = prompt.choice.structure(prompt.tools or ())
        if forced is not None:
            if params.ignore_eos:
                raise invalid("ignore_eos cannot be combined with a tool_choice that forces a call", "ignore_eos")
            request.tool_parser, structure = "json", forced
    request.rules = _rules(params, structure, limits, tokenizer, compiler, request.reasoning_parser)
    return request


def _reasoning_parser(
    chat: Chat, token_ids: Sequence[int], tokenizer: Tokenizer, limits: Limits
) -> ReasoningParserName | None:
    """The form of the reasoning that is to come, by the model and by what its turn begins with."""
    chosen = tokenizer.reasoning_parser if limits.reasoning_parser == "auto" else limits.reasoning_parser
    if chosen is None or chosen == "none":
        return None
    if chat.continue_final_message:
        return in_prompt(chosen, chat.messages[-1]["content"])
    end = tokenizer.decode(token_ids[-_LAST_TOKENS:], skip_special_tokens=False).rstrip()
    return in_prompt(chosen, next((marker for marker in FORMS[chosen].markers if end.endswith(marker)), ""))


def _tool_parser(tokenizer: Tokenizer, limits: Limits) -> ToolParserName | None:
    chosen = limits.tool_call_parser
    if chosen == "auto":
        return tokenizer.tool_parser
    return None if chosen == "none" else chosen


def _rules(
    params: SamplingParams,
    structure: StructuredOutputs | None,
    limits: Limits,
    tokenizer: Tokenizer | None,
    compiler: GrammarCompiler | None,
    reasoning_parser: ReasoningParserName | None,
) -> LogitRules | None:
    grammar: Grammar | GatedGrammar | None = None
    if structure is not None:
        if compiler is None:
            raise invalid("structured_outputs need a tokenizer, and this engine runs without one", "structured_outputs")
        grammar = compiler.compile(structure)
        if reasoning_parser is not None and tokenizer is not None:
            grammar = GatedGrammar(grammar, ReasoningGate.of(tokenizer, reasoning_parser))
    bad_sequences: list[tuple[int, ...]] = []
    if params.bad_words:
        if tokenizer is None:
            raise invalid("bad_words need a tokenizer, and this engine runs without one", "bad_words")
        spellings = [ids for word in params.bad_words for ids in tokenizer.spellings(word, "bad_words")]
        bad_sequences = [tuple(ids) for ids in spellings if ids and max(ids) < limits.vocab_size]
    return LogitRules.of(params, limits.vocab_size, limits.eos_token_ids, bad_sequences, grammar)
