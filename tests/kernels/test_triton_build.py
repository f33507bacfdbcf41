"""The kernels compile for GPUs that this machine does not have, without spills or narrow memory accesses."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton", reason="Triton is not installed: the CUDA kernels are not checked")

from tests.kernels.test_triton_interpreter import run_python

MISALIGNED = """
import dataclasses, sys
import torch
import pagemill.kernels.build as build
from pagemill.kernels.layout import KVLayout

class OddLayout(KVLayout):
    # One element between the blocks: every block but the first starts at an odd address.
    def allocate(self):
        return super().allocate().new_zeros((self.num_blocks, self.elements_per_block + 1))[:, :-1]
    def layer(self, pool, index):
        return super().layer(pool.contiguous(), index) if pool.is_contiguous() else _odd(self, pool, index)

def _odd(layout, pool, index):
    kv = KVLayout.layer(layout, pool.contiguous(), index)
    strides = (pool.stride(0), *kv.k.stride()[1:])
    k = torch.as_strided(pool, kv.k.shape, strides)
    return dataclasses.replace(kv, k=k, v=k)

build.KVLayout = OddLayout
build.CompileOnlyOps.copy_blocks = lambda self, pool, pairs: None
kernels = list(build.compile_kernels(90, build.COMMON_SHAPES[:1]))
found = {kernel.kernel: build.faults(kernel) for kernel in kernels if build.faults(kernel)}
print(found)
sys.exit(0 if "paged_attention" in found else 1)
"""


def test_kernels_compile_for_hopper_without_faults() -> None:
    result = run_python("-m", "pagemill.kernels.build", "--json", "--capability", "90", interpret=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    kernels = [json.loads(line) for line in result.stdout.splitlines()]
    assert {kernel["kernel"] for kernel in kernels} == {
        "paged_attention", "merge_parts", "write_kv", "rotary", "rms_norm", "silu_and_mul", "copy_blocks",
        "sample_chunk", "sample_row",
    }  # fmt: skip
    attention = [kernel for kernel in kernels if kernel["kernel"] == "paged_attention"]
    assert {kernel["matrix_unit"] for kernel in attention} == {"HMMA", "HGMMA"}
    assert all(kernel["spilled_bytes"] == 0 for kernel in kernels)
    assert all(kernel["narrow_accesses"] == 0 for kernel in attention)
    assert all(kernel["shared_bytes"] <= 227 * 1024 for kernel in kernels)


def test_a_misaligned_pool_is_seen() -> None:
    """The check can fail: strides that are no multiples of 16 elements turn wide loads into narrow ones."""
    result = run_python("-c", MISALIGNED, interpret=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert "narrower than 32 bits" in result.stdout
