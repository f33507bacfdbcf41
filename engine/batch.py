"""The arrays of one step, made from what the scheduler decided. Work is proportional to the batch, not to the requests.

Positions, slots and tables are computed for the whole batch at once; only what lies in Python lists (token ids, block
ids, parameters) is walked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from pagemill.engine.request import Request
from pagemill.engine.scheduler_output import ScheduledSequence
from pagemill.kernels.metadata import AttentionMetadata
from pagemill.kernels.ops import SampleBatch


@dataclass(frozen=True, slots=True)
class StepBatch:
    """T tokens of S sequences, of which R are sampled after.

    token_ids int64 [T]; sample_rows int64 [R]: which tokens' logits are wanted, one row for each sampled sequence;
    banned: (row of R, token ids) of the rows that may not end yet. draw_rows int64 [D]: which of the R rows each draw
    is from, several times the same one where several choices begin; sampling: how the D draws are made. tops: (row of
    R, count) of the rows whose likeliest tokens are wanted instead of draws.
    """

    token_ids: npt.NDArray[np.int64]
    meta: AttentionMetadata
    sample_rows: npt.NDArray[np.int64]
    banned: list[tuple[int, list[int]]]
    draw_rows: npt.NDArray[np.int64]
    sampling: SampleBatch
    tops: list[tuple[int, int]]


def build_batch(
    scheduled: Sequence[ScheduledSequence],
    *,
    block_size: int,
    vocab_size: int,
    eos_token_ids: Sequence[int],
    device: str,
) -> StepBatch:
    """Arrays for one step; `scheduled` has at least one sequence, each with at least one token."""
    count = len(scheduled)
    num_tokens = np.fromiter((item.num_tokens for item in scheduled), np.int64, count)
    starts = np.fromiter((item.start for item in scheduled), np.int64, count)
    query_start = np.zeros(count + 1, np.int64)
    np.cumsum(num_tokens, out=query_start[1:])
    total = int(query_start[-1])
    token_ids = np.fromiter(
        chain.from_iterable(item.request.tokens(item.start, item.start + item.num_tokens) for item in scheduled),
        np.int64,
        total,
    )
    seq_lens = starts + num_tokens
    tables = _block_tables(scheduled, -(-seq_lens // block_size))
    sequence = np.repeat(np.arange(count), num_tokens)
    positions = np.arange(total) - query_start[sequence] + starts[sequence]
    slots = tables[sequence, positions // block_size].astype(np.int64) * block_size + positions % block_size
    meta = AttentionMetadata.build(
        query_start=query_start,
        seq_lens=seq_lens,
        block_tables=tables,
        slot_mapping=slots,
        positions=positions,
        device=device,
    )
    samples = np.fromiter((item.samples for item in scheduled), np.bool_, count)
    sampled = [item for item in scheduled if item.samples]
    draws = [
        (row, item, item.request.index + seat)
        for row, item in enumerate(sampled)
        if not item.top
        for seat in range(item.request.seats)
    ]
    return StepBatch(
        token_ids=token_ids,
        meta=meta,
        sample_rows=query_start[1:][samples] - 1,
        banned=_banned(sampled, vocab_size, eos_token_ids),
        draw_rows=np.fromiter((row for row, _, _ in draws), np.int64, len(draws)),
        sampling=_sampling(draws),
        tops=[(row, item.top) for row, item in enumerate(sampled) if item.top],
    )


def _block_tables(scheduled: Sequence[ScheduledSequence], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """int32 [S, W], W the longest; entries past a sequence's length point at the null block."""
    tables = np.zeros((len(scheduled), int(lengths.max())), np.int32)
    inside = np.arange(tables.shape[1]) < lengths[:, None]
    needed = zip(scheduled, lengths.tolist(), strict=True)
    tables[inside] = np.fromiter(
        chain.from_iterable(item.block_ids[:length] for item, length in needed), np.int32, int(lengths.sum())
    )
    return tables


def _sampling(draws: Sequence[tuple[int, ScheduledSequence, int]]) -> SampleBatch:
    rows = len(draws)
    params = [item.request.params for _, item, _ in draws]
    return SampleBatch(
        temperature=np.fromiter((each.temperature for each in params), np.float32, rows),
        top_k=np.fromiter((each.top_k for each in params), np.int32, rows),
        top_p=np.fromiter((each.top_p for each in params), np.float32, rows),
        min_p=np.fromiter((each.min_p for each in params), np.float32, rows),
        seed=np.fromiter((item.request.seed for _, item, _ in draws), np.uint64, rows),
        position=np.fromiter((_generated(item) for _, item, _ in draws), np.int64, rows),
        index=np.fromiter((choice for _, _, choice in draws), np.int32, rows),
    )


def _generated(item: ScheduledSequence) -> int:
    """Index, among the generated tokens, of the token that this step samples."""
    return item.start + item.num_tokens - len(item.request.prompt_token_ids)


def _banned(
    sampled: Sequence[ScheduledSequence], vocab_size: int, eos_token_ids: Sequence[int]
) -> list[tuple[int, list[int]]]:
    """Rows that have not reached min_tokens, with the ids that would end them."""
    return [
        (row, ids)
        for row, item in enumerate(sampled)
        if _generated(item) < item.request.params.min_tokens
        and (ids := _ending_ids(item.request, vocab_size, eos_token_ids))
    ]


def _ending_ids(request: Request, vocab_size: int, eos_token_ids: Sequence[int]) -> list[int]:
    params = request.params
    ids = {*(() if params.ignore_eos else eos_token_ids), *(params.stop_token_ids or ())}
    return [token_id for token_id in sorted(ids) if token_id < vocab_size]
