"""The operations that a model is made of: one meaning, several back ends. `kernels.reference` is the definition.

Shapes: T query tokens of a step, Hq query heads, Hk key/value heads (Hq a multiple of Hk), D head_dim, H hidden size.
Every operation fills every row of what it returns and harms no input unless it says so. Tensors of the activations have
the model's dtype (float32, bfloat16; on CUDA also float16) and lie on the back end's device.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import structlog
import torch

from pagemill.kernels.decoder import CompiledDecoder, DecoderStack
from pagemill.kernels.layout import KVForm, LayerKV
from pagemill.kernels.metadata import AttentionMetadata
from pagemill.kernels.quantised_weight import QuantisedWeight

_log = structlog.get_logger(__name__)

BACK_ENDS = ("reference", "torch", "cpu", "triton", "interpret")


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """How each of R rows of logits is to be sampled.

    temperature float32 [R]: 0 is greedy and ignores the rest. top_k int32 [R]: 0 is off. top_p, min_p float32 [R]:
    1 and 0 are off. seed uint64 [R], position int64 [R] (index of the token among the generated ones) and index int32
    [R] (which choice of the request) key the row's noise, so that a row's token depends on nothing else in the batch.
    """

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    seed: npt.NDArray[np.uint64]
    position: npt.NDArray[np.int64]
    index: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return int(self.temperature.shape[0])

    @classmethod
    def greedy(cls, rows: int) -> SampleBatch:
        """Argmax for every row."""
        return cls(
            np.zeros(rows, np.float32),
            np.zeros(rows, np.int32),
            np.ones(rows, np.float32),
            np.zeros(rows, np.float32),
            np.zeros(rows, np.uint64),
            np.zeros(rows, np.int64),
            np.zeros(rows, np.int32),
        )


def _none(dtype: Any, *shape: int) -> Any:
    return field(default_factory=lambda: np.zeros(shape or (0,), dtype))


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """What is done to R rows of logits [R, V] before they are sampled, in this order. A row not named is left alone.

    1. masks: mask_rows int32 [M], strictly increasing; masks uint32 [M, ceil(V / 32)], where bit t % 32 of word t // 32
       says that token t may stay. Others become -inf.
    2. bans: the logit of ban_ids int32 [B] in rows ban_rows int32 [B] becomes -inf.
    3. biases: bias float32 [N] is added to the logit of bias_ids int32 [N] in rows bias_rows int32 [N]. No (row, id)
       comes twice.
    4. penalties: for each of penalty_rows int32 [P] (none twice) the entries starts[i] .. starts[i + 1] of ids and
       counts, int32 [Q], list the distinct tokens of its prompt and output and how often each is in the output (0: only
       in the prompt). repetition, presence, frequency are float32 [P]. A positive logit of a listed token is divided by
       the repetition penalty, another multiplied by it; then frequency * count is subtracted, and presence where count
       is not 0.

    Ids outside the vocabulary are skipped: refusing them is for whoever knows the request. Construction raises
    ValueError where types or lengths do not fit each other. `LogitEdits()` is no edit at all.
    """

    mask_rows: npt.NDArray[np.int32] = _none(np.int32)
    masks: npt.NDArray[np.uint32] = _none(np.uint32, 0, 0)
    ban_rows: npt.NDArray[np.int32] = _none(np.int32)
    ban_ids: npt.NDArray[np.int32] = _none(np.int32)
    bias_rows: npt.NDArray[np.int32] = _none(np.int32)
    bias_ids: npt.NDArray[np.int32] = _none(np.int32)
    bias: npt.NDArray[np.float32] = _none(np.float32)
    penalty_rows: npt.NDArray[np.int32] = _none(np.int32)
    repetition: npt.NDArray[np.float32] = _none(np.float32)
    presence: npt.NDArray[np.float32] = _none(np.float32)
    frequency: npt.NDArray[np.float32] = _none(np.float32)
    starts: npt.NDArray[np.int32] = _none(np.int32, 1)
    ids: npt.NDArray[np.int32] = _none(np.int32)
    counts: npt.NDArray[np.int32] = _none(np.int32)

    def __post_init__(self) -> None:
        for name, like, dtype in _EDIT_COLUMNS:
            column, length = getattr(self, name), len(getattr(self, like))
            if column.dtype != dtype or column.shape != (length,):
                got = f"{column.dtype} {list(column.shape)}"
                raise ValueError(f"{name} must be {np.dtype(dtype)} [{length}], as long as {like}, got {got}")
        if self.masks.dtype != np.uint32 or self.masks.ndim != 2 or len(self.masks) != len(self.mask_rows):
            raise ValueError(f"masks must be uint32, one row for each of mask_rows, got {self.masks.dtype}")
        starts = self.starts
        if starts.dtype != np.int32 or starts.shape != (len(self.penalty_rows) + 1,):
            raise ValueError(f"starts must be int32 [{len(self.penalty_rows) + 1}], got {starts.dtype} {starts.shape}")
        if starts[0] != 0 or starts[-1] != len(self.ids) or (starts[1:] < starts[:-1]).any():
            raise ValueError(f"starts must rise from 0 to the {len(self.ids)} ids, got {starts.tolist()}")
        if (self.mask_rows[1:] <= self.mask_rows[:-1]).any():
            raise ValueError(f"mask_rows must be strictly increasing, got {self.mask_rows.tolist()}")
        if len(set(self.penalty_rows.tolist())) < len(self.penalty_rows):
            raise ValueError(f"no row may be penalised twice, got {self.penalty_rows.tolist()}")

    @classmethod
    def one_of_each(cls, vocab_size: int) -> LogitEdits:
        """An edit of each kind to token 0 of row 0, for compiling what takes them."""
        row, id_, amount = np.zeros(1, np.int32), np.zeros(1, np.int32), np.ones(1, np.float32)
        masks = np.zeros((1, -(-vocab_size // 32)), np.uint32)
        starts = np.array([0, 1], np.int32)
        return cls(row, masks, row, id_, row, id_, amount, row, amount, amount, amount, starts, id_, row)

    def check_fit(self, rows: int, vocab_size: int) -> None:
        """Raises ValueError where a row is none of logits [rows, vocab_size], or a mask is not as wide."""
        for name in ("mask_rows", "ban_rows", "bias_rows", "penalty_rows"):
            named = getattr(self, name)
            if len(named) and (named.min() < 0 or named.max() >= rows):
                raise ValueError(f"{name} must lie in 0 .. {rows - 1}, got {named.min()} .. {named.max()}")
        words = -(-vocab_size // 32)
        if len(self.mask_rows) and self.masks.shape[1] != words:
            raise ValueError(f"masks of {vocab_size} tokens take {words} words, got {self.masks.shape[1]}")


_EDIT_COLUMNS: tuple[tuple[str, str, Any], ...] = (  # name, which other is as long, type
    ("mask_rows", "mask_rows", np.int32),
    ("ban_rows", "ban_rows", np.int32),
    ("ban_ids", "ban_rows", np.int32),
    ("bias_rows", "bias_rows", np.int32),
    ("bias_ids", "bias_rows", np.int32),
    ("bias", "bias_rows", np.float32),
    ("penalty_rows", "penalty_rows", np.int32),
    ("repetition", "penalty_rows", np.float32),
    ("presence", "penalty_rows", np.float32),
    ("frequency", "penalty_rows", np.float32),
    ("ids", "ids", np.int32),
    ("counts", "ids", np.int32),
)


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """Log-probabilities of L rows, tensors on the device of their logits.

    chosen float32 [L]: of the token asked for; rank int64 [L]: 1 for the likeliest, else 1 + the number of likelier
    tokens; ids int64 [L, top] and values float32 [L, top]: the likeliest tokens, best first, the lowest id first in
    ties. What is not there is NaN, rank 0 or id -1: the chosen one where no token was asked for (id outside the
    vocabulary), all of a row that is no distribution (it holds NaN or +inf, or only -inf), and columns past the
    vocabulary.
    """

    chosen: torch.Tensor
    rank: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor


class PreparedLinear(Protocol):
    """A weight in the order its back end reads fastest. Opaque; only `in_features` and `out_features` are public."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...


class Ops(Protocol):
    """A back end. `kv_form` is the order of the KV pool that its kernels read (`KVLayout(form=ops.kv_form)`)."""

    name: str
    kv_form: KVForm

    @property
    def threads(self) -> int:
        """Threads of this process that compute, at present."""
        ...

    def step(self, tokens: int) -> AbstractContextManager[None]:
        """Around everything that is computed for a step of so many tokens: a back end may learn from its time."""
        ...

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, kv: LayerKV, slot_mapping: torch.Tensor) -> None:
        """Store key, value [T, Hk, D] at slot_mapping int64 [T]; slots outside the pool are skipped."""
        ...

    def paged_attention(
        self, query: torch.Tensor, kv: LayerKV, meta: AttentionMetadata, *, scale: float, sliding_window: int = 0
    ) -> torch.Tensor:
        """Causal attention of query [T, Hq, D] over the paged context; returns [T, Hq, D].

        The keys of this step's tokens must have been written. With sliding_window W > 0 a key is visible iff
        query position - key position < W.
        """
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last axis of x [T, H]."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(x + residual), x + residual). The norm is taken of the sum as it is returned, rounded.

        residual may be float32 beside a 16-bit x; the new residual has its dtype, the normed output x's.
        """
        ...

    def rotary_embedding(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
    ) -> None:
        """Rotate query [T, Hq, D] and key [T, Hk, D] in place; rows may be strided views of one projection.

        cos_sin float32 [P, D]: cosines of the D / 2 frequencies, then sines, by position. Halves are paired (NeoX).
        """
        ...

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of gate_up [T, 2 I] = (gate | up); returns [T, I]."""
        ...

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PreparedLinear:
        """Take a weight [N, K] (and bias [N]) once, at load time; it may be repacked and must not change afterwards."""
        ...

    def prepare_gated_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PreparedLinear:
        """`prepare_linear` for a weight [2 I, K] = (gate above up), for `gated_linear`."""
        ...

    def prepare_stored(
        self, parts: Iterable[torch.Tensor], bias: torch.Tensor | None, dtype: torch.dtype, *, gated: bool = False
    ) -> PreparedLinear | None:
        """`prepare_linear` or, if gated, `prepare_gated_linear` for weights [N_i, K] one under another, as they are
        stored: on the host, of any type of floating-point numbers; rounded to `dtype`.

        None, and nothing is read, where the back end wants them as one tensor of `dtype` on its device.
        """
        ...

    def prepare_quantised(
        self, weight: QuantisedWeight, bias: torch.Tensor | None, dtype: torch.dtype, *, gated: bool = False
    ) -> PreparedLinear:
        """`prepare_linear` or, if gated, `prepare_gated_linear` for a quantised weight and activations of `dtype`.

        Raises ValueError where the back end has no kernels for it.
        """
        ...

    def linear(self, x: torch.Tensor, prepared: Any) -> torch.Tensor:
        """x [T, K] times the transposed weight plus bias; returns [T, N]."""
        ...

    def gated_linear(self, x: torch.Tensor, prepared: Any) -> torch.Tensor:
        """silu(gate) * up of the projections (gate | up) of x [T, K]; returns [T, I]. These may stay unrounded."""
        ...

    def logits(self, hidden: torch.Tensor, prepared: Any) -> torch.Tensor:
        """`linear`, returned as float32. A back end that can does not round in between."""
        ...

    def embedding(self, token_ids: torch.Tensor, prepared: Any) -> torch.Tensor:
        """Rows token_ids int64 [T] of a weight [N, K] as it was given to `prepare_linear`; returns [T, K].

        So a tied head and embedding are stored once. Raises IndexError on an id outside the weight, where ids lie on
        the host.
        """
        ...

    def compile_decoder(self, stack: DecoderStack, dtype: torch.dtype) -> CompiledDecoder | None:
        """The layers of a stack, for activations of `dtype`, in one go; None where they run operation by operation."""
        ...

    def copy_blocks(self, pool: torch.Tensor, pairs: torch.Tensor) -> None:
        """Copy whole blocks of a pool [layers, blocks, piece], pairs int64 [n, 2] of (source, destination). All reads
        come before writes."""
        ...

    def edit_logits(self, logits: torch.Tensor, edits: LogitEdits) -> None:
        """Apply edits to logits float32 [R, V] in place; rows that no edit names are not even read.

        Rows may be parts of longer ones. Raises ValueError where the edits do not fit the shape.
        """
        ...

    def logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> TopLogprobs:
        """Log-softmax of logits float32 [L, V] at token_ids int64 [L] (-1: none) and at the `top` >= 0 likeliest."""
        ...

    def sample(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        """Choose a token for each row of logits float32 [R, V]; returns int64 [R].

        temperature, then min_p, top_k, top_p (each over what the one before left, all ties at a threshold kept), then
        the largest logit / temperature + Gumbel noise. The noise of a token is a function of (seed, position, index,
        token id) alone (`kernels.rng`), the same integers on every back end. The lowest id wins ties. A row that holds
        NaN or only -inf yields -1.
        """
        ...


def select_ops(
    device: str,
    *,
    override: str | None = None,
    threads: int | None = None,
    cache_dir: str | None = None,
    report: Callable[[str, int, float], None] | None = None,
) -> Ops:
    """The back end for a device ("cpu", "cuda", "cuda:1"), or the one named by `override`.

    On the CPU that is numba, and plain torch, with a warning that says why, where numba cannot be used. threads,
    cache_dir (compiled kernels; default ~/.cache/pagemill) and report (`kernel_cache.Report`) are for the CPU. Raises
    ValueError on an unknown name, and RuntimeError where an override cannot be used here.
    """
    name = override or ("cpu" if torch.device(device).type == "cpu" else "triton")
    if name == "reference":
        from pagemill.kernels.reference import ReferenceOps

        return ReferenceOps()
    if name == "cpu":
        problem = numba_problem()
        if problem is None:
            from pagemill.kernels.cpu.ops import CpuOps

            return CpuOps(threads=threads, cache_dir=cache_dir, report=report)
        if override is not None:
            raise RuntimeError(problem)
        _log.warning("the CPU kernels cannot be used; running on plain torch, which is slower", reason=problem)
        name = "torch"
    if name == "torch":
        from pagemill.kernels.torch_ops import TorchOps

        return TorchOps()
    if name in ("triton", "interpret"):
        from pagemill.kernels.triton.ops import TritonOps

        return TritonOps(interpret=name == "interpret")
    raise ValueError(f"unknown kernels {name!r}: choose one of {', '.join(BACK_ENDS)}")


def numba_problem() -> str | None:
    """Why the CPU kernels cannot be compiled here, or None where they can."""
    if sys.byteorder != "little" or sys.maxsize < 2**32:
        return f"the kernels are for 64-bit little-endian processors, and this is {platform.machine()}"
    try:
        import numba.core.config
    except (ImportError, OSError, AttributeError) as error:  # not there, not whole, or at odds with NumPy
        return f"numba cannot be imported: {type(error).__name__}: {error}"
    if numba.core.config.DISABLE_JIT:
        return "numba is told not to compile (NUMBA_DISABLE_JIT)"
    from pagemill.kernels.cpu.target import lacking

    if missing := lacking():
        return f"NUMBA_CPU_FEATURES names what this processor does not have: {', '.join(missing)}"
    return None
