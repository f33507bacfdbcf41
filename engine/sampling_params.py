"""How one request wants its tokens chosen and where it wants them to end.

Names and meanings are vLLM's and OpenAI's. Everything is checked when the object is made, so that the step loop never
meets a bad value; what depends on the model (vocabulary, context length) is checked by `check_vocabulary` and by
admission.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any, Literal

from pagemill.engine import checks
from pagemill.engine.errors import invalid
from pagemill.engine.structured_outputs import StructuredOutputs
from pagemill.engine.vllm_arguments import SAMPLING_ARGUMENTS, is_accepted

MAX_CHOICES = 64
MAX_BEAMS = 64
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # characters
MAX_STOP_TOKEN_IDS = 128
MAX_LOGPROBS = 20
MAX_BIASED_TOKENS = 1024
MAX_ALLOWED_TOKENS = 262_144
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 256  # characters
LEAST_TEMPERATURE = 1e-5  # below it decoding is greedy
SEED_MASK = (1 << 64) - 1


def _temperature(value: object) -> float:
    temperature = checks.number("temperature", value, 0.0, 100.0)
    # Logits divided by less overflow, and nothing but the likeliest token could be drawn anyway.
    return temperature if temperature >= LEAST_TEMPERATURE else 0.0


def _count(name: str, value: object) -> int | None:
    """How many alternatives to list; None: no log-probabilities at all. OpenAI's chat says true for none beside the
    chosen token."""
    if value is None or value is False:
        return None
    return 0 if value is True else checks.integer(name, value, 0, MAX_LOGPROBS)


def _as_mapping(biases: object) -> object:
    """Checked biases are pairs; whoever copies parameters gives them back."""
    return dict(biases) if isinstance(biases, tuple) and all(isinstance(pair, tuple) for pair in biases) else biases


def _structure(structured_outputs: Any, response_format: Any) -> StructuredOutputs | None:
    if response_format is None:
        if structured_outputs is None or isinstance(structured_outputs, StructuredOutputs):
            return structured_outputs
        return StructuredOutputs.from_vllm(structured_outputs)
    if structured_outputs is not None:
        raise invalid("response_format and structured_outputs cannot be combined", "response_format")
    return StructuredOutputs.from_response_format(response_format)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Decoding parameters of one request. Raises `RequestError("invalid_request")`, naming the field, on a bad value.

    n: choices to generate; their prompt is computed and stored once.
    temperature: 0 (or less than 0.00001) is greedy; otherwise logits are divided by it.
    top_k: keep the k most likely tokens (0 or -1: all). top_p: the smallest set with this probability. min_p: drop
        tokens less likely than this share of the likeliest one.
    seed: with it, the same request gives the same tokens whatever runs beside it. None: drawn once by the engine.
    max_tokens: tokens to generate at most; None: what the context leaves, at most `default_max_tokens`.
    min_tokens: no end-of-sequence and no stop before this many tokens.
    stop: strings that end the text; they are not part of it unless include_stop_str_in_output.
    stop_token_ids: token ids that end the text. ignore_eos: the model's end-of-sequence does not end it.
    beam_width: more than 1 searches with so many beams and returns the best n; nothing is drawn then, so temperature
        may only be 0 or 1 and top_k, top_p, min_p are off. length_penalty: exponent of the length by which a beam's
        log-probability is divided. early_stopping: true stops at beam_width finished beams, false when no running beam
        looks better than them, "never" when none can become better (the three rules of transformers).
    presence_penalty, frequency_penalty: taken off the logit of every token generated before, once and for each time.
    repetition_penalty: the logit of every token of prompt and output is divided by it where positive, else multiplied.
    logit_bias: token id -> number added to its logit. allowed_token_ids: nothing else is ever sampled. bad_words: the
        token that would complete one of these texts, in either of its spellings (after a space or not), is not sampled.
    logprobs: list so many likeliest tokens with log-probabilities beside each generated one, of the distribution before
        any of these parameters; 0: the generated token's alone. prompt_logprobs: the same for the prompt's tokens.
    structured_outputs: what the text has to be (see `StructuredOutputs`); response_format: OpenAI's way to say so.
    The names after it are vLLM's; they are refused except at the value that changes nothing.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] | Sequence[str] | str | None = ()
    stop_token_ids: tuple[int, ...] | Sequence[int] | None = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    beam_width: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] | Mapping[Any, float] | None = ()
    allowed_token_ids: tuple[int, ...] | Sequence[int] | None = None
    bad_words: tuple[str, ...] | Sequence[str] | str | None = ()
    logprobs: int | bool | None = None
    prompt_logprobs: int | bool | None = None
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None
    response_format: InitVar[Any] = None
    logits_processors: InitVar[Any] = None
    guided_decoding: InitVar[Any] = None
    truncate_prompt_tokens: InitVar[Any] = None
    spaces_between_special_tokens: InitVar[Any] = None
    detokenize: InitVar[Any] = None
    best_of: InitVar[Any] = None

    def __post_init__(self, response_format: Any, *unsupported: Any) -> None:
        for name, value in zip(SAMPLING_ARGUMENTS, unsupported, strict=True):
            if not is_accepted(SAMPLING_ARGUMENTS, name, value):
                raise invalid(f"{name} is not supported yet by this engine; leave it out", name)
        fixed: dict[str, Any] = {
            "n": checks.integer("n", self.n, 1, MAX_CHOICES),
            "beam_width": checks.integer("beam_width", self.beam_width, 1, MAX_BEAMS),
            "length_penalty": checks.number("length_penalty", self.length_penalty, -10.0, 10.0),
            "temperature": _temperature(self.temperature),
            "top_p": checks.number("top_p", self.top_p, 0.0, 1.0, low_open=True),
            "min_p": checks.number("min_p", self.min_p, 0.0, 1.0),
            "top_k": max(0, checks.integer("top_k", self.top_k, -1, 2**31 - 1)),
            "min_tokens": checks.integer("min_tokens", self.min_tokens, 0, 2**31 - 1),
            "stop": checks.strings("stop", self.stop, most=MAX_STOP_STRINGS, longest=MAX_STOP_LENGTH),
            "stop_token_ids": checks.token_ids("stop_token_ids", self.stop_token_ids, most=MAX_STOP_TOKEN_IDS),
            "presence_penalty": checks.number("presence_penalty", self.presence_penalty, -2.0, 2.0),
            "frequency_penalty": checks.number("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            "repetition_penalty": checks.number(
                "repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_open=True
            ),
            "logit_bias": checks.token_biases(
                "logit_bias", _as_mapping(self.logit_bias), -100.0, 100.0, most=MAX_BIASED_TOKENS
            ),
            "bad_words": checks.strings("bad_words", self.bad_words, most=MAX_BAD_WORDS, longest=MAX_BAD_WORD_LENGTH),
            "logprobs": _count("logprobs", self.logprobs),
            "prompt_logprobs": _count("prompt_logprobs", self.prompt_logprobs),
            "structured_outputs": _structure(self.structured_outputs, response_format),
        }
        if self.allowed_token_ids is not None:
            fixed["allowed_token_ids"] = allowed = checks.token_ids(
                "allowed_token_ids", self.allowed_token_ids, most=MAX_ALLOWED_TOKENS
            )
            if not allowed:
                raise invalid("allowed_token_ids must not be empty", "allowed_token_ids")
        if self.max_tokens is not None:
            fixed["max_tokens"] = checks.integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
            if fixed["min_tokens"] > fixed["max_tokens"]:
                raise invalid(
                    f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}", "min_tokens"
                )
        if self.seed is not None:
            fixed["seed"] = checks.integer("seed", self.seed, -(2**63), SEED_MASK) & SEED_MASK
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            checks.boolean(name, getattr(self, name))
        for name, value in fixed.items():
            object.__setattr__(self, name, value)
        if not (isinstance(self.early_stopping, str) and self.early_stopping == "never"):
            checks.boolean("early_stopping", self.early_stopping)
        if self.ignore_eos and self.structured_outputs is not None:
            raise invalid(
                "ignore_eos cannot be combined with structured_outputs, which end where they are whole", "ignore_eos"
            )
        if self.beam_width > 1:
            self._check_beams()

    def _check_beams(self) -> None:
        """Raise for what means nothing, or something else, in a beam search."""
        if self.n > self.beam_width:
            raise invalid(f"n must be at most beam_width ({self.beam_width}), got {self.n}", "n")
        if self.temperature not in (0.0, 1.0):
            raise invalid(f"temperature must be 0 or 1 with beam_width, got {self.temperature:g}", "temperature")
        neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "stop": (), "min_tokens": 0}
        neutral |= {"logprobs": None, "prompt_logprobs": None}
        for name, off in neutral.items():
            if getattr(self, name) != off:
                raise invalid(f"{name} cannot be combined with beam_width", name)

    @classmethod
    def from_mapping(cls, fields: Mapping[str, Any]) -> SamplingParams:
        """Make parameters from the flat fields of a request body; a JSON null means the default."""
        unknown = sorted(set(fields) - set(SAMPLING_FIELDS))
        if unknown:
            raise invalid(f"unknown field {unknown[0]!r}", unknown[0])
        return cls(**{name: value for name, value in fields.items() if value is not None})

    @property
    def uses_beams(self) -> bool:
        return self.beam_width > 1

    @property
    def num_sequences(self) -> int:
        """Sequences that run at once for the request."""
        return self.beam_width if self.beam_width > 1 else self.n

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def structure(self) -> StructuredOutputs | None:
        """`structured_outputs` as checked."""
        return self.structured_outputs if isinstance(self.structured_outputs, StructuredOutputs) else None

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as checked: pairs of token id and number, by ascending id."""
        return self.logit_bias if isinstance(self.logit_bias, tuple) else ()

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `invalid_request` where a token id lies outside the model's vocabulary."""
        biased = tuple(token_id for token_id, _ in self.biases)
        named = (
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids),
            ("logit_bias", biased),
        )
        for name, token_ids in named:
            highest = max(token_ids or (), default=-1)
            if highest >= vocab_size:
                raise invalid(f"{name} must be below the vocabulary size {vocab_size}, got {highest}", name)


SAMPLING_FIELDS: tuple[str, ...] = (
    *(field.name for field in dataclasses.fields(SamplingParams)),
    "response_format",
)
