"""What commands and roles import: a start is mostly imports, and one more line of them is easily a second."""

from __future__ import annotations

import subprocess
import sys

import pytest

_HEAVY = ("torch", "transformers", "numba", "triton", "numpy", "aiohttp")
_NEVER = ("transformers", "triton", "torch._dynamo", "torch._inductor", "matplotlib", "pandas", "scipy")

_LOADS = """
from pagemill import LLM
from pagemill.engine.chat import Chat
llm = LLM("smollm2-135m", num_blocks_override=8, threads=1, max_num_seqs=2, max_num_batched_tokens=16)
assert llm._parts.tokenizer.apply_chat(Chat([{"role": "user", "content": "x"}]))
"""

_GENERATES = f"""
from pagemill.engine.torch_import import without_compilers
with without_compilers():
    import pagemill.ingest.worker
{_LOADS}
from pagemill import SamplingParams
kinds = [SamplingParams(max_tokens=4, temperature=0), SamplingParams(max_tokens=4, top_p=0.9, logprobs=2)]
llm.generate(["one two three"] * 2, kinds)
"""


@pytest.mark.parametrize(
    ("program", "banned"),
    [
        ("from pagemill.adapters.cli.main import run; run([])", (*_HEAVY, "redis", "structlog", "asyncio")),
        ("from pagemill.adapters.cli.main import run; run(['--version'])", (*_HEAVY, "redis", "structlog", "asyncio")),
        ("import pagemill.adapters.cli.serve", _HEAVY),
        ("import pagemill.adapters.cli.client_commands", _HEAVY),
        ("import pagemill.adapters.cli.dlq_command", _HEAVY),
        ("import pagemill.ingest.client", _HEAVY),
        ("import pagemill.adapters.http.server", [name for name in _HEAVY if name != "aiohttp"]),
        ("import pagemill.adapters.cli.webhooks_command", [name for name in _HEAVY if name != "aiohttp"]),
        ("import pagemill.ingest.worker", (*_NEVER, "numba", "aiohttp")),
        (_LOADS, (*_NEVER, "aiohttp", "redis", "pagemill.kernels.cpu.quantised")),
        (_GENERATES, (*_NEVER, "torch._decomp", "torch._prims")),
    ],
)
def test_nothing_is_imported_that_is_not_needed(program: str, banned: tuple[str, ...]) -> None:
    program += f"\nimport sys; print([name for name in {list(banned)!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.splitlines()[-1] == "[]"


def test_what_torch_puts_off_runs_for_whoever_needs_it() -> None:
    program = """
from pagemill.engine.torch_import import complete, without_compilers
with without_compilers():
    import torch
def shape():
    return torch.empty(3, 3, device="meta").index_select(0, torch.zeros(2, dtype=torch.int64, device="meta")).shape
try:
    print(shape())
except NotImplementedError:
    print("put off")
complete()
print(tuple(shape()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines() == ["put off", "(2, 3)"]


@pytest.mark.parametrize("compiles", [False, True])
def test_garbage_of_a_start_is_looked_for_once_if_so_much_was_made_that_something_compiled(compiles: bool) -> None:
    program = f"""
import gc
usual = gc.get_threshold()
from pagemill.adapters.cli import garbage
garbage.import_engine()
collections = []
gc.callbacks.append(lambda phase, info: collections.append(info["generation"]))
kept = [[] for _ in range(garbage._OBJECTS_OF_A_START // 2 * {3 if compiles else 1})]
garbage.keep_what_is_there()
print(2 in collections, gc.get_threshold() == usual, gc.get_freeze_count() >= len(kept), gc.isenabled())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == [str(compiles), "True", "True", "True"]
