"""The processor that kernels are compiled for: this one, or what NUMBA_CPU_NAME and NUMBA_CPU_FEATURES name together.

The name alone chooses no instructions: numba keeps this processor's features unless it is given others.
"""

from __future__ import annotations

import llvmlite.binding  # type: ignore[import-untyped]
from numba.core.registry import cpu_target

from pagemill.kernels.cpu import amx


def processor() -> str:
    """Its name, as LLVM calls it."""
    name: str = cpu_target.target_context.codegen().magic_tuple()[1]
    return name


def has(feature: str) -> bool:
    """Whether it has a feature, as LLVM calls it (avx2, avx512f, avx512bf16, neon)."""
    features: str = cpu_target.target_context.codegen().magic_tuple()[2]
    return f"+{feature}" in features.split(",")


def lacking() -> list[str]:
    """Features that kernels are to be compiled for and this processor does not have: it would end the process."""
    here = llvmlite.binding.get_host_cpu_features()
    asked: str = cpu_target.target_context.codegen().magic_tuple()[2]
    return [name[1:] for name in asked.split(",") if name.startswith("+") and not here.get(name[1:])]


def instructions() -> str:
    """The widest vectors that kernels can use, and what becomes of bfloat16, in words."""
    wide = next((name for feature, name in _WIDE if has(feature)), "128-bit vectors")
    if amx.allowed():
        return f"{wide}, bfloat16 multiplied in tiles"
    pairs = "multiplied in pairs" if has("avx512bf16") else "widened to float32"
    return f"{wide}, bfloat16 {pairs}"


_WIDE = (("avx512f", "AVX-512"), ("avx2", "AVX2"), ("avx", "AVX"), ("neon", "NEON"))
