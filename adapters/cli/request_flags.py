"""Flags for the fields of a request."""

from __future__ import annotations

import argparse
from typing import Any, get_type_hints

import orjson

from pagemill.engine.sampling_params import SAMPLING_FIELDS, SamplingParams

BODY_PREFIX = "body:"

_SAMPLING_HELP = {
    "n": "choices to generate from the prompt",
    "beam_width": "search with so many beams and give the best n",
    "length_penalty": "exponent of the length that a beam's log-probability is divided by",
    "early_stopping": "when a beam search ends, as in transformers",
    "temperature": "0 is greedy; default 1",
    "top_k": "keep the k most likely tokens; default all",
    "top_p": "keep the smallest set of tokens with this probability; default 1",
    "min_p": "drop tokens less likely than this share of the likeliest; default 0",
    "seed": "the same seed gives the same tokens",
    "max_tokens": "tokens to generate at most",
    "min_tokens": "tokens to generate at least",
    "stop": "text that ends the output; may be given several times",
    "stop_token_ids": "token ids that end the output, with commas between",
    "ignore_eos": "go on after the model's end-of-sequence",
    "skip_special_tokens": "leave special tokens out of the text (default)",
    "include_stop_str_in_output": "keep the stop string in the text",
    "presence_penalty": "taken off the logits of tokens generated before; default 0",
    "frequency_penalty": "taken off them once for each time; default 0",
    "repetition_penalty": "divides the logits of tokens of prompt and output; default 1",
    "logit_bias": 'added to logits, as JSON: {"token id": number}',
    "allowed_token_ids": "the only token ids that may be generated, with commas between",
    "bad_words": "text that is not generated; may be given several times",
    "logprobs": "log-probabilities of each token and of so many likeliest ones (see --json)",
    "prompt_logprobs": "the same for the prompt",
    "structured_outputs": 'what the text has to be, as JSON: {"json": SCHEMA}, {"regex": "..."}, {"choice": [...]}',
    "response_format": 'the same as OpenAI writes it: {"type": "json_object"}',
}
_IDS = ("stop_token_ids", "allowed_token_ids")
_TEXTS = ("stop", "bad_words")
_OBJECTS = ("logit_bias", "structured_outputs", "response_format")


def add_request_flags(parser: argparse.ArgumentParser) -> Any:
    """Adds the groups "request" and "decoding", and gives the first. Values lie under BODY_PREFIX and the field."""
    body = parser.add_argument_group("request")
    body.add_argument(
        "--model", dest=BODY_PREFIX + "model", metavar="NAME", help="served model name; default: what the queue serves"
    )
    body.add_argument(
        "--priority", dest=BODY_PREFIX + "priority", type=int, metavar="0|1|2", help="0 high, 1 normal, 2 batch"
    )
    body.add_argument("--tenant", dest=BODY_PREFIX + "tenant", metavar="NAME", help="whose request this is")
    body.add_argument("--ttl-ms", dest=BODY_PREFIX + "ttl_ms", type=int, metavar="MS", help="deadline from acceptance")
    body.add_argument(
        "--cache-salt", dest=BODY_PREFIX + "cache_salt", metavar="TEXT", help="share prefixes only within this salt"
    )
    body.add_argument(
        "--idempotency-key",
        dest=BODY_PREFIX + "idempotency_key",
        metavar="KEY",
        help="submitting again gives the same request",
    )
    section = parser.add_argument_group("decoding")
    hints = get_type_hints(SamplingParams)
    for name in SAMPLING_FIELDS:
        _add_sampling(section, name, hints[name])
    return body


def _add_sampling(section: Any, name: str, hint: Any) -> None:
    flag, dest, text = "--" + name.replace("_", "-"), BODY_PREFIX + name, _SAMPLING_HELP.get(name, "")
    if hint is bool:
        section.add_argument(flag, dest=dest, action=argparse.BooleanOptionalAction, help=text)
    elif name in _TEXTS:
        section.add_argument(flag, dest=dest, action="append", metavar="TEXT", help=text)
    elif name in _OBJECTS:
        section.add_argument(flag, dest=dest, type=_object, metavar="JSON", help=text)
    elif name in _IDS:
        section.add_argument(flag, dest=dest, type=_ids, metavar="IDS", help=text)
    elif name == "early_stopping":
        section.add_argument(flag, dest=dest, type=_early_stopping, metavar="true|false|never", help=text)
    else:
        section.add_argument(flag, dest=dest, type=float if hint is float else int, help=text, metavar="N")


def _early_stopping(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text, text)


def _object(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error


def _ids(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
