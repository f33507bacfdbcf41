"""The sampler: Philox against its published vectors, the CPU kernel against the reference, the draws against chance."""

from __future__ import annotations

import dataclasses

import numba
import numpy as np
import numpy.typing as npt
import pytest
import torch

from pagemill.kernels.cpu import sampler as cpu_sampler
from pagemill.kernels.cpu import select
from pagemill.kernels.cpu.ops import CpuOps
from pagemill.kernels.ops import SampleBatch
from pagemill.kernels.rng import gumbel, philox, token_bits
from tests.kernels.paged import REFERENCE


@pytest.fixture(scope="module")
def cpu() -> CpuOps:
    return CpuOps()


def batch_of(rows: int, **fields: object) -> SampleBatch:
    """Temperature 1, no filters, seed 0 and positions 0, 1, 2 ... except as told."""
    base = SampleBatch.greedy(rows)
    defaults = {"temperature": np.ones(rows, np.float32), "position": np.arange(rows, dtype=np.int64)}
    changed = {
        name: np.broadcast_to(np.asarray(value, getattr(base, name).dtype), (rows,)).copy()
        for name, value in (defaults | fields).items()
    }
    return dataclasses.replace(base, **changed)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    """The vectors of Random123's kat_vectors for philox4x32 10."""
    actual = philox(np.array(counter, np.uint32), np.array(key, np.uint32))
    assert actual.tolist() == expected


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 12345, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 7, 2**32 + 3])
def test_the_kernel_draws_the_same_integers(seed: int, position: int) -> None:
    token_bits_of_kernel = cpu_sampler.token_bits

    @numba.njit
    def call(seed: int, position: int, out: npt.NDArray[np.uint32]) -> None:
        token_bits_of_kernel(512, seed, position, 3, out)

    out = np.zeros(64, np.uint32)
    call(np.uint64(seed), position, out)
    assert np.array_equal(out, token_bits(seed, position, 3, 1024)[512:576])


def test_noise_depends_on_every_part_of_its_key() -> None:
    base = token_bits(5, 6, 7, 1000)
    others = [token_bits(6, 6, 7, 1000), token_bits(5 + 2**32, 6, 7, 1000), token_bits(5, 7, 7, 1000)]
    others += [token_bits(5, 6 + 2**32, 7, 1000), token_bits(5, 6, 8, 1000)]
    assert len(np.unique(base)) > 990
    for other in others:
        assert (base == other).sum() < 5


def test_gumbel_is_finite_at_both_ends() -> None:
    assert np.isfinite(gumbel(np.array([0, 2**32 - 1], np.uint32))).all()


def random_batch(rows: int, rng: np.random.Generator) -> SampleBatch:
    return SampleBatch(
        temperature=rng.choice([0.0, 0.3, 1.0, 1.7, 100.0], rows).astype(np.float32),
        top_k=rng.choice([0, 1, 2, 5, 50, 300, 10**6], rows).astype(np.int32),
        top_p=rng.choice([1.0, 0.999, 0.9, 0.5, 0.01, 1e-6, 0.0], rows).astype(np.float32),
        min_p=rng.choice([0.0, 0.0, 0.02, 0.3, 1.0], rows).astype(np.float32),
        seed=rng.integers(0, 2**64, rows, dtype=np.uint64),
        position=rng.integers(0, 2**40, rows),
        index=rng.integers(0, 5, rows).astype(np.int32),
    )


@pytest.mark.parametrize("vocab", [1, 2, 3, 63, 64, 65, 257, 1001, 5000])
@pytest.mark.parametrize("shape", ["normal", "rounded", "flat", "peaked", "masked"])
def test_the_kernel_chooses_what_the_reference_chooses(cpu: CpuOps, vocab: int, shape: str) -> None:
    rng = np.random.default_rng(vocab)
    rows = 48
    logits = rng.normal(0, 3, (rows, vocab)).astype(np.float32)
    if shape == "rounded":  # many ties, at every threshold
        logits = np.round(logits)
    elif shape == "flat":
        logits *= 1e-3
    elif shape == "peaked":
        logits[np.arange(rows), rng.integers(0, vocab, rows)] += 40
    elif shape == "masked":
        logits[rng.random((rows, vocab)) < 0.9] = -np.inf
    batch = random_batch(rows, rng)
    scores = torch.from_numpy(logits)
    assert cpu.sample(scores, batch).tolist() == REFERENCE.sample(scores, batch).tolist()


def test_temperatures_at_the_ends_of_the_range(cpu: CpuOps) -> None:
    logits = torch.randn(6, 300) * 10
    logits[:, 100] = logits[:, 200] = logits.max() + 1  # the lowest id wins where noise is lost in the scale
    batch = batch_of(6, temperature=[1e-44, 1e-38, 1e-20, 1e-6, 1.0, 100.0], top_p=0.9)
    chosen = cpu.sample(logits, batch).tolist()
    assert chosen == REFERENCE.sample(logits, batch).tolist()
    assert chosen[:3] == [100, 100, 100]


def test_greedy_takes_the_lowest_id_of_a_tie(cpu: CpuOps) -> None:
    logits = torch.zeros(3, 9000)
    logits[1, [4097, 8999]] = 1.0
    logits[2] = -5.0
    assert cpu.sample(logits, SampleBatch.greedy(3)).tolist() == [0, 4097, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_token_yield_minus_one(cpu: CpuOps, temperature: float) -> None:
    logits = torch.randn(6, 500)
    logits[0, 499] = float("nan")
    logits[1, 0] = float("nan")
    logits[2] = float("-inf")
    logits[3] = float("-inf")
    logits[3, 321] = -3e38
    logits[4, 7] = logits[4, 9] = float("inf")
    batch = batch_of(6, temperature=temperature, top_k=5, top_p=0.5, min_p=0.1)
    for ops in (cpu, REFERENCE):
        chosen = ops.sample(logits, batch).tolist()
        assert chosen[:5] == [-1, -1, -1, 321, 7]
        assert chosen[5] >= 0


@pytest.mark.parametrize("at", [0, 5000, 8999])
def test_nan_is_found_wherever_it_is(cpu: CpuOps, at: int) -> None:
    logits = torch.randn(2, 9000)
    logits[0, at] = float("nan")
    for temperature in (0.0, 1.0):
        first, second = cpu.sample(logits, batch_of(2, temperature=temperature)).tolist()
        assert first == -1
        assert second >= 0


def test_a_row_depends_on_nothing_beside_it(cpu: CpuOps) -> None:
    rng = np.random.default_rng(3)
    batch = random_batch(40, rng)
    logits = torch.from_numpy(rng.normal(0, 3, (40, 3000)).astype(np.float32))
    together = cpu.sample(logits, batch).tolist()
    for row in range(40):
        alone = SampleBatch(*(getattr(batch, field.name)[row : row + 1] for field in dataclasses.fields(batch)))
        assert cpu.sample(logits[row : row + 1], alone).tolist() == [together[row]]
    assert cpu.sample(logits, batch).tolist() == together


def test_rows_may_be_spread_out(cpu: CpuOps) -> None:
    wide = torch.randn(4, 2000)
    batch = batch_of(4)
    assert cpu.sample(wide[:, :1000], batch).tolist() == cpu.sample(wide[:, :1000].contiguous(), batch).tolist()


SIGNIFICANCE = 1e-4
"""Two-sided chance that a fair sampler fails one of the tests below, on numbers that are the same in every run."""

_DEVIATIONS = 3.89  # of a normal distribution, that 1e-4 of it lies beyond on both sides


def assert_fair(chosen: npt.NDArray[np.int64], probabilities: npt.NDArray[np.float64]) -> None:
    """Pearson's chi-square test of draws, neither too far from what is expected nor too near.

    Tokens expected fewer than 5 times count as one. Wilson and Hilferty (1931): the cube root of chi-square over its
    degrees of freedom is about normal, with mean 1 - 2 / (9 df) and variance 2 / (9 df).
    """
    counts = np.bincount(chosen, minlength=probabilities.size).astype(float)
    assert counts.size == probabilities.size
    assert (counts[probabilities == 0] == 0).all()
    expected = probabilities * chosen.size
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    assert counts.size > 1
    freedom = counts.size - 1
    ratio = ((counts - expected) ** 2 / expected).sum() / freedom
    deviations = (np.cbrt(ratio) - (1 - 2 / (9 * freedom))) / np.sqrt(2 / (9 * freedom))
    assert abs(deviations) < _DEVIATIONS


@pytest.mark.parametrize("vary", ["position", "seed", "index"])
def test_draws_follow_the_distribution(cpu: CpuOps, vary: str) -> None:
    rows, vocab = 20000, 30
    logits = torch.linspace(-1.5, 1.5, vocab).repeat(rows, 1)
    numbers = np.arange(rows) * 7
    chosen = cpu.sample(logits, batch_of(rows, **{"position": 0, vary: numbers})).numpy()
    assert_fair(chosen, torch.softmax(logits[0].double(), dim=0).numpy())


def filtered(
    logits: npt.NDArray[np.float64], temperature: float, top_k: int, top_p: float, min_p: float
) -> npt.NDArray[np.float64]:
    """The distribution that is drawn from, by sorting probabilities that are renormalised after each filter."""
    weights = np.exp(logits / temperature)
    weights[weights < min_p * weights.max()] = 0
    order = np.argsort(-weights)
    if top_k:
        weights[order[top_k:]] = 0
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[before >= top_p * weights.sum()]] = 0
    return weights / weights.sum()


FILTERS = {
    "temperature 0.5": {"temperature": 0.5},
    "temperature 1.7": {"temperature": 1.7},
    "top_k": {"top_k": 12},
    "top_k 1": {"top_k": 1},
    "top_p": {"top_p": 0.8},
    "top_p, hot": {"temperature": 1.7, "top_p": 0.97},
    "min_p": {"min_p": 0.08},
    "top_k then top_p": {"top_k": 20, "top_p": 0.7},
    "min_p then top_k": {"min_p": 0.02, "top_k": 10, "temperature": 1.3},
    "min_p then top_p": {"min_p": 0.1, "top_p": 0.9},
    "all": {"temperature": 0.8, "min_p": 0.03, "top_k": 25, "top_p": 0.9},
}


@pytest.mark.parametrize("name", FILTERS)
def test_filtered_draws_follow_the_filtered_distribution(cpu: CpuOps, name: str) -> None:
    rows, vocab = 20000, 200
    parameters = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | FILTERS[name]
    logits = np.random.default_rng(7).normal(0, 1.5, vocab).astype(np.float32)
    batch = batch_of(rows, seed=11, **parameters)
    chosen = cpu.sample(torch.from_numpy(logits).repeat(rows, 1), batch).numpy()
    wanted = filtered(logits.astype(np.float64), **parameters)  # type: ignore[arg-type]
    if (wanted > 0).sum() == 1:
        assert (chosen == wanted.argmax()).all()
    else:
        assert_fair(chosen, wanted)


def test_the_reference_draws_follow_the_filtered_distribution() -> None:
    logits = np.random.default_rng(8).normal(0, 1.5, 40).astype(np.float32)
    batch = batch_of(20000, seed=5, **FILTERS["all"])
    chosen = REFERENCE.sample(torch.from_numpy(logits).repeat(20000, 1), batch).numpy()
    assert_fair(chosen, filtered(logits.astype(np.float64), **FILTERS["all"]))  # type: ignore[arg-type]


@pytest.mark.parametrize("vary", ["position", "seed", "index"])
def test_neighbouring_draws_are_independent(cpu: CpuOps, vary: str) -> None:
    """Pairs of draws at n and n + 1 of one part of the key are as likely as the product of both."""
    logits = torch.tensor([0.0, 0.5, -0.5, 0.2, 0.9, -1.0])
    batch = batch_of(40000, **{"position": 3, "seed": 4, "index": 1, vary: np.arange(40000)})
    first, second = cpu.sample(logits.repeat(40000, 1), batch).numpy().reshape(-1, 2).T
    probabilities = torch.softmax(logits.double(), dim=0).numpy()
    assert_fair(first * 6 + second, np.outer(probabilities, probabilities).ravel())


def test_every_place_of_a_long_row_is_as_likely_as_any_other(cpu: CpuOps) -> None:
    rows, vocab = 400, 20011  # the last span and the last counter of a row are not full
    logits = torch.full((rows, vocab), -1.25)
    drawn = [cpu.sample(logits, batch_of(rows, position=np.arange(rows) + at)) for at in range(0, 20000, rows)]
    chosen = torch.cat(drawn).numpy()
    for place in (chosen * 100 // vocab, chosen % 4, chosen % 64):
        assert_fair(place, np.full(place.max() + 1, 1 / (place.max() + 1)))


SHAPES = ("normal", "flat", "one octave", "rounded", "equal", "two values", "peaked", "masked", "far apart", "zeros")


def row_of(shape: str, vocab: int, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Rows that are hard to select from: all in one bucket, all tied, or spread over all floats."""
    row = rng.normal(0, 3, vocab)
    if shape == "flat":
        row *= 1e-3
    elif shape == "one octave":
        row = rng.uniform(4, 4.7, vocab)
    elif shape == "rounded":
        row = np.round(row)
    elif shape == "equal":
        row[:] = -7.25
    elif shape == "two values":
        row = np.where(rng.random(vocab) < 0.3, 1.5, np.float32(1.5) - np.float32(2**-23))
    elif shape == "peaked":
        row[rng.integers(0, vocab, 3)] += [30, 29, 25]
    elif shape == "masked":
        row[rng.random(vocab) < 0.97] = -np.inf
    elif shape == "far apart":
        row = rng.choice([-1, 1], vocab) * 10.0 ** rng.uniform(-44, 38, vocab)
    elif shape == "zeros":
        row = rng.choice([0.0, -0.0, 1e-45, -1e-45, 1.0], vocab)
    return row.astype(np.float32)


@numba.njit
def _row_threshold(
    row: npt.NDArray[np.float32], limit: np.float32, heat: np.float32, wanted: float
) -> tuple[float, float]:
    size = row.shape[0]
    maxima = np.empty((size + _SPAN - 1) // _SPAN, np.float32)
    largest = _find_maxima(row, maxima)
    values, weights = np.empty(size + _SLACK, np.float32), np.empty(size + _SLACK, np.float32)
    buckets = np.empty(_BUCKETS, np.float64)
    return _threshold(row, maxima, limit, largest, heat, wanted, values, weights, buckets), largest


_SPAN, _SLACK, _BUCKETS = select.SPAN, select.SLACK, select.BUCKETS
_find_maxima, _threshold = select.find_maxima, select.row_threshold


@pytest.mark.parametrize("vocab", [1, 64, 1025, 20001])
@pytest.mark.parametrize("shape", SHAPES)
def test_selecting_finds_what_sorting_finds(shape: str, vocab: int) -> None:
    row = row_of(shape, vocab, np.random.default_rng(vocab))
    row[0] = 2.0  # nothing but -inf is not selected from
    finite = np.sort(row[row > -np.inf])[::-1]
    for wanted in {1, 2, 50, 1000, finite.size // 2, finite.size - 1, finite.size, finite.size + 5}:
        if wanted > 0:
            got, largest = _row_threshold(row, np.float32(-np.inf), np.float32(0), float(wanted))
            assert got == finite[min(wanted, finite.size) - 1]
            assert largest == finite[0]
    # The mass at or above the threshold reaches the share, and the mass above it does not, as far as float32 can tell.
    weights = np.exp(finite.astype(np.float64) - finite[0])
    for share in (1e-6, 0.3, 0.9, 0.9999):
        got, _ = _row_threshold(row, np.float32(-np.inf), np.float32(1), share * weights.sum())
        assert got in finite
        assert weights[finite >= got].sum() >= share * weights.sum() * (1 - 1e-5)
        assert weights[finite > got].sum() <= share * weights.sum() * (1 + 1e-5)


def test_random_rows_are_sampled_as_by_the_reference(cpu: CpuOps) -> None:
    for seed in range(60):
        rng = np.random.default_rng(seed)
        vocab = int(rng.choice([4, 17, 64, 129, 1000, 1024, 4097]))
        logits = torch.from_numpy(np.stack([row_of(shape, vocab, rng) for shape in rng.choice(SHAPES, 8)]))
        temperature = rng.choice([0.01, 0.3, 0.7, 1.0, 1.5, 50.0], 8).astype(np.float32)
        batch = dataclasses.replace(random_batch(8, rng), temperature=temperature)
        assert cpu.sample(logits, batch).tolist() == REFERENCE.sample(logits, batch).tolist(), f"seed {seed}"


def test_scores_have_the_precision_of_the_reference(cpu: CpuOps) -> None:
    """Logits divided by the temperature in float32 would tie here, or overflow."""
    near = torch.tensor([1.5 - 2**-23, 1.5] * 20).repeat(50, 1)
    chosen = cpu.sample(near, batch_of(50, temperature=0.7, min_p=1.0))
    assert (chosen % 2 == 1).all()
    far = torch.tensor([2e37, 8e37, 4e37]).repeat(50, 1)
    assert cpu.sample(far, batch_of(50, temperature=0.01)).tolist() == [1] * 50


@pytest.mark.parametrize("shape", SHAPES)
def test_long_rows_are_sampled_as_by_the_reference(cpu: CpuOps, shape: str) -> None:
    rng = np.random.default_rng(4)
    logits = torch.from_numpy(np.stack([row_of(shape, 30001, rng) for _ in range(12)]))
    batch = random_batch(12, rng)
    assert cpu.sample(logits, batch).tolist() == REFERENCE.sample(logits, batch).tolist()


def test_filters_renormalise(cpu: CpuOps) -> None:
    """temperature, then min_p, top_k, top_p, each over what the one before left: worked out by hand."""
    rows = 20000
    logits = torch.log(torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])).repeat(rows, 1)
    # min_p 0.3 keeps .4 .3 .15; top_k 3 keeps them; of their .85, top_p .8 needs .68: .4 + .3.
    chosen = cpu.sample(logits, batch_of(rows, min_p=0.3, top_k=3, top_p=0.8)).numpy()
    assert_fair(chosen, np.array([4 / 7, 3 / 7, 0, 0, 0]))
    # At temperature 0.5 the weights are squared; top_k 2 keeps .16 and .09.
    chosen = cpu.sample(logits, batch_of(rows, temperature=0.5, top_k=2)).numpy()
    assert_fair(chosen, np.array([16 / 25, 9 / 25, 0, 0, 0]))


def test_ties_at_a_threshold_all_stay(cpu: CpuOps) -> None:
    rows = 4000
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, -9.0]).repeat(rows, 1)
    for fields in ({"top_k": 2}, {"top_p": 0.6}):
        assert set(cpu.sample(logits, batch_of(rows, temperature=1.0, **fields)).tolist()) == {0, 1, 2, 3}
