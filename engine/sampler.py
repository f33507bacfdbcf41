"""From a step's logits to its tokens: raw log-probabilities, the edits, the draws, and the drafts that were right.

The order is that of the design: log-probabilities are of the model's own distribution; then masks, bans, biases and
penalties; then temperature, min_p, top_k, top_p and the draw, which are one kernel. A beam's logits become
log-probabilities before its edits, as in transformers' beam search.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pagemill.engine.batch import SampledRows, StepBatch
from pagemill.engine.logprobs import PositionLogprobs, TokenLogprob
from pagemill.engine.scheduler_output import Sampled
from pagemill.kernels.ops import Ops


def sample_step(logits: torch.Tensor, batch: StepBatch, sampled: Sequence[SampledRows], ops: Ops) -> list[Sampled]:
    """Sample every sequence of a step from its rows of logits float32 [R, V], which are changed. sampled: whose they
    are."""
    told = _told_draws(sampled)
    raw = _rows(logits, batch.draw_rows[[draw for draw, _ in told]]) if told else None
    searched = [each for each in sampled if each.item.top]
    for each in searched:
        logits[each.first] = torch.log_softmax(logits[each.first], dim=-1)
    if batch.edits is not None:
        ops.edit_logits(logits, batch.edits)
    drawn: list[int] = []
    if len(batch.draw_rows):
        every = len(batch.draw_rows) == logits.shape[0] and not searched
        drawn = ops.sample(logits if every else _rows(logits, batch.draw_rows), batch.sampling).tolist()
    results = [_offers(logits[each.first], each.item.top) if each.item.top else _drawn(each, drawn) for each in sampled]
    if raw is not None:
        found = position_logprobs(raw, [drawn[draw] for draw, _ in told], [top for _, top in told], ops)
        by_draw = dict(zip((draw for draw, _ in told), found, strict=True))
        for each, result in zip(sampled, results, strict=True):
            if each.first_draw in by_draw and each.num_draws:
                result.logprobs = [by_draw[each.first_draw + place] for place in range(len(result.tokens))]
    return results


def share_draws(sampled: Sequence[SampledRows], drawn: Sequence[int]) -> list[Sampled]:
    """What each sequence gets of the draws of a step that only draws."""
    return [_drawn(each, drawn) for each in sampled]


def position_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], tops: Sequence[int], ops: Ops
) -> list[PositionLogprobs]:
    """What rows of logits [L, V] say about `token_ids`, with so many of the likeliest tokens beside each, as far as
    there are any: V may be less, and a row that is no distribution has none."""
    found = ops.logprobs(logits, torch.tensor(token_ids, dtype=torch.int64, device=logits.device), max(tops, default=0))
    chosen, rank = found.chosen.tolist(), found.rank.tolist()
    ids, values = found.ids.tolist(), found.values.tolist()
    return [
        PositionLogprobs(
            TokenLogprob(token_id, chosen[row], rank[row]),
            [
                TokenLogprob(other, values[row][place], place + 1)
                for place, other in enumerate(ids[row][:top])
                if other >= 0
            ],
        )
        for row, (token_id, top) in enumerate(zip(token_ids, tops, strict=True))
    ]


def _told_draws(sampled: Sequence[SampledRows]) -> list[tuple[int, int]]:
    """The draws whose log-probabilities are wanted, with the number of alternatives."""
    return [
        (each.first_draw + place, each.item.request.params.logprobs or 0)
        for each in sampled
        if each.item.request.params.logprobs is not None
        for place in range(each.num_draws)
    ]


def _drawn(each: SampledRows, drawn: Sequence[int]) -> Sampled:
    tokens = list(drawn[each.first_draw : each.first_draw + each.num_draws])
    if each.item.drafts:
        right = 0
        while right < len(each.item.drafts) and tokens[right] == each.item.drafts[right]:
            right += 1
        tokens = tokens[: right + 1]
    return Sampled(tokens)


def _offers(logprobs: torch.Tensor, top: int) -> Sampled:
    values, ids = logprobs.topk(min(top, logprobs.shape[-1]))
    if not bool(torch.isfinite(values[0])):
        return Sampled([-1], [])
    return Sampled(ids.tolist(), values.tolist())


def _rows(logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    return logits[torch.from_numpy(rows).to(logits.device)]
