"""Which tile shapes, warps and pipeline stages the attention kernel is compiled with, by device and head shape.

A table instead of autotuning: the choice is the same on every start, nothing is compiled or timed while requests wait,
and a CUDA graph capture cannot meet a trial run. The entries come from the compiler's own figures (registers, spills,
shared memory: `python -m pagemill.kernels.build`), not yet from timings on a device.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagemill.kernels.triton.plan import TileShape


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What the kernels' choices depend on: compute capability (90 for 9.0) and the number of multiprocessors."""

    capability: int
    multiprocessors: int


INTERPRETED_DEVICE = DeviceFacts(capability=90, multiprocessors=8)
"""The device that the interpreter plays: few multiprocessors, so that short contexts are split too."""


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """One compiled variant: tile shape, warps per program, stages of the load pipeline."""

    shape: TileShape
    num_warps: int
    num_stages: int


PROGRAMS_PER_MULTIPROCESSOR = 3
"""Decode programs that fit a multiprocessor at once by their registers; what splitting fills the device up to."""


def next_power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def padded_head_dim(head_dim: int) -> int:
    """The matrix unit takes powers of two, 16 at least."""
    return max(16, next_power_of_two(head_dim))


def decode_config(capability: int, *, head_dim: int, itemsize: int, group: int) -> AttentionConfig:
    """Few query rows, all time in reading keys and values: the smallest row tile that holds one token's group."""
    block_m = max(16, next_power_of_two(group))
    row_bytes = padded_head_dim(head_dim) * itemsize
    if itemsize == 4:
        return AttentionConfig(TileShape(block_m, 32), num_warps=8, num_stages=2)
    return AttentionConfig(TileShape(block_m, 64 if row_bytes <= 256 else 32), num_warps=4, num_stages=3)


def prefill_config(capability: int, *, head_dim: int, itemsize: int, group: int) -> AttentionConfig:
    """Many query rows, time in the matrix unit: the largest tiles that stay in registers."""
    row_bytes = padded_head_dim(head_dim) * itemsize
    # Datacentre Hopper and Blackwell: 227 KiB of shared memory, matrix operands read from it and not from registers.
    large = capability // 10 in (9, 10)
    if itemsize == 4:
        # Exact float32 products run outside the matrix unit, with both operands in registers.
        block_m, tile, num_warps, num_stages = 64 if row_bytes <= 256 else 16, 32, 8, 2
    elif row_bytes <= 128:
        block_m, tile, num_warps, num_stages = 128, 64, 4 if capability // 10 == 10 else 8, 3
    elif row_bytes <= 256:
        block_m, tile, num_warps, num_stages = 128, 64 if large else 32, 8, 3
    else:
        block_m, tile, num_warps, num_stages = 128 if large else 64, 32, 8, 3
    return AttentionConfig(TileShape(max(block_m, next_power_of_two(group)), tile), num_warps, num_stages)
