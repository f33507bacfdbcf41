"""The fused sampler on the CPU: maximum, cut by min_p, top_k and top_p without sorting the row, then the draw.

Gumbel-max needs a token's noise only if it may still win. With the largest logit of a span of tokens and the best score
so far, the bound -log(u) >= 1 - u says how close to 1 a draw u of that span must be, so most spans are done with when
the largest of their random bits is known, before any logarithm; and where no noise could make up for what a span
trails, not even bits are made. Both skips are exact: they change no result.

Scores are float64, as the reference's are. (In numba, float(x) of a float32 is still a float32: hence np.float64.)
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pagemill.kernels.cpu.jit import helper, kernel
from pagemill.kernels.cpu.select import BUCKETS, SLACK, SPAN, find_maxima, row_threshold, threshold
from pagemill.kernels.cpu.simd import PHILOX_LANES, exp32, next_item, philox_block, philox_max, row_max
from pagemill.kernels.cpu.team import run
from pagemill.kernels.rng import UNIT

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_LOWEST = np.float32(-np.inf)

_MAX_GUMBEL = -math.log(-math.log(1.0 - 0.5 * UNIT)) + 1e-9
_MARGIN = 1e-5  # more than float32 is wrong by in an exponent of up to _MAX_GUMBEL
_CHUNK = 4096  # logits among which a maximum is looked for at a time
_MAX_HEAT = 1e30
_LEAST_SHARE = 1e-30  # of a nucleus, which is never empty


@helper
def token_bits(first_token: int, seed: Any, position: int, choice: int, bits: Any) -> None:
    """The random bits of the tokens first_token .. first_token + SPAN, uint32 [SPAN]. first_token: a multiple of 4."""
    place = np.uint64(position)
    for group in range(0, SPAN // 4, PHILOX_LANES):
        philox_block(
            bits,
            np.int64(group * 4),
            np.uint64(first_token // 4 + group),
            place & _LOW,
            np.uint64(choice) & _LOW,
            place >> _SHIFT,
            seed & _LOW,
            seed >> _SHIFT,
        )


@helper
def _largest_bits(first_token: int, seed: Any, position: int, choice: int) -> Any:
    """The largest of what `token_bits` makes."""
    place = np.uint64(position)
    return philox_max(
        np.uint64(first_token // 4),
        place & _LOW,
        np.uint64(choice) & _LOW,
        place >> _SHIFT,
        seed & _LOW,
        seed >> _SHIFT,
    )


@helper
def _gumbel(bits: Any) -> float:
    return -math.log(-math.log((np.float64(bits) + 0.5) * UNIT))


@helper
def _least_bits(gap: float) -> float:
    """The least random bits that can lift a token over the best score, which it trails by -gap before noise.

    It must have -log(u) < exp(gap), and 1 - u <= -log(u).
    """
    reach = np.float64(exp32(np.float32(gap + _MARGIN)))
    return (1.0 - reach) / UNIT - 1.0 if reach < 1.0 else 0.0


@helper
def _argmax(row: Any) -> int:
    """The first index of the largest logit; -1 for NaN or nothing above -inf."""
    best = _LOWEST
    at = -1
    for start in range(0, row.shape[0], _CHUNK):
        largest = row_max(row, start, min(_CHUNK, row.shape[0] - start))
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
def _first_of(row: Any, maxima: Any, largest: Any) -> int:
    """The first index of the largest logit; -1 for NaN or nothing above -inf."""
    if math.isnan(largest) or largest == _LOWEST:
        return -1
    span = 0
    while maxima[span] != largest:
        span += 1
    token = span * SPAN
    while row[token] != largest:
        token += 1
    return token


@helper
def _first_at_least(scaled: float, temperature: float) -> Any:
    """The smallest float32 logit with logit / temperature >= scaled."""
    logit = np.float32(scaled * temperature)
    while np.float64(logit) / temperature >= scaled:
        logit = np.nextafter(logit, _LOWEST)
    while np.float64(logit) / temperature < scaled:
        logit = np.nextafter(logit, -_LOWEST)
    return logit


@helper
def _top_k(row: Any, maxima: Any, largest: Any, wanted: int, values: Any, weights: Any, buckets: Any) -> Any:
    """The `wanted`-th largest logit of a row, or the smallest where fewer are above -inf."""
    limit = _LOWEST
    if wanted < maxima.shape[0]:
        # That many spans have a maximum of at least this, so that many tokens have.
        weights[: maxima.shape[0]] = _ONE
        limit = threshold(maxima, weights[: maxima.shape[0]], np.float64(wanted))
    return row_threshold(row, maxima, limit, largest, _ZERO, np.float64(wanted), values, weights, buckets)


@helper
def _mass(row: Any, maxima: Any, heat: Any, largest: Any, cut: Any) -> float:
    """The sum of exp((logit - largest) / temperature) over logits of at least the cut."""
    total = 0.0
    for span in range(maxima.shape[0]):
        if maxima[span] >= cut:
            stretch = row[span * SPAN : min((span + 1) * SPAN, row.shape[0])]
            part = _ZERO
            for i in range(stretch.shape[0]):
                weight = exp32((stretch[i] - largest) * heat)
                part += weight if stretch[i] >= cut else _ZERO
            total += np.float64(part)
    return total


@helper
def _top_p(
    row: Any,
    maxima: Any,
    temperature: float,
    largest: Any,
    cut: Any,
    top_p: float,
    values: Any,
    weights: Any,
    buckets: Any,
) -> Any:
    """The smallest logit of the nucleus: the fewest likeliest tokens, of those at or above the cut, with mass top_p."""
    heat = np.float32(min(1.0 / temperature, _MAX_HEAT))
    total = _mass(row, maxima, heat, largest, cut)
    # All tokens lighter than an equal share of 1 - top_p weigh less than that together: the nucleus ends above them.
    share = 0.5 * (1.0 - top_p) * total / row.shape[0]
    floor = np.float32(np.float64(largest) + math.log(max(share, 1e-300)) * temperature)
    wanted = max(top_p, _LEAST_SHARE) * total
    return row_threshold(row, maxima, max(cut, floor), largest, heat, wanted, values, weights, buckets)


@helper
def _draw(
    row: Any, maxima: Any, temperature: float, cut: Any, first: int, seed: Any, position: int, choice: int, bits: Any
) -> int:
    """Gumbel-max over the tokens at or above the cut; `first` is the likeliest one, `bits` scratch."""
    token_bits(first // 4 * 4, seed, position, choice, bits)
    chosen = first
    best = np.float64(row[first]) / temperature + _gumbel(bits[first % 4])
    for span in range(maxima.shape[0]):
        gap = np.float64(maxima[span]) / temperature - best
        if maxima[span] < cut or gap < -_MAX_GUMBEL:
            continue
        least = _least_bits(gap)
        if _largest_bits(span * SPAN, seed, position, choice) < least:
            continue
        token_bits(span * SPAN, seed, position, choice, bits)
        for token in range(span * SPAN, min((span + 1) * SPAN, row.shape[0])):
            own = bits[token - span * SPAN]
            if own < least or row[token] < cut:
                continue
            score = np.float64(row[token]) / temperature + _gumbel(own)
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
    bits = np.empty(SPAN, np.uint32)
    buckets = np.empty(BUCKETS, np.float64)
    maxima = np.empty((size + SPAN - 1) // SPAN, np.float32)
    values = np.empty(size + SLACK, np.float32)
    weights = np.empty(size + SLACK, np.float32)
    while True:
        index = next_item(counter)
        if index >= logits.shape[0]:
            break
        row = logits[index]
        heat = np.float64(temperature[index])
        if heat == 0.0:
            out[index] = _argmax(row)
            continue
        largest = find_maxima(row, maxima)
        first = _first_of(row, maxima, largest)
        out[index] = first
        if first < 0 or largest == np.inf:
            continue
        cut = _LOWEST
        if min_p[index] > _ZERO:
            cut = _first_at_least(np.float64(largest) / heat + math.log(np.float64(min_p[index])), heat)
        if 0 < top_k[index] < size:
            cut = max(cut, _top_k(row, maxima, largest, top_k[index], values, weights, buckets))
        if top_p[index] < _ONE:
            cut = _top_p(row, maxima, heat, largest, cut, np.float64(top_p[index]), values, weights, buckets)
        out[index] = _draw(row, maxima, heat, cut, first, seed[index], position[index], choice[index], bits)


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
