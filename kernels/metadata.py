"""What a step's attention needs to know about its sequences, made once per step on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

T = TypeVar("T")
IntArray = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class HostMetadata:
    """The same arrays as in `AttentionMetadata`, as NumPy on the host, for kernels and plans that run there."""

    query_start: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    slot_mapping: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step's ragged batch of S sequences and T query tokens; decode, prefill and chunks are the same thing.

    query_start int32 [S + 1]: the query tokens of sequence s are query_start[s] .. query_start[s + 1].
    seq_lens int32 [S]: context in tokens, those of this step included; query token i of s sits at position
        seq_lens[s] - (query_start[s + 1] - query_start[s]) + i.
    block_tables int32 [S, W]: block ids in order; entries past ceil(seq_len / block_size) are never read.
    slot_mapping int64 [T]: block_id * block_size + offset where each token's key and value go; negative: nowhere.
    positions int64 [T].
    """

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    host: HostMetadata
    _plans: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def build(
        cls,
        *,
        query_start: IntArray,
        seq_lens: IntArray,
        block_tables: IntArray,
        slot_mapping: IntArray,
        positions: IntArray,
        device: str = "cpu",
    ) -> AttentionMetadata:
        """Check the arrays against one another and put them on the device. Raises ValueError where they disagree."""
        host = HostMetadata(
            np.ascontiguousarray(query_start, dtype=np.int32),
            np.ascontiguousarray(seq_lens, dtype=np.int32),
            np.ascontiguousarray(block_tables, dtype=np.int32),
            np.ascontiguousarray(slot_mapping, dtype=np.int64),
            np.ascontiguousarray(positions, dtype=np.int64),
        )
        sequences = host.seq_lens.shape[0]
        tokens = host.positions.shape[0]
        query_lens = np.diff(host.query_start)
        if host.query_start.shape != (sequences + 1,) or host.query_start[0] != 0 or host.query_start[-1] != tokens:
            raise ValueError(f"query_start must run from 0 to {tokens} in {sequences + 1} entries")
        if host.slot_mapping.shape != (tokens,):
            raise ValueError(f"slot_mapping must have {tokens} entries, got {host.slot_mapping.shape}")
        if host.block_tables.ndim != 2 or host.block_tables.shape[0] != sequences:
            raise ValueError(f"block_tables must have {sequences} rows, got shape {host.block_tables.shape}")
        if (query_lens < 0).any() or (query_lens > host.seq_lens).any():
            raise ValueError("a sequence's query tokens must be part of its context")

        def on_device(array: IntArray) -> torch.Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        return cls(
            on_device(host.query_start),
            on_device(host.seq_lens),
            on_device(host.block_tables),
            on_device(host.slot_mapping),
            on_device(host.positions),
            host,
        )

    @property
    def num_tokens(self) -> int:
        return int(self.host.positions.shape[0])

    @property
    def num_sequences(self) -> int:
        return int(self.host.seq_lens.shape[0])

    def renew(self) -> None:
        """Forget what was made of the arrays, which have been filled anew."""
        self._plans.clear()

    def plan(self, name: str, make: Callable[[HostMetadata], T]) -> T:
        """A back end's work list for this step, made at its first layer and kept for the others."""
        if name not in self._plans:
            self._plans[name] = make(self.host)
        plan: T = self._plans[name]
        return plan
