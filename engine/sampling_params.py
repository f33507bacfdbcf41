"""How one request wants its tokens chosen and where it wants them to end.

Names and meanings are vLLM's and OpenAI's. Everything is checked when the object is made, so that the step loop never
meets a bad value; what depends on the model (vocabulary, context length) is checked by `check_vocabulary` and by
admission.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any, Literal

from pagemill.engine.errors import invalid
from pagemill.engine.values import as_integer, as_number, shown
from pagemill.engine.vllm_arguments import SAMPLING_ARGUMENTS, is_accepted

MAX_CHOICES = 64
MAX_BEAMS = 64
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # characters
MAX_STOP_TOKEN_IDS = 128
LEAST_TEMPERATURE = 1e-5  # below it decoding is greedy
SEED_MASK = (1 << 64) - 1


def _number(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> float:
    number = as_number(value)
    if number is None:
        raise invalid(f"{name} must be a number, got {type(value).__name__}", name)
    bounds = f"{'(' if low_open else '['}{low:g}, {high:g}]"
    if not math.isfinite(number) or number < low or number > high or (low_open and number == low):
        raise invalid(f"{name} must be in {bounds}, got {shown(value)}", name)
    return number


def _temperature(value: object) -> float:
    temperature = _number("temperature", value, 0.0, 100.0)
    # Logits divided by less overflow, and nothing but the likeliest token could be drawn anyway.
    return temperature if temperature >= LEAST_TEMPERATURE else 0.0


def _integer(name: str, value: object, low: int, high: int) -> int:
    integer = as_integer(value)
    if integer is None:
        raise invalid(f"{name} must be an integer, got {type(value).__name__}", name)
    if not low <= integer <= high:
        raise invalid(f"{name} must be in [{low}, {high}], got {shown(value)}", name)
    return integer


def _boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise invalid(f"{name} must be true or false, got {type(value).__name__}", name)
    return value


def _stop_strings(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else value
    if (
        not isinstance(strings, Collection)
        or isinstance(strings, Mapping | bytes)
        or not all(isinstance(item, str) for item in strings)
    ):
        raise invalid("stop must be a string or a list of strings", "stop")
    if len(strings) > MAX_STOP_STRINGS:
        raise invalid(f"stop may hold at most {MAX_STOP_STRINGS} strings, got {len(strings)}", "stop")
    for item in strings:
        if not item:
            raise invalid("stop may not hold an empty string", "stop")
        if len(item) > MAX_STOP_LENGTH:
            raise invalid(f"a stop string may have at most {MAX_STOP_LENGTH} characters, got {len(item)}", "stop")
    return tuple(dict.fromkeys(strings))


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Collection):
        raise invalid(f"{name} must be a list of token ids", name)
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise invalid(f"{name} may hold at most {MAX_STOP_TOKEN_IDS} token ids, got {len(value)}", name)
    return tuple(dict.fromkeys(_integer(name, item, 0, 2**31 - 1) for item in value))


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
    presence_penalty: InitVar[Any] = None
    frequency_penalty: InitVar[Any] = None
    repetition_penalty: InitVar[Any] = None
    logit_bias: InitVar[Any] = None
    allowed_token_ids: InitVar[Any] = None
    bad_words: InitVar[Any] = None
    logprobs: InitVar[Any] = None
    prompt_logprobs: InitVar[Any] = None
    logits_processors: InitVar[Any] = None
    structured_outputs: InitVar[Any] = None
    guided_decoding: InitVar[Any] = None
    truncate_prompt_tokens: InitVar[Any] = None
    spaces_between_special_tokens: InitVar[Any] = None
    detokenize: InitVar[Any] = None
    best_of: InitVar[Any] = None

    def __post_init__(self, *unsupported: Any) -> None:
        for name, value in zip(SAMPLING_ARGUMENTS, unsupported, strict=True):
            if not is_accepted(SAMPLING_ARGUMENTS, name, value):
                raise invalid(f"{name} is not supported yet by this engine; leave it out", name)
        fixed: dict[str, Any] = {
            "n": _integer("n", self.n, 1, MAX_CHOICES),
            "beam_width": _integer("beam_width", self.beam_width, 1, MAX_BEAMS),
            "length_penalty": _number("length_penalty", self.length_penalty, -10.0, 10.0),
            "temperature": _temperature(self.temperature),
            "top_p": _number("top_p", self.top_p, 0.0, 1.0, low_open=True),
            "min_p": _number("min_p", self.min_p, 0.0, 1.0),
            "top_k": max(0, _integer("top_k", self.top_k, -1, 2**31 - 1)),
            "min_tokens": _integer("min_tokens", self.min_tokens, 0, 2**31 - 1),
            "stop": _stop_strings(self.stop),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
        }
        if self.max_tokens is not None:
            fixed["max_tokens"] = _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
            if fixed["min_tokens"] > fixed["max_tokens"]:
                raise invalid(
                    f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}", "min_tokens"
                )
        if self.seed is not None:
            fixed["seed"] = _integer("seed", self.seed, -(2**63), SEED_MASK) & SEED_MASK
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            _boolean(name, getattr(self, name))
        for name, value in fixed.items():
            object.__setattr__(self, name, value)
        if not (isinstance(self.early_stopping, str) and self.early_stopping == "never"):
            _boolean("early_stopping", self.early_stopping)
        if self.beam_width > 1:
            self._check_beams()

    def _check_beams(self) -> None:
        """Raise for what means nothing, or something else, in a beam search."""
        if self.n > self.beam_width:
            raise invalid(f"n must be at most beam_width ({self.beam_width}), got {self.n}", "n")
        if self.temperature not in (0.0, 1.0):
            raise invalid(f"temperature must be 0 or 1 with beam_width, got {self.temperature:g}", "temperature")
        for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0), ("stop", ()), ("min_tokens", 0)):
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
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `invalid_request` where a token id lies outside the model's vocabulary."""
        for token_id in self.stop_token_ids or ():
            if token_id >= vocab_size:
                raise invalid(
                    f"stop_token_ids must be below the vocabulary size {vocab_size}, got {token_id}", "stop_token_ids"
                )


SAMPLING_FIELDS: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(SamplingParams))
