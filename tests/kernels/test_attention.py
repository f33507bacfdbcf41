"""Paged attention and the KV write: the reference against a naive loop, the CPU kernels against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagemill.kernels.cpu import amx, attention_amx
from pagemill.kernels.cpu.ops import CpuOps
from pagemill.kernels.cpu.plan import attention_plan
from pagemill.kernels.cpu.plan_sharing import SEGMENT
from pagemill.kernels.metadata import AttentionMetadata
from tests.kernels.paged import REFERENCE, PagedCase, distance, make_case, naive_attention

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-3}
DTYPES = [torch.float32, torch.bfloat16]
MIXED = ([1, 17, 65, 130, 40, 33], [1, 17, 1, 7, 33, 1])  # a first token, prefills, decodes, a chunk


@pytest.fixture(autouse=True, params=["tiles", "vectors"] if amx.allowed() else ["vectors"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this processor has tiles, attention in vectors is tried too."""
    if request.param == "vectors":
        monkeypatch.setattr(attention_amx, "use_tiles", lambda *form: False)


@pytest.fixture(scope="module")
def cpu() -> CpuOps:
    return CpuOps()


@pytest.mark.parametrize("form", ["k_major", "token_major"])
@pytest.mark.parametrize("window", [0, 1, 5])
def test_reference_follows_the_definition(form: str, window: int) -> None:
    case = make_case([1, 9, 20], [1, 9, 3], block_size=4, form=form)  # type: ignore[arg-type]
    actual = REFERENCE.paged_attention(case.query, case.kv, case.meta, scale=0.3, sliding_window=window)
    assert distance(actual, naive_attention(case, 0.3, window)) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 5, 8, 16, 32, 64])
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim"), [(3, 3, 64), (1, 4, 16), (2, 1, 80), (1, 8, 128), (2, 7, 20), (1, 17, 96)]
)
def test_attention(cpu: CpuOps, dtype: torch.dtype, block_size: int, kv_heads: int, group: int, head_dim: int) -> None:
    case = make_case(*MIXED, block_size=block_size, kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=dtype)
    scale = head_dim**-0.5
    actual = cpu.paged_attention(case.query, case.kv, case.meta, scale=scale)
    again = cpu.paged_attention(case.query, case.kv, case.meta, scale=scale)
    expected = REFERENCE.paged_attention(case.query, case.kv, case.meta, scale=scale)
    assert distance(actual, expected) < TOLERANCE[dtype]
    assert torch.equal(actual, again)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 8, 64])
@pytest.mark.parametrize("window", [1, 2, 16, 17, 63, 64, 65, 1000])
def test_sliding_window(cpu: CpuOps, dtype: torch.dtype, block_size: int, window: int) -> None:
    lengths = [window, window + 1, 129], [1, min(window + 1, 40), 30]
    case = make_case(*lengths, block_size=block_size, dtype=dtype)
    actual = cpu.paged_attention(case.query, case.kv, case.meta, scale=0.25, sliding_window=window)
    expected = REFERENCE.paged_attention(case.query, case.kv, case.meta, scale=0.25, sliding_window=window)
    assert distance(actual, expected) < TOLERANCE[dtype]


def test_window_lets_a_key_go_exactly_one_token_late(cpu: CpuOps) -> None:
    case = make_case([9], [1], kv_heads=1, group=1)
    keys, values = case.kv.gather(case.meta.block_tables[0, :1].long())
    oldest_slot = case.meta.host.block_tables[0, 0] * case.layout.block_size
    value = values[:1] + 1000.0
    case.kv.scatter(torch.tensor([oldest_slot]), keys[:1], value)
    with_it = cpu.paged_attention(case.query, case.kv, case.meta, scale=0.01, sliding_window=9)
    without = cpu.paged_attention(case.query, case.kv, case.meta, scale=0.01, sliding_window=8)
    assert with_it.mean() > 50.0
    assert without.abs().max() < 50.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_before_the_window_are_not_read(cpu: CpuOps, dtype: torch.dtype) -> None:
    """Blocks that have slid out of the window may have been freed: their ids are wild, their slots poison."""
    case = make_case([200], [1], dtype=dtype)
    expected = REFERENCE.paged_attention(case.query, case.kv, case.meta, scale=0.25, sliding_window=20)
    case.meta.host.block_tables[0, :11] = 0
    out_of_window = case.kv.v[case.meta.host.block_tables[0, 11]]
    out_of_window[:, :4] = float("nan")  # positions 176 .. 179; the window is 180 .. 199
    actual = cpu.paged_attention(case.query, case.kv, case.meta, scale=0.25, sliding_window=20)
    assert distance(actual, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_is_untouched_by_its_neighbours(cpu: CpuOps, dtype: torch.dtype) -> None:
    lens, queries = [70, 33, 90, 5, 64, 17, 128, 1], [1, 33, 9, 5, 1, 1, 1, 1]
    case = make_case(lens, queries, dtype=dtype)
    together = cpu.paged_attention(case.query, case.kv, case.meta, scale=0.25)
    host = case.meta.host
    for row in range(len(lens)):
        query, meta = alone(case, row)
        begin, end = host.query_start[row : row + 2]
        assert torch.equal(cpu.paged_attention(query, case.kv, meta, scale=0.25), together[begin:end])


def alone(case: PagedCase, row: int) -> tuple[torch.Tensor, AttentionMetadata]:
    """The queries and metadata of one sequence of a case, as if nothing were beside it."""
    host = case.meta.host
    begin, end = int(host.query_start[row]), int(host.query_start[row + 1])
    meta = AttentionMetadata.build(
        query_start=np.array([0, end - begin]),
        seq_lens=host.seq_lens[row : row + 1],
        block_tables=host.block_tables[row : row + 1],
        slot_mapping=host.slot_mapping[begin:end],
        positions=host.positions[begin:end],
    )
    return case.query[begin:end], meta


def check_dealt_out(case: PagedCase, window: int = 0) -> None:
    """On one thread and on five, in a step and alone: the same bits, and the right ones."""
    expected = REFERENCE.paged_attention(case.query, case.kv, case.meta, scale=0.25, sliding_window=window)
    host = case.meta.host
    outputs = []
    for threads in (1, 5):
        ops = CpuOps(threads=threads)
        meta = AttentionMetadata.build(
            **{
                name: getattr(host, name)
                for name in ("query_start", "seq_lens", "block_tables", "slot_mapping", "positions")
            }
        )
        for _ in range(2):  # layers of a step use its plan again
            outputs.append(ops.paged_attention(case.query, case.kv, meta, scale=0.25, sliding_window=window))
        for row in range(len(host.seq_lens)):
            query, own = alone(case, row)
            actual = ops.paged_attention(query, case.kv, own, scale=0.25, sliding_window=window)
            assert torch.equal(actual, outputs[0][host.query_start[row] : host.query_start[row + 1]])
    assert distance(outputs[0], expected) < TOLERANCE[case.query.dtype]
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("block_size", "head_dim"), [(16, 64), (256, 32), (7, 32), (48, 96), (100, 20)])
def test_segments_of_long_contexts(dtype: torch.dtype, block_size: int, head_dim: int) -> None:
    """Lengths around a segment's 256 tokens, decodes, guesses and chunks, dealt out to few and to many threads."""
    case = make_case(
        [255, 256, 257, 512, 1100, 700, 520],
        [1, 1, 2, 5, 1, 60, 300],
        block_size=block_size,
        head_dim=head_dim,
        group=3,
        dtype=dtype,
    )
    check_dealt_out(case)
    check_dealt_out(case, window=300)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_long_context(dtype: torch.dtype) -> None:
    check_dealt_out(make_case([3000], [1], head_dim=64, group=3, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 24])
def test_sequences_with_the_same_first_blocks(dtype: torch.dtype, block_size: int) -> None:
    """All begin with the first one's blocks, some go on with those of the third, the last has its own."""
    lens, queries = [300, 600, 1000, 900, 1000, 560, 700], [1, 3, 1, 2, 1, 200, 1]
    case = make_case(lens, queries, block_size=block_size, kv_heads=2, group=3, head_dim=64, dtype=dtype)
    tables = case.meta.host.block_tables
    tables[1:-1, : 272 // block_size] = tables[0, : 272 // block_size]
    tables[3:6, : 520 // block_size] = tables[2, : 520 // block_size]
    tables[4, : 768 // block_size] = tables[3, : 768 // block_size]
    check_dealt_out(case)
    check_dealt_out(case, window=400)


@pytest.mark.parametrize("group", [5, 40, 200])
def test_groups_of_any_size_share_segments(group: int) -> None:
    case = make_case([530] * 40, [1] * 40, kv_heads=1, group=group, head_dim=32, dtype=torch.bfloat16)
    tables = case.meta.host.block_tables
    tables[:, :32] = tables[0, :32]
    check_dealt_out(case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 3])
def test_a_token_has_the_same_bits_in_a_prefill_in_chunks_and_in_a_decode(
    cpu: CpuOps, dtype: torch.dtype, group: int
) -> None:
    """So that a preempted request, computed again in other pieces, goes on with the same tokens."""
    length = 150
    case = make_case([length], [length], group=group, head_dim=64, dtype=dtype)
    whole = cpu.paged_attention(case.query, case.kv, case.meta, scale=0.125)
    for step in (1, 7, 64):
        for begin in range(0, length, step):
            end = min(begin + step, length)
            chunk = AttentionMetadata.build(
                query_start=np.array([0, end - begin]),
                seq_lens=np.array([end]),
                block_tables=case.meta.host.block_tables,
                slot_mapping=case.meta.host.slot_mapping[begin:end],
                positions=case.meta.host.positions[begin:end],
            )
            actual = cpu.paged_attention(case.query[begin:end], case.kv, chunk, scale=0.125)
            assert torch.equal(actual, whole[begin:end])


def test_one_thread_gives_the_same_bits() -> None:
    case = make_case(*MIXED, kv_heads=3, group=3, head_dim=64, dtype=torch.bfloat16)
    outputs = [CpuOps(threads=count).paged_attention(case.query, case.kv, case.meta, scale=0.125) for count in (1, 2)]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.0, 1.0, 300.0])
def test_extreme_scores_stay_finite(cpu: CpuOps, dtype: torch.dtype, scale: float) -> None:
    case = make_case([100, 40], [1, 40], dtype=dtype)
    actual = cpu.paged_attention(case.query, case.kv, case.meta, scale=scale)
    expected = REFERENCE.paged_attention(case.query, case.kv, case.meta, scale=scale)
    assert distance(actual, expected) < 10 * TOLERANCE[dtype]


def test_nan_in_a_query_stays_in_its_row(cpu: CpuOps) -> None:
    case = make_case([20, 20], [1, 1])
    case.query[0] = float("nan")
    actual = cpu.paged_attention(case.query, case.kv, case.meta, scale=0.25)
    assert actual[0].isnan().all()
    assert torch.isfinite(actual[1]).all()


def test_sequences_without_queries_and_empty_steps(cpu: CpuOps) -> None:
    case = make_case([20, 7, 12], [1, 0, 12])
    expected = REFERENCE.paged_attention(case.query, case.kv, case.meta, scale=0.25)
    assert distance(cpu.paged_attention(case.query, case.kv, case.meta, scale=0.25), expected) < 1e-5
    empty = make_case([7], [0])
    assert cpu.paged_attention(empty.query, empty.kv, empty.meta, scale=0.25).shape == (0, 4, 16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 16])
def test_write_kv_writes_its_slots_and_no_other(cpu: CpuOps, dtype: torch.dtype, block_size: int) -> None:
    case = make_case([20, 9], [20, 3], block_size=block_size, dtype=dtype)
    blank = case.layout.allocate()
    blank.fill_(7.0)
    expected = blank.clone()
    slots = case.meta.slot_mapping.clone()
    slots[[2, 21]] = torch.tensor([-1, case.layout.num_blocks * block_size])  # padding; past the pool
    stacked = torch.stack([case.key, case.value, case.key], dim=1)  # rows that are parts of longer ones
    cpu.write_kv(stacked[:, 0], stacked[:, 1], case.layout.layer(blank, 1), slots)
    REFERENCE.write_kv(case.key, case.value, case.layout.layer(expected, 1), slots)
    assert torch.equal(blank, expected)
    assert (blank != 7.0).sum() == 2 * (len(slots) - 2) * case.layout.num_kv_heads * case.layout.head_dim


def test_what_is_written_is_what_attention_reads(cpu: CpuOps) -> None:
    case = make_case([40], [40], dtype=torch.bfloat16)
    expected = cpu.paged_attention(case.query, case.kv, case.meta, scale=0.25)
    fresh = case.layout.allocate()
    fresh.fill_(float("nan"))
    kv = case.layout.layer(fresh, 0)
    cpu.write_kv(case.key, case.value, kv, case.meta.slot_mapping)
    assert torch.equal(cpu.paged_attention(case.query, kv, case.meta, scale=0.25), expected)


@pytest.mark.parametrize("seed", range(30))
def test_the_plan_covers_every_query_head_and_segment_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(0, 12))
    block_size = int(rng.choice([5, 16, 64]))
    query_lens = rng.integers(0, 3 if seed % 2 else 80, count)
    seq_lens = np.maximum(query_lens + rng.integers(0, 2000, count), 1)
    tables = np.arange(count * 500).reshape(count, 500)
    for row in range(count):  # some begin like another
        same = int(rng.integers(0, 300))
        tables[row, :same] = tables[rng.integers(0, row + 1), :same]
    host = AttentionMetadata.build(
        query_start=np.concatenate([[0], np.cumsum(query_lens)]),
        seq_lens=seq_lens,
        block_tables=tables,
        slot_mapping=np.zeros(query_lens.sum()),
        positions=np.zeros(query_lens.sum()),
    ).host
    group, heads, threads = int(rng.integers(1, 12)), int(rng.integers(1, 5)), int(rng.integers(1, 5))
    window = int(rng.choice([0, 0, 100, 600]))
    plan = attention_plan(host, group=group, num_kv_heads=heads, block_size=block_size, threads=threads, window=window)
    seen = np.zeros((int(query_lens.sum()), heads, 10), int)
    pieces = np.zeros(len(seen), int)
    owner = np.repeat(np.arange(count), query_lens)
    for sequence, first, number, head, many, begin, end, is_part in plan.items:
        own = plan.tokens[first : first + number]
        assert number >= 1 and begin < end
        used = tables[sequence, begin * SEGMENT // block_size : -(-end * SEGMENT // block_size)]
        for token in own:
            table = tables[owner[token], begin * SEGMENT // block_size : -(-end * SEGMENT // block_size)]
            visible = -(-(plan.rows[token, 0] + 1) // block_size) - begin * SEGMENT // block_size
            assert (table[:visible] == used[:visible]).all()
        seen[own, head : head + many, begin:end] += 1
        pieces[own] += is_part
    for token, (position, segment, segments, slot, expected, pending) in enumerate(plan.rows):
        assert position == seq_lens[owner[token]] - query_lens[owner[token]] + token - host.query_start[owner[token]]
        oldest = max(0, position + 1 - window) if window else 0
        assert (segment, segment + segments) == (oldest // SEGMENT, position // SEGMENT + 1)
        assert (seen[token, :, segment : segment + segments] == 1).all()
        assert expected == pending == pieces[token]
        assert not expected or slot + segments <= plan.num_parts
    kept = plan.rows[plan.rows[:, 4] > 0]
    assert kept[:, 2].sum() == plan.num_parts


def test_metadata_refuses_what_does_not_fit_together() -> None:
    good = {
        "query_start": np.array([0, 1, 3]),
        "seq_lens": np.array([4, 2]),
        "block_tables": np.ones((2, 2)),
        "slot_mapping": np.zeros(3),
        "positions": np.zeros(3),
    }
    AttentionMetadata.build(**good)  # type: ignore[arg-type]
    for name, bad in [
        ("query_start", np.array([0, 1, 2])),
        ("query_start", np.array([0, 3])),
        ("query_start", np.array([0, 4, 3])),
        ("seq_lens", np.array([4, 1])),
        ("block_tables", np.ones((1, 2))),
        ("slot_mapping", np.zeros(2)),
    ]:
        with pytest.raises(ValueError):
            AttentionMetadata.build(**{**good, name: bad})  # type: ignore[arg-type]
