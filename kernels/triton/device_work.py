"""A step's attention as work lists on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagemill.kernels.triton.configs import (
    PROGRAMS_PER_MULTIPROCESSOR,
    AttentionConfig,
    DeviceFacts,
    decode_config,
    prefill_config,
)
from pagemill.kernels.triton.plan import plan_attention


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """A work list on the device, with the variant it was made for. `work` int32 [items, 8], `merge` int32 [n, 4]."""

    config: AttentionConfig
    work: torch.Tensor
    merge: torch.Tensor
    num_parts: int


def device_works(
    facts: DeviceFacts,
    query_start: npt.NDArray[np.integer[Any]],
    seq_lens: npt.NDArray[np.integer[Any]],
    device: torch.device,
    *,
    group: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    window: int,
) -> list[DeviceWork]:
    """The launches of a step's attention: one for decode tiles and one for prefill tiles, where there are any."""
    shape: dict[str, int] = {"head_dim": head_dim, "itemsize": dtype.itemsize, "group": group}
    decode = decode_config(facts.capability, **shape)
    prefill = prefill_config(facts.capability, **shape)
    plan = plan_attention(
        query_start,
        seq_lens,
        group=group,
        kv_heads=kv_heads,
        decode=decode.shape,
        prefill=prefill.shape,
        window=window,
        target_programs=facts.multiprocessors * PROGRAMS_PER_MULTIPROCESSOR,
    )
    lists = [(config, work) for config, work in ((decode, plan.decode), (prefill, plan.prefill)) if work.work.size]
    # One transfer for all lists: a step's records are small, and each transfer costs a launch.
    arrays = [array.ravel() for _, work in lists for array in (work.work, work.merge)]
    flat = np.concatenate(arrays) if arrays else np.empty(0, np.int32)
    words = torch.from_numpy(flat).to(device, non_blocking=True)
    works = []
    at = 0
    for config, work in lists:
        middle, end = at + work.work.size, at + work.work.size + work.merge.size
        works.append(
            DeviceWork(
                config,
                words[at:middle].view(work.work.shape),
                words[middle:end].view(work.merge.shape),
                work.num_parts,
            )
        )
        at = end
    return works
