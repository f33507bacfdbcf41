"""The kernels compile for GPUs that this machine does not have, without spills or narrow memory accesses."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton", reason="Triton is not installed: the CUDA kernels are not checked")

from tests.kernels.test_triton_interpreter import run_python

MISALIGNED = """
import torch
from pagemill.kernels.build import compile_calls, faults
from pagemill.kernels.layout import LayerKV

def calls(ops):
    # An odd number of elements between the blocks: every other block starts at an odd address.
    pool = torch.as_strided(torch.zeros(40_000, dtype=torch.bfloat16), (2, 16, 8, 128), (16_385, 1024, 128, 1))
    rows = torch.zeros((3, 8, 128), dtype=torch.bfloat16)
    ops.write_kv(rows, rows, LayerKV(pool, pool, "token_major", 2, 16, 8, 128), torch.zeros(3, dtype=torch.int64))

print([faults(kernel) for kernel in compile_calls(90, "misaligned", calls, set())])
"""


def test_kernels_compile_for_hopper_without_faults() -> None:
    result = run_python(
        "-m", "pagemill.kernels.build", "--json", "--capability", "90", "--model", "llama-3-8b", interpret=False
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    kernels = [json.loads(line) for line in result.stdout.splitlines()]
    assert {kernel["kernel"] for kernel in kernels} == {
        "paged_attention", "merge_parts", "write_kv", "rotary", "rms_norm", "silu_and_mul", "copy_blocks",
        "sample_chunk", "sample_row", "mask_logits", "shift_logits", "penalise_logits", "logprobs_chunk", "threshold",
    }  # fmt: skip
    attention = [kernel for kernel in kernels if kernel["kernel"] == "paged_attention"]
    assert {kernel["matrix_unit"] for kernel in attention} == {"HMMA", "HGMMA"}
    assert all(kernel["spilled_bytes"] == 0 for kernel in kernels)
    assert all(kernel["narrow_accesses"] == 0 for kernel in attention)


def test_a_misaligned_pool_is_seen() -> None:
    """The check can fail: strides that are no multiples of 16 elements turn wide loads into narrow ones."""
    result = run_python("-c", MISALIGNED, interpret=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert "narrower than 32 bits" in result.stdout, result.stdout
