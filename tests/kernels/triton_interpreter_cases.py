"""The Triton kernels in Triton's interpreter. Not collected with the suite: `test_triton_interpreter.py` runs it in a
process of its own, because the interpreter is chosen when Triton is imported, and for the whole process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pagemill.engine.config import EngineConfig
from pagemill.engine.loader import resolve_model
from pagemill.engine.model_runner import ModelRunner
from pagemill.kernels.layout import KVLayout
from pagemill.kernels.ops import Ops, SampleBatch, select_ops
from pagemill.kernels.rng import token_bits
from pagemill.kernels.triton.attention_cases import ATTENTION_CASES, WILD_BLOCK_ID, AttentionCase, make_attention_step
from pagemill.kernels.triton.checks import Check, all_checks, poisoned_scratch
from pagemill.kernels.triton.configs import INTERPRETED_DEVICE
from pagemill.kernels.triton.device_work import device_works
from pagemill.kernels.triton.sampling import philox_bits_kernel, sample_parameters
from tests.engine.tiny_models import CONFIGS, Driver, generated_by_transformers, save_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered in multiply:RuntimeWarning"),
]


@pytest.fixture(scope="module")
def ops() -> Ops:
    return select_ops("cpu", override="interpret")


@pytest.mark.parametrize("check", all_checks(), ids=lambda check: check.name)
def test_agrees_with_the_reference(ops: Ops, check: Check) -> None:
    with poisoned_scratch():
        outcome = check.run(ops, "cpu")
    assert outcome.passed, f"error {outcome.error:.2e}, allowed {outcome.tolerance:.0e}"


def test_the_cases_named_after_splitting_are_split() -> None:
    """... on the device that the interpreter plays, else they would check nothing."""
    for case in ATTENTION_CASES:
        works = device_works(
            INTERPRETED_DEVICE,
            np.cumsum([0, *case.query_lens]),
            np.array(case.seq_lens),
            torch.device("cpu"),
            group=case.group,
            kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            dtype=case.dtype,
            window=case.window,
        )
        assert any(work.num_parts for work in works) == case.name.startswith("split"), case.name


@pytest.mark.parametrize("block_size", [16, 64])
def test_blocks_before_the_window_are_not_read(ops: Ops, block_size: int) -> None:
    case = AttentionCase("before the window", (1, 20), (700, 500), block_size=block_size, window=100)
    step = make_attention_step(case, ops, "cpu")
    want = ops.paged_attention(step.query, step.kv, step.meta, scale=0.1, sliding_window=case.window)
    for sequence, (queries, length) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        passed = (length - queries - case.window + 1) // block_size
        dead = step.meta.block_tables[sequence, :passed]
        step.kv.k[dead.long()] = torch.nan
        step.kv.v[dead.long()] = torch.nan
        dead.fill_(WILD_BLOCK_ID)
    assert torch.equal(ops.paged_attention(step.query, step.kv, step.meta, scale=0.1, sliding_window=case.window), want)


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1])
@pytest.mark.parametrize(("position", "choice"), [(0, 0), (7, 3), (2**32 + 5, 2**31 - 1)])
def test_noise_integers_are_those_of_the_contract(seed: int, position: int, choice: int) -> None:
    vocab = 1030
    batch = SampleBatch.greedy(1)
    batch.seed[0], batch.position[0], batch.index[0] = seed, position, choice
    groups = -(-vocab // 4)
    words = torch.empty((groups, 4), dtype=torch.int32)
    philox_bits_kernel[(-(-groups // 128),)](words, torch.from_numpy(sample_parameters(batch)), groups, BLOCK=128)
    assert np.array_equal(words.numpy().view(np.uint32).reshape(-1)[:vocab], token_bits(seed, position, choice, vocab))


def test_a_row_draws_the_same_token_alone_and_in_a_batch(ops: Ops) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn((4, 300), generator=generator)
    batch = SampleBatch(
        temperature=np.array([1.0, 0.0, 1.5, 0.7], np.float32),
        top_k=np.array([0, 0, 20, 0], np.int32),
        top_p=np.array([0.9, 1, 1, 0.5], np.float32),
        min_p=np.array([0, 0, 0.05, 0], np.float32),
        seed=np.array([9, 9, 9, 9], np.uint64),
        position=np.arange(4),
        index=np.zeros(4, np.int32),
    )
    together = ops.sample(logits, batch)
    for row in range(4):
        one = slice(row, row + 1)
        fields = (batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.seed, batch.position, batch.index)
        assert ops.sample(logits[one], SampleBatch(*(field[one] for field in fields))).item() == together[row]


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window"])
def test_a_model_on_these_kernels_generates_what_transformers_does(tmp_path: Path, name: str) -> None:
    """Prefill in chunks, then decode, through the engine's own runner."""
    folder = save_model(CONFIGS[name](), tmp_path)
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32", block_size=8, num_blocks_override=20)
    prompt = list(range(40, 54))
    runner = ModelRunner(config, resolve_model(config.model), kernels="interpret")
    assert [Driver(runner).generate(prompt, 4, chunk=11)] == generated_by_transformers(folder, [prompt], 4)


def test_compiled_kernels_are_refused_where_triton_interprets() -> None:
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET unset"):
        select_ops("cpu", override="triton")


def test_no_rows_at_all_is_no_error(ops: Ops) -> None:
    layout = KVLayout(num_blocks=2, num_layers=1, block_size=16, num_kv_heads=2, head_dim=64, form=ops.kv_form)
    kv = layout.layer(layout.allocate(), 0)
    nothing = torch.empty((0, 2, 64))
    ops.write_kv(nothing, nothing, kv, torch.empty(0, dtype=torch.int64))
    ops.rotary_embedding(nothing, nothing, torch.empty(0, dtype=torch.int64), torch.zeros((4, 64)))
    assert ops.rms_norm(torch.empty((0, 64)), torch.ones(64), 1e-5).shape == (0, 64)
    assert ops.silu_and_mul(torch.empty((0, 64))).shape == (0, 32)
    assert ops.sample(torch.empty((0, 50)), SampleBatch.greedy(0)).shape == (0,)


def test_a_pool_in_another_order_is_refused(ops: Ops) -> None:
    layout = KVLayout(num_blocks=2, num_layers=1, block_size=16, num_kv_heads=2, head_dim=64, form="k_major")
    key = torch.zeros((1, 2, 64))
    with pytest.raises(ValueError, match="token_major"):
        ops.write_kv(key, key, layout.layer(layout.allocate(), 0), torch.tensor([16]))


def test_rows_without_unit_stride_are_refused(ops: Ops) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        ops.rms_norm(torch.zeros((64, 3)).T, torch.ones(64), 1e-5)
