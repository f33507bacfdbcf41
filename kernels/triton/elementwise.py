"""RMS norm (with and without the residual addition) and the gated activation, in Triton.

One program per row with one fixed block, sums in float32: a row's result does not depend on its neighbours.
Widths are constants of a model: as arguments they would hide from the compiler how wide it may load.
"""

# Parameters of a kernel are Triton values and constants, which Python annotations cannot say.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    output,
    new_residual,
    x,
    residual,
    weight,
    eps,
    x_stride: tl.int64,
    residual_stride: tl.int64,
    HIDDEN: tl.constexpr,
    WITH_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """output = norm(x) * weight; with a residual, the norm is of x + residual as stored in `new_residual`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < HIDDEN
    values = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if WITH_RESIDUAL:
        values += tl.load(residual + row * residual_stride + columns, mask=mask, other=0.0).to(tl.float32)
        stored = values.to(new_residual.dtype.element_ty)
        tl.store(new_residual + row * HIDDEN + columns, stored, mask=mask)
        values = stored.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 0) / HIDDEN + eps)
    weights = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    normed = values * scale * weights
    tl.store(output + row * HIDDEN + columns, normed.to(output.dtype.element_ty), mask=mask)


@triton.jit
def silu_and_mul_kernel(output, gate_up, gate_up_stride: tl.int64, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """output [T, WIDTH] = silu(gate) * up, gate and up side by side. Grid (tokens, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    gate = tl.load(gate_up + row * gate_up_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_up_stride + WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(output + row * WIDTH + columns, result.to(output.dtype.element_ty), mask=mask)
