"""Whether a model of transformers computes the same on the paged pool as by itself: tried out on its own weights.

A model may leave the attention interface aside in some layers, add something of its own to the scores, or take a
token's place in the batch for its position, and would run all the same. So a few tokens of two sequences are computed
both ways before it serves: alone and whole with transformers' plain attention, and together on the pool, in chunks and
out-of-order blocks. Sliding windows are cut short for the occasion, so that they matter within so few tokens.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from pagemill.engine.models.base import Model
from pagemill.kernels.layout import KVLayout, LayerKV
from pagemill.kernels.metadata import AttentionMetadata

BLOCK_SIZE = 16
SHORT_WINDOW = 7
_LENGTHS = (23, 34)
_STEPS = ((9, 17), (14, 16), (0, 1))  # tokens of each sequence in each step
_TABLES = np.array([[4, 2, 0], [5, 1, 3]], np.int32)
_NUM_BLOCKS = 6
_WINDOW_FIELDS = ("sliding_window", "attention_chunk_size", "window_size", "local_attention")
_TOLERANCE = {torch.float32: 3e-4}
_COARSE = 4e-2  # for 16-bit types
_COARSE_SHARE = 0.75  # of the tokens must be so close: rounding may choose another expert for some


def sequences(vocab_size: int) -> list[list[int]]:
    """The token ids of the two sequences."""
    draw = torch.Generator().manual_seed(20)
    return [torch.randint(vocab_size, (length,), generator=draw).tolist() for length in _LENGTHS]


def plain_logits(model: Any, vocab_size: int, device: str) -> torch.Tensor:
    """float64 [57, vocab_size] of the sequences, one after the other, each alone through the whole model."""
    rows = []
    for ids in sequences(vocab_size):
        rows.append(model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0].double().cpu())
    return torch.cat(rows)


def paged_logits(model: Model, layout: Callable[[int, int], KVLayout], device: str) -> torch.Tensor:
    """The same rows from both sequences on a pool of their own. `layout` makes one of (num_blocks, block_size)."""
    shape = layout(_NUM_BLOCKS, BLOCK_SIZE)
    pool = shape.allocate().fill_(float("nan"))  # what was never written must never be read
    kv = [shape.layer(pool, index) for index in range(shape.num_layers)]
    ids = sequences(model.spec.vocab_size)
    found: list[list[torch.Tensor]] = [[] for _ in ids]
    done = [0] * len(ids)
    for counts in _STEPS:
        logits = _step(model, kv, ids, done, counts, device)
        for sequence, part in enumerate(torch.split(logits.double().cpu(), list(counts))):
            found[sequence].append(part)
            done[sequence] += counts[sequence]
    return torch.cat(list(itertools.chain.from_iterable(found)))


def _step(
    model: Model,
    kv: Sequence[LayerKV],
    ids: Sequence[Sequence[int]],
    done: Sequence[int],
    counts: Sequence[int],
    device: str,
) -> torch.Tensor:
    here = [index for index, count in enumerate(counts) if count]
    positions = np.concatenate([np.arange(done[index], done[index] + counts[index]) for index in here])
    owner = np.repeat(here, [counts[index] for index in here])
    meta = AttentionMetadata.build(
        query_start=np.cumsum([0] + [counts[index] for index in here]),
        seq_lens=np.array([done[index] + counts[index] for index in here]),
        block_tables=_TABLES[here],
        slot_mapping=_TABLES[owner, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
        positions=positions,
        device=device,
    )
    tokens = [ids[index][done[index] : done[index] + counts[index]] for index in here]
    batch = torch.tensor(list(itertools.chain.from_iterable(tokens)), device=device)
    return model.logits(model.forward(batch, meta, kv, torch.arange(len(batch), device=device)))


def difference(paged: torch.Tensor, plain: torch.Tensor, dtype: torch.dtype) -> str | None:
    """What is wrong with the logits on the pool, or None. Distances are relative to the spread of a token's logits."""
    spread = (plain - plain.mean(dim=-1, keepdim=True)).norm(dim=-1)
    distance = (paged - plain).norm(dim=-1) / spread.clamp_min(1e-12)
    tolerance = _TOLERANCE.get(dtype)
    if tolerance is None:
        tolerance, worst = _COARSE, float(distance.quantile(_COARSE_SHARE))
    else:
        worst = float(distance.max())
    if worst <= tolerance:  # false for NaN, too
        return None
    return f"on the paged pool its logits are off by {worst:.2g} (at most {tolerance:g}); it would answer wrongly"


@contextlib.contextmanager
def short_windows(model: Any) -> Iterator[None]:
    """Cut every sliding window and attention chunk of a model to `SHORT_WINDOW` tokens meanwhile."""
    holders = {id(module): module for module in model.modules()}
    holders |= {id(config): config for config in map(_config, model.modules()) if config is not None}
    saved = []
    for holder in holders.values():
        for name in _WINDOW_FIELDS:
            value = vars(holder).get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > SHORT_WINDOW:
                saved.append((holder, name, value))
                setattr(holder, name, SHORT_WINDOW)
    try:
        yield
    finally:
        for holder, name, value in saved:
            setattr(holder, name, value)


def _config(module: Any) -> Any:
    return vars(module).get("config")
