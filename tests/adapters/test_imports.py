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
        (_LOADS, (*_NEVER, "aiohttp", "redis")),
    ],
)
def test_nothing_is_imported_that_is_not_needed(program: str, banned: tuple[str, ...]) -> None:
    program += f"\nimport sys; print([name for name in {list(banned)!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "[]"
