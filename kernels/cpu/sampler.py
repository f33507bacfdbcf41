"""The fused sampler on the CPU: maximum, cut by min_p, top_k and top_p without sorting the row, then the draw.

Gumbel-max needs noise only for tokens that may still win. No token's noise exceeds `_MAX_GUMBEL`, so a stretch of the
row that trails the best score so far by more than that is skipped before its noise is made; and of the noise the cheap
bound -log(u) >= 1 - u is tried before any logarithm. Both skips are exact: they change no result.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pagemill.kernels.cpu.jit import helper, kernel
from pagemill.kernels.cpu.simd import (
    PHILOX_LANES,
    exp32,
    float_of_rank,
    missing_to_one,
    next_item,
    philox_block,
    row_max,
)
from pagemill.kernels.cpu.team import run
from pagemill.kernels.rng import UNIT

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_LOWEST = np.float32(-np.inf)

_MAX_GUMBEL = -math.log(-math.log(1.0 - 0.5 * UNIT)) + 1e-9
_MARGIN = np.float32(1e-6)
_CHUNK = 256  # tokens whose noise is made at a time, four to a Philox counter
_SPAN = 64  # tokens that share an entry in a row's list of maxima
_MAX_HEAT = 1e30
_INFINITE_RANK = 0x7F800000  # the place of +inf in the order of the floats; that of -inf is -_INFINITE_RANK - 1


@helper
def token_bits(first_token: int, seed: Any, position: int, choice: int, bits: Any) -> None:
    """The random bits of the tokens first_token .. first_token + _CHUNK into uint32 [4, _CHUNK / 4].

    first_token is a multiple of 4; those of token first_token + 4 * i + lane are at [lane, i].
    """
    place = np.uint64(position)
    for group in range(0, _CHUNK // 4, PHILOX_LANES):
        philox_block(
            bits,
            np.int64(group),
            np.int64(_CHUNK // 4),
            np.uint64(first_token // 4 + group),
            place & _LOW,
            np.uint64(choice) & _LOW,
            place >> _SHIFT,
            seed & _LOW,
            seed >> _SHIFT,
        )


@helper
def _gumbel(bits: Any) -> float:
    return -math.log(-math.log((float(bits) + 0.5) * UNIT))


@helper
def _may_win(logit: Any, heat: Any, best: Any, bits: Any) -> int:
    """0 where -log(u) >= 1 - u already puts the token's score below the best, with a margin for float32; else 1.

    logit / temperature - log(-log(u)) > best means -log(u) < exp(logit / temperature - best).
    """
    scaled = logit * heat
    slack = _MARGIN * (_ONE + abs(scaled) + abs(best))
    # Asked this way round, a temperature so small that float32 overflows to NaN skips nobody.
    return 0 if missing_to_one(bits) > exp32(scaled - best + slack) else 1


@helper
def _argmax(row: Any) -> int:
    """The first index of the largest logit; -1 for NaN or nothing above -inf."""
    best = _LOWEST
    at = -1
    for start in range(0, row.shape[0], 16 * _CHUNK):
        largest = row_max(row, start, min(16 * _CHUNK, row.shape[0] - start))
        if math.isnan(largest):
            return -1
        if largest > best:
            best = largest
            at = start
    if at < 0:
        return -1
    while row[at] != best:
        at += 1
    return at


@helper
def _first_at_least(scaled: float, temperature: float) -> Any:
    """The smallest float32 logit with logit / temperature >= scaled."""
    logit = np.float32(scaled * temperature)
    while float(logit) / temperature >= scaled:
        logit = np.nextafter(logit, _LOWEST)
    while float(logit) / temperature < scaled:
        logit = np.nextafter(logit, -_LOWEST)
    return logit


@helper
def _weight_from(values: Any, weights: Any, limit: Any) -> float:
    """The weights of the values at or above a limit, summed."""
    total = 0.0
    for i in range(values.shape[0]):
        total += float(weights[i]) if values[i] >= limit else 0.0
    return total


@helper
def _threshold(values: Any, weights: Any, wanted: float) -> Any:
    """The largest value from which upward the weights come to what is wanted, or to all there is.

    A binary search over the order of the floats: 32 passes, but of whole vectors, and ties cost nothing.
    """
    wanted = min(wanted, _weight_from(values, weights, _LOWEST))
    low, high = -_INFINITE_RANK - 1, _INFINITE_RANK + 1
    while high - low > 1:
        middle = (low + high) // 2
        if _weight_from(values, weights, float_of_rank(middle)) >= wanted:
            low = middle
        else:
            high = middle
    return float_of_rank(low)


@helper
def _collect(row: Any, maxima: Any, limit: Any, values: Any) -> int:
    """Copy the logits at or above a limit, but for -inf; returns how many."""
    found = 0
    for span in range(maxima.shape[0]):
        if maxima[span] >= limit:
            stretch = row[span * _SPAN : min((span + 1) * _SPAN, row.shape[0])]
            for i in range(stretch.shape[0]):
                if stretch[i] >= limit and stretch[i] > _LOWEST:
                    values[found] = stretch[i]
                    found += 1
    return found


@helper
def _top_k(row: Any, maxima: Any, wanted: int, values: Any, weights: Any) -> Any:
    """The `wanted`-th largest logit of a row, or the smallest where fewer are above -inf."""
    weights[:] = _ONE
    limit = _LOWEST
    if wanted <= maxima.shape[0]:
        # That many spans have a maximum of at least this, so that many tokens have.
        limit = _threshold(maxima, weights, float(wanted))
    found = _collect(row, maxima, limit, values)
    return _threshold(values[:found], weights, float(wanted))


@helper
def _mass(row: Any, largest: Any, heat: Any, cut: Any) -> float:
    """The sum of exp((logit - largest) / temperature) over logits of at least the cut."""
    total = 0.0
    for start in range(0, row.shape[0], _CHUNK):
        chunk = row[start : min(start + _CHUNK, row.shape[0])]
        part = _ZERO
        for i in range(chunk.shape[0]):
            weight = exp32((chunk[i] - largest) * heat)
            part += weight if chunk[i] >= cut else _ZERO
        total += float(part)
    return total


@helper
def _top_p(
    row: Any, maxima: Any, temperature: float, largest: Any, cut: Any, top_p: float, values: Any, weights: Any
) -> Any:
    """The smallest logit of the nucleus: the fewest likeliest tokens, of those at or above the cut, with mass top_p."""
    heat = np.float32(min(1.0 / temperature, _MAX_HEAT))
    total = _mass(row, largest, heat, cut)
    # All tokens lighter than an equal share of 1 - top_p weigh less than that together: the nucleus ends above them.
    share = 0.5 * (1.0 - top_p) * total / row.shape[0]
    floor = np.float32(float(largest) + math.log(max(share, 1e-300)) * temperature)
    found = _collect(row, maxima, max(cut, floor), values)
    for i in range(found):
        weights[i] = exp32((values[i] - largest) * heat)
    return _threshold(values[:found], weights, top_p * total)


@helper
def _draw(row: Any, temperature: float, cut: Any, first: int, seed: Any, position: int, choice: int, bits: Any) -> int:
    """Gumbel-max over the tokens at or above the cut; `first` is the likeliest one, `bits` scratch."""
    token_bits(first // 4 * 4, seed, position, choice, bits)
    chosen = first
    best = float(row[first]) / temperature + _gumbel(bits[first % 4, 0])
    heat = np.float32(min(1.0 / temperature, _MAX_HEAT))
    for start in range(0, row.shape[0], _CHUNK):
        chunk = row[start : min(start + _CHUNK, row.shape[0])]
        highest = row_max(row, start, chunk.shape[0])
        if highest < cut or float(highest) / temperature < best - _MAX_GUMBEL:
            continue
        token_bits(start, seed, position, choice, bits)
        for lane in range(min(4, chunk.shape[0])):
            logits = chunk[lane::4]
            lane_bits = bits[lane]
            passed = 0
            for i in range(logits.shape[0]):
                passed += _may_win(logits[i], heat, np.float32(best), lane_bits[i])
            if passed == 0:
                continue
            for i in range(logits.shape[0]):
                if logits[i] < cut or _may_win(logits[i], heat, np.float32(best), lane_bits[i]) == 0:
                    continue
                score = float(logits[i]) / temperature + _gumbel(lane_bits[i])
                token = start + 4 * i + lane
                if score > best or (score == best and token < chosen):
                    best = score
                    chosen = token
    return chosen


@helper
def _sample_rows(
    part: int,
    parts: int,
    counter: Any,
    logits: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    seed: Any,
    position: Any,
    choice: Any,
    out: Any,
) -> None:
    size = logits.shape[1]
    bits = np.empty((4, _CHUNK // 4), np.uint32)
    maxima = np.empty((size + _SPAN - 1) // _SPAN, np.float32)
    values = np.empty(size, np.float32)
    weights = np.empty(size, np.float32)
    while True:
        index = next_item(counter)
        if index >= logits.shape[0]:
            break
        row = logits[index]
        first = _argmax(row)
        heat = float(temperature[index])
        if first < 0 or heat == 0.0 or row[first] == np.inf:
            out[index] = first
            continue
        cut = _LOWEST
        if min_p[index] > _ZERO:
            cut = _first_at_least(float(row[first]) / heat + math.log(float(min_p[index])), heat)
        if 0 < top_k[index] < size or top_p[index] < _ONE:
            for span in range(maxima.shape[0]):
                maxima[span] = row_max(row, span * _SPAN, min(_SPAN, size - span * _SPAN))
            if 0 < top_k[index] < size:
                cut = max(cut, _top_k(row, maxima, top_k[index], values, weights))
            if top_p[index] < _ONE:
                cut = _top_p(row, maxima, heat, row[first], cut, float(top_p[index]), values, weights)
        out[index] = _draw(row, heat, cut, first, seed[index], position[index], choice[index], bits)


@kernel
def sample(
    board: int,
    logits: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    seed: Any,
    position: Any,
    choice: Any,
    out: Any,
) -> None:
    """One token for each row of logits float32 [R, V] into out int64 [R]; see `Ops.sample`."""
    counter = np.zeros(1, np.int64)
    run(board, 1, _sample_rows, (counter, logits, temperature, top_k, top_p, min_p, seed, position, choice, out))
