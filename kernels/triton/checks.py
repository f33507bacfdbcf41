"""Every operation of a back end against the reference, on inputs made to catch the known faults of paged kernels.

Used by the tests (in Triton's interpreter) and by `bench/gpu_check.py` (on a device). What the inputs do: memory that
no sequence owns is NaN, table entries past a sequence are 2^31 - 1, block ids are a random permutation, tensors are
strided views of larger ones, and `poisoned_scratch` fills what the kernels allocate with NaN before they write it.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagemill.kernels.layout import KVLayout, LayerKV
from pagemill.kernels.metadata import AttentionMetadata
from pagemill.kernels.ops import LogitEdits, Ops, SampleBatch
from pagemill.kernels.reference import ReferenceOps

WILD_BLOCK_ID = 2**31 - 1
ATTENTION_TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}
ELEMENTWISE_TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 2e-3}
TRUNCATED_BFLOAT16 = 8e-3
"""Tolerance in Triton's interpreter, which cuts bfloat16 off where a device rounds it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """`error` must not exceed `tolerance` (relative; 0 for exact results). `result` is compared between repetitions."""

    error: float
    tolerance: float
    result: torch.Tensor

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance


@dataclass(frozen=True, slots=True)
class Check:
    """A named comparison: `run(ops, device)` is deterministic, so running it twice must give equal bits."""

    name: str
    run: Callable[[Ops, str], Outcome]


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """A ragged step: the queries of s are the last `query_lens[s]` of `seq_lens[s]` tokens. `spare_rows` follow."""

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    block_size: int = 16
    head_dim: int = 64
    kv_heads: int = 2
    group: int = 3
    dtype: torch.dtype = torch.float16
    window: int = 0
    spare_rows: int = 0


_EDGES = (1, 15, 16, 17, 63, 64, 65, 130)
_RAGGED = (1, 3, 0, 17, 33, 64, 50)
_MIXED_QUERIES, _MIXED_CONTEXTS = (1, 40, 1, 7, 0, 16), (100, 40, 1, 77, 30, 144)

ATTENTION_CASES: tuple[AttentionCase, ...] = (
    *(AttentionCase(f"decode block {b}", (1,) * 8, _EDGES, block_size=b) for b in (1, 8, 16, 24, 64, 128)),
    *(AttentionCase(f"decode head {d}", (1,) * 8, _EDGES, head_dim=d) for d in (16, 80, 96, 128, 256)),
    *(AttentionCase(f"decode group {g}", (1,) * 8, _EDGES, group=g, kv_heads=1) for g in (1, 4, 7, 20)),
    *(AttentionCase(f"prefill block {b}", _RAGGED, _RAGGED, block_size=b) for b in (1, 8, 16, 64, 128)),
    *(AttentionCase(f"prefill head {d}", _RAGGED, _RAGGED, head_dim=d) for d in (80, 96, 128)),
    *(AttentionCase(f"prefill group {g}", _RAGGED, _RAGGED, group=g, kv_heads=1) for g in (1, 4, 7, 20)),
    AttentionCase("mixed", _MIXED_QUERIES, _MIXED_CONTEXTS),
    AttentionCase("mixed, float32", _MIXED_QUERIES, _MIXED_CONTEXTS, dtype=torch.float32),
    AttentionCase("mixed, float32, head 128", _MIXED_QUERIES, _MIXED_CONTEXTS, head_dim=128, dtype=torch.float32),
    AttentionCase("mixed, bfloat16", _MIXED_QUERIES, _MIXED_CONTEXTS, dtype=torch.bfloat16),
    AttentionCase("spare rows", _MIXED_QUERIES, _MIXED_CONTEXTS, spare_rows=5),
    AttentionCase("chunk of a long prompt", (48, 50), (300, 170), group=4, block_size=32),
    *(AttentionCase(f"window {w}", _MIXED_QUERIES, _MIXED_CONTEXTS, window=w) for w in (1, 16, 17, 64, 100, 1000)),
    AttentionCase("window, block 64", (1, 70, 5), (300, 150, 133), block_size=64, window=65),
    AttentionCase("window, block 1", (1, 70), (90, 150), block_size=1, window=33),
    AttentionCase("split", (1, 1, 1), (2047, 5, 600), kv_heads=1),
    AttentionCase("split at part borders", (1, 1, 1), (1536, 1537, 1535), kv_heads=1, group=7),
    AttentionCase("split prefill", (40, 3), (1500, 1100), kv_heads=1, group=4, block_size=64),
    AttentionCase("split, head 80, float32", (1,), (1300,), kv_heads=1, head_dim=80, dtype=torch.float32),
    AttentionCase("split, window", (1, 9), (2500, 1900), kv_heads=1, window=1100),
    AttentionCase("split, window, block 128", (2,), (2500,), kv_heads=1, window=1500, block_size=128),
)


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """The tensors of a case on a device."""

    query: torch.Tensor
    kv: LayerKV
    meta: AttentionMetadata


def make_attention_step(case: AttentionCase, ops: Ops, device: str) -> AttentionStep:
    """Random queries, keys and values for a case, in a pool where all else is NaN."""
    rng, generator = _random(case.name)
    needed = [-(-length // case.block_size) for length in case.seq_lens]
    layout = KVLayout(
        num_blocks=1 + sum(needed) + 3,
        num_layers=2,
        block_size=case.block_size,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        dtype=case.dtype,
        device=device,
        form=ops.kv_form,
    )
    pool = layout.allocate()
    pool.fill_(torch.nan)
    kv = layout.layer(pool, 1)
    free = iter(rng.permutation(np.arange(1, layout.num_blocks)))
    tables = np.full((len(needed), max(needed) + 2), WILD_BLOCK_ID, dtype=np.int32)
    for sequence, (count, length) in enumerate(zip(needed, case.seq_lens, strict=True)):
        tables[sequence, :count] = [next(free) for _ in range(count)]
        at = np.arange(length)
        slots = tables[sequence, at // case.block_size].astype(np.int64) * case.block_size + at % case.block_size
        shape = (length, case.kv_heads, case.head_dim)
        key, value = torch.randn((2, *shape), generator=generator).to(device=device, dtype=case.dtype)
        kv.scatter(torch.from_numpy(slots).to(device), key, value)
    pairs = list(zip(case.query_lens, case.seq_lens, strict=True))
    tokens = sum(case.query_lens)
    meta = AttentionMetadata.build(
        query_start=np.cumsum([0, *case.query_lens]),
        seq_lens=np.array(case.seq_lens),
        block_tables=tables,
        slot_mapping=np.full(tokens, -1),
        positions=np.concatenate([np.arange(length - queries, length) for queries, length in pairs]),
        device=device,
    )
    heads = case.kv_heads * case.group
    rows = torch.randn((tokens + case.spare_rows, heads + 2, case.head_dim), generator=generator)
    return AttentionStep(rows.to(device=device, dtype=case.dtype)[:, 1:-1], kv, meta)


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
        Check("sample, mixed rows", _sample_mixed),
        Check("sample, greedy", _sample_greedy),
        *(Check(f"edit_logits {v}", _bind(_edit_logits, v)) for v in (31, 4200)),
        *(Check(f"logprobs {v}, top {n}", _bind(_logprobs, v, n)) for v, n in ((5, 7), (4200, 0), (4200, 20))),
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
    errors = [_relative(got[a:b], want[a:b]) for a, b in itertools.pairwise(starts)]
    return Outcome(_worst(errors), ATTENTION_TOLERANCE[case.dtype], got)


def _rms_norm(ops: Ops, device: str, dtype: torch.dtype, hidden: int) -> Outcome:
    x, weight = _normal("rms_norm", device, dtype, (7, hidden + 8), (hidden,))
    x = x[:, :hidden]
    return _compare(ops, ops.rms_norm(x, weight, 1e-5), ReferenceOps().rms_norm(x, weight, 1e-5))


def _add_rms_norm(ops: Ops, device: str, dtype: torch.dtype, residual_dtype: torch.dtype) -> Outcome:
    x, residual, weight = _normal("add_rms_norm", device, dtype, (5, 200), (5, 200), (200,))
    residual = residual.to(residual_dtype)
    got, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    want, want_total = ReferenceOps().add_rms_norm(x, residual, weight, 1e-5)
    sums, norms = _compare(ops, total, want_total), _compare(ops, got, want)
    return norms if sums.passed else sums


def _silu_and_mul(ops: Ops, device: str, dtype: torch.dtype, width: int) -> Outcome:
    (gate_up,) = _normal("silu", device, dtype, (3, 2 * width))
    gate_up[0, :4] = torch.tensor([-100.0, 100.0, 0.0, -30.0])
    return _compare(ops, ops.silu_and_mul(gate_up), ReferenceOps().silu_and_mul(gate_up))


def _rotary(ops: Ops, device: str, dtype: torch.dtype, head_dim: int) -> Outcome:
    qkv, cos_sin = _normal("rotary", device, dtype, (6, 9, head_dim), (50, head_dim))
    positions = torch.tensor([0, 49, 3, 3, 17, 48], device=device)
    want = qkv.clone()
    ops.rotary_embedding(qkv[:, :5], qkv[:, 5:7], positions, cos_sin.float())
    ReferenceOps().rotary_embedding(want[:, :5], want[:, 5:7], positions, cos_sin.float())
    return _compare(ops, qkv, want)


def _linear(ops: Ops, device: str, dtype: torch.dtype) -> Outcome:
    x, weight, bias = _normal("linear", device, dtype, (5, 64), (96, 64), (96,))
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
    (qkv,) = _normal("write_kv", device, dtype, (8, 12, 80))
    end = layout.num_blocks * block_size
    slots = torch.tensor([block_size, -1, end - 1, end, 7, -(2**40), 2**40, end // 2], device=device)
    ops.write_kv(qkv[:, 6:9], qkv[:, 9:], layout.layer(got, 1), slots)
    ReferenceOps(ops.kv_form).write_kv(qkv[:, 6:9], qkv[:, 9:], layout.layer(want, 1), slots)
    return _exact(_bits(got), _bits(want))


def _copy_blocks(ops: Ops, device: str, pairs: Sequence[tuple[int, int]]) -> Outcome:
    (got,) = _normal("copy_blocks", device, torch.float16, (8, 5000))
    want = got.clone()
    tensor = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
    ops.copy_blocks(got, tensor)
    ReferenceOps().copy_blocks(want, tensor)
    return _exact(got, want)


def _sample_mixed(ops: Ops, device: str) -> Outcome:
    """Rows with every mixture of filters and temperatures, ties, NaN, infinities, far positions and large seeds."""
    rng, generator = _random("sample")
    rows, vocab = 24, 2200
    logits = torch.randn((rows, vocab), generator=generator) * 3
    logits[1] = torch.nan
    logits[2] = -torch.inf
    logits[3, 2190] = torch.nan
    logits[4, 11] = torch.inf
    logits[5, 100:] = -torch.inf
    logits[6:10] = 1.0
    logits[10:16] = (logits[10:16] * 2).round() / 2
    logits[16] = 0.0
    logits[16, ::3] = -0.0
    logits[17] *= 1e37

    def some(values: npt.NDArray[np.float64], off: float) -> npt.NDArray[np.float64]:
        return np.where(rng.random(rows) < 0.5, off, values)

    batch = SampleBatch(
        temperature=np.where(rng.random(rows) < 0.15, 0, rng.uniform(0.05, 2, rows)).astype(np.float32),
        top_k=some(rng.integers(1, 60, rows).astype(np.float64), 0).astype(np.int32),
        top_p=some(rng.choice([0, 0.3, 0.9, 0.999], rows), 1).astype(np.float32),
        min_p=some(rng.random(rows) * 0.3, 0).astype(np.float32),
        seed=rng.integers(0, 2**64, rows, dtype=np.uint64),
        position=rng.integers(0, 2**40, rows),
        index=rng.integers(0, 5, rows).astype(np.int32),
    )
    got = ops.sample(logits.to(device), batch)
    return _exact(got.cpu(), ReferenceOps().sample(logits, batch))


def _sample_greedy(ops: Ops, device: str) -> Outcome:
    _, generator = _random("greedy")
    logits = torch.randn((6, 5001), generator=generator)
    logits[0, [70, 4999]] = 50.0
    logits[1, -1] = 50.0
    logits[2] = 0.0
    logits[3, 4000] = torch.nan
    logits[4] = -torch.inf
    logits[5, [9, 4000]] = torch.inf
    batch = SampleBatch.greedy(6)
    return _exact(ops.sample(logits.to(device), batch).cpu(), ReferenceOps().sample(logits, batch))


def _edit_logits(ops: Ops, device: str, vocab: int) -> Outcome:
    """Edits of every kind that meet in some rows, with ids outside the vocabulary, in rows that are parts of longer."""
    rng, generator = _random("edit_logits")
    rows = 6
    wide = torch.randn((rows, vocab + 7), generator=generator) * 4
    wide[0, 3] = torch.nan
    wide[5] = -torch.inf
    words = -(-vocab // 32)

    def int32(values: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        return np.asarray(values, np.int32)

    def float32(size: int) -> npt.NDArray[np.float32]:
        return rng.uniform(0.3, 2, size).astype(np.float32)

    lists = [rng.choice(vocab, size, replace=False) for size in (0, vocab // 2, vocab // 7, 3)]
    lists[-1][:2] = -1, vocab
    edits = LogitEdits(
        mask_rows=int32([0, 2, 3]),
        masks=rng.integers(0, 2**32, (3, words), dtype=np.uint32),
        ban_rows=int32([1, 2, 2, 4]),
        ban_ids=int32([1, -1, vocab, vocab - 1]),
        bias_rows=int32([2, 2, 3, 4, 0]),
        bias_ids=int32([2, vocab + 3, 0, vocab - 1, 3]),
        bias=float32(5),
        penalty_rows=int32([5, 1, 2, 0]),
        repetition=float32(4),
        presence=float32(4),
        frequency=float32(4),
        starts=int32(np.cumsum([0, *map(len, lists)])),
        ids=int32(np.concatenate(lists)),
        counts=int32(rng.integers(0, 4, sum(map(len, lists)))),
    )
    got, want = wide.to(device), wide.clone()
    ops.edit_logits(got[:, :vocab], edits)
    ReferenceOps().edit_logits(want[:, :vocab], edits)
    got = got.cpu()
    same = torch.equal(got.isfinite(), want.isfinite()) and torch.equal(got.isnan(), want.isnan())
    error = _relative(got.nan_to_num(neginf=0.0), want.nan_to_num(neginf=0.0)) if same else torch.inf
    return Outcome(error, ELEMENTWISE_TOLERANCE[torch.float32], got)


def _logprobs(ops: Ops, device: str, vocab: int, top: int) -> Outcome:
    """Ties, zeros of both signs, NaN, infinities, rows of -inf and tokens that are none."""
    _, generator = _random("logprobs")
    logits = (torch.randn((10, vocab), generator=generator) * 4).round() / 2
    logits[0] = 0.0
    logits[0, ::3] = -0.0
    logits[1, 4] = torch.nan
    logits[2] = -torch.inf
    logits[3, 1] = torch.inf
    logits[4, 2:] = -torch.inf
    tokens = torch.tensor([1, 2, 3, 4, 2, vocab - 1, -1, vocab, 0, 1])
    got = ops.logprobs(logits.to(device), tokens.to(device), top)
    want = ReferenceOps().logprobs(logits, tokens, top)
    exact = torch.equal(got.rank.cpu(), want.rank) and torch.equal(got.ids.cpu(), want.ids)
    pairs = [(got.chosen.cpu(), want.chosen), (got.values.cpu(), want.values)]
    # Infinity and NaN must be where they are in the reference.
    errors = [float((a - b).abs().nan_to_num(nan=0.0).max()) for a, b in pairs if a.numel()]
    for a, b in pairs:
        exact = exact and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf())
    return Outcome(
        _worst(errors) if exact else torch.inf, 1e-5, torch.cat((got.chosen.cpu(), got.values.cpu().ravel()))
    )


def _far_blocks(ops: Ops, device: str) -> Outcome:
    """A pool of more than 2^31 elements, with data in its last blocks: an int32 offset would wrap."""
    layout = KVLayout(
        num_blocks=2060,
        num_layers=32,
        block_size=16,
        num_kv_heads=8,
        head_dim=128,
        dtype=torch.float16,
        device=device,
        form=ops.kv_form,
    )
    pool = layout.allocate()
    kv = layout.layer(pool, 31)
    length = 20
    table = np.array([[2057, 2059]], dtype=np.int32)
    at = np.arange(length)
    slots = table[0, at // 16].astype(np.int64) * 16 + at % 16
    query, key, value = _normal("far", device, torch.float16, (length, 8, 128), (length, 8, 128), (length, 8, 128))
    meta = AttentionMetadata.build(
        query_start=np.array([0, length]),
        seq_lens=np.array([length]),
        block_tables=table,
        slot_mapping=slots,
        positions=at,
        device=device,
    )
    ops.write_kv(key, value, kv, meta.slot_mapping)
    ops.copy_blocks(pool, torch.tensor([[2059, 2058]]))
    if not torch.equal(pool[2058, -1024:], pool[2059, -1024:]):
        return Outcome(torch.inf, 0.0, pool[2058])
    got = ops.paged_attention(query, kv, meta, scale=0.1)
    want = ReferenceOps(ops.kv_form).paged_attention(query, kv, meta, scale=0.1)
    return Outcome(_relative(got, want), ATTENTION_TOLERANCE[torch.float16], got)


def _bind(function: Callable[..., Outcome], *arguments: object) -> Callable[[Ops, str], Outcome]:
    return lambda ops, device: function(ops, device, *arguments)


def _random(name: str) -> tuple[np.random.Generator, torch.Generator]:
    seed = zlib.crc32(name.encode())
    return np.random.default_rng(seed), torch.Generator().manual_seed(seed)


def _normal(name: str, device: str, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    _, generator = _random(name)
    return [torch.randn(shape, generator=generator).to(device=device, dtype=dtype) for shape in shapes]


def _compare(ops: Ops, got: torch.Tensor, want: torch.Tensor) -> Outcome:
    truncated = ops.name == "interpret" and want.dtype == torch.bfloat16
    tolerance = TRUNCATED_BFLOAT16 if truncated else ELEMENTWISE_TOLERANCE[want.dtype]
    return Outcome(_relative(got, want), tolerance, got)


def _exact(got: torch.Tensor, want: torch.Tensor) -> Outcome:
    return Outcome(float((got != want).sum()), 0.0, got)


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    if got.shape != want.shape or got.dtype != want.dtype:
        return torch.inf
    size = float(want.double().norm())
    error = float((got.double() - want.double()).norm())
    return error / size if size > 0 else error


def _worst(errors: Sequence[float]) -> float:
    """The largest, NaN counting as larger than all."""
    return float(np.max(np.nan_to_num(np.array(errors), nan=np.inf)))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
