"""The operations that a model is made of: one meaning, several back ends. `kernels.reference` is the definition.

Shapes: T query tokens of a step, Hq query heads, Hk key/value heads (Hq a multiple of Hk), D head_dim, H hidden size.
Every operation fills every row of what it returns and harms no input unless it says so. Tensors of the activations have
the model's dtype (float32, bfloat16; on CUDA also float16) and lie on the back end's device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import structlog
import torch

from pagemill.kernels.layout import KVForm, LayerKV
from pagemill.kernels.metadata import AttentionMetadata

_log = structlog.get_logger(__name__)

BACK_ENDS = ("reference", "cpu", "triton", "interpret")


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

    def linear(self, x: torch.Tensor, prepared: Any) -> torch.Tensor:
        """x [T, K] times the transposed weight plus bias; returns [T, N]."""
        ...

    def copy_blocks(self, pool: torch.Tensor, pairs: torch.Tensor) -> None:
        """Copy whole blocks of the pool, pairs int64 [n, 2] of (source, destination). All reads come before writes."""
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
    device: str, *, override: str | None = None, threads: int | None = None, cache_dir: str | None = None
) -> Ops:
    """The back end for a device ("cpu", "cuda", "cuda:1"), or the one named by `override`.

    On the CPU that is numba, and plain torch where numba is not installed. threads and cache_dir (compiled kernels;
    default ~/.cache/pagemill) are for the CPU. Raises ValueError on an unknown name.
    """
    name = override or ("cpu" if torch.device(device).type == "cpu" else "triton")
    if name == "reference":
        return _reference()
    if name == "cpu":
        try:
            from pagemill.kernels.cpu.ops import CpuOps
        except ImportError as error:
            _log.warning("CPU kernels need numba; running the slow reference", error=str(error))
            return _reference()
        return CpuOps(threads=threads, cache_dir=cache_dir)
    if name in ("triton", "interpret"):
        from pagemill.kernels.triton.ops import TritonOps

        return TritonOps(interpret=name == "interpret")
    raise ValueError(f"unknown kernels {name!r}: choose one of {', '.join(BACK_ENDS)}")


def _reference() -> Ops:
    from pagemill.kernels.reference import ReferenceOps

    return ReferenceOps()
