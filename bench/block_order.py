"""What it is worth on the CPU that a sequence's blocks lie in a row: two layouts of the pool, four orders of blocks.

    python -m bench.block_order [--threads N] [--only TEXT] [--rounds N] [--megabytes N] [--json]

The pool has the layer outermost (`kernels/layout.py`), so that blocks of neighbouring ids are one piece of memory. With
the block outermost, [block, layer, ...], the blocks of one layer lie all other layers apart, whatever their ids. Both
are read here from the very same memory of thirty layers, by the same kernel: only strides and addresses differ. Ids of
a sequence's blocks ascend, descend, come in drawn runs of eight, or are drawn one by one; where they are in order a
shared prefix is one run and each sequence's own part another.

A round takes each variant once through as many layers as hold at least `--megabytes` of keys and values, in an order
that changes from round to round. Printed are medians of a layer's time over that of the first variant in the same
round, with their quartiles: attention, and for prefills and decodes the write of the step's keys and values.
SmolLM2-135M's heads: 9 over 3 key/value heads of 64, bfloat16, blocks of 16 tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch
from bench.attention_cost import DIM, HEADS, KV_HEADS, Shape

from pagemill.kernels.cpu.ops import CpuOps
from pagemill.kernels.layout import KVLayout, LayerKV
from pagemill.kernels.metadata import AttentionMetadata

LAYERS, BLOCK = 30, 16

SHAPES = (
    *(Shape(f"decode {n} x {length}", n, length) for length in (127, 1000, 4000) for n in (1, 8, 64, 96)),
    Shape("decode 48 x 1500, 1400 shared", 48, 1504, shared=1392),
    Shape("prefill 512 at 0", 1, 512, queries=512),
    Shape("prefill 512 at 3488", 1, 4000, queries=512),
    Shape("prefill 5 x 105 behind 1392", 5, 1497, queries=105, shared=1392),
)
MOST_BLOCKS = 30_000  # 11 GB: a shape that needs more is left out


@dataclass(frozen=True, slots=True)
class Variant:
    outer: str
    order: str

    def __str__(self) -> str:
        return f"{self.outer}, {self.order}"


ORDERS = ("random", "eights", "ascending", "descending")
VARIANTS = tuple(Variant(outer, order) for outer in ("block", "layer") for order in ORDERS)


def tables_of(shape: Shape, order: str) -> Any:
    """Block tables: the same ids in each order, dealt out sequence by sequence."""
    per_sequence, common = -(-shape.length // BLOCK), shape.shared // BLOCK
    own = per_sequence - common
    ids = np.arange(1, 1 + common + shape.sequences * own, dtype=np.int32)
    if order == "random":
        ids = np.random.default_rng(0).permutation(ids)
    elif order == "eights":
        place = np.random.default_rng(0).permutation(-(-len(ids) // 8))
        ids = ids[np.argsort(place[np.arange(len(ids)) // 8], kind="stable")]
    elif order == "descending":
        ids = ids[::-1]
    prefix = np.tile(ids[:common], (shape.sequences, 1))
    return np.concatenate([prefix, ids[common:].reshape(shape.sequences, own)], axis=1)


def step(shape: Shape, tables: Any) -> AttentionMetadata:
    tokens = shape.sequences * shape.queries
    positions = np.tile(np.arange(shape.length - shape.queries, shape.length), shape.sequences)
    sequence = np.repeat(np.arange(shape.sequences), shape.queries)
    return AttentionMetadata.build(
        query_start=np.arange(0, tokens + 1, shape.queries),
        seq_lens=np.full(shape.sequences, shape.length),
        block_tables=tables,
        slot_mapping=tables[sequence, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK,
        positions=positions,
    )


def layers_of(pool: torch.Tensor, layout: KVLayout, outer: str) -> list[LayerKV]:
    """Views of the pool's layers, in its own layout or as if the block were outermost."""
    if outer == "layer":
        return [layout.layer(pool, index) for index in range(LAYERS)]
    apart = pool.view(layout.num_blocks, LAYERS, layout.elements_per_piece)
    return [layout.layer(apart.transpose(0, 1), index) for index in range(LAYERS)]


def seconds(run: Callable[[LayerKV], object], layers: list[LayerKV]) -> float:
    start = time.perf_counter()
    for layer in layers:
        run(layer)
    return (time.perf_counter() - start) / len(layers)


def measure(ops: CpuOps, shape: Shape, rounds: int, megabytes: int) -> list[dict[str, Any]]:
    blocks = tables_of(shape, "random").max() + 1
    layout = KVLayout(num_blocks=int(blocks), num_layers=LAYERS, block_size=BLOCK, num_kv_heads=KV_HEADS, head_dim=DIM,
                      dtype=torch.bfloat16)  # fmt: skip
    pool = layout.allocate()
    pool.copy_(torch.randn(layout.elements_per_piece).to(layout.dtype).expand_as(pool))
    tokens = shape.sequences * shape.queries
    query = torch.randn(tokens, HEADS, DIM).to(layout.dtype)
    rows = torch.randn(tokens, KV_HEADS, DIM).to(layout.dtype)
    a_layer = shape.tokens_read * 2 * KV_HEADS * DIM * layout.dtype.itemsize
    several = min(LAYERS, -(-(megabytes << 20) // a_layer))
    runs: dict[tuple[str, Variant], Callable[[], float]] = {}
    for variant in VARIANTS:
        meta, layers = step(shape, tables_of(shape, variant.order)), layers_of(pool, layout, variant.outer)[:several]

        def attend(meta: AttentionMetadata = meta, layers: list[LayerKV] = layers) -> float:
            return seconds(lambda kv: ops.paged_attention(query, kv, meta, scale=DIM**-0.5), layers)

        def write(meta: AttentionMetadata = meta, layers: list[LayerKV] = layers) -> float:
            return seconds(lambda kv: ops.write_kv(rows, rows, kv, meta.slot_mapping), layers)

        runs["attention", variant], runs["write", variant] = attend, write
    times: dict[tuple[str, Variant], list[float]] = {key: [] for key in runs}
    dealer = random.Random(0)
    for number in range(rounds + 1):
        for key in dealer.sample(list(runs), len(runs)):
            took = runs[key]()
            if number:  # the first compiles, plans and maps
                times[key].append(took)
    found = []
    for (what, variant), took in times.items():
        ratios = [mine / first for mine, first in zip(took, times[what, VARIANTS[0]], strict=True)]
        low, middle, high = quantiles(ratios, n=4)
        found.append(
            {
                "shape": shape.name,
                "what": what,
                "variant": str(variant),
                "us": round(median(took) * 1e6, 1),
                "ratio": round(middle, 3),
                "low": round(low, 3),
                "high": round(high, 3),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    ops = CpuOps(threads=options.threads)
    if not options.json:
        print(f"{ops.threads} threads, {options.rounds} rounds, {options.megabytes} MB at least")
        print(f"{'shape':32}{'what':11}{'variant':20}{'us':>9}{'ratio':>8}{'quartiles':>15}")
    for shape in SHAPES:
        if options.only not in shape.name or shape.sequences * shape.length // BLOCK > MOST_BLOCKS:
            continue
        for row in measure(ops, shape, options.rounds, options.megabytes):
            if options.json:
                print(json.dumps(row), flush=True)
            else:
                print("{shape:32}{what:11}{variant:20}{us:9}{ratio:8}{low:9} -{high:6}".format(**row), flush=True)


if __name__ == "__main__":
    main()
