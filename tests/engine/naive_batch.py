"""The naive twin of `engine.batch`: a step's arrays from nothing, a token and a draw at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagemill.engine.batch import StepBatch
from pagemill.engine.scheduler_output import ScheduledSequence

COLUMNS = ("temperature", "top_k", "top_p", "min_p", "seed", "index", "position")


def naive_batch(scheduled: Sequence[ScheduledSequence], block_size: int) -> dict[str, Any]:
    """What a batch must say, as lists. Block tables: as far as they are read."""
    found: dict[str, Any] = {"query_start": [0], "seq_lens": [], "block_tables": []}
    names = ("token_ids", "positions", "slots", "wanted", "draw_rows", *COLUMNS)
    found |= {name: [] for name in names}
    for item in scheduled:
        request = item.request
        known = [*request.prompt_token_ids, *request.output_token_ids, *item.drafts]
        end = item.start + item.num_tokens
        for position in range(item.start, end):
            found["token_ids"].append(known[position])
            found["positions"].append(position)
            found["slots"].append(item.block_ids[position // block_size] * block_size + position % block_size)
        found["query_start"].append(len(found["token_ids"]))
        found["seq_lens"].append(end)
        found["block_tables"].append(item.block_ids[: -(-end // block_size)])
        if not item.samples:
            continue
        rows = 1 + len(item.drafts)
        first = len(found["wanted"])
        found["wanted"] += range(len(found["token_ids"]) - rows, len(found["token_ids"]))
        for draw in range(0 if item.top else max(rows, request.seats)):
            params, ahead = request.params, draw if item.drafts else 0
            found["draw_rows"].append(first + ahead)
            own = (params.temperature, params.top_k, params.top_p, params.min_p, request.seed)
            keys = (request.index + draw - ahead, len(request.output_token_ids) + ahead)
            for name, value in zip(COLUMNS, (*own, *keys), strict=True):
                found[name].append(value)
    return found


def told(batch: StepBatch, block_size: int) -> dict[str, Any]:
    """What a batch says, in the same form; what stands on the device and on the host must be the same."""
    meta, host = batch.meta, batch.meta.host
    for name in ("query_start", "seq_lens", "block_tables", "slot_mapping", "positions"):
        assert getattr(meta, name).tolist() == getattr(host, name).tolist(), name
        assert getattr(host, name).flags.c_contiguous
    lengths = host.seq_lens.tolist()
    found = {
        "query_start": host.query_start.tolist(),
        "seq_lens": lengths,
        "block_tables": [
            row[: -(-length // block_size)] for row, length in zip(host.block_tables.tolist(), lengths, strict=True)
        ],
        "token_ids": batch.token_ids.tolist(),
        "positions": host.positions.tolist(),
        "slots": host.slot_mapping.tolist(),
        "wanted": batch.wanted.tolist(),
        "draw_rows": batch.draw_rows.tolist(),
    }
    return found | {name: getattr(batch.sampling, name).tolist() for name in COLUMNS}
