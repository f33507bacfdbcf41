"""Edits of logits and log-probabilities against independent NumPy computations."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pagemill.kernels.cpu.ops import CpuOps
from pagemill.kernels.ops import LogitEdits, Ops
from tests.kernels.paged import REFERENCE

Array = npt.NDArray[np.float32]


@pytest.fixture(scope="module", params=["reference", "cpu", "cpu, one thread"])
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "reference":
        return REFERENCE
    return CpuOps(threads=2 if request.param == "cpu" else 1)


def int32(values: object) -> npt.NDArray[np.int32]:
    return np.asarray(values, np.int32)


def packed(allowed: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint32]:
    """Masks of bools [M, V], with NumPy's own packing of bits; the unused bits of the last word are set."""
    padded = np.ones((allowed.shape[0], -(-allowed.shape[1] // 32) * 32), bool)
    padded[:, : allowed.shape[1]] = allowed
    return np.packbits(padded, axis=1, bitorder="little").view("<u4")


def edited(ops: Ops, logits: Array, edits: LogitEdits) -> Array:
    tensor = torch.from_numpy(logits.copy())
    ops.edit_logits(tensor, edits)
    return tensor.numpy()


@dataclasses.dataclass
class Everything:
    """Random edits of all kinds, and what they make of the logits, worked out in dense float64 arrays."""

    edits: LogitEdits
    wanted: npt.NDArray[np.float64]
    touched: npt.NDArray[np.bool_]


def everything(logits: Array, seed: int, kinds: str = "mask ban bias penalty") -> Everything:
    rng = np.random.default_rng(seed)
    rows, vocab = logits.shape
    want = logits.astype(np.float64)
    touched = np.zeros(rows, bool)
    fields: dict[str, npt.NDArray[np.generic]] = {}

    def some() -> npt.NDArray[np.int32]:
        return np.sort(rng.choice(rows, rng.integers(0, rows), replace=False)).astype(np.int32)

    if "mask" in kinds:
        named = some()
        allowed = rng.random((named.size, vocab)) < rng.choice([0.0, 0.03, 0.5, 1.0], (named.size, 1))
        fields |= {"mask_rows": named, "masks": packed(allowed)}
        want[named] = np.where(allowed, want[named], -np.inf)
        touched[named] = True
    if "ban" in kinds:
        named = rng.integers(0, rows, 40).astype(np.int32)
        ids = rng.integers(0, vocab, 40).astype(np.int32)
        fields |= {"ban_rows": named, "ban_ids": ids}
        want[named, ids] = -np.inf
        touched[named] = True
    if "bias" in kinds:
        pairs = rng.choice(rows * vocab, min(50, rows * vocab // 2), replace=False)
        named, ids = (pairs // vocab).astype(np.int32), (pairs % vocab).astype(np.int32)
        bias = rng.uniform(-100, 100, pairs.size).astype(np.float32)
        fields |= {"bias_rows": named, "bias_ids": ids, "bias": bias}
        want[named, ids] += bias
        touched[named] = True
    if "penalty" in kinds:
        named = rng.permutation(some())
        repetition, presence, frequency = (rng.uniform(a, b, named.size).astype(np.float32) for a, b in
                                           ((0.2, 2), (-2, 2), (-2, 2)))  # fmt: skip
        lists = [rng.choice(vocab, rng.integers(0, vocab + 1), replace=False).astype(np.int32) for _ in named]
        counts = [rng.integers(0, 5, ids.size).astype(np.int32) for ids in lists]
        fields |= {
            "penalty_rows": named,
            "repetition": repetition,
            "presence": presence,
            "frequency": frequency,
            "starts": int32(np.cumsum([0, *map(len, lists)])),
            "ids": int32(np.concatenate([*lists, []])),
            "counts": int32(np.concatenate([*counts, []])),
        }
        for i, row in enumerate(named):
            seen, times = np.zeros(vocab, bool), np.zeros(vocab)
            seen[lists[i]] = True
            times[lists[i]] = counts[i]
            factor = np.where(seen, float(repetition[i]), 1.0)
            want[row] = np.where(want[row] > 0, want[row] / factor, want[row] * factor)
            want[row] -= float(frequency[i]) * times + float(presence[i]) * (times > 0)
        touched[named] = True
    return Everything(LogitEdits(**fields), want, touched)  # type: ignore[arg-type]


@pytest.mark.parametrize("kinds", ["mask", "ban", "bias", "penalty", "mask ban bias penalty"])
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1000])
def test_edits_do_what_numpy_does(ops: Ops, kinds: str, vocab: int) -> None:
    logits = np.random.default_rng(vocab).normal(0, 4, (7, vocab)).astype(np.float32)
    case = everything(logits, vocab, kinds)
    got = edited(ops, logits, case.edits)
    np.testing.assert_allclose(got, case.wanted, rtol=1e-6, atol=2e-5)
    assert np.array_equal(got[~case.touched].view(np.int32), logits[~case.touched].view(np.int32))


@pytest.mark.parametrize("vocab", [7, 700])
@pytest.mark.parametrize("top", [0, 1, 5, 20, 100])
def test_logprobs_are_those_of_numpy(ops: Ops, vocab: int, top: int) -> None:
    rng = np.random.default_rng(top)
    logits = np.round(rng.normal(0, 3, (9, vocab)), 1).astype(np.float32)  # rounded: many ties
    asked = rng.integers(0, vocab, 9)
    got = ops.logprobs(torch.from_numpy(logits), torch.from_numpy(asked), top)
    exact = logits.astype(np.float64)
    want = exact - np.log(np.exp(exact).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(got.chosen.numpy(), want[np.arange(9), asked], atol=2e-6)
    assert got.rank.tolist() == [1 + int((row > row[token]).sum()) for row, token in zip(logits, asked, strict=True)]
    ids = np.lexsort((np.broadcast_to(np.arange(vocab), logits.shape), -logits), axis=1)[:, :top]
    pad = ((0, 0), (0, top - ids.shape[1]))
    assert np.array_equal(got.ids.numpy(), np.pad(ids, pad, constant_values=-1))
    values = np.pad(np.take_along_axis(want, ids, 1), pad, constant_values=np.nan)
    np.testing.assert_allclose(got.values.numpy(), values, atol=2e-6)
