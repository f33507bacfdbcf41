"""Each sampling parameter against an independent computation: transformers' logits, its processors, and plain NumPy."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessorList
from transformers.generation import logits_process as hf

from pagemill.engine.core import EngineCore
from pagemill.engine.logit_rules import LogitRules
from pagemill.engine.logprobs import PositionLogprobs
from pagemill.engine.outputs import SequenceOutput
from pagemill.engine.prompt import TokenIds, make_request
from pagemill.engine.request import Request
from pagemill.engine.sampling_params import SamplingParams
from pagemill.kernels.rng import gumbel, token_bits
from tests.engine.test_invariance import engine
from tests.engine.tiny_models import CONFIGS, VOCAB, save_model

EOS = 301
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
Words = tuple[tuple[int, ...], ...]


class Reference:
    """transformers' model, whole sequences at a time, and the parameters applied one after the other in float64."""

    def __init__(self, path: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def logits(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        with torch.inference_mode():
            return self._model(torch.tensor([tokens])).logits[0].numpy()

    def generate(
        self, prompt: list[int], params: SamplingParams, seed: int = 0, index: int = 0, bad_words: Words = ()
    ) -> tuple[list[int], list[npt.NDArray[np.float32]]]:
        """The tokens, and the raw logits that each was drawn from."""
        output: list[int] = []
        rows: list[npt.NDArray[np.float32]] = []
        while len(output) < (params.max_tokens or 0):
            rows.append(self.logits([*prompt, *output])[-1])
            scores = edited(rows[-1].astype(np.float64), prompt, output, params, bad_words)
            output.append(draw(scores, params, seed, len(output), index))
            if output[-1] == EOS and not params.ignore_eos:
                break
        return output, rows


def edited(
    scores: npt.NDArray[np.float64], prompt: list[int], output: list[int], params: SamplingParams, bad_words: Words
) -> npt.NDArray[np.float64]:
    if params.allowed_token_ids is not None:
        kept = np.full_like(scores, -np.inf)
        kept[list(params.allowed_token_ids)] = scores[list(params.allowed_token_ids)]
        scores = kept
    tokens = torch.tensor([[*prompt, *output]])
    processors = LogitsProcessorList()
    if bad_words:
        processors.append(hf.NoBadWordsLogitsProcessor([list(word) for word in bad_words]))
    if params.min_tokens:
        ends = [*(() if params.ignore_eos else (EOS,)), *(params.stop_token_ids or ())]
        processors.append(hf.MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, ends))
    if params.biases:
        processors.append(hf.SequenceBiasLogitsProcessor([[[token], bias] for token, bias in params.biases]))
    if params.repetition_penalty != 1.0:
        processors.append(hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    scores = processors(tokens, torch.from_numpy(scores.copy())[None])[0].numpy().copy()
    for token in set(output):
        scores[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return scores


def draw(scores: npt.NDArray[np.float64], params: SamplingParams, seed: int, position: int, index: int) -> int:
    if params.temperature == 0.0:
        return int(scores.argmax())
    warped = torch.from_numpy(scores / np.float32(params.temperature))[None]
    nothing = torch.zeros((1, 0), dtype=torch.int64)
    if params.min_p:
        warped = hf.MinPLogitsWarper(params.min_p)(nothing, warped)
    if params.top_k:
        warped = hf.TopKLogitsWarper(params.top_k)(nothing, warped)
    if params.top_p < 1.0:
        warped = hf.TopPLogitsWarper(params.top_p)(nothing, warped)
    noise = gumbel(token_bits(seed, position, index, VOCAB))
    return int((warped[0].numpy() + noise).argmax())


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = CONFIGS["llama-gqa"]()
    config.eos_token_id = EOS
    return save_model(config, tmp_path_factory.mktemp("decoding"))


@pytest.fixture(scope="module")
def reference(path: Path) -> Reference:
    return Reference(path)


@pytest.fixture(scope="module")
def core(path: Path) -> EngineCore:
    return engine(path).core


def request(name: str, prompt: list[int], params: SamplingParams, bad_words: Words = (), seed: int = 0) -> Request:
    made = Request(name, list(prompt), params, seed=seed, max_tokens=params.max_tokens or 1)
    made.rules = LogitRules.of(params, VOCAB, (EOS,), bad_words)
    return made


def run(core: EngineCore, *requests: Request) -> dict[tuple[str, int], SequenceOutput]:
    """Everything that each choice got, as one increment."""
    found: dict[tuple[str, int], SequenceOutput] = {}
    for each in requests:
        core.add(each)
    while core.has_requests:
        for output in core.step():
            sofar = found.setdefault((output.request_id, output.index), SequenceOutput(output.request_id, output.index))
            sofar.token_ids += output.token_ids
            sofar.error = output.error or sofar.error
            sofar.finish_reason = output.finish_reason
            if output.logprobs is not None:
                assert len(output.logprobs) == len(output.token_ids)
                sofar.logprobs = [*(sofar.logprobs or ()), *output.logprobs]
            if output.prompt_logprobs is not None:
                assert sofar.prompt_logprobs is None
                sofar.prompt_logprobs = output.prompt_logprobs
    core.check()
    return found


FREQUENT = list(range(0, VOCAB, 2))
CASES: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.7},
    "presence-negative": {"presence_penalty": -1.5},
    "frequency": {"frequency_penalty": 0.9},
    "frequency-negative": {"frequency_penalty": -0.3},
    "repetition": {"repetition_penalty": 1.6},
    "repetition-below-one": {"repetition_penalty": 0.6},
    "penalties": {"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {str(token): (token % 9) - 4 for token in range(0, VOCAB, 3)}},
    "bias-out": {"logit_bias": dict.fromkeys(range(100), -100)},
    "allowed": {"allowed_token_ids": FREQUENT},
    "allowed-one": {"allowed_token_ids": [5]},
    "min-tokens": {"min_tokens": 9, "logit_bias": {EOS: 50}},
    "eos": {"logit_bias": {EOS: 9}},
    "temperature": {"temperature": 1.3},
    "cold": {"temperature": 0.2},
    "top-k": {"temperature": 1.5, "top_k": 5},
    "top-p": {"temperature": 1.5, "top_p": 0.6},
    "min-p": {"temperature": 1.5, "min_p": 0.2},
    "everything": {
        "temperature": 1.2,
        "top_k": 60,
        "top_p": 0.95,
        "min_p": 0.01,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": {4: 2.0, 6: -1.0},
        "allowed_token_ids": FREQUENT,
        "min_tokens": 3,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_a_parameter_alone(name: str, core: EngineCore, reference: Reference) -> None:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 24} | CASES[name])
    expected, _ = reference.generate(PROMPT, params, seed=11)
    plain, _ = reference.generate(PROMPT, SamplingParams(temperature=params.temperature, max_tokens=24), seed=11)
    assert name in ("cold", "temperature") or expected != plain, "the case shows nothing"
    assert run(core, request("r", PROMPT, params, seed=11))["r", 0].token_ids == expected


def test_bad_words(core: EngineCore, reference: Reference) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=16)
    free, _ = reference.generate(PROMPT, greedy)
    # One that begins in the prompt, one token alone, one of three tokens in the middle, one that never matches.
    words: Words = ((PROMPT[-1], free[0]), (free[3],), tuple(free[5:8]), (free[5], free[5], free[5], 1))
    expected, _ = reference.generate(PROMPT, greedy, bad_words=words)
    assert expected != free and free[3] not in expected and expected[0] != free[0]
    assert run(core, request("r", PROMPT, greedy, words))["r", 0].token_ids == expected


def test_many_at_once_are_as_if_alone(core: EngineCore, reference: Reference) -> None:
    """A batch of all cases, plain neighbours and several choices between them: no row touches another."""
    rng = random.Random(3)
    requests, expected = [], {}
    for place, (name, fields) in enumerate(CASES.items()):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))]
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "n": 1 + place % 2} | fields)
        requests.append(request(name, prompt, params, seed=place))
        requests.append(request(f"plain-{name}", prompt, SamplingParams(temperature=0.0, max_tokens=12)))
        for index in range(params.n):
            expected[name, index], _ = reference.generate(prompt, params, seed=place, index=index)
        expected[f"plain-{name}", 0], _ = reference.generate(prompt, requests[-1].params)
    found = run(core, *requests)
    assert {key: output.token_ids for key, output in found.items()} == expected


def test_state_survives_preemption_and_another_engine(path: Path, core: EngineCore, reference: Reference) -> None:
    """Penalties and bad words are a function of the tokens: of those told by an engine before, too."""
    params = SamplingParams(
        temperature=0.9, max_tokens=30, presence_penalty=1.0, frequency_penalty=0.5, ignore_eos=True
    )
    words: Words = ((5,), (9, 2))
    expected, _ = reference.generate(PROMPT, params, seed=4, bad_words=words)
    for told in (1, 7, 29):
        resumed = request("r", PROMPT, params, words, seed=4)
        core.add(resumed, [expected[:told]])
        tokens = expected[:told]
        while core.has_requests:
            for output in core.step():
                assert output.offset == len(tokens)
                tokens += output.token_ids
        assert tokens == expected
    small = engine(path, num_blocks_override=16, num_speculative_tokens=0).core
    crowd = [request(f"r{index}", PROMPT, params, words, seed=4) for index in range(4)]
    found = run(small, *crowd)
    assert small.scheduler.statistics().preemptions > 0
    assert all(output.token_ids == expected for output in found.values())


def near(found: PositionLogprobs, row: npt.NDArray[np.float32], token_id: int, top: int) -> None:
    exact = row.astype(np.float64)
    logprobs = exact - np.logaddexp.reduce(exact)
    assert found.chosen.token_id == token_id
    assert found.chosen.logprob == pytest.approx(logprobs[token_id], abs=2e-5)
    assert found.chosen.rank == 1 + int((row > row[token_id]).sum())
    order = np.argsort(-logprobs, kind="stable")[:top]
    assert [token.token_id for token in found.top] == order.tolist()
    assert [token.logprob for token in found.top] == pytest.approx(logprobs[order].tolist(), abs=2e-5)


@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_logprobs_are_of_the_raw_distribution(top: int, core: EngineCore, reference: Reference) -> None:
    params = SamplingParams(**CASES["everything"] | {"max_tokens": 10, "logprobs": top, "n": 2})
    other = request("plain", PROMPT, SamplingParams(temperature=0.0, max_tokens=10))
    found = run(core, other, request("r", PROMPT, params, seed=8))
    assert found["plain", 0].logprobs is None
    for index in range(2):
        expected, rows = reference.generate(PROMPT, params, seed=8, index=index)
        output = found["r", index]
        assert output.token_ids == expected and output.logprobs is not None
        for position, row, token_id in zip(output.logprobs, rows, expected, strict=True):
            near(position, row, token_id, top)


def test_a_vocabulary_of_fewer_tokens_than_are_listed(tmp_path: Path) -> None:
    """Of amino acids, say: no more than all of them are listed."""
    config = CONFIGS["llama-gqa"]()
    config.vocab_size = 7
    folder = save_model(config, tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=20, prompt_logprobs=20)
    found = run(engine(folder).core, request("r", [1, 2, 3], params))["r", 0]
    assert found.logprobs is not None and found.prompt_logprobs is not None
    for position in (*found.logprobs, *found.prompt_logprobs[1:]):
        assert position is not None
        assert sorted(token.token_id for token in position.top) == list(range(7))
        assert sum(math.exp(token.logprob) for token in position.top) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("budget", [4, 64])
def test_prompt_logprobs(budget: int, path: Path, reference: Reference) -> None:
    """Of every prompt token but the first, with a prompt in one piece or in chunks, cached by others or not, and once
    only where the request is preempted in between."""
    prompt = [(place * place) % VOCAB for place in range(40)]
    core = engine(path, max_num_batched_tokens=budget, num_blocks_override=24).core
    rows = reference.logits(prompt)
    plain = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    params = SamplingParams(temperature=0.0, max_tokens=30, prompt_logprobs=3, n=2, ignore_eos=True)
    found = run(core, request("before", prompt, SamplingParams(temperature=0.0, max_tokens=1)))
    found = run(core, request("a", prompt, params), request("b", prompt, plain), request("c", prompt, params))
    assert found["b", 0].prompt_logprobs is None and found["a", 1].prompt_logprobs is None
    for name in ("a", "c"):
        told = found[name, 0].prompt_logprobs
        assert told is not None and len(told) == len(prompt) and told[0] is None
        for place in range(1, len(prompt)):
            position = told[place]
            assert position is not None
            near(position, rows[place - 1], prompt[place], 3)
    assert found["a", 0].token_ids == found["b", 0].token_ids


def test_a_prompt_of_one_token_has_one_entry_that_says_nothing(core: EngineCore) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=0)
    assert run(core, request("r", [5], params))["r", 0].prompt_logprobs == [None]


def test_rules_that_leave_no_token_end_their_request_alone(core: EngineCore, reference: Reference) -> None:
    stuck = SamplingParams(temperature=0.0, max_tokens=8, allowed_token_ids=[EOS], min_tokens=2)
    plain = SamplingParams(temperature=0.0, max_tokens=8)
    found = run(core, request("stuck", PROMPT, stuck), request("plain", PROMPT, plain))
    error = found["stuck", 0].error
    assert error is not None and error.code == "engine_error" and "no token can be sampled" in error.message
    assert found["plain", 0].token_ids == reference.generate(PROMPT, plain)[0]


@pytest.mark.parametrize("fields", [{"repetition_penalty": 1.4}, {"logit_bias": {5: 4.0, EOS: -2.0}}])
def test_beams_with_edits_are_those_of_transformers(fields: dict[str, Any], path: Path, core: EngineCore) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, beam_width=4, n=4, **fields)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    given: dict[str, Any] = {"repetition_penalty": params.repetition_penalty}
    if params.biases:
        given["sequence_bias"] = [[[token], bias] for token, bias in params.biases]
    ids = torch.tensor([PROMPT])
    best = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=4,
        num_return_sequences=4,
        do_sample=False,
        max_new_tokens=12,
        pad_token_id=0,
        **given,
    )
    expected = [row[len(PROMPT) :] for row in best.tolist()]
    found = run(core, request("r", PROMPT, params))
    for index, tokens in enumerate(expected):
        own = found["r", index].token_ids
        assert own == tokens[: len(own)] and set(tokens[len(own) :]) <= {0, EOS}
    lonely = make_request("x", TokenIds(PROMPT), params, engine(path).limits, None)
    assert lonely.rules is not None
