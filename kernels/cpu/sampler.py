"""The fused sampler on the CPU: a pass for the maximum, histograms instead of sorts for top_k and top_p, then the draw.

Gumbel-max needs noise only for tokens that may still win. No token's noise exceeds `_MAX_GUMBEL`, so whoever trails the
best score so far by more than that is skipped before its noise is computed; and of the noise the cheap bound
-log(u) >= 1 - u is tried before any logarithm. Both skips are exact: they change no result.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pagemill.kernels.cpu.jit import helper, kernel
from pagemill.kernels.cpu.simd import exp32, next_item, row_max
from pagemill.kernels.cpu.team import run
from pagemill.kernels.rng import PHILOX_M0, PHILOX_M1, PHILOX_ROUNDS, PHILOX_W0, PHILOX_W1, UNIT

_M0, _M1 = np.uint64(PHILOX_M0), np.uint64(PHILOX_M1)
_W0, _W1 = np.uint64(PHILOX_W0), np.uint64(PHILOX_W1)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)

_MAX_GUMBEL = -math.log(-math.log(1.0 - 0.5 * UNIT)) + 1e-9
_CHUNK = 4096
_BINS = 2048
_BINS_PER_NAT = 64.0

# exp(-d) for whole d: how small 1 - u must be for a token d below the best score to overtake it.
_NEEDED = np.exp(-np.arange(int(_MAX_GUMBEL) + 2)) * (1.0 + 1e-9)


@helper
def philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """Philox4x32-10; all words are uint64 that hold 32 bits. The twin of `kernels.rng.philox`."""
    for _ in range(PHILOX_ROUNDS):
        product0 = c0 * _M0
        product1 = c2 * _M1
        c0 = (product1 >> _SHIFT) ^ c1 ^ k0
        c1 = product1 & _LOW
        c2 = (product0 >> _SHIFT) ^ c3 ^ k1
        c3 = product0 & _LOW
        k0 = (k0 + _W0) & _LOW
        k1 = (k1 + _W1) & _LOW
    return c0, c1, c2, c3


@helper
def _gumbel(bits: Any) -> float:
    return -math.log(-math.log((float(bits) + 0.5) * UNIT))


@helper
def _argmax(row: Any) -> int:
    """The first index of the largest logit; -1 for NaN or nothing above -inf."""
    best = np.float32(-np.inf)
    chunk = -1
    for start in range(0, row.shape[0], _CHUNK):
        largest = row_max(row, start, min(_CHUNK, row.shape[0] - start))
        if math.isnan(largest):
            return -1
        if largest > best:
            best = largest
            chunk = start
    if chunk < 0:
        return -1
    while row[chunk] != best:
        chunk += 1
    return chunk


@helper
def _bin(distance: float) -> int:
    return int(min(distance * _BINS_PER_NAT, _BINS - 1.0))


@helper
def _threshold(
    row: Any, temperature: float, top: float, min_p: float, top_k: int, top_p: float, counts: Any, mass: Any
) -> float:
    """The lowest logit / temperature that min_p, top_k and top_p leave; all ties at it stay."""
    size = row.shape[0]
    cut = -np.inf
    if min_p > 0.0:
        cut = top + math.log(min_p)
    if 0 < top_k < size:
        counts[:] = 0
        for i in range(size):
            scaled = float(row[i]) / temperature
            if scaled >= cut and scaled != -np.inf:
                counts[_bin(top - scaled)] += 1
        above = 0
        index = 0
        while index < _BINS and above + counts[index] < top_k:
            above += counts[index]
            index += 1
        if index < _BINS:
            members = np.empty(counts[index], np.float64)
            found = 0
            for i in range(size):
                scaled = float(row[i]) / temperature
                if scaled >= cut and scaled != -np.inf and _bin(top - scaled) == index:
                    members[found] = scaled
                    found += 1
            members.sort()
            cut = members[found - (top_k - above)]
    if top_p < 1.0:
        counts[:] = 0
        mass[:] = 0.0
        for i in range(size):
            scaled = float(row[i]) / temperature
            if scaled >= cut and scaled != -np.inf:
                index = _bin(top - scaled)
                counts[index] += 1
                mass[index] += float(exp32(np.float32(scaled - top)))
        wanted = top_p * mass.sum()
        above_mass = 0.0
        index = 0
        while index < _BINS - 1 and above_mass + mass[index] < wanted:
            above_mass += mass[index]
            index += 1
        while index > 0 and counts[index] == 0:
            index -= 1
            above_mass -= mass[index]
        members = np.empty(counts[index], np.float64)
        found = 0
        for i in range(size):
            scaled = float(row[i]) / temperature
            if scaled >= cut and scaled != -np.inf and _bin(top - scaled) == index:
                members[found] = scaled
                found += 1
        members.sort()
        last = found - 1
        while last > 0:
            above_mass += float(exp32(np.float32(members[last] - top)))
            if above_mass >= wanted:
                break
            last -= 1
        cut = members[last]
    return cut


@helper
def _draw(row: Any, temperature: float, cut: float, first: int, seed: Any, position: int, choice: int) -> int:
    """Gumbel-max over the tokens at or above the cut; `first` is the likeliest one."""
    k0, k1 = seed & _LOW, seed >> _SHIFT
    place = np.uint64(position)
    c1, c2, c3 = place & _LOW, np.uint64(choice) & _LOW, place >> _SHIFT
    words = philox(np.uint64(first // 4), c1, c2, c3, k0, k1)
    lane = first % 4
    bits = words[0] if lane == 0 else words[1] if lane == 1 else words[2] if lane == 2 else words[3]
    chosen = first
    best = float(row[first]) / temperature + _gumbel(bits)
    size = row.shape[0]
    # A hair below the exact bound, in logits, so that the exact test is left to those who pass.
    limit = max(cut, best - _MAX_GUMBEL) * temperature
    limit -= 1e-6 * abs(limit)
    for start in range(0, size, 4):
        end = min(start + 4, size)
        alive = False
        for i in range(start, end):
            alive |= float(row[i]) >= limit
        if not alive:
            continue
        words = philox(np.uint64(start // 4), c1, c2, c3, k0, k1)
        for lane in range(end - start):
            i = start + lane
            scaled = float(row[i]) / temperature
            behind = best - scaled
            if scaled < cut or behind > _MAX_GUMBEL:
                continue
            bits = words[0] if lane == 0 else words[1] if lane == 1 else words[2] if lane == 2 else words[3]
            if behind > 0.0 and (float(_LOW - bits) + 0.5) * UNIT > _NEEDED[int(behind)]:
                continue
            score = scaled + _gumbel(bits)
            if score > best or (score == best and i < chosen):
                best = score
                chosen = i
                limit = max(cut, best - _MAX_GUMBEL) * temperature
                limit -= 1e-6 * abs(limit)
    return chosen


@helper
def _sample_rows(
    thread: int,
    threads: int,
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
    counts = np.empty(_BINS, np.int64)
    mass = np.empty(_BINS, np.float64)
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
        top = float(row[first]) / heat
        cut = _threshold(row, heat, top, float(min_p[index]), top_k[index], float(top_p[index]), counts, mass)
        out[index] = _draw(row, heat, cut, first, seed[index], position[index], choice[index])


@kernel
def sample(
    threads: int,
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
    run(threads, _sample_rows, (counter, logits, temperature, top_k, top_p, min_p, seed, position, choice, out))
