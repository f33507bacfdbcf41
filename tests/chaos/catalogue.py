"""The requests of a run, and what they answer when nothing goes wrong.

A few hundred bodies are sent over and over; each is run once on an engine that nobody disturbs. Bodies whose tokens
hang by a thread are not used: a batch of another size may differ from it in the last bit of a logit, and two tokens
that are as close as that would change places without any fault.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagemill.ingest.client import AsyncClient

WORDS = ("a queue", "is", "the stream", "of tokens", "engine", "reads", "\u00e9t\u00e9", "\u6d41", "and", "writes", ";")
LEAST_GAP = 1e-3  # natural logarithms between the two likeliest tokens


@dataclass(frozen=True, slots=True)
class Answer:
    """What one choice of a body is: its tokens, its text and why it ended."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Task:
    """A body and its undisturbed answer, choice by choice."""

    body: dict[str, Any]
    answers: tuple[Answer, ...]


def make_bodies(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Request bodies of many kinds: greedy and seeded, choices, stop strings, structure, penalties, no stream."""
    return [_body(rng) for _ in range(count)]


def _body(rng: random.Random) -> dict[str, Any]:
    prompt = " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": rng.choice((1, 4, 12, 24, 40, 80)), "temperature": 0}
    if rng.random() < 0.3:
        body |= {"temperature": 0.8, "seed": rng.randrange(1 << 40), "top_p": 0.95}
    kind = rng.random()
    if kind < 0.1:
        body |= {"n": 2, "temperature": 0.9, "seed": rng.randrange(1 << 40)}
    elif kind < 0.2:
        body |= {"stop": ["e", "\ufffd("]}
    elif kind < 0.3:
        body |= {"structured_outputs": {"regex": "[a-z]{3,30} ?[0-9]*"}}
    elif kind < 0.4:
        body |= {"repetition_penalty": 1.3, "presence_penalty": 0.5}
    if rng.random() < 0.1:
        body["stream"] = False
    if rng.random() < 0.5:
        body["flush_ms"] = rng.choice((0, 5, 100))
    return body


async def undisturbed(client: AsyncClient, bodies: Sequence[dict[str, Any]]) -> list[Task]:
    """Run each body and keep those whose answer is sure."""
    tasks = await asyncio.gather(*(_answer(client, body) for body in bodies))
    return [task for task in tasks if task is not None]


async def _answer(client: AsyncClient, body: dict[str, Any]) -> Task | None:
    handle = await client.submit(**body, logprobs=2)
    result = await handle.result(timeout=120)
    for choice in result.choices:
        for position in choice.logprobs or ():
            best = sorted((top["logprob"] or -99.0 for top in position["top_logprobs"]), reverse=True)
            if len(best) > 1 and best[0] - best[1] < LEAST_GAP:
                return None
    answers = [Answer(tuple(c.token_ids), c.text, str(c.finish_reason)) for c in result.choices]
    again = await (await client.submit(**body)).result(timeout=120)
    if [tuple(choice.token_ids) for choice in again.choices] != [answer.token_ids for answer in answers]:
        return None
    return Task(body, tuple(answers))
