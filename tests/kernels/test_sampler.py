"""The sampler: Philox against its published vectors, the CPU kernel against the reference, the draws against chance."""

from __future__ import annotations

import dataclasses

import numba
import numpy as np
import numpy.typing as npt
import pytest
import torch

from pagemill.kernels.cpu import sampler as cpu_sampler
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
        top_p=rng.choice([1.0, 0.999, 0.9, 0.5, 0.01, 1e-6], rows).astype(np.float32),
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


def chi_square(chosen: npt.NDArray[np.int64], probabilities: npt.NDArray[np.float64]) -> float:
    """Pearson's statistic over its degrees of freedom; near 1 for fair draws."""
    counts = np.bincount(chosen, minlength=probabilities.size)
    assert (counts[probabilities == 0] == 0).all()
    alive = probabilities > 0
    expected = probabilities[alive] * chosen.size
    return float(((counts[alive] - expected) ** 2 / expected).sum() / (alive.sum() - 1))


@pytest.mark.parametrize("vary", ["position", "seed", "index"])
def test_draws_follow_the_distribution(cpu: CpuOps, vary: str) -> None:
    rows, vocab = 20000, 30
    logits = torch.linspace(-1.5, 1.5, vocab).repeat(rows, 1)
    numbers = np.arange(rows) * 7
    chosen = cpu.sample(logits, batch_of(rows, **{"position": 0, vary: numbers})).numpy()
    probabilities = torch.softmax(logits[0].double(), dim=0).numpy()
    assert 0.3 < chi_square(chosen, probabilities) < 2.4  # p about 1e-4 at 29 degrees of freedom


def test_filters_renormalise(cpu: CpuOps) -> None:
    """temperature, then min_p, top_k, top_p, each over what the one before left: worked out by hand."""
    rows = 20000
    logits = torch.log(torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])).repeat(rows, 1)
    # min_p 0.3 keeps .4 .3 .15; top_k 3 keeps them; of their .85, top_p .8 needs .68: .4 + .3.
    chosen = cpu.sample(logits, batch_of(rows, min_p=0.3, top_k=3, top_p=0.8)).numpy()
    assert 0.0 < chi_square(chosen, np.array([4 / 7, 3 / 7, 0, 0, 0])) < 15.1
    # At temperature 0.5 the weights are squared; top_k 2 keeps .16 and .09.
    chosen = cpu.sample(logits, batch_of(rows, temperature=0.5, top_k=2)).numpy()
    assert 0.0 < chi_square(chosen, np.array([16 / 25, 9 / 25, 0, 0, 0])) < 15.1


def test_ties_at_a_threshold_all_stay(cpu: CpuOps) -> None:
    rows = 4000
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, -9.0]).repeat(rows, 1)
    for fields in ({"top_k": 2}, {"top_p": 0.6}):
        assert set(cpu.sample(logits, batch_of(rows, temperature=1.0, **fields)).tolist()) == {0, 1, 2, 3}
