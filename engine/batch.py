"""The arrays of one step, made from what the scheduler decided. Work is proportional to the batch, not to the requests.

What a sequence brings to every step, its block table and how its tokens are drawn, is kept in rows (`batch_rows`). A
step that only draws one token more for each sequence, as most do, also keeps the arrays themselves and fills them
anew; and where it is the last one again, each sequence one token further, it leaves even that to compiled code that
can. Other steps, with chunks of prompts, drafts, several choices or beams, are computed for the whole batch at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from pagemill.engine.batch_rows import BatchRows
from pagemill.engine.logit_edits import RuledRows, collect_edits
from pagemill.engine.scheduler_output import ScheduledSequence
from pagemill.kernels.metadata import AttentionMetadata, HostMetadata
from pagemill.kernels.ops import LogitEdits, SampleBatch

IntArray = npt.NDArray[np.int64]


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

    token_ids int64 [T] and wanted int64 [R + P], on the device: the latter says of which tokens hidden states are
    wanted, first the R whose logits are sampled from, then those of `prompts`. sampled: whose rows the R are; None
    where each is another sequence's, from which one token is drawn and nothing else wanted. edits: what is done to them
    first. draw_rows int64 [D]: which of the R rows each draw is from, several times the same one where several choices
    begin; sampling: how they are made. prompts: log-probabilities of prompt tokens, of other rows. only_draws: whether
    all that is wanted of the logits is one draw from each row, as it is.

    advance: where it is not None the arrays are still those of the last step, of the same sequences, and their tokens
    now are what compiled code drew for them. It brings the arrays one token further; or compiled code does.

    Valid until the next batch is built: arrays are used again.
    """

    token_ids: torch.Tensor
    meta: AttentionMetadata
    wanted: torch.Tensor
    num_rows: int
    sampled: list[SampledRows] | None
    edits: LogitEdits | None
    draw_rows: IntArray
    sampling: SampleBatch
    prompts: list[PromptRows]
    only_draws: bool
    advance: Callable[[], None] | None = None


class BatchBuilder:
    """Makes the batches of one engine's steps, one after the other, for a pool of blocks of `block_size` tokens.

    sliding_window: the model's, 0 where it sees all tokens. With one, blocks out of sight leave the tables.
    """

    def __init__(self, *, block_size: int, vocab_size: int, device: str, sliding_window: int = 0) -> None:
        self._block_size = block_size
        self._keeps_blocks = sliding_window == 0
        self._vocab_size = vocab_size
        self._device = device
        self._rows = BatchRows()
        self._decodes: _Decodes | None = None
        self._following: list[int] = []  # where the sequences of the last step go on, if they all decoded
        self.drawn: list[int] | None = None
        """What compiled code drew in the batch that was built last: set by whoever had it drawn."""

    def build(self, scheduled: Sequence[ScheduledSequence]) -> StepBatch:
        """`scheduled` has at least one sequence, each with at least one token."""
        rows, drawn = self._rows, self.drawn
        self.drawn = None
        requests, tables, lengths, heads, starts, following, tokens = [], [], [], [], [], [], []
        size = self._block_size
        one_draw = only_decodes = True
        for item in scheduled:
            request, start = item.request, item.start
            table = item.block_ids
            requests.append(request)
            tables.append(table)
            lengths.append(len(table))
            heads.append(table[start // size])
            starts.append(start)
            following.append(start + 1)
            # What decides the next token is the last one known.
            tokens.append((request.output_token_ids or request.prompt_token_ids)[-1])
            if item.drafts or item.top or request.seats > 1:
                one_draw = only_decodes = False
            elif item.num_tokens != 1 or not item.samples:
                only_decodes = False
        further = only_decodes and starts == self._following
        self._following = following if only_decodes else []
        if rows.update(requests, tables, lengths, heads, further=further and self._keeps_blocks):
            self._decodes = None
        if rows.marked or not only_decodes:
            return self._step(scheduled, one_draw=one_draw and not rows.marked)
        if self._decodes is None:
            self._decodes, further = _Decodes(rows, self._block_size, self._device), False
        return self._decodes.fill(starts, tokens, drawn if further else None)

    def _step(self, scheduled: Sequence[ScheduledSequence], *, one_draw: bool) -> StepBatch:
        """A step of any kind. `one_draw`: no sampled sequence wants more than one."""
        count, size = len(scheduled), self._block_size
        num_tokens = np.array([item.num_tokens for item in scheduled])
        starts = np.array([item.start for item in scheduled])
        query_start = np.zeros(count + 1, np.int64)
        np.cumsum(num_tokens, out=query_start[1:])
        total = int(query_start[-1])
        token_ids = np.fromiter(chain.from_iterable(map(_token_ids, scheduled)), np.int64, total)
        sequence = np.repeat(np.arange(count), num_tokens)
        positions = np.arange(total) - query_start[sequence] + starts[sequence]
        tables = self._rows.tables
        slots = tables[sequence, positions // size].astype(np.int64) * size + positions % size
        meta = AttentionMetadata.build(
            query_start=query_start,
            seq_lens=starts + num_tokens,
            block_tables=tables,
            slot_mapping=slots,
            positions=positions,
            device=self._device,
        )
        if one_draw:
            owners = np.array([place for place, item in enumerate(scheduled) if item.samples], np.int64)
            outputs = np.array([len(item.request.output_token_ids) for item in scheduled], np.int64)
            return StepBatch(
                token_ids=self._on_device(token_ids),
                meta=meta,
                wanted=self._on_device(query_start[owners + 1] - 1),
                num_rows=len(owners),
                sampled=None,
                edits=None,
                draw_rows=np.arange(len(owners)),
                sampling=_sampling(self._rows, owners, outputs[owners]),
                prompts=[],
                only_draws=True,
            )
        first_tokens = query_start.tolist()
        sampled, wanted = _sampled_rows(scheduled, first_tokens[1:])
        num_rows = len(wanted)
        ruled = [
            RuledRows(each.first, each.item.request, each.item.request.rules, each.item.drafts)
            for each in sampled
            if each.item.request.rules is not None
        ]
        prompts = _prompt_rows(scheduled, first_tokens)
        for prompt in prompts:
            wanted += range(prompt.first, prompt.first + len(prompt.token_ids))
        draw_rows, sampling = self._draws(scheduled, sampled)
        return StepBatch(
            token_ids=self._on_device(token_ids),
            meta=meta,
            wanted=self._on_device(np.array(wanted, np.int64)),
            num_rows=num_rows,
            sampled=sampled,
            edits=collect_edits(ruled, self._vocab_size) if ruled else None,
            draw_rows=draw_rows,
            sampling=sampling,
            prompts=prompts,
            only_draws=not self._rows.marked and np.array_equal(draw_rows, np.arange(num_rows)),
        )

    def _draws(
        self, scheduled: Sequence[ScheduledSequence], sampled: Sequence[SampledRows]
    ) -> tuple[IntArray, SampleBatch]:
        """Of which row each draw is, and how it is made: in each seat's own noise, or along the drafts."""
        owners = [place for place, item in enumerate(scheduled) if item.samples]
        counts = np.array([each.num_draws for each in sampled], np.int64)
        first_draws = np.array([each.first_draw for each in sampled], np.int64)
        further = np.arange(counts.sum()) - np.repeat(first_draws, counts)  # the draw's number among its sequence's
        drafted = np.repeat(np.array([each.count > 1 for each in sampled], bool), counts)
        along = np.where(drafted, further, 0)
        outputs = np.array([len(each.item.request.output_token_ids) for each in sampled], np.int64)
        sampling = _sampling(
            self._rows, np.repeat(np.array(owners, np.int64), counts), np.repeat(outputs, counts) + along
        )
        sampling.index[:] += (further - along).astype(np.int32)
        return np.repeat(np.array([each.first for each in sampled], np.int64), counts) + along, sampling

    def _on_device(self, array: IntArray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


class _Decodes:
    """A step of which each sequence is drawn one token more: its arrays, for as long as the sequences are the same."""

    def __init__(self, rows: BatchRows, block_size: int, device: str) -> None:
        count = len(rows.requests)
        self._requests = rows.requests
        self._block_size = block_size
        self._device = device
        self._places = np.arange(count)
        self._token_ids = np.zeros(count, np.int64)
        self._outputs = np.zeros(count, np.int64)
        self._sampling = _sampling(rows, self._places, self._outputs)
        self._host = HostMetadata(
            query_start=np.arange(count + 1, dtype=np.int32),
            seq_lens=np.zeros(count, np.int32),
            block_tables=rows.tables,
            slot_mapping=np.zeros(count, np.int64),
            positions=np.zeros(count, np.int64),
        )
        host = self._host
        self._tensors = [
            torch.from_numpy(array)
            for array in (
                self._token_ids,
                self._places,
                host.query_start,
                host.seq_lens,
                host.block_tables,
                host.slot_mapping,
                host.positions,
            )
        ]
        self._batch = self._of(self._tensors)
        self._further = replace(self._batch, advance=self._write)
        self._rows = rows
        self._starts: list[int] = []
        self._tokens: list[int] = []

    def fill(self, starts: list[int], tokens: list[int], drawn: list[int] | None) -> StepBatch:
        """`tokens` are at `starts`. `drawn`: what compiled code drew for the tokens before them, where it did."""
        self._starts, self._tokens = starts, tokens
        if drawn is not None and tokens == drawn:
            return self._further
        self._write()
        if self._device != "cpu":
            return self._of([tensor.to(self._device, non_blocking=True) for tensor in self._tensors])
        return self._batch

    def _write(self) -> None:
        host, size = self._host, self._block_size
        self._token_ids[:] = self._tokens
        self._outputs[:] = [len(each.output_token_ids) for each in self._requests]
        host.positions[:] = self._starts
        np.add(host.positions, 1, out=host.seq_lens, casting="unsafe")
        blocks = self._rows.tables[self._places, host.positions // size]
        host.slot_mapping[:] = blocks.astype(np.int64) * size + host.positions % size
        self._batch.meta.renew()

    def _of(self, tensors: list[torch.Tensor]) -> StepBatch:
        token_ids, wanted, query_start, seq_lens, block_tables, slot_mapping, positions = tensors
        return StepBatch(
            token_ids=token_ids,
            meta=AttentionMetadata(query_start, seq_lens, block_tables, slot_mapping, positions, self._host),
            wanted=wanted,
            num_rows=len(self._requests),
            sampled=None,
            edits=None,
            draw_rows=self._places,
            sampling=self._sampling,
            prompts=[],
            only_draws=True,
        )


def _token_ids(item: ScheduledSequence) -> list[int]:
    known = item.request.tokens(item.start, item.start + item.num_tokens - len(item.drafts))
    return [*known, *item.drafts] if item.drafts else known


def _sampling(rows: BatchRows, owners: IntArray, positions: IntArray) -> SampleBatch:
    """Draws for the sequences in the rows `owners`, of their tokens number `positions`."""
    columns = {name: rows.draws[name][owners] for name in rows.draws.dtype.names or ()}
    return SampleBatch(position=positions, **columns)


def _sampled_rows(scheduled: Sequence[ScheduledSequence], ends: Sequence[int]) -> tuple[list[SampledRows], list[int]]:
    """The rows of every sampled sequence, and which tokens of the step these are of."""
    sampled: list[SampledRows] = []
    tokens: list[int] = []
    draw = 0
    for item, end in zip(scheduled, ends, strict=True):
        if not item.samples:
            continue
        count = 1 + len(item.drafts)
        draws = 0 if item.top else max(item.request.seats, count)
        sampled.append(SampledRows(item, len(tokens), count, draw, draws))
        tokens += range(end - count, end)
        draw += draws
    return sampled, tokens


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
