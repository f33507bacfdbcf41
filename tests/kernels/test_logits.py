"""Edits of logits and log-probabilities against independent NumPy computations."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pagemill.kernels.cpu.ops import CpuOps
from pagemill.kernels.ops import LogitEdits, Ops
from pagemill.kernels.triton.checks import Check, all_checks
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


def test_a_list_longer_than_the_kernels_own(ops: Ops) -> None:
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 3, (2, 500)).astype(np.float32))
    got = ops.logprobs(logits, torch.tensor([3, -1]), 500)
    assert got.ids[0].tolist() == logits[0].sort(descending=True, stable=True).indices.tolist()
    assert got.values[1].exp().sum().item() == pytest.approx(1, abs=1e-5)
    assert got.rank.tolist()[1] == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_no_distribution_has_no_logprobs(ops: Ops, value: float) -> None:
    logits = torch.randn(3, 200)
    logits[1] = value if value == -np.inf else logits[1]
    logits[1, 77] = value
    got = ops.logprobs(logits, torch.tensor([5, 5, 5]), 3)
    assert got.rank[1] == 0
    assert got.ids[1].tolist() == [-1] * 3
    assert got.chosen.isnan().tolist() == [False, True, False]
    assert got.values.isnan().all(dim=1).tolist() == [False, True, False]
    assert got.ids[2].tolist() == logits[2].topk(3).indices.tolist()


def test_a_token_that_cannot_be_has_minus_infinity(ops: Ops) -> None:
    logits = torch.tensor([[1.0, -np.inf, 1.0, -np.inf]])
    got = ops.logprobs(logits, torch.tensor([3]), 4)
    assert got.chosen.tolist() == [-np.inf]
    assert got.rank.tolist() == [3]
    assert got.ids.tolist() == [[0, 2, 1, 3]]
    assert got.values.tolist() == [[pytest.approx(-np.log(2)), pytest.approx(-np.log(2)), -np.inf, -np.inf]]


def test_no_rows_and_no_edits_are_no_error(ops: Ops) -> None:
    got = ops.logprobs(torch.empty((0, 50)), torch.empty(0, dtype=torch.int64), 5)
    assert got.chosen.shape == got.rank.shape == (0,)
    assert got.ids.shape == got.values.shape == (0, 5)
    ops.edit_logits(torch.empty((0, 50)), LogitEdits())
    logits = torch.randn(3, 50)
    before = logits.clone()
    ops.edit_logits(logits, LogitEdits())
    assert torch.equal(logits, before)


def test_rows_may_be_parts_of_longer_ones_and_nothing_outside_them_is_written(ops: Ops) -> None:
    rng = np.random.default_rng(5)
    wide = rng.normal(0, 4, (9, 150)).astype(np.float32)
    case = everything(wide[:, 20:117], 6)
    # Tokens outside the vocabulary, some of which would land in the next row.
    edits = dataclasses.replace(
        case.edits,
        ban_rows=np.concatenate((case.edits.ban_rows, int32([0, 8, 3]))),
        ban_ids=np.concatenate((case.edits.ban_ids, int32([-1, 97, 2**31 - 1]))),
        bias_rows=np.concatenate((case.edits.bias_rows, int32([0, 8]))),
        bias_ids=np.concatenate((case.edits.bias_ids, int32([-(2**31), 97]))),
        bias=np.concatenate((case.edits.bias, np.ones(2, np.float32))),
        penalty_rows=np.append(case.edits.penalty_rows, int32(np.setdiff1d(np.arange(9), case.edits.penalty_rows)[0])),
        repetition=np.append(case.edits.repetition, np.float32(2)),
        presence=np.append(case.edits.presence, np.float32(2)),
        frequency=np.append(case.edits.frequency, np.float32(2)),
        starts=np.append(case.edits.starts, case.edits.starts[-1] + int32(3)),
        ids=np.append(case.edits.ids, int32([-1, 97, 10**9])),
        counts=np.append(case.edits.counts, int32([1, 1, 1])),
    )
    tensor = torch.from_numpy(wide.copy())
    ops.edit_logits(tensor[:, 20:117], edits)
    got = tensor.numpy()
    np.testing.assert_allclose(got[:, 20:117], case.wanted, rtol=1e-6, atol=2e-5)
    outside = np.ones((9, 150), bool)
    outside[:, 20:117] = False
    assert np.array_equal(got[outside], wide[outside])
    asked = torch.arange(9)
    whole = ops.logprobs(torch.from_numpy(wide[:, 20:117].copy()), asked, 4)
    part = ops.logprobs(torch.from_numpy(wide)[:, 20:117], asked, 4)
    assert torch.equal(whole.chosen, part.chosen)
    assert torch.equal(whole.ids, part.ids)


def test_nan_and_infinity_stay_what_they_are(ops: Ops) -> None:
    logits = np.full((2, 6), 1.0, np.float32)
    logits[0] = [np.nan, -np.inf, np.inf, np.nan, -np.inf, 2.0]
    one = np.ones(1, np.float32)
    edits = LogitEdits(
        ban_rows=int32([0]), ban_ids=int32([3]), bias_rows=int32([0]), bias_ids=int32([4]), bias=5 * one,
        penalty_rows=int32([0]), repetition=2 * one, presence=one, frequency=one,
        starts=int32([0, 6]), ids=int32(range(6)), counts=int32([1] * 6),
    )  # fmt: skip
    got = edited(ops, logits, edits)
    np.testing.assert_array_equal(got[0], [np.nan, -np.inf, np.inf, -np.inf, -np.inf, -1.0])
    np.testing.assert_array_equal(got[1], logits[1])


def test_each_edit_sees_what_the_one_before_left(ops: Ops) -> None:
    """A bias does not bring back what a mask or a ban took, and penalties divide what a bias has made positive."""
    one = np.ones(1, np.float32)
    edits = LogitEdits(
        mask_rows=int32([0]), masks=np.array([[0b1011]], np.uint32), ban_rows=int32([0]), ban_ids=int32([1]),
        bias_rows=int32([0] * 4), bias_ids=int32(range(4)), bias=np.full(4, 5, np.float32),
        penalty_rows=int32([0]), repetition=2 * one, presence=0.25 * one, frequency=0.5 * one,
        starts=int32([0, 2]), ids=int32([3, 0]), counts=int32([3, 0]),
    )  # fmt: skip
    got = edited(ops, np.array([[-9.0, 1.0, 1.0, -1.0]], np.float32), edits)
    # Token 0: (-9 + 5) * 2, only in the prompt. Token 3: (-1 + 5) / 2 - 3 * 0.5 - 0.25.
    assert got.tolist() == [[-8.0, -np.inf, -np.inf, 0.25]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ban_rows": int32([0])}, "ban_ids must be int32 .1., as long as ban_rows"),
        ({"ban_rows": np.zeros(1, np.int64), "ban_ids": int32([0])}, "ban_rows must be int32"),
        ({"bias_rows": int32([0]), "bias_ids": int32([0]), "bias": np.zeros(1)}, "bias must be float32"),
        ({"mask_rows": int32([0])}, "masks"),
        ({"mask_rows": int32([1, 1]), "masks": np.zeros((2, 1), np.uint32)}, "strictly increasing"),
        ({"starts": int32([0, 0])}, "starts must be int32 .1."),
        ({"ids": int32([1]), "counts": int32([1])}, "rise from 0 to the 1 ids"),
    ],
)
def test_edits_that_do_not_fit_each_other_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LogitEdits(**fields)  # type: ignore[arg-type]


def test_a_row_penalised_twice_and_falling_starts_are_refused() -> None:
    two, ids = np.ones(2, np.float32), int32([0, 1])
    columns = {"repetition": two, "presence": two, "frequency": two, "ids": ids, "counts": ids}
    with pytest.raises(ValueError, match="penalised twice"):
        LogitEdits(penalty_rows=int32([3, 3]), starts=int32([0, 1, 2]), **columns)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="starts must rise"):
        LogitEdits(penalty_rows=int32([3, 4]), starts=int32([0, 3, 2]), **columns)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        (LogitEdits(ban_rows=int32([2]), ban_ids=int32([0])), "ban_rows must lie in 0 .. 1, got 2"),
        (LogitEdits(bias_rows=int32([-1]), bias_ids=int32([0]), bias=np.zeros(1, np.float32)), "bias_rows"),
        (LogitEdits(mask_rows=int32([0]), masks=np.zeros((1, 2), np.uint32)), "take 3 words, got 2"),
    ],
)
def test_edits_that_do_not_fit_the_logits_are_refused_and_change_nothing(
    ops: Ops, edits: LogitEdits, message: str
) -> None:
    logits = torch.randn(2, 70)
    before = logits.clone()
    with pytest.raises(ValueError, match=message):
        ops.edit_logits(logits, edits)
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "check", [check for check in all_checks() if "logit" in check.name or "logprob" in check.name], ids=lambda c: c.name
)
def test_the_checks_that_a_device_gets(ops: Ops, check: Check) -> None:
    outcome = check.run(ops, "cpu")
    assert outcome.passed, f"error {outcome.error:.2e}"
