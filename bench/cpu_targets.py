"""The CPU kernels for processors that are not here: `python -m bench.cpu_targets`

* Older x86-64 processors run here: an engine writes with their kernels in float32, and transformers must agree with
  every token (`bench.agreement`).
* For 64-bit Arm every kernel is compiled: once for a plain x86-64 processor, and what LLVM then has is handed to its
  back ends for Arm. That fails where a kernel cannot be expressed there, or calls a routine that no library has, for
  which LLVM would end the process. So the kernels compile there; they have not run there.

A program and not a function to call from an engine: it changes how numba compiles in the whole process.
"""

# llvmlite and numba ship no types.
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_HASWELL = "+sse3,+ssse3,+sse4.1,+sse4.2,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+popcnt,+movbe,+cx16"
PROCESSORS = {
    "x86-64": "",
    "haswell": _HASWELL,
    "skylake-avx512": f"{_HASWELL},+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl",
}
"""What NUMBA_CPU_FEATURES has to name beside NUMBA_CPU_NAME, or numba keeps to this processor's."""

_EXACT = ("--set", "dtype=float32", "--least", "1", "--largest-gap", "0.001", "--sequences", "8")

TARGETS = (
    ("aarch64-unknown-linux-gnu", "generic"),
    ("aarch64-unknown-linux-gnu", "neoverse-n1"),
    ("aarch64-unknown-linux-gnu", "neoverse-v2"),
    ("arm64-apple-darwin", "apple-m1"),
)

KNOWN_CALLS = re.compile(
    r"_?(NRT_\w+|numba_\w+|sched_yield|clock_gettime|sem_(init|post|wait)|mem(cpy|set|move)"
    r"|(exp|log|log10|fma|floor|rint|pow)f?|Py\w+|_Py\w+)"
)
"""What numba, the interpreter and the C library bring."""

# Counting references is the one thing that LLVM has expressed in x86's own terms by the time that its code can be read.
_COUNTING = re.compile(r"@llvm\.x86\.atomic\.sub\.cc\.(i32|i64)")


def environment_of(processor: str) -> dict[str, str]:
    """This process's, with numba compiling for one of PROCESSORS."""
    return {**os.environ, "NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": PROCESSORS[processor]}


def compiled_kernels() -> dict[str, str]:
    """LLVM's code of every kernel, by name and type of the last argument, compiled for x86-64 without any extension."""
    os.environ |= environment_of("x86-64")
    from pagemill.engine.blank_model import write_blank_llama
    from pagemill.engine.config import EngineConfig
    from pagemill.engine.loader import resolve_model
    from pagemill.engine.model_runner import ModelRunner
    from pagemill.kernels.cpu import jit

    with tempfile.TemporaryDirectory() as folder:
        write_blank_llama(Path(folder))
        for dtype in ("float32", "bfloat16"):
            config = EngineConfig(model=folder, cache_dir=folder, dtype=dtype, threads=2, num_blocks_override=8)
            ModelRunner(config, resolve_model(folder))
    return {
        f"{entry.py_func.__name__} for {signature[-1:]}": compiled.library.get_llvm_str()
        for entry in jit.entries()
        for signature, compiled in entry.overloads.items()
    }


def unknown_calls(code: str, triple: str, processor: str) -> list[str]:
    """Compile LLVM's code for a target; the names that its assembly calls and nobody there has.

    Raises RuntimeError where it is not even valid there. (Some faults end the process, with LLVM's reason.)
    """
    import llvmlite.binding as llvm

    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=processor, opt=3, reloc="pic")
    module = llvm.parse_assembly(_retargeted(code, triple, str(machine.target_data)))
    module.verify()
    called = set(re.findall(r"\bbl\s+(\S+)", machine.emit_assembly(module)))
    defined = {function.name for function in module.functions if not function.is_declaration}
    # On a Mac every name has an underscore in front.
    return sorted(name for name in called if not {name, name[1:]} & defined and not KNOWN_CALLS.fullmatch(name))


def _retargeted(code: str, triple: str, layout: str) -> str:
    code = re.sub(r'target triple = ".*"', f'target triple = "{triple}"', code)
    code = re.sub(r'target datalayout = ".*"', f'target datalayout = "{layout}"', code)
    code = re.sub(r'"(target-cpu|target-features|tune-cpu)"="[^"]*"', "", code)
    widths = sorted(set(_COUNTING.findall(code)))
    code = re.sub(r"^declare .*llvm\.x86\.atomic\.sub\.cc.*$", "", code, flags=re.MULTILINE)
    code = _COUNTING.sub(r"@counted_down.\1", code)
    return code + "".join(_counted_down(width) for width in widths)


def _counted_down(width: str) -> str:
    """What x86's instruction does: take off, and say whether that left zero."""
    return f"""
define internal i8 @counted_down.{width}(ptr %place, {width} %amount, i32 %condition) {{
  %before = atomicrmw sub ptr %place, {width} %amount seq_cst
  %zero = icmp eq {width} %before, %amount
  %result = zext i1 %zero to i8
  ret i8 %result
}}
"""


def faults() -> Iterator[str]:
    """What is wrong, in words, while a line for each target is printed."""
    import llvmlite.binding as llvm

    kernels = compiled_kernels()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    for name, code in kernels.items():
        for intrinsic in sorted(set(re.findall(r"llvm\.x86\.\w+[\w.]*", code))):
            if "atomic.sub.cc" not in intrinsic:
                yield f"{name} asks for {intrinsic} on a processor without extensions"
    for triple, processor in TARGETS:
        for name, code in kernels.items():
            try:
                missing = unknown_calls(code, triple, processor)
            except RuntimeError as error:
                yield f"{name} is not valid for {triple}: {error}"
                continue
            if missing:
                yield f"{name} calls {', '.join(missing)} on {triple}"
        print(f"{triple}, {processor}: {len(kernels)} kernels compiled", flush=True)


def main() -> int:
    """Returns 0, or 1 where tokens differ or a kernel has faults."""
    for processor in PROCESSORS:
        print(f"{processor}: ", end="", flush=True)
        command = [sys.executable, "-m", "bench.agreement", *_EXACT]
        if subprocess.run(command, env=environment_of(processor), check=False).returncode:
            return 1
    found = list(faults())
    for fault in found:
        print(fault, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
