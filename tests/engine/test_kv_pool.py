"""Moves of blocks between the pool and the host pool against the same moves one at a time."""

from __future__ import annotations

import random

import pytest
import torch

from pagemill.engine.kv_pool import KVPool
from pagemill.engine.scheduler_output import BlockMove
from pagemill.kernels.layout import KVLayout
from pagemill.kernels.ops import select_ops

BLOCKS, HOST_BLOCKS = 12, 9
LAYOUT = KVLayout(num_blocks=BLOCKS, num_layers=3, block_size=4, num_kv_heads=2, head_dim=6, dtype=torch.bfloat16)


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_blocks_of_all_layers_move_whether_neighbours_or_not(kernels: str) -> None:
    rng = random.Random(3)
    for _ in range(60):
        pool = KVPool(LAYOUT, select_ops("cpu", override=kernels), HOST_BLOCKS)
        pool._pool.normal_()
        pool._host.normal_()
        moves = random_moves(rng)
        device, host = pool._pool.clone(), pool._host.clone()
        for move in moves:
            source, target = (host, device) if move.kind == "in" else (device, device if move.kind == "copy" else host)
            target[:, move.target] = source[:, move.source]
        pool.move_blocks(moves)
        assert torch.equal(pool._pool, device), moves
        assert torch.equal(pool._host, host), moves


def random_moves(rng: random.Random) -> list[BlockMove]:
    """Swaps of some blocks, alone and in runs of neighbours that end with the pool, and a copy between two of them."""
    moves: list[BlockMove] = []
    for _ in range(rng.randint(1, 3)):
        count = rng.randint(1, 4)
        block, host = rng.randint(1, BLOCKS - count), rng.randint(0, HOST_BLOCKS - count)
        step = rng.choice((1, -1))
        for index in range(count)[::step]:
            moves.append(BlockMove("out", block + index, host + index))
        if rng.random() < 0.5:
            moves.append(BlockMove("copy", *rng.sample(range(1, BLOCKS), 2)))
        moves += [BlockMove("in", rng.randrange(HOST_BLOCKS), target) for target in rng.sample(range(1, BLOCKS), count)]
    return moves
