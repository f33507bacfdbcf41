"""Matrix products with quantised weights, and single rows of them for embeddings; see `quantised_tile` for the layout.

A row is summed in the same order whatever rows are beside it, as in `matmul`.
"""

# numba ships no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import numpy as np

from pagemill.kernels.cpu.jit import helper, kernel
from pagemill.kernels.cpu.quantised_tile import PANEL, STEP, VECTORS, scale_at, tile1, tile2, tile4, tile8
from pagemill.kernels.cpu.simd import LANES, narrow, next_item, widen
from pagemill.kernels.cpu.team import run
from pagemill.kernels.cpu.views import matrix, vector

_MOST_ROWS = 8


@helper
def group_sums(x: Any, group: int, sums: Any) -> None:
    """sums[r, g] = sum of x[r] over group g, in float32."""
    for row in range(x.shape[0]):
        for index in range(sums.shape[1]):
            total = np.float32(0.0)
            for k in range(index * group, (index + 1) * group):
                total += widen(x[row, k])
            sums[row, index] = total


@helper
def _tile_rows(
    rows: int,
    x: Any,
    xo: int,
    depth: int,
    sums: Any,
    so: int,
    data: Any,
    at: int,
    column: int,
    groups: int,
    steps: int,
    block: int,
    code: Any,
    scale: Any,
    minimum: Any,
    c: Any,
) -> int:
    """One tile of at most `rows` rows; returns how many it did."""
    if rows >= 8:
        tile8(
            x,
            xo,
            depth,
            sums,
            so,
            groups,
            data,
            at,
            column,
            groups,
            steps,
            block,
            code,
            scale,
            minimum,
            c,
            column,
            PANEL,
        )
        return 8
    if rows >= 4:
        tile4(
            x,
            xo,
            depth,
            sums,
            so,
            groups,
            data,
            at,
            column,
            groups,
            steps,
            block,
            code,
            scale,
            minimum,
            c,
            column,
            PANEL,
        )
        return 4
    if rows >= 2:
        tile2(
            x,
            xo,
            depth,
            sums,
            so,
            groups,
            data,
            at,
            column,
            groups,
            steps,
            block,
            code,
            scale,
            minimum,
            c,
            column,
            PANEL,
        )
        return 2
    tile1(
        x, xo, depth, sums, so, groups, data, at, column, groups, steps, block, code, scale, minimum, c, column, PANEL
    )
    return 1


@helper
def multiply_blocks(
    part: int,
    parts: int,
    counter: Any,
    panels_at_once: int,
    most_rows: int,
    x: Any,
    sums: Any,
    data: Any,
    steps: int,
    block: int,
    code: Any,
    scale: Any,
    minimum: Any,
    bias: Any,
    out: Any,
) -> None:
    rows, depth, features, groups = x.shape[0], x.shape[1], out.shape[1], sums.shape[1]
    panels = (features + PANEL - 1) // PANEL
    scratch = np.empty((_MOST_ROWS, PANEL), np.float32)
    flat = scratch.reshape(-1)
    while True:
        first = next_item(counter) * panels_at_once
        if first >= panels:
            break
        for panel in range(first, min(first + panels_at_once, panels)):
            start = panel * PANEL
            width = min(PANEL, features - start)
            row = 0
            while row < rows:
                done = 0
                for column in range(0, PANEL, VECTORS * LANES):
                    done = _tile_rows(
                        min(most_rows, rows - row),
                        x,
                        row * depth,
                        depth,
                        sums,
                        row * groups,
                        data,
                        panel * groups * block,
                        column,
                        groups,
                        steps,
                        block,
                        code,
                        scale,
                        minimum,
                        flat,
                    )
                for r in range(done):
                    target = out[row + r, start : start + width]
                    source = scratch[r]
                    if bias.shape[0] > 0:
                        added = bias[start : start + width]
                        for i in range(width):
                            target[i] = narrow(source[i] + widen(added[i]), target[i])
                    else:
                        for i in range(width):
                            target[i] = narrow(source[i], target[i])
                row += done


@kernel
def multiply(
    board: int,
    panels_at_once: int,
    most_rows: int,
    x: int,
    rows: int,
    width: int,
    data: Any,
    groups: int,
    block: int,
    code: Any,
    scale: Any,
    minimum: Any,
    bias: Any,
    out: int,
    features: int,
) -> None:
    """out [rows, features] = x [rows, width] times quantised panels, plus bias [features] or [0].

    x and out by address, of the type of bias: float32, or bfloat16 as uint16. data: the panels' bytes, in blocks of
    `block` for each of `groups` groups; code, scale, minimum: values of the form's types, see `quantised_tile`.
    """
    like = bias.dtype.type(0)
    counter = np.zeros(1, np.int64)
    inputs, results = matrix(x, rows, width, like), matrix(out, rows, features, like)
    sums = np.empty((rows, groups), np.float32)
    group = width // groups
    group_sums(inputs, group, sums)
    steps = group // STEP
    arrays = (counter, panels_at_once, most_rows, inputs, sums, data, steps, block, code, scale, minimum, bias, results)
    run(board, 1, multiply_blocks, arrays)


@kernel
def look_up(
    ids: int,
    rows: int,
    data: Any,
    groups: int,
    block: int,
    bits: int,
    scale: Any,
    scale_bytes: int,
    has_minimum: bool,
    width: int,
    out: int,
    like: Any,
) -> None:
    """out [rows, width] = the rows ids int64 [rows] of a quantised weight, dequantised. ids must be rows of it."""
    wanted, results = vector(ids, rows, np.int64(0)), matrix(out, rows, width, like)
    group = width // groups
    for row in range(rows):
        panel, feature = wanted[row] // PANEL, wanted[row] % PANEL
        for index in range(groups):
            start = (panel * groups + index) * block
            scales = start + PANEL * group * bits // 8
            factor = scale_at(data, scales + feature * scale_bytes, scale)
            base = np.float32(0.0)
            if has_minimum:
                base = scale_at(data, scales + (PANEL + feature) * scale_bytes, scale)
            for k in range(group):
                pair, half = k % STEP // 2, k % 2
                if bits == 4:
                    byte = data[start + (k // STEP * PANEL + feature) * 4 + 2 * half + pair // 2]
                    code = (np.int64(byte) >> (4 * (pair % 2))) & 15
                    if not has_minimum:
                        code -= 8
                else:
                    vectors = (k // STEP * 4 + pair) * (PANEL // LANES) + feature // LANES
                    byte = data[start + vectors * 2 * LANES + half * LANES + feature % LANES]
                    code = np.int64(np.int8(byte))
                results[row, index * group + k] = narrow(factor * np.float32(code) + base, like)
