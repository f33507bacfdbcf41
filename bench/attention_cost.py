"""What paged attention of one layer costs on the CPU, by shape of the step.

    python bench/attention_cost.py [--threads N] [--block-size N] [--dtype float32] [--only TEXT] [--repeat N] [--json]

SmolLM2-135M's heads: 9 over 3 key/value heads of 64. Every sequence's blocks lie anywhere in the pool, as they do in an
engine that has run for a while. Each run takes another of as many layers as fill 256 MB, so that keys and values come
from memory as in a model of thirty layers. Medians: microseconds, useful GFLOP/s (what a causal query may see, 4
operations for each query head, dimension and token), and GB/s of the keys and values that the step must read once. The
probe is torch's sum over 256 MB on the same number of threads, in the same minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from pagemill.kernels.cpu.ops import CpuOps
from pagemill.kernels.layout import KVLayout, LayerKV
from pagemill.kernels.metadata import AttentionMetadata

HEADS, KV_HEADS, DIM = 9, 3, 64
WORKING_SET = 256 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """`sequences` times `queries` tokens at the end of a context of `length`, of which `shared` are common."""

    name: str
    sequences: int
    length: int
    queries: int = 1
    shared: int = 0

    @property
    def flops(self) -> int:
        pairs = self.queries * (self.length - self.queries) + self.queries * (self.queries + 1) // 2
        return 4 * HEADS * DIM * pairs * self.sequences

    @property
    def tokens_read(self) -> int:
        return self.shared + self.sequences * (self.length - self.shared)


SHAPES = (
    Shape("decode 96 x 130", 96, 130),
    Shape("decode 96 x 300", 96, 300),
    Shape("decode 8 x 2048", 8, 2048),
    Shape("decode 1 x 4096", 1, 4096),
    Shape("decode 48 x 1530, 1400 shared", 48, 1530, shared=1400),
    Shape("guesses 16 x 300, 5 each", 16, 300, queries=5),
    Shape("prefill 512 at 0", 1, 512, queries=512),
    Shape("prefill 512 at 1400", 1, 1912, queries=512),
    Shape("prefill 512 at 2048", 1, 2560, queries=512),
    Shape("prefill 5 x 105 behind 1400", 5, 1505, queries=105, shared=1400),
)


def tables_of(shape: Shape, block_size: int) -> tuple[Any, int]:
    """Block tables with ids in random order, and the number of blocks of the pool."""
    per_sequence = -(-shape.length // block_size)
    common = shape.shared // block_size
    used = common + shape.sequences * (per_sequence - common)
    ids = np.random.default_rng(0).permutation(np.arange(1, used + 1)).astype(np.int32)
    own = ids[common:].reshape(shape.sequences, per_sequence - common)
    return np.concatenate([np.tile(ids[:common], (shape.sequences, 1)), own], axis=1), used + 1


def step(shape: Shape, tables: Any) -> AttentionMetadata:
    tokens = shape.sequences * shape.queries
    positions = np.tile(np.arange(shape.length - shape.queries, shape.length), shape.sequences)
    return AttentionMetadata.build(
        query_start=np.arange(0, tokens + 1, shape.queries),
        seq_lens=np.full(shape.sequences, shape.length),
        block_tables=tables,
        slot_mapping=np.full(tokens, -1),
        positions=positions,
    )


def layers_of(layout: KVLayout) -> list[LayerKV]:
    pool = layout.allocate()
    pool.copy_(torch.randn(layout.elements_per_piece).to(layout.dtype).expand_as(pool))
    return [layout.layer(pool, index) for index in range(layout.num_layers)]


def probe(threads: int) -> float:
    """Read bandwidth in GB/s."""
    numbers = torch.ones(WORKING_SET // 4)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    best = min(_timed(lambda: numbers.sum()) for _ in range(5))
    torch.set_num_threads(before)
    return WORKING_SET / best / 1e9


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--only", default="")
    parser.add_argument("--repeat", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    ops = CpuOps(threads=options.threads)
    dtype = getattr(torch, options.dtype)
    if not options.json:
        print(f"{ops.threads} threads, block size {options.block_size}, {options.dtype}")
        print(f"{'shape':32}{'us':>9}{'GFLOP/s':>9}{'GB/s':>7}{'probe':>7}{'plan us':>9}")
    for shape in SHAPES:
        if options.only not in shape.name:
            continue
        tables, blocks = tables_of(shape, options.block_size)
        one = KVLayout(
            num_blocks=blocks,
            num_layers=1,
            block_size=options.block_size,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            dtype=dtype,
        )
        count = max(1, min(30, WORKING_SET // (blocks * one.bytes_per_block)))
        layout = KVLayout(
            num_blocks=blocks,
            num_layers=count,
            block_size=options.block_size,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            dtype=dtype,
        )
        layers = layers_of(layout)
        query = torch.randn(shape.sequences * shape.queries, HEADS, DIM).to(dtype)
        once = partial(ops.paged_attention, query, scale=DIM**-0.5)
        _timed(partial(once, layers[0], step(shape, tables)))
        meta = step(shape, tables)
        first = _timed(partial(once, layers[0], meta))
        times = [_timed(partial(once, layers[run % count], meta)) for run in range(options.repeat)]
        median = statistics.median(times)
        read = shape.tokens_read * 2 * KV_HEADS * DIM * dtype.itemsize
        row = {
            "shape": shape.name,
            "us": round(median * 1e6, 1),
            "gflops": round(shape.flops / median / 1e9, 1),
            "gbps": round(read / median / 1e9, 2),
            "probe": round(probe(ops.threads), 1),
            "plan_us": round((first - median) * 1e6),
        }
        if options.json:
            print(json.dumps(row))
        else:
            print("{shape:32}{us:9}{gflops:9}{gbps:7}{probe:7}{plan_us:9}".format(**row))


if __name__ == "__main__":
    main()
