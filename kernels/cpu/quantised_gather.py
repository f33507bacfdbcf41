"""Single rows of quantised weights, dequantised: embeddings; see `quantised_form` for the layout."""

# numba ships no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pagemill.kernels.cpu.gather import (
    GATHER_COUNT,
    GATHER_IDS,
    GATHER_OUT,
    GATHER_RECORD,
    GATHER_WORDS,
)
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
from pagemill.kernels.cpu.team import address_of
from pagemill.kernels.cpu.views import matrix, vector

_ZERO = np.float32(0.0)


def _make_gather(form: Form) -> Any:
    scale_at = make_scale_at(form.half)
    nibbles, has_minimum, scale_bytes, step_bytes = form.nibbles, form.has_minimum, form.scale_bytes, form.step_bytes
    like = np.uint16(0) if form.stored_pairs else _ZERO

    @helper
    def gather(part: int, parts: int, task_at: int) -> None:
        task = vector(task_at, GATHER_WORDS, np.int64(0))
        record = vector(task[GATHER_RECORD], RECORD_WORDS, np.int64(0))
        width, groups, block = record[RECORD_WIDTH], record[RECORD_GROUPS], record[RECORD_BLOCK]
        count, group = task[GATHER_COUNT], width // groups
        ids = vector(task[GATHER_IDS], count, np.int64(0))
        results = matrix(task[GATHER_OUT], count, width, like)
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


def _make_gatherer(form: Form) -> Callable[[], int]:
    gather = _make_gather(form)

    def gatherer() -> int:
        address: int = address_of(gather)
        return address

    gatherer.__qualname__ = form.named("gatherer")
    return kernel(gatherer)


GATHERERS = {form: _make_gatherer(form) for form in FORMS}
"""For each form a function that returns the address of the worker, see `gather`."""
