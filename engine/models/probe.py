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
from pagemill.engine.models.spec import ModelSpec
from pagemill.kernels.layout import KVLayout, LayerKV
from pagemill.kernels.metadata import AttentionMetadata

BLOCK_SIZE = 16
SHORT_WINDOW = 7
_LENGTHS = (23, 34)
_STEPS = ((5, 9), (7, 8), (6, 8), (5, 8), (0, 1))  # tokens of each sequence in each step
_TABLES = np.array([[4, 2, 0], [5, 1, 3]], np.int32)
_NUM_BLOCKS = 6
_WINDOW_FIELDS = ("sliding_window", "attention_chunk_size", "window_size", "local_attention")
# How many times the shift by rounding noise is still taken for rounding, and for which share of the tokens it must
# hold. 16-bit products are summed in float32 and rounded once; float32 ones are as far off as their order of summing
# makes them. In 16 bits rounding chooses other experts for some tokens. Measured on tiny models of 99 types: the 86
# right ones are off by at most 0.5 of the shift in bfloat16 and 2.7 in float32, the 13 wrong ones by at least 6.9.
_COARSE, _COARSE_SHARE = 2.0, 0.9
_FINE, _FINE_SHARE = 50.0, 0.95


def _sequences(spec: ModelSpec) -> list[list[int]]:
    """The token ids of the two sequences; those of a model for shorter ones are shorter."""
    draw = torch.Generator().manual_seed(20)
    lengths = [min(length, spec.max_model_len) for length in _LENGTHS]
    return [torch.randint(spec.vocab_size, (length,), generator=draw).tolist() for length in lengths]


def plain_logits(model: Any, spec: ModelSpec, device: str) -> torch.Tensor:
    """float32 [57, vocab_size] of the sequences, one after the other, each alone through the whole model."""
    rows = []
    for ids in _sequences(spec):
        rows.append(model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0].float().cpu())
    return torch.cat(rows)


@contextlib.contextmanager
def rounding_noise(model: Any) -> Iterator[None]:
    """Shift every intermediate result of a model by up to one unit of its last place meanwhile."""

    def shift(module: Any, args: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return output
        noise = torch.rand(output.shape, generator=draw).to(output.device) * 2 - 1
        return output * (1 + noise * torch.finfo(output.dtype).eps).to(output.dtype)

    draw = torch.Generator().manual_seed(21)
    hooks = [part.register_forward_hook(shift) for part in model.modules() if not list(part.children())]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def paged_logits(model: Model, layout: Callable[[int, int], KVLayout], device: str) -> torch.Tensor:
    """The same rows from both sequences on a pool of their own. `layout` makes one of (num_blocks, block_size)."""
    shape = layout(_NUM_BLOCKS, BLOCK_SIZE)
    pool = shape.allocate().fill_(float("nan"))  # what was never written must never be read
    kv = [shape.layer(pool, index) for index in range(shape.num_layers)]
    ids = _sequences(model.spec)
    found: list[list[torch.Tensor]] = [[] for _ in ids]
    done = [0] * len(ids)
    for most in _STEPS:
        counts = [min(count, len(ids[index]) - done[index]) for index, count in enumerate(most)]
        if not any(counts):
            break
        logits = _step(model, kv, ids, done, counts, device)
        for sequence, part in enumerate(torch.split(logits.cpu(), counts)):
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


def difference(paged: torch.Tensor, plain: torch.Tensor, shifted: torch.Tensor, dtype: torch.dtype) -> str | None:
    """What is wrong with the logits on the pool, or None. `shifted` are the plain ones under `rounding_noise`."""
    roundings, share = (_FINE, _FINE_SHARE) if dtype == torch.float32 else (_COARSE, _COARSE_SHARE)
    # Relative to the spread of a token's logits.
    spread = (plain - plain.mean(dim=-1, keepdim=True)).norm(dim=-1).clamp_min(1e-12)
    distance, shift = (float(((logits - plain).norm(dim=-1) / spread).quantile(share)) for logits in (paged, shifted))
    if distance <= roundings * shift:  # false for NaN, too
        return None
    return (
        f"on the paged pool its logits are off by {distance:.2g} of their spread, and {roundings * shift:.2g} would be "
        "rounding: it attends in a way that the interface does not show"
    )


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
