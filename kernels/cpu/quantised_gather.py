"""Single rows of quantised weights, dequantised: embeddings; see `quantised_form` for the layout."""

# numba ships no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pagemill.kernels.cpu.jit import helper, kernel
from pagemill.kernels.cpu.matmul import PANEL
from pagemill.kernels.cpu.quantised_form import STEP, Form, make_scale_at
from pagemill.kernels.cpu.quantised_matmul import (
    FORMS,
    RECORD_BLOCK,
    RECORD_GROUPS,
    RECORD_PANELS,
    RECORD_WIDTH,
    RECORD_WORDS,
)
from pagemill.kernels.cpu.simd import LANES, narrow
from pagemill.kernels.cpu.team import run
from pagemill.kernels.cpu.views import matrix, vector

_PARTS = 4
_ZERO = np.float32(0.0)


def _make_gather(form: Form) -> Any:
    scale_at = make_scale_at(form.half)
    nibbles, has_minimum, scale_bytes, step_bytes = form.nibbles, form.has_minimum, form.scale_bytes, form.step_bytes
    like = np.uint16(0) if form.stored_pairs else _ZERO

    @helper
    def gather(part: int, parts: int, record_at: int, ids: Any, out: int) -> None:
        record = vector(record_at, RECORD_WORDS, np.int64(0))
        width, groups, block = record[RECORD_WIDTH], record[RECORD_GROUPS], record[RECORD_BLOCK]
        count, group = ids.shape[0], width // groups
        results = matrix(out, count, width, like)
        for row in range(count * part // parts, count * (part + 1) // parts):
            panel, feature = ids[row] // PANEL, ids[row] % PANEL
            for index in range(groups):
                start = record[RECORD_PANELS] + (panel * groups + index) * block
                scales = start + group // STEP * step_bytes
                codes = vector(start, group // STEP * step_bytes, np.uint8(0))
                factor, base = scale_at(scales + feature * scale_bytes), _ZERO
                if has_minimum:
                    base = scale_at(scales + (PANEL + feature) * scale_bytes)
                for k in range(group):
                    pair, half = k % STEP // 2, k % 2
                    if nibbles:
                        byte = codes[(k // STEP * PANEL + feature) * 4 + 2 * half + pair // 2]
                        code = (np.int64(byte) >> (4 * (pair % 2))) & 15
                        if not has_minimum:
                            code -= 8
                    else:
                        lane = (k // STEP * 4 + pair) * (PANEL // LANES) + feature // LANES
                        code = np.int64(np.int8(codes[(2 * lane + half) * LANES + feature % LANES]))
                    results[row, index * group + k] = narrow(factor * np.float32(code) + base, like)

    return gather


def _make_look_up(form: Form) -> Callable[[int, int, int, int, int], None]:
    gather = _make_gather(form)

    def look_up(board: int, record: int, ids: int, count: int, out: int) -> None:
        run(board, _PARTS, gather, (record, vector(ids, count, np.int64(0)), out))

    look_up.__qualname__ = form.named("look_up")
    return kernel(look_up)


LOOK_UPS = {form: _make_look_up(form) for form in FORMS}
"""For each form a function (board, record, ids, count, out): rows ids int64 [count] of a weight of one section,
dequantised, to out [count, in_features]; all by address."""
