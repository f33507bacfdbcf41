"""The attention work list: everything covered exactly once, for any batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed: the CUDA kernels are not checked")

from pagemill.kernels.triton.plan import MIN_PART_TOKENS, AttentionPlan, TileShape, WorkList, plan_attention

DECODE, PREFILL = TileShape(16, 64), TileShape(128, 64)


def make_plan(query_lens: list[int], seq_lens: list[int], *, group: int = 4, kv_heads: int = 2, window: int = 0,
              target: int = 0, decode: TileShape = DECODE, prefill: TileShape = PREFILL) -> AttentionPlan:  # fmt: skip
    return plan_attention(
        np.cumsum([0, *query_lens]),
        np.array(seq_lens),
        group=group,
        kv_heads=kv_heads,
        decode=decode,
        prefill=prefill,
        window=window,
        target_programs=target,
    )


def covered(work: WorkList, counts: np.ndarray, query_start: np.ndarray, seq_lens: list[int], window: int) -> None:
    """Adds 1 to counts[token, key] for each visible pair that an item of the list computes."""
    for sequence, first_token, tokens, first_position, low, high, _, _ in work.work.tolist():
        query_len = query_start[sequence + 1] - query_start[sequence]
        assert query_start[sequence] <= first_token
        assert first_token + tokens <= query_start[sequence + 1]
        assert first_position == seq_lens[sequence] - query_len + first_token - query_start[sequence]
        assert 0 <= low <= high <= seq_lens[sequence]
        for token in range(tokens):
            position = first_position + token
            begin = max(low, position - window + 1) if window else low
            counts[first_token + token, begin : min(high, position + 1)] += 1


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    pairs = draw(
        st.lists(
            st.tuples(st.one_of(st.integers(0, 2), st.integers(0, 150)), st.one_of(st.just(0), st.integers(0, 1800))),
            min_size=1,
            max_size=5,
        )
    )
    return [query for query, _ in pairs], [query + past for query, past in pairs]


@settings(max_examples=150, deadline=None)
@given(
    batch=batches(),
    group=st.sampled_from([1, 3, 4, 7, 16]),
    kv_heads=st.sampled_from([1, 2, 8]),
    window=st.sampled_from([0, 0, 1, 63, 64, 65, 700, 5000]),
    target=st.sampled_from([0, 1, 8, 24, 400]),
    tile=st.sampled_from([16, 32, 64]),
)
def test_each_visible_pair_is_in_exactly_one_item(
    batch: tuple[list[int], list[int]], group: int, kv_heads: int, window: int, target: int, tile: int
) -> None:
    check_plan(*batch, group=group, kv_heads=kv_heads, window=window, target=target, tile=tile)


@pytest.mark.parametrize("window", [600, 700, 1100])
@pytest.mark.parametrize("queries", [1, 3, 70])
def test_windows_that_begin_inside_a_part(window: int, queries: int) -> None:
    for context in range(1000, 1600, 37):
        check_plan([queries], [context], group=4, kv_heads=1, window=window, target=1000, tile=64)


def check_plan(
    query_lens: list[int], seq_lens: list[int], *, group: int, kv_heads: int, window: int, target: int, tile: int
) -> None:
    """Coverage exactly once, well-formed parts, one writer per output row."""
    decode, prefill = TileShape(16, tile), TileShape(64, tile)
    plan = make_plan(
        query_lens,
        seq_lens,
        group=group,
        kv_heads=kv_heads,
        window=window,
        target=target,
        decode=decode,
        prefill=prefill,
    )
    query_start = np.cumsum([0, *query_lens])
    counts = np.zeros((query_start[-1], max(seq_lens, default=0)), dtype=np.int64)
    for work, shape in ((plan.decode, decode), (plan.prefill, prefill)):
        assert (work.work[:, 2] * group <= shape.block_m).all()
        assert (work.work[:, 2] > 0).all()
        covered(work, counts, query_start, seq_lens, window)
        check_parts(work, tile, window)
    for sequence, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for token in range(query_len):
            position = seq_len - query_len + token
            row = counts[query_start[sequence] + token]
            first = max(position - window + 1, 0) if window else 0
            assert (row[first : position + 1] == 1).all()
            assert row[:first].sum() == row[position + 1 :].sum() == 0
    writers = np.zeros(query_start[-1], dtype=np.int64)
    for work in (plan.decode, plan.prefill):
        for _, first_token, tokens, *_, part, _ in work.work.tolist():
            writers[first_token : first_token + tokens] += part < 0
        np.add.at(writers, work.merge[:, 0], 1)
    assert (writers == 1).all(), "each output row has one writer"


def check_parts(work: WorkList, tile: int, window: int) -> None:
    """Parts are numbered 0 .. n - 1, none is empty, those of a tile are contiguous, and merges name exactly them."""
    parts = work.work[work.work[:, 6] >= 0]
    parts = parts[np.argsort(parts[:, 6])]
    assert parts[:, 6].tolist() == list(range(work.num_parts))
    assert (parts[:, 5] > parts[:, 4]).all()
    if not window:
        assert (work.work[:, 4] % tile == 0).all(), "unmasked tiles start at multiples of the tile"
    of_token = {token: (first, count, place) for token, first, count, place in work.merge.tolist()}
    assert len(of_token) == len(work.merge)
    seen = 0
    while seen < len(parts):
        first_token, tokens = parts[seen, 1:3].tolist()
        first, count, _ = of_token[first_token]
        assert first == seen
        group = parts[seen : seen + count]
        assert (group[:, :4] == group[0, :4]).all()
        assert (group[1:, 4] == group[:-1, 5]).all()
        assert (group[1:, 4] % tile == 0).all()
        for place in range(tokens):
            assert of_token.pop(first_token + place) == (first, count, place)
        seen += count
    assert not of_token


def test_long_items_come_first() -> None:
    plan = make_plan([1, 1, 1], [10, 5000, 300])
    assert plan.decode.work[:, 5].tolist() == [5000, 300, 10]


def test_a_lone_long_sequence_is_cut_to_fill_the_device() -> None:
    plan = make_plan([1], [32768], kv_heads=8, target=396)
    assert 40 <= plan.decode.num_parts <= 396 // 8
    assert plan.decode.merge.tolist() == [[0, 0, plan.decode.num_parts, 0]]


def test_equal_sequences_that_fill_the_device_are_not_cut() -> None:
    assert make_plan([1] * 64, [4096] * 64, kv_heads=8, target=396).decode.num_parts == 0


def test_one_long_sequence_among_short_ones_is_cut_and_they_are_not() -> None:
    plan = make_plan([1] * 64, [128] * 63 + [32768], kv_heads=8, target=396)
    cut = plan.decode.work[plan.decode.work[:, 6] >= 0]
    assert set(cut[:, 0].tolist()) == {63}
    assert len(cut) > 20


def test_short_contexts_are_never_cut() -> None:
    assert make_plan([1], [2 * MIN_PART_TOKENS], kv_heads=1, target=10_000).decode.num_parts == 0


@pytest.mark.parametrize("excess", [-1, 0, 1])
def test_contexts_that_end_at_a_part_border_have_no_empty_part(excess: int) -> None:
    context = 8 * MIN_PART_TOKENS + excess
    plan = make_plan([1], [context], kv_heads=1, target=100)
    parts = plan.decode.work[np.argsort(plan.decode.work[:, 6])]
    assert len(parts) == 8 + (excess > 0)
    assert (parts[:, 5] > parts[:, 4]).all()


def test_no_sequences_make_no_work() -> None:
    for queries, contexts in (([], []), ([0, 0], [5, 0])):
        plan = make_plan(queries, contexts, target=100)
        assert plan.decode.work.shape == plan.prefill.work.shape == (0, 8)
        assert plan.decode.merge.shape == (0, 4)


def test_a_group_larger_than_the_row_tile_is_refused_by_no_one() -> None:
    """A query tile must hold one token's whole group (the configurations see to it); the widest group still fits."""
    plan = make_plan([1, 30], [40, 30], group=71, decode=TileShape(128, 64), prefill=TileShape(128, 64))
    assert plan.decode.work[:, 2].tolist() == [1]
    assert plan.prefill.work[:, 2].tolist() == [1] * 30
