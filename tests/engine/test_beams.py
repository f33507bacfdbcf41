"""Beam search: the beams of transformers, on shared blocks, also when the pool is contested."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagemill.engine.admission import Limits, check_request
from pagemill.engine.assembly import EngineParts, build
from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import RequestError
from pagemill.engine.outputs import SequenceOutput
from pagemill.engine.prompt import TokenIds, make_request
from pagemill.engine.sampling_params import SamplingParams
from tests.engine.invented import Bench, beam_twin, make, twin
from tests.engine.tiny_models import CONFIGS, save_model

Early = bool | Literal["never"]
PROMPTS = [[5, 9, 17, 200, 31], [250, 4], [11] * 19, [77, 78, 79, 80, 81, 82, 83, 84]]
NEW_TOKENS = 14
GRID: list[tuple[int, float, Early]] = [
    *itertools.product((2, 4), (0.0, 1.0, 2.5, -1.0), (True, False, "never")),
    (8, 1.0, False),
    (8, 1.0, "never"),
]


@dataclass
class Truth:
    """A model whose search meets its end token often, and transformers' beams for every case of the grid."""

    folder: Path
    eos: int
    beams: dict[tuple[int, float, Early], list[list[int]]]


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    folder = save_model(CONFIGS["llama-gqa"](), tmp_path_factory.mktemp("beams"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])

    def generate(width: int, **options: Any) -> list[list[int]]:
        """The beams of all prompts, in order, from one left-padded batch."""
        output = model.generate(
            ids,
            attention_mask=mask,
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=0,
            **options,
        )
        return [row[longest:].tolist() for row in output]

    # The end token is one that the beams would choose anyway, so that finished and running beams compete.
    chosen = Counter(token for beam in generate(4) for token in beam[3:])
    eos = chosen.most_common(1)[0][0]
    found = {
        (width, penalty, early): [
            _cut(beam, eos) for beam in generate(width, length_penalty=penalty, early_stopping=early, eos_token_id=eos)
        ]
        for width, penalty, early in GRID
    }
    return Truth(folder, eos, found)


def _cut(tokens: list[int], eos: int) -> list[int]:
    """Without the padding behind an end token."""
    return tokens[: tokens.index(eos) + 1] if eos in tokens else tokens


def engine(folder: Path, **settings: Any) -> EngineParts:
    fields: dict[str, Any] = {
        "model": str(folder),
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "skip_tokenizer_init": True,
        "num_blocks_override": 400,
        "block_size": 4,
    }
    return build(EngineConfig(**(fields | settings)))


def run(parts: EngineParts, jobs: dict[str, tuple[list[int], SamplingParams]]) -> dict[str, list[SequenceOutput]]:
    outputs: dict[str, list[SequenceOutput]] = {}
    for name, (prompt, params) in jobs.items():
        parts.core.add(make_request(name, TokenIds(prompt), params, parts.limits, None))
    while parts.core.has_requests:
        for output in parts.core.step():
            outputs.setdefault(output.request_id, []).append(output)
        parts.core.check()
    assert parts.core.scheduler.statistics().cache.pool.used == 0
    return outputs


def beams(outputs: list[SequenceOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs if output.token_ids]


def beam_params(width: int, penalty: float, early: Early, eos: int) -> SamplingParams:
    return SamplingParams(
        n=width,
        beam_width=width,
        length_penalty=penalty,
        early_stopping=early,
        max_tokens=NEW_TOKENS,
        stop_token_ids=[eos],
        temperature=0.0,
    )


@pytest.mark.parametrize("blocks", [400, 44])
def test_beams_equal_transformers(truth: Truth, blocks: int) -> None:
    """All searches at once, in a roomy pool and in one that holds hardly more than the widest."""
    parts = engine(truth.folder, num_blocks_override=blocks)
    jobs = {
        f"{width}/{penalty}/{early}/{index}": (prompt, beam_params(width, penalty, early, truth.eos))
        for width, penalty, early in GRID
        for index, prompt in enumerate(PROMPTS)
    }
    outputs = run(parts, jobs)
    ended = 0
    for width, penalty, early in GRID:
        names = [f"{width}/{penalty}/{early}/{index}" for index in range(len(PROMPTS))]
        found = [tokens for name in names for tokens in beams(outputs[name])]
        assert found == truth.beams[width, penalty, early], (width, penalty, early)
        ended += sum(truth.eos in tokens for tokens in found)
    assert ended > len(GRID), "a model that never ends tests half of the rules"
    assert parts.core.scheduler.statistics().preemptions == 0


def test_beams_beside_requests_that_are_preempted(truth: Truth) -> None:
    parts = engine(truth.folder, num_blocks_override=48, num_speculative_tokens=0)
    greedy = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    alone = run(engine(truth.folder, num_speculative_tokens=0), {"other0": ([9, 8, 7], greedy)})["other0"]
    jobs = {f"other{index}": ([9, 8, 7], greedy) for index in range(6)}
    jobs |= {f"beams{index}": (prompt, beam_params(4, 1.0, False, truth.eos)) for index, prompt in enumerate(PROMPTS)}
    outputs = run(parts, jobs)
    found = [tokens for index in range(len(PROMPTS)) for tokens in beams(outputs[f"beams{index}"])]
    assert found == truth.beams[4, 1.0, False]
    for index in range(6):
        assert beams(outputs[f"other{index}"]) == beams(alone)
    assert parts.core.scheduler.statistics().preemptions > 0


def test_four_beams_share_a_long_prompt() -> None:
    """Peak blocks of four beams behind 512 tokens: at most 45 % of four sequences of their own."""

    def peak(**search: Any) -> int:
        bench = Bench(num_blocks=400, block_size=16, max_num_batched_tokens=512, enable_prefix_caching=False)
        count = 1 if search else 4
        for index in range(count):
            bench.add(make(f"r{index}", [7] * 512, 32, ignore_eos=True, **search))
        bench.run()
        return bench.cache.statistics().peak_used

    assert peak(beam_width=4) <= 0.45 * peak()


def test_a_search_that_outgrows_the_pool_tells_what_it_has() -> None:
    bench = Bench(num_blocks=1 + 8, block_size=2, max_num_batched_tokens=16)
    bench.add(make("r", [1, 2, 3], 30, n=2, beam_width=3, ignore_eos=True))
    bench.run()
    assert bench.ends["r"].finish_reason == "length"
    assert 0 < len(bench.choices["r", 0]) < 30


def test_beams_that_rules_thin_out_keep_their_places(truth: Truth) -> None:
    """Two tokens are allowed, so two beams begin, then four. Whoever waits must get neither the seats nor the blocks of
    those that are still to come."""
    search = SamplingParams(beam_width=4, n=4, allowed_token_ids=[7, 9], ignore_eos=True, max_tokens=12)
    jobs = {"search": ([1, 2, 3], search)}
    alone = run(engine(truth.folder), jobs)
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    jobs |= {f"other{index}": ([9] * (2 + 9 * index), greedy) for index in range(4)}
    parts = engine(truth.folder, max_num_seqs=4, max_num_batched_tokens=4, num_speculative_tokens=0)
    assert beams(run(parts, jobs)["search"]) == beams(alone["search"])
    parts = engine(truth.folder, num_blocks_override=20)
    parts.core.add(make_request("search", TokenIds([1, 2, 3]), search, parts.limits, None))
    parts.core.step()
    assert parts.core.scheduler.num_running == 2
    assert parts.core.scheduler.cache.num_available == 20 - 1 - 4 * 4, "a beam may need a copy and three blocks more"


@pytest.mark.parametrize(("width", "block_size", "prompt"), [(3, 16, 3), (5, 16, 1), (8, 16, 17)])
def test_a_pool_of_what_a_search_is_promised_holds_it(width: int, block_size: int, prompt: int) -> None:
    now, most = (-(-tokens // block_size) for tokens in (prompt, prompt + 9))
    bench = Bench(num_blocks=1 + now + width * (most - now + 1), block_size=block_size)
    bench.add(make("r", range(1, 1 + prompt), 10, n=width, beam_width=width))
    bench.run()
    found = [bench.choices["r", index] for index in range(width)]
    assert found == beam_twin(range(1, 1 + prompt), width, width, 10, 1.0, False)


def test_aborting_a_search_frees_every_beam() -> None:
    bench = Bench(num_blocks=60, block_size=4)
    bench.add(make("r", [1, 2, 3], 30, beam_width=4))
    bench.add(make("neighbour", [5], 12, ignore_eos=True))
    for _ in range(5):
        bench.step()
    bench.abort("r")
    assert bench.ends["r"].finish_reason == "cancelled"
    bench.run()
    assert bench.tokens["neighbour"] == twin([5], 0, 12, ignore_eos=True)


def test_the_twin_needs_no_more_than_the_rules() -> None:
    bench = Bench(num_blocks=200, block_size=4)
    bench.add(make("r", [1, 2, 3], 10, n=2, beam_width=3, length_penalty=0.0, early_stopping="never"))
    bench.run()
    assert [bench.choices["r", i] for i in range(2)] == beam_twin([1, 2, 3], 3, 2, 10, 0.0, "never")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 3}, "n"),
        ({"temperature": 0.5}, "temperature"),
        ({"top_k": 5}, "top_k"),
        ({"top_p": 0.5}, "top_p"),
        ({"stop": ["x"]}, "stop"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 1000}, "beam_width"),
        ({"early_stopping": "sometimes"}, "early_stopping"),
        ({"length_penalty": float("nan")}, "length_penalty"),
    ],
)
def test_what_does_not_go_with_beams_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**({"beam_width": 2} | fields))
    assert (caught.value.code, caught.value.param) == ("invalid_request", param)


def test_more_sequences_than_run_at_once_are_refused() -> None:
    limits = Limits(vocab_size=50, max_model_len=64, block_size=4, num_blocks=99, default_max_tokens=9, max_num_seqs=3)
    for fields in ({"n": 4}, {"beam_width": 4}):
        with pytest.raises(RequestError) as caught:
            check_request(make("r", [1], 4, **fields), limits)
        assert caught.value.param == next(iter(fields))
