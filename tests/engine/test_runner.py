"""The runner: settings, batches, sampling per request, and the memory it takes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagemill.engine.batch import BatchBuilder
from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import ConfigError
from pagemill.engine.loader import BUNDLED_MODEL, resolve_model
from pagemill.engine.logit_rules import LogitRules
from pagemill.engine.model_runner import ModelRunner
from pagemill.engine.models.llama_shape import typical_layers
from pagemill.engine.request import Request
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.scheduler_output import BlockMove, ScheduledSequence, SchedulerOutput
from pagemill.kernels.cpu.matmul import PANEL
from tests.engine.tiny_models import CONFIGS, VOCAB, Driver, save_model

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = CONFIGS["llama-gqa"]()
    config.eos_token_id = [7, 11]
    return save_model(config, tmp_path_factory.mktemp("llama"))


def make_runner(folder: Path, **settings: Any) -> ModelRunner:
    fields: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_blocks_override": 64, "threads": 1}
    config = EngineConfig(model=str(folder), **fields | settings)
    return ModelRunner(config, resolve_model(config.model))


@pytest.fixture
def driver(folder: Path) -> Iterator[Driver]:
    yield Driver(make_runner(folder))


# ---------------------------------------------------------------- batches


def test_batch_arrays() -> None:
    first = Request("a", [1, 2, 3, 4, 5], GREEDY, seed=0, max_tokens=9, output_token_ids=[6])
    second = Request("b", [7, 8, 9], SamplingParams(temperature=0.5, top_k=4, top_p=0.9, min_p=0.1), 2**64 - 1, 9)
    third = Request("c", [1] * 9, GREEDY, seed=0, max_tokens=9)
    batch = BatchBuilder(block_size=2, vocab_size=100, device="cpu").build(
        [
            ScheduledSequence(first, 5, 1, [9, 4, 3, 8], True),
            ScheduledSequence(second, 1, 2, [2, 5], True),
            ScheduledSequence(third, 4, 3, [6, 7, 1, 1, 1], False),
        ]
    )
    assert batch.token_ids.tolist() == [6, 8, 9, 1, 1, 1]
    assert batch.meta.query_start.tolist() == [0, 1, 3, 6]
    assert batch.meta.seq_lens.tolist() == [6, 3, 7]
    assert batch.meta.positions.tolist() == [5, 1, 2, 4, 5, 6]
    assert batch.meta.slot_mapping.tolist() == [3 * 2 + 1, 2 * 2 + 1, 5 * 2, 1 * 2, 1 * 2 + 1, 1 * 2]
    assert batch.meta.block_tables[:, :4].tolist() == [[9, 4, 3, 8], [2, 5, 0, 0], [6, 7, 1, 1]]
    assert batch.wanted.tolist() == [0, 2]
    assert batch.sampling.temperature.tolist() == [0.0, 0.5]
    assert batch.sampling.top_k.tolist() == [0, 4]
    assert batch.sampling.position.tolist() == [1, 0], "index of the token that is sampled, among the generated"
    assert batch.sampling.seed.dtype == np.uint64 and batch.sampling.seed[1] == 2**64 - 1
    assert batch.edits is None


# ---------------------------------------------------------------- steps


def test_empty_and_unsampled_steps_return_nothing(driver: Driver) -> None:
    assert driver.runner.execute(SchedulerOutput(1)).sampled == []
    request = driver.request(PROMPT, GREEDY)
    assert driver.step(ScheduledSequence(request, 0, 5, driver.blocks(8), False)) == []


def test_copied_blocks_carry_on_a_sequence(driver: Driver) -> None:
    """Copy-on-write: the copy continues as the original would have, also when the original is overwritten."""
    expected = driver.generate(PROMPT, 6)
    request = driver.request(PROMPT, GREEDY)
    block, other = driver.blocks(1), driver.blocks(16)
    request.output_token_ids += driver.step(ScheduledSequence(request, 0, len(PROMPT), block, True))
    intruder = driver.request(PROMPT[::-1], GREEDY)
    output = SchedulerOutput(
        2, [ScheduledSequence(intruder, 0, len(PROMPT), block, True)], moves=[BlockMove("copy", block[0], other[0])]
    )
    driver.runner.execute(output)
    while len(request.output_token_ids) < 6:
        request.output_token_ids += driver.step(ScheduledSequence(request, request.num_tokens - 1, 1, other, True))
    assert request.output_token_ids == expected


def test_rows_of_nan_are_reported_alone(driver: Driver) -> None:
    well, ill = driver.request(PROMPT, GREEDY), driver.request(PROMPT, GREEDY)
    expected = driver.generate(PROMPT, 1)
    model: Any = driver.runner._model
    panel, lane = divmod(VOCAB - 1, PANEL)
    stored = model._embedding.table.panels[panel, :, lane].view(np.float32)
    assert model._head is not model._embedding.table
    kept = stored.copy()
    ill.prompt_token_ids[-1] = VOCAB - 1
    scheduled = [ScheduledSequence(r, 0, len(PROMPT), driver.blocks(8), True) for r in (well, ill, well)]
    stored[:] = np.nan
    try:
        assert driver.step(*scheduled) == [expected[0], -1, expected[0]]
    finally:
        stored[:] = kept


def test_a_seeded_token_depends_on_nothing_but_its_request(driver: Driver) -> None:
    params = SamplingParams(temperature=1.5, top_p=0.95, seed=42)
    alone = driver.generate(PROMPT, 10, params=params, seed=42)
    assert driver.generate(PROMPT, 10, params=params, seed=42, chunk=3) == alone
    assert driver.generate(PROMPT, 10, params=params, seed=43) != alone

    request = driver.request(PROMPT, params, seed=42)
    table = driver.blocks(20)
    for step in range(10):  # beside neighbours that come and go, and once recomputed from the start
        start = 0 if step in (0, 6) else request.num_tokens - 1
        others = [
            ScheduledSequence(driver.request([step, n], SamplingParams(seed=n), seed=n), 0, 2, driver.blocks(1), True)
            for n in range(step % 3)
        ]
        mine = ScheduledSequence(request, start, request.num_tokens - start, table, True)
        request.output_token_ids.append(driver.step(*others, mine)[-1])
        driver._free += [block for other in others for block in other.block_ids]
    assert request.output_token_ids == alone


def test_min_tokens_masks_what_would_end_the_row_and_only_there(driver: Driver) -> None:
    free = driver.generate(PROMPT, 8)
    stop = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=tuple(free[:5]))
    held = driver.generate(PROMPT, 8, params=stop)
    assert not set(held[:3]) & set(free[:5])
    neighbour = driver.request(PROMPT, GREEDY)
    request = driver.request(PROMPT, stop)
    scheduled = [ScheduledSequence(r, 0, len(PROMPT), driver.blocks(8), True) for r in (neighbour, request)]
    assert driver.step(*scheduled) == [free[0], held[0]]
    request.output_token_ids += held[:3]  # the fourth token is free to end the sequence
    last = ScheduledSequence(request, 0, request.num_tokens, driver.blocks(16), True)
    plain = ScheduledSequence(
        Request("p", PROMPT + held[:3], GREEDY, 0, 9), 0, last.num_tokens, driver.blocks(16), True
    )
    assert len(set(driver.step(last, plain))) == 1


def test_end_of_sequence_counts_for_min_tokens_unless_ignored(folder: Path) -> None:
    def banned(params: SamplingParams) -> list[int]:
        rules = LogitRules.of(params, 50, (7, 11))
        item = ScheduledSequence(Request("a", [1], params, 0, 9, rules=rules), 0, 1, [1], True)
        edits = BatchBuilder(block_size=16, vocab_size=50, device="cpu").build([item]).edits
        assert edits is None or set(edits.ban_rows.tolist()) <= {0}
        return [] if edits is None else edits.ban_ids.tolist()

    assert make_runner(folder).spec.eos_token_ids == (7, 11)
    assert banned(SamplingParams(min_tokens=1)) == [7, 11]
    assert banned(SamplingParams(min_tokens=1, ignore_eos=True)) == []
    assert banned(SamplingParams(min_tokens=1, ignore_eos=True, stop_token_ids=[9, 50])) == [9]
    assert banned(SamplingParams()) == []


# ---------------------------------------------------------------- settings and memory


def test_the_pool_is_profiled(folder: Path) -> None:
    """In a process of its own: in this one the step may fit into what earlier tests have left behind."""
    program = f"""if True:
        from pathlib import Path
        from pagemill.engine.machine import process_memory
        from tests.engine.test_runner import make_runner

        before = process_memory()
        runner = make_runner(
            Path({str(folder)!r}), num_blocks_override=None, max_num_seqs=4096, max_num_batched_tokens=256
        )
        assert runner.budget.source == "gpu_memory_utilization"
        assert 0 < runner.budget.activations < 64 << 20, runner.budget
        assert runner.budget.pool == runner.num_blocks * runner.bytes_per_block > 200 << 20, runner.budget
        assert process_memory() - before < 100 << 20, "the pool was committed before it was used"
    """
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240)


@pytest.mark.parametrize(
    ("windows", "layers"), [((0,), 1), ((0, 0, 0), 2), ((8, 8), 2), ((0, 8, 0, 8), 2), ((0, 0, 0, 8), 4)]
)
def test_a_step_is_profiled_on_as_few_layers_as_show_its_memory(windows: tuple[int, ...], layers: int) -> None:
    """One of each window, since layers that see equally far share a work list, and a layer behind another."""
    assert typical_layers(windows) == layers


def test_a_profiled_pool_works_like_a_given_one(folder: Path) -> None:
    runner = make_runner(folder, num_blocks_override=None, max_num_seqs=4096, max_num_batched_tokens=256)
    assert Driver(runner).generate(PROMPT, 3) == Driver(make_runner(folder)).generate(PROMPT, 3)


def test_a_pool_that_the_system_refuses_is_a_named_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    usual = resource.getrlimit(resource.RLIMIT_AS)
    monkeypatch.setattr("pagemill.engine.memory.memory_limit", lambda: 1 << 45)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), usual[1]))
    try:
        with pytest.raises(ConfigError, match="the system refused a KV pool of 6144"):
            make_runner(folder, num_blocks_override=1 << 19)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, usual)


def test_a_model_larger_than_the_memory_is_refused_before_it_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagemill.engine.machine import process_memory

    monkeypatch.setattr("pagemill.engine.memory.memory_limit", lambda: process_memory() + 1000)
    with pytest.raises(ConfigError, match=r"take \d+ MiB in float32, and this process may use 0 MiB more on cpu"):
        make_runner(folder)


def test_the_profiled_step_fits_a_short_context(folder: Path) -> None:
    """More tokens in a step than all sequences of the context length have."""
    runner = make_runner(folder, num_blocks_override=None, max_model_len=5, max_num_seqs=3, max_num_batched_tokens=512)
    assert runner.num_blocks == 3 + 1


def test_settings_are_resolved(folder: Path) -> None:
    runner = make_runner(folder, dtype="auto", block_size=8)
    assert (runner.device, runner.block_size, runner.num_blocks) == ("cpu", 8, 65)
    assert runner.max_num_batched_tokens == 512
    flags = Path("/proc/cpuinfo").read_text().split()
    assert runner.dtype_name == ("bfloat16" if {"avx512_bf16", "amx_bf16", "bf16"} & set(flags) else "float32")
    assert make_runner(folder, max_num_batched_tokens=7).max_num_batched_tokens == 7


def test_settings_that_do_not_go_together(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="float16 is not supported on the CPU"):
        make_runner(folder, dtype="float16")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no usable CUDA device"):
            make_runner(folder, device="cuda")
    with pytest.raises(ConfigError, match="unknown kernels"):
        ModelRunner(EngineConfig(model=str(folder), device="cpu"), resolve_model(str(folder)), kernels="none")
    odd = CONFIGS["opt-norm-before"]()
    odd.hidden_size = odd.word_embed_proj_dim = 60
    save_model(odd, tmp_path)
    assert make_runner(tmp_path).spec.head_dim == 15
    with pytest.raises(ConfigError, match="cannot be served in bfloat16: head_dim must be even"):
        make_runner(tmp_path, dtype="bfloat16")


# ---------------------------------------------------------------- the bundled model

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
)


def test_smollm2_in_float32_gives_the_tokens_of_transformers() -> None:
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model = resolve_model(BUNDLED_MODEL)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model.path)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    reference = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
    expected = [
        reference.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=12, min_new_tokens=12)[0, len(ids) :]
        for ids in prompts
    ]
    del reference
    config = EngineConfig(dtype="float32", device="cpu", num_blocks_override=40)
    driver = Driver(ModelRunner(config, model))
    params = SamplingParams(temperature=0.0, min_tokens=12)
    assert driver.runner.spec.eos_token_ids == (2,)
    for ids, tokens in zip(prompts, expected, strict=True):
        assert driver.generate(ids, 12, params=params, chunk=7) == tokens.tolist()
