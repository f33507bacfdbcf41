"""Every operation of a back end against the reference, on inputs made to catch the known faults of paged kernels.

Used by the tests (in Triton's interpreter) and by `bench/gpu_check.py` (on a device). What the inputs do: memory that
no sequence owns is NaN, table entries past a sequence are 2^31 - 1, block ids are a random permutation, tensors are
strided views of larger ones, and `poisoned_scratch` fills what the kernels allocate with NaN before they write it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pagemill.kernels.layout import KVLayout
from pagemill.kernels.metadata import AttentionMetadata
from pagemill.kernels.ops import Ops
from pagemill.kernels.reference import ReferenceOps
from pagemill.kernels.triton.attention_cases import ATTENTION_CASES, AttentionCase, make_attention_step
from pagemill.kernels.triton.comparison import ELEMENTWISE_TOLERANCE, Outcome, exact, normal, relative, worst
from pagemill.kernels.triton.logits_checks import edit_logits, logprobs, sample_greedy, sample_mixed

ATTENTION_TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}
TRUNCATED_BFLOAT16 = 8e-3
"""Tolerance in Triton's interpreter, which cuts bfloat16 off where a device rounds it."""


@dataclass(frozen=True, slots=True)
class Check:
    """A named comparison: `run(ops, device)` is deterministic, so running it twice must give equal bits."""

    name: str
    run: Callable[[Ops, str], Outcome]


def all_checks() -> list[Check]:
    """All checks, cheap ones first."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    return [
        *(Check(f"rms_norm {_short(t)} {h}", _bind(_rms_norm, t, h)) for t in dtypes for h in (64, 300)),
        *(Check(f"add_rms_norm {_short(t)}", _bind(_add_rms_norm, t, t)) for t in dtypes),
        Check("add_rms_norm bfloat16 beside float32", _bind(_add_rms_norm, torch.bfloat16, torch.float32)),
        *(Check(f"silu_and_mul {_short(t)} {w}", _bind(_silu_and_mul, t, w)) for t in dtypes for w in (96, 1500)),
        *(Check(f"rotary {_short(t)} head {d}", _bind(_rotary, t, d)) for t in dtypes for d in (64, 80, 128)),
        *(Check(f"linear {_short(t)}", _bind(_linear, t)) for t in (torch.float32, torch.bfloat16)),
        *(Check(f"write_kv {_short(t)} block {b}", _bind(_write_kv, t, b)) for t in dtypes for b in (1, 16, 24)),
        Check("copy_blocks", _bind(_copy_blocks, ((3, 5), (3, 6), (1, 2)))),
        Check("copy_blocks, chained", _bind(_copy_blocks, ((1, 2), (2, 3), (3, 1)))),
        Check("copy_blocks, none", _bind(_copy_blocks, ())),
        Check("sample, mixed rows", sample_mixed),
        Check("sample, greedy", sample_greedy),
        *(Check(f"edit_logits {v}", _bind(edit_logits, v)) for v in (31, 4200)),
        *(Check(f"logprobs {v}, top {n}", _bind(logprobs, v, n)) for v, n in ((5, 7), (4200, 0), (4200, 20))),
        Check("offsets beyond 2^31 elements", _far_blocks),
        *(Check(f"attention: {case.name}", _bind(_attention, case)) for case in ATTENTION_CASES),
    ]


@contextmanager
def poisoned_scratch() -> Iterator[None]:
    """Within it, memory that torch allocates without filling holds NaN (or the largest integer)."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled


def _attention(ops: Ops, device: str, case: AttentionCase) -> Outcome:
    step = make_attention_step(case, ops, device)
    scale = case.head_dim**-0.5
    got = ops.paged_attention(step.query, step.kv, step.meta, scale=scale, sliding_window=case.window)
    want = ReferenceOps(ops.kv_form).paged_attention(
        step.query, step.kv, step.meta, scale=scale, sliding_window=case.window
    )
    starts = [0, *np.cumsum(case.query_lens).tolist(), got.shape[0]]
    errors = [relative(got[a:b], want[a:b]) for a, b in itertools.pairwise(starts)]
    return Outcome(worst(errors), ATTENTION_TOLERANCE[case.dtype], got)


def _rms_norm(ops: Ops, device: str, dtype: torch.dtype, hidden: int) -> Outcome:
    x, weight = normal("rms_norm", device, dtype, (7, hidden + 8), (hidden,))
    x = x[:, :hidden]
    return _compare(ops, ops.rms_norm(x, weight, 1e-5), ReferenceOps().rms_norm(x, weight, 1e-5))


def _add_rms_norm(ops: Ops, device: str, dtype: torch.dtype, residual_dtype: torch.dtype) -> Outcome:
    x, residual, weight = normal("add_rms_norm", device, dtype, (5, 200), (5, 200), (200,))
    residual = residual.to(residual_dtype)
    got, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    want, want_total = ReferenceOps().add_rms_norm(x, residual, weight, 1e-5)
    sums, norms = _compare(ops, total, want_total), _compare(ops, got, want)
    return norms if sums.passed else sums


def _silu_and_mul(ops: Ops, device: str, dtype: torch.dtype, width: int) -> Outcome:
    (gate_up,) = normal("silu", device, dtype, (3, 2 * width))
    gate_up[0, :4] = torch.tensor([-100.0, 100.0, 0.0, -30.0])
    return _compare(ops, ops.silu_and_mul(gate_up), ReferenceOps().silu_and_mul(gate_up))


def _rotary(ops: Ops, device: str, dtype: torch.dtype, head_dim: int) -> Outcome:
    qkv, cos_sin = normal("rotary", device, dtype, (6, 9, head_dim), (50, head_dim))
    positions = torch.tensor([0, 49, 3, 3, 17, 48], device=device)
    want = qkv.clone()
    ops.rotary_embedding(qkv[:, :5], qkv[:, 5:7], positions, cos_sin.float())
    ReferenceOps().rotary_embedding(want[:, :5], want[:, 5:7], positions, cos_sin.float())
    return _compare(ops, qkv, want)


def _linear(ops: Ops, device: str, dtype: torch.dtype) -> Outcome:
    x, weight, bias = normal("linear", device, dtype, (5, 64), (96, 64), (96,))
    return _compare(
        ops,
        ops.linear(x, ops.prepare_linear(weight, bias)),
        ReferenceOps().linear(x, ReferenceOps().prepare_linear(weight, bias)),
    )


def _write_kv(ops: Ops, device: str, dtype: torch.dtype, block_size: int) -> Outcome:
    layout = KVLayout(
        num_blocks=40,
        num_layers=2,
        block_size=block_size,
        num_kv_heads=3,
        head_dim=80,
        dtype=dtype,
        device=device,
        form=ops.kv_form,
    )
    got = layout.allocate()
    got.fill_(torch.nan)
    want = got.clone()
    (qkv,) = normal("write_kv", device, dtype, (8, 12, 80))
    end = layout.num_blocks * block_size
    slots = torch.tensor([block_size, -1, end - 1, end, 7, -(2**40), 2**40, end // 2], device=device)
    ops.write_kv(qkv[:, 6:9], qkv[:, 9:], layout.layer(got, 1), slots)
    ReferenceOps(ops.kv_form).write_kv(qkv[:, 6:9], qkv[:, 9:], layout.layer(want, 1), slots)
    return exact(_bits(got), _bits(want))


def _copy_blocks(ops: Ops, device: str, pairs: Sequence[tuple[int, int]]) -> Outcome:
    (got,) = normal("copy_blocks", device, torch.float16, (3, 8, 5000))
    want = got.clone()
    tensor = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
    ops.copy_blocks(got, tensor)
    ReferenceOps().copy_blocks(want, tensor)
    return exact(got, want)


def _far_blocks(ops: Ops, device: str) -> Outcome:
    """A layer of more than 2^31 elements, with data in its last blocks: an int32 offset would wrap."""
    layout = KVLayout(
        num_blocks=65_560,
        num_layers=1,
        block_size=16,
        num_kv_heads=8,
        head_dim=128,
        dtype=torch.float16,
        device=device,
        form=ops.kv_form,
    )
    pool = layout.allocate()
    kv = layout.layer(pool, 0)
    length = 20
    table = np.array([[65_557, 65_559]], dtype=np.int32)
    at = np.arange(length)
    slots = table[0, at // 16].astype(np.int64) * 16 + at % 16
    query, key, value = normal("far", device, torch.float16, (length, 8, 128), (length, 8, 128), (length, 8, 128))
    meta = AttentionMetadata.build(
        query_start=np.array([0, length]),
        seq_lens=np.array([length]),
        block_tables=table,
        slot_mapping=slots,
        positions=at,
        device=device,
    )
    ops.write_kv(key, value, kv, meta.slot_mapping)
    ops.copy_blocks(pool, torch.tensor([[65_559, 65_558]]))
    if not torch.equal(pool[0, 65_558, -1024:], pool[0, 65_559, -1024:]):
        return Outcome(torch.inf, 0.0, pool[0, 65_558])
    got = ops.paged_attention(query, kv, meta, scale=0.1)
    want = ReferenceOps(ops.kv_form).paged_attention(query, kv, meta, scale=0.1)
    return Outcome(relative(got, want), ATTENTION_TOLERANCE[torch.float16], got)


def _bind(function: Callable[..., Outcome], *arguments: object) -> Callable[[Ops, str], Outcome]:
    return lambda ops, device: function(ops, device, *arguments)


def _compare(ops: Ops, got: torch.Tensor, want: torch.Tensor) -> Outcome:
    truncated = ops.name == "interpret" and want.dtype == torch.bfloat16
    tolerance = TRUNCATED_BFLOAT16 if truncated else ELEMENTWISE_TOLERANCE[want.dtype]
    return Outcome(relative(got, want), tolerance, got)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
