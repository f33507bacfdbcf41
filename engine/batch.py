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

from pagemill.engine.logit_edits import RuledRows, collect_edits
from pagemill.engine.scheduler_output import ScheduledSequence
from pagemill.kernels.metadata import AttentionMetadata
from pagemill.kernels.ops import LogitEdits, SampleBatch

_DRAW = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("seed", np.uint64),
        ("position", np.int64),
        ("index", np.int32),
    ]
)


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The rows of logits of one sequence: `count` from `first` on, one behind its last known token and one behind each
    draft. Its draws are `num_draws` from `first_draw` on: one for each seat, or one for each row; none with `top`."""

    item: ScheduledSequence
    first: int
    count: int
    first_draw: int
    num_draws: int


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Prompt tokens of the step's item number `place` whose successors' log-probabilities are wanted: they are tokens
    first .. first + len(token_ids) of the step, and `token_ids` are the successors."""

    place: int
    first: int
    token_ids: list[int]
    top: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """T tokens of S sequences. R rows of logits are wanted after, and D draws made from them.

    token_ids int64 [T]. sample_rows int64 [R]: which tokens' logits. sampled: whose they are. edits: what is done to
    them first. draw_rows int64 [D]: which of the R rows each draw is from, several times the same one where several
    choices begin; sampling: how they are made. prompts: log-probabilities of prompt tokens, of other rows.
    """

    token_ids: npt.NDArray[np.int64]
    meta: AttentionMetadata
    sample_rows: npt.NDArray[np.int64]
    sampled: list[SampledRows]
    edits: LogitEdits | None
    draw_rows: npt.NDArray[np.int64]
    sampling: SampleBatch
    prompts: list[PromptRows]


def build_batch(scheduled: Sequence[ScheduledSequence], *, block_size: int, vocab_size: int, device: str) -> StepBatch:
    """Arrays for one step; `scheduled` has at least one sequence, each with at least one token."""
    count = len(scheduled)
    num_tokens = np.fromiter((item.num_tokens for item in scheduled), np.int64, count)
    starts = np.fromiter((item.start for item in scheduled), np.int64, count)
    query_start = np.zeros(count + 1, np.int64)
    np.cumsum(num_tokens, out=query_start[1:])
    total = int(query_start[-1])
    token_ids = np.fromiter(chain.from_iterable(map(_token_ids, scheduled)), np.int64, total)
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
    sampled, ends = _sampled_rows(scheduled, query_start[1:].tolist())
    rows = sampled[-1].first + sampled[-1].count if sampled else 0
    sample_rows = (
        np.array(ends, np.int64)
        if rows == len(sampled)
        else np.concatenate([np.arange(end - each.count + 1, end + 1) for each, end in zip(sampled, ends, strict=True)])
    )
    ruled = [
        RuledRows(each.first, each.item.request, each.item.request.rules, each.item.drafts)
        for each in sampled
        if each.item.request.rules is not None
    ]
    return StepBatch(
        token_ids=token_ids,
        meta=meta,
        sample_rows=sample_rows,
        sampled=sampled,
        edits=collect_edits(ruled, vocab_size) if ruled else None,
        draw_rows=_draw_rows(sampled),
        sampling=_sampling(sampled),
        prompts=_prompt_rows(scheduled, query_start.tolist()),
    )


def _token_ids(item: ScheduledSequence) -> list[int]:
    known = item.request.tokens(item.start, item.start + item.num_tokens - len(item.drafts))
    return [*known, *item.drafts] if item.drafts else known


def _block_tables(scheduled: Sequence[ScheduledSequence], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """int32 [S, W], W the longest; entries past a sequence's length point at the null block."""
    tables = np.zeros((len(scheduled), int(lengths.max())), np.int32)
    inside = np.arange(tables.shape[1]) < lengths[:, None]
    needed = zip(scheduled, lengths.tolist(), strict=True)
    tables[inside] = np.fromiter(
        chain.from_iterable(item.block_ids[:length] for item, length in needed), np.int32, int(lengths.sum())
    )
    return tables


def _sampled_rows(scheduled: Sequence[ScheduledSequence], ends: Sequence[int]) -> tuple[list[SampledRows], list[int]]:
    """The rows of every sampled sequence, and the last token of each in the step."""
    sampled: list[SampledRows] = []
    last: list[int] = []
    row = draw = 0
    for item, end in zip(scheduled, ends, strict=True):
        if not item.samples:
            continue
        count = 1 + len(item.drafts)
        draws = 0 if item.top else max(item.request.seats, count)
        sampled.append(SampledRows(item, row, count, draw, draws))
        last.append(end - 1)
        row += count
        draw += draws
    return sampled, last


def _draw_rows(sampled: Sequence[SampledRows]) -> npt.NDArray[np.int64]:
    if all(each.num_draws == each.count for each in sampled):
        return np.arange(sum(each.count for each in sampled))
    rows = [each.first + (place if each.count > 1 else 0) for each in sampled for place in range(each.num_draws)]
    return np.array(rows, np.int64)


def _sampling(sampled: Sequence[SampledRows]) -> SampleBatch:
    total = sum(each.num_draws for each in sampled)
    table = np.fromiter(chain.from_iterable(map(_draws, sampled)), _DRAW, total)
    return SampleBatch(**{name: np.ascontiguousarray(table[name]) for name in _DRAW.names or ()})


def _draws(each: SampledRows) -> list[tuple[float, int, float, float, int, int, int]]:
    """How the sequence's draws are made: in each seat's own noise, or along the drafts."""
    request = each.item.request
    params, seed, index = request.params, request.seed, request.index
    position = len(request.output_token_ids)
    first = (params.temperature, params.top_k, params.top_p, params.min_p, seed, position, index)
    if each.num_draws == 1:
        return [first]
    if each.count > 1:
        return [(*first[:5], position + place, index) for place in range(each.num_draws)]
    return [(*first[:6], index + seat) for seat in range(each.num_draws)]


def _prompt_rows(scheduled: Sequence[ScheduledSequence], starts: Sequence[int]) -> list[PromptRows]:
    found = []
    for place, item in enumerate(scheduled):
        request = item.request
        if not request.wants_prompt_logprobs:
            continue
        # A token's logits are about the next one; nothing is said about the first of all.
        told = max(1, request.num_told_logprobs)
        first = max(item.start, told - 1)
        successors = request.prompt_token_ids[first + 1 : item.start + item.num_tokens + 1]
        if successors:
            top = request.params.prompt_logprobs or 0
            found.append(PromptRows(place, starts[place] + first - item.start, successors, top))
    return found
