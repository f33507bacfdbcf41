"""Structured output in the engine: beside neighbours, in choices and beams, preempted, resumed and with drafts."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from pagemill.engine.assembly import EngineParts, build
from pagemill.engine.config import EngineConfig
from pagemill.engine.outputs import SequenceOutput
from pagemill.engine.prompt import make_request
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.scheduler_output import ScheduledSequence

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PROMPT = "A person as JSON:"
DATE = r"[0-9]{4}-[01][0-9]-[0-3][0-9]"


@pytest.fixture(scope="module")
def parts() -> EngineParts:
    return build(
        EngineConfig(
            dtype="float32",
            threads=1,
            block_size=8,
            num_blocks_override=20,
            max_model_len=160,
            max_num_seqs=8,
            num_speculative_tokens=0,
        )
    )


def add(parts: EngineParts, name: str, told: list[list[int]] | None = None, **fields: Any) -> list[SequenceOutput]:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 40} | fields)
    request = make_request(name, PROMPT, params, parts.limits, parts.tokenizer, seed=3, compiler=parts.compiler)
    return parts.core.add(request, told or ())


def run(parts: EngineParts) -> dict[tuple[str, int], SequenceOutput]:
    found: dict[tuple[str, int], SequenceOutput] = {}
    while parts.core.has_requests:
        for output in parts.core.step():
            whole = found.setdefault((output.request_id, output.index), SequenceOutput(output.request_id, output.index))
            whole.token_ids += output.token_ids
            whole.text += output.text
            whole.finish_reason, whole.error = output.finish_reason, output.error or whole.error
    parts.core.check()
    return found


def test_every_kind_beside_plain_neighbours(parts: EngineParts) -> None:
    add(parts, "plain", max_tokens=12)
    alone = run(parts)["plain", 0].token_ids
    add(parts, "plain", max_tokens=12)
    add(parts, "json", structured_outputs={"json": PERSON})
    add(parts, "regex", structured_outputs={"regex": DATE}, temperature=1.0)
    add(parts, "choice", structured_outputs={"choice": ["Lyon", "Nice", "Paris"]})
    add(parts, "grammar", structured_outputs={"grammar": 'start: "(" start ")" | "x"'}, max_tokens=30)
    add(parts, "object", response_format={"type": "json_object"}, max_tokens=60)
    found = run(parts)
    assert found["plain", 0].token_ids == alone
    person = json.loads(found["json", 0].text)
    assert set(person) == {"name", "age"} and type(person["age"]) is int
    assert re.fullmatch(DATE, found["regex", 0].text)
    assert found["choice", 0].text in ("Lyon", "Nice", "Paris")
    for name in ("json", "regex", "choice"):
        assert found[name, 0].finish_reason == "stop"
    for name in ("grammar", "object"):
        output = found[name, 0]
        whole = re.fullmatch(r"(\(*)x(\)*)", output.text) if name == "grammar" else output.text
        assert output.finish_reason == "length" or (whole and (name == "grammar" or json.loads(output.text)))


def test_choices_and_beams_follow_it_each_in_its_own_place(parts: EngineParts) -> None:
    pattern = r"(ab|ba|c){3,6}!"
    add(parts, "n", structured_outputs={"regex": pattern}, n=4, temperature=1.5)
    texts = [output.text for output in run(parts).values()]
    assert len(texts) == 4 and len(set(texts)) > 1
    assert all(re.fullmatch(pattern, text) for text in texts)
    add(parts, "beams", structured_outputs={"choice": ["Lyon", "Nice", "Paris"]}, beam_width=4, n=3)
    beams = [output.text for output in run(parts).values()]
    assert beams and set(beams) <= {"Lyon", "Nice", "Paris"} and len(set(beams)) == len(beams)


def test_it_goes_on_after_preemption_and_on_another_engine(parts: EngineParts) -> None:
    fields = {"structured_outputs": {"regex": "([a-z]{4,9} ){12}end"}, "temperature": 1.0, "max_tokens": 90}
    add(parts, "whole", **fields)
    whole = run(parts)["whole", 0]
    assert whole.finish_reason == "stop" and re.fullmatch("([a-z]{4,9} ){12}end", whole.text)
    for told in (1, 9, len(whole.token_ids) - 1):
        add(parts, "resumed", [whole.token_ids[:told]], **fields)
        resumed = run(parts)["resumed", 0]
        assert whole.token_ids[:told] + resumed.token_ids == whole.token_ids
    before = parts.core.scheduler.statistics().preemptions
    parts.core.scheduler.promises.forecast, forecast = None, parts.core.scheduler.promises.forecast
    for name in "abcdef":
        add(parts, name, **fields)
    crowd = run(parts)
    parts.core.scheduler.promises.forecast = forecast
    assert parts.core.scheduler.statistics().preemptions > before
    assert all(output.token_ids == whole.token_ids for output in crowd.values())


def test_told_tokens_that_do_not_follow_it_end_the_request_alone(parts: EngineParts) -> None:
    """What another engine published under other rules cannot be gone on from, and says so."""
    add(parts, "plain", max_tokens=4)
    assert parts.tokenizer is not None
    output = add(parts, "odd", [parts.tokenizer.encode("no digits")], structured_outputs={"regex": DATE})[-1]
    assert output.final and output.error is not None
    assert "does not follow the request's structured output" in output.error.message
    assert run(parts)["plain", 0].finish_reason == "length"


def test_a_complete_one_ends_at_once_with_stop_even_at_the_limit(parts: EngineParts) -> None:
    add(parts, "free", structured_outputs={"choice": ["Paris"]})
    length = len(run(parts)["free", 0].token_ids)
    add(parts, "full", structured_outputs={"choice": ["Paris"]}, max_tokens=length)
    output = run(parts)["full", 0]
    assert (output.text, output.finish_reason) == ("Paris", "stop")
    add(parts, "cut", structured_outputs={"choice": ["Paris is the capital"]}, max_tokens=2)
    assert run(parts)["cut", 0].finish_reason == "length"


def test_stop_strings_penalties_and_log_probabilities_go_with_it(parts: EngineParts) -> None:
    add(parts, "stop", structured_outputs={"json": PERSON}, stop='"age"', repetition_penalty=1.2, logprobs=2)
    output = run(parts)["stop", 0]
    assert output.finish_reason == "stop" and '"name":' in output.text and "age" not in output.text


def test_drafts_are_held_to_it(parts: EngineParts) -> None:
    """Behind each draft stands the mask of the text up to it: what is accepted is what would have been drawn."""
    fields = {"structured_outputs": {"json": PERSON}, "presence_penalty": 0.5}
    add(parts, "r", **fields)
    expected = run(parts)["r", 0].token_ids
    params = SamplingParams(temperature=0.0, max_tokens=40, **fields)
    request = make_request("d", PROMPT, params, parts.limits, parts.tokenizer, seed=3, compiler=parts.compiler)
    assert request.rules is not None
    runner: Any = parts.core._runner
    for guess, right in ((expected[3:6], 3), ([expected[3], 0, expected[5]], 1), ([0, 0, 0], 0)):
        request.output_token_ids = expected[:3]
        request.logits_state = request.rules.begin(request.prompt_token_ids, request.output_token_ids)
        tokens = request.num_tokens
        blocks = list(range(1, 2 + (tokens + 3) // 8))
        item = ScheduledSequence(request, 0, tokens + 3, blocks, True, drafts=list(guess))
        (sampled,) = runner._compute([item], runner._pool).sampled
        assert sampled.tokens == expected[3 : 3 + right + 1]
