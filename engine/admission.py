"""Refusing what cannot be served, before it costs anybody anything."""

from __future__ import annotations

from dataclasses import dataclass

from pagemill.engine.errors import RequestError, invalid
from pagemill.engine.reasoning import ReasoningParserSetting
from pagemill.engine.request import Request
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.tool_calls import ToolParserSetting
from pagemill.engine.values import shown


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model and the pool allow. Sizes in tokens, `num_blocks` without the null block."""

    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    default_max_tokens: int
    max_num_seqs: int
    eos_token_ids: tuple[int, ...] = ()
    tool_call_parser: ToolParserSetting = "auto"
    reasoning_parser: ReasoningParserSetting = "auto"


def resolve_max_tokens(prompt_tokens: int, params: SamplingParams, limits: Limits) -> int:
    """How many tokens the request may generate: what it asks for, at most what the context leaves.

    Raises `prompt_too_long` where the context leaves room for none.
    """
    room = limits.max_model_len - prompt_tokens
    if room < 1:
        raise RequestError(
            "prompt_too_long",
            f"the prompt has {prompt_tokens} tokens; with at least one to generate, at most "
            f"{limits.max_model_len - 1} fit max_model_len {limits.max_model_len}",
            param="prompt",
        )
    return min(room, params.max_tokens if params.max_tokens is not None else limits.default_max_tokens)


def check_prompt(prompt_token_ids: list[int], vocab_size: int) -> None:
    """Raise `invalid_request` on an empty prompt or a token id outside the vocabulary."""
    if not prompt_token_ids:
        raise invalid("the prompt holds no token", "prompt")
    low, high = min(prompt_token_ids), max(prompt_token_ids)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise invalid(f"prompt_token_ids must be in [0, {vocab_size - 1}], got {shown(bad)}", "prompt_token_ids")


def certain_slots(request: Request) -> int:
    """KV slots that the request will need for certain, whatever the model says."""
    params = request.params
    endless = params.ignore_eos and not params.stop and not params.stop_token_ids
    least = request.max_tokens if endless else min(request.max_tokens, max(1, params.min_tokens))
    return max(request.num_tokens, len(request.prompt_token_ids) + least - 1)


def check_request(request: Request, limits: Limits) -> None:
    """Raise the named error of a request that this engine can never serve."""
    check_prompt(request.prompt_token_ids, limits.vocab_size)
    request.params.check_vocabulary(limits.vocab_size)
    if request.params.num_sequences > limits.max_num_seqs:
        field = "beam_width" if request.params.uses_beams else "n"
        raise invalid(
            f"{field} must be at most {limits.max_num_seqs}, the sequences that run at once here, "
            f"got {request.params.num_sequences}",
            field,
        )
    slots = certain_slots(request)
    blocks = -(-slots // limits.block_size)
    if blocks > limits.num_blocks:
        raise RequestError(
            "never_fits",
            f"the request needs {slots} tokens = {blocks} blocks of {limits.block_size}; the pool has "
            f"{limits.num_blocks}",
            param="prompt",
        )
