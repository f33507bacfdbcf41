"""Finding the few large values of a row, or the value from which upward the weights reach a sum, without sorting.

A row is read once into the maxima of its spans; whatever asks for large values afterwards skips the spans that have
none. The value at a given sum is found by adding weights up in buckets of the floats' order, most significant bits
first, as a radix sort would, but following only the bucket that holds the answer. So the work is bounded whatever the
row holds, and ties cost nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagemill.kernels.cpu.jit import helper
from pagemill.kernels.cpu.simd import LANES, exp32, float_of_rank, keep_between, rank_of_float, row_max

SPAN = 64
"""Tokens that share a maximum."""

BUCKETS = 2048
"""Entries of a float64 scratch array."""

SLACK = LANES
"""Entries that the scratch array for values has beyond a row's length."""

_LOWEST = np.float32(-np.inf)
_LOWEST_FINITE = np.finfo(np.float32).min
_INFINITE_RANK = 0x7F800000  # the place of +inf in the order of the floats; that of -inf is -_INFINITE_RANK - 1
_BITS = 11  # of the order of the floats, to one round of buckets
_SHIFT = 32 - _BITS
_BASE = -(1 << (_BITS - 1))  # the order of the floats, shifted, begins here
_FEW = 1024  # values among which halving the order is as fast as buckets are


@helper
def find_maxima(row: Any, maxima: Any) -> Any:
    """The maxima of the spans of a row into float32 [ceil(V / SPAN)]; returns the largest. NaN where one is."""
    for span in range(maxima.shape[0]):
        maxima[span] = row_max(row, span * SPAN, min(SPAN, row.shape[0] - span * SPAN))
    return row_max(maxima, 0, maxima.shape[0])


@helper
def _weight_from(values: Any, weights: Any, limit: Any) -> float:
    """The weights of the values at or above a limit, summed."""
    total = 0.0
    for i in range(values.shape[0]):
        total += np.float64(weights[i]) if values[i] >= limit else 0.0
    return total


@helper
def _reached(buckets: Any, above: float, wanted: float) -> Any:
    """The bucket in which the weights, added up from the last bucket down, come to what is wanted; the weight past it.

    The lowest bucket that holds any where they never do.
    """
    found, past = 0, above
    for bucket in range(BUCKETS - 1, -1, -1):
        if buckets[bucket] > 0.0:
            found, past = bucket, above
            above += buckets[bucket]
            if above >= wanted:
                break
    return found, past


@helper
def _search(values: Any, weights: Any, wanted: float, low: int, high: int) -> Any:
    """The largest value from which upward the weights come to what is wanted, at a place low .. high of the order."""
    wanted = min(wanted, _weight_from(values, weights, _LOWEST))
    low, high = max(low, -_INFINITE_RANK - 1), min(high, _INFINITE_RANK + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if _weight_from(values, weights, float_of_rank(middle)) >= wanted:
            low = middle
        else:
            high = middle
    return float_of_rank(low)


@helper
def threshold(values: Any, weights: Any, wanted: float) -> Any:
    """The largest value from which upward the weights come to what is wanted; the smallest value where they never do.

    For few values, float32 [n] with weights float32 [n], n > 0, without NaN: it takes 32 passes.
    """
    return _search(values, weights, wanted, -_INFINITE_RANK - 1, _INFINITE_RANK + 1)


@helper
def _weigh(values: Any, largest: Any, heat: Any, weights: Any) -> None:
    """exp((value - largest) * heat), also where the difference overflows and heat is 0."""
    for i in range(values.shape[0]):
        weights[i] = exp32(max(values[i] - largest, _LOWEST_FINITE) * heat)


@helper
def _collect(row: Any, maxima: Any, low: Any, high: Any, values: Any) -> int:
    """Copy the logits from low to below high; returns how many."""
    found = 0
    for span in range(maxima.shape[0]):
        if maxima[span] >= low:
            found = keep_between(row, span * SPAN, min(SPAN, row.shape[0] - span * SPAN), low, high, values, found)
    return found


@helper
def _fill_buckets(row: Any, maxima: Any, limit: Any, largest: Any, heat: Any, buckets: Any) -> None:
    """The weights of the logits at or above a limit, by the highest bits of their order."""
    weights = np.empty(SPAN, np.float32)
    places = np.empty(SPAN, np.int32)
    buckets[:] = 0.0
    for span in range(maxima.shape[0]):
        if maxima[span] >= limit:
            stretch = row[span * SPAN : min((span + 1) * SPAN, row.shape[0])]
            _weigh(stretch, largest, heat, weights)
            for i in range(stretch.shape[0]):
                weights[i] = weights[i] if stretch[i] >= limit else np.float32(0.0)
                places[i] = (rank_of_float(stretch[i]) >> _SHIFT) - _BASE
            for i in range(stretch.shape[0]):
                buckets[np.uint32(places[i])] += weights[i]


@helper
def row_threshold(
    row: Any, maxima: Any, limit: Any, largest: Any, heat: Any, wanted: float, values: Any, weights: Any, buckets: Any
) -> Any:
    """The largest logit from which upward the weights of a row come to what is wanted; the smallest if they never do.

    A token's weight is exp((logit - largest) * heat), for a finite heat; tokens below the limit and at -inf have none.
    wanted > 0. largest: that of the row, finite. Scratch: values and weights float32 [V + SLACK], buckets float64
    [BUCKETS].
    """
    limit = max(limit, _LOWEST_FINITE)
    passing = 0
    for span in range(maxima.shape[0]):
        passing += 1 if maxima[span] >= limit else 0
    if passing * SPAN <= _FEW:
        count = _collect(row, maxima, limit, -_LOWEST, values)
        _weigh(values[:count], largest, heat, weights)
        return threshold(values[:count], weights[:count], wanted)

    _fill_buckets(row, maxima, limit, largest, heat, buckets)
    bucket, past = _reached(buckets, 0.0, wanted)
    low, shift = (_BASE + bucket) << _SHIFT, _SHIFT
    least = max(limit, float_of_rank(max(low, -_INFINITE_RANK)))
    count = _collect(row, maxima, least, float_of_rank(min(low + (1 << shift), _INFINITE_RANK)), values)
    _weigh(values[:count], largest, heat, weights)
    if count > _FEW:
        shift -= _BITS
        base = low >> shift
        buckets[:] = 0.0
        for i in range(count):
            buckets[np.uint32((rank_of_float(values[i]) >> shift) - base)] += weights[i]
        bucket, past = _reached(buckets, past, wanted)
        low = (base + bucket) << shift
        kept = 0
        for i in range(count):
            # Written before it is known to stay: a branch that cannot be predicted costs more.
            value, weight = values[i], weights[i]
            values[kept], weights[kept] = value, weight
            kept += 1 if (rank_of_float(value) >> shift) - base == bucket else 0
        count = kept
    return _search(values[:count], weights[:count], wanted - past, low, low + (1 << shift))
