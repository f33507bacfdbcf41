"""Finding the few large values of a row, or the value from which upward the weights reach a sum, without sorting.

A row is read once into the maxima of its spans; whatever asks for large values afterwards skips the spans that have
none. The value at a given sum is found by counting into buckets of the floats' order, most significant bits first, as a
radix sort would, but following only the bucket that holds the answer. So the work is bounded whatever the row holds.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagemill.kernels.cpu.jit import helper
from pagemill.kernels.cpu.simd import float_of_rank, rank_of_float, row_max

SPAN = 64
"""Tokens that share a maximum."""

BUCKETS = 2048
"""Entries of a scratch array float64 that `threshold` takes."""

_LOWEST = np.float32(-np.inf)
_INFINITE_RANK = 0x7F800000  # the place of +inf in the order of the floats; that of -inf is -_INFINITE_RANK - 1
_BITS = 11  # of the order of the floats, to one round of buckets
_FIRST_SHIFT = 32 - _BITS
_FEW = 1024  # values among which halving the order is as fast as buckets are


@helper
def find_maxima(row: Any, maxima: Any) -> Any:
    """The maxima of the spans of a row into float32 [ceil(V / SPAN)]; returns the largest. NaN where one is."""
    for span in range(maxima.shape[0]):
        maxima[span] = row_max(row, span * SPAN, min(SPAN, row.shape[0] - span * SPAN))
    return row_max(maxima, 0, maxima.shape[0])


@helper
def collect(row: Any, maxima: Any, limit: Any, values: Any) -> int:
    """Copy the logits at or above a limit, but for -inf; returns how many."""
    found = 0
    for span in range(maxima.shape[0]):
        if maxima[span] >= limit:
            stretch = row[span * SPAN : min((span + 1) * SPAN, row.shape[0])]
            for i in range(stretch.shape[0]):
                # Written before it is known to stay: a branch that cannot be predicted costs more.
                values[found] = stretch[i]
                found += 1 if stretch[i] >= limit and stretch[i] > _LOWEST else 0
    return found


@helper
def _weight_from(values: Any, weights: Any, limit: Any) -> float:
    """The weights of the values at or above a limit, summed."""
    total = 0.0
    for i in range(values.shape[0]):
        total += float(weights[i]) if values[i] >= limit else 0.0
    return total


@helper
def threshold(values: Any, weights: Any, wanted: float, buckets: Any) -> Any:
    """The largest value from which upward the weights come to what is wanted; the smallest where they never do.

    values, weights float32 [n], n > 0, without NaN and -inf; both are scratch afterwards. buckets float64 [BUCKETS].
    """
    count = values.shape[0]
    above = 0.0  # the weight of all values past the ones still looked at
    low, high = -_INFINITE_RANK - 1, _INFINITE_RANK + 1
    shift, base = _FIRST_SHIFT, -(1 << (_BITS - 1))
    while count > _FEW and shift > 0:
        buckets[:] = 0.0
        for i in range(count):
            buckets[np.uint64((rank_of_float(values[i]) >> shift) - base)] += weights[i]
        bucket = BUCKETS - 1
        last = -1
        while bucket >= 0:
            if buckets[bucket] > 0.0:
                last = bucket
                if above + buckets[bucket] >= wanted:
                    break
                above += buckets[bucket]
            bucket -= 1
        if bucket < 0:
            above -= buckets[last]
        kept = 0
        for i in range(count):
            value, weight = values[i], weights[i]
            values[kept], weights[kept] = value, weight
            kept += 1 if (rank_of_float(value) >> shift) - base == last else 0
        count = kept
        low = max(low, (base + last) << shift)
        high = min(high, (base + last + 1) << shift)
        base = (base + last) << _BITS
        shift -= _BITS
    values, weights = values[:count], weights[:count]
    wanted = min(wanted - above, _weight_from(values, weights, _LOWEST))
    while high - low > 1:
        middle = (low + high) // 2
        if _weight_from(values, weights, float_of_rank(middle)) >= wanted:
            low = middle
        else:
            high = middle
    return float_of_rank(low)
