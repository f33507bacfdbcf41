"""Plain torch against the reference, and that it takes over with a reason given where numba cannot be used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pagemill.kernels.ops import numba_problem, select_ops
from pagemill.kernels.torch_ops import TorchOps
from tests.kernels.paged import REFERENCE, distance, make_case

OPS = TorchOps()
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 1, 5, 17, 64])
@pytest.mark.parametrize(("kv_heads", "group", "block_size"), [(3, 3, 16), (2, 1, 5), (1, 4, 64)])
def test_attention(dtype: torch.dtype, window: int, kv_heads: int, group: int, block_size: int) -> None:
    case = make_case(
        [1, 17, 65, 130, 40], [1, 17, 1, 7, 33], block_size=block_size, kv_heads=kv_heads, group=group, dtype=dtype
    )
    actual = OPS.paged_attention(case.query, case.kv, case.meta, scale=0.25, sliding_window=window)
    expected = REFERENCE.paged_attention(case.query, case.kv, case.meta, scale=0.25, sliding_window=window)
    assert actual.dtype == dtype
    assert distance(actual, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rest_of_a_layer(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((5, 48), (96, 48), (96,)))
    residual, norm = torch.randn(5, 48), torch.randn(48).to(dtype)
    linear = [ops.linear(x, ops.prepare_linear(weight, bias)) for ops in (OPS, REFERENCE)]
    added = [ops.add_rms_norm(x, residual, norm, 1e-5) for ops in (OPS, REFERENCE)]
    heads = torch.randn(5, 6, 8).to(dtype)
    rotated = []
    for ops in (OPS, REFERENCE):
        query, key = heads[:, :4].clone(), heads[:, 4:].clone()
        ops.rotary_embedding(query, key, torch.arange(5), torch.randn(9, 8, generator=torch.Generator().manual_seed(1)))
        rotated += [query, key]
    pairs = [
        linear,
        [OPS.rms_norm(x, norm, 1e-5), REFERENCE.rms_norm(x, norm, 1e-5)],
        [added[0][0], added[1][0]],
        [added[0][1], added[1][1]],
        [OPS.silu_and_mul(weight), REFERENCE.silu_and_mul(weight)],
        rotated[::2],
        rotated[1::2],
    ]
    for actual, expected in pairs:
        assert actual.dtype == expected.dtype
        assert distance(actual, expected) < TOLERANCE[dtype]


_ENGINE = """
import json, sys
if sys.argv[2] == "absent":
    sys.modules["numba"] = None
else:
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == "llvmlite.binding.ffi":
                raise OSError("Could not find/load shared object file")
    sys.meta_path.insert(0, Finder())
from structlog.testing import capture_logs
from tests.kernels.test_torch_ops import generate
with capture_logs() as logs:
    used, texts = generate(sys.argv[1])
said = [log["reason"] for log in logs if "cannot be used" in log["event"]]
print(json.dumps([used, said, texts]))
"""


def generate(model: str) -> tuple[str, list[list[int]]]:
    """The kernels that an engine chooses, and what it writes in float32, greedy and seeded."""
    from pagemill import LLM, SamplingParams

    llm = LLM(model, dtype="float32", threads=1, skip_tokenizer_init=True, num_blocks_override=64, max_num_seqs=8)
    greedy, seeded = SamplingParams(max_tokens=24, temperature=0), SamplingParams(max_tokens=24, seed=7, top_p=0.9)
    outputs = llm.generate([[5, 6, 7, 8], [9, 3, 44, 17, 2] * 5, [1]], [greedy, greedy, seeded])
    runner: Any = llm._parts.core._runner
    return runner.ops.name, [output.outputs[0].token_ids for output in outputs]


def test_without_numba_an_engine_says_why_and_writes_the_same(tmp_path: Path) -> None:
    from tests.engine.tiny_models import CONFIGS, save_model

    save_model(CONFIGS["llama-gqa"](), tmp_path)
    running = {
        reason: subprocess.Popen(
            [sys.executable, "-c", _ENGINE, str(tmp_path), way],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for way, reason in (("absent", "numba"), ("broken", "find/load shared object"))
    }
    used, texts = generate(str(tmp_path))
    assert used == "cpu"
    for reason, process in running.items():
        output, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
        used, said, written = json.loads(output.splitlines()[-1])
        assert used == "torch"
        assert len(said) == 1
        assert reason in said[0]
        assert written == texts


def test_kernels_that_were_asked_for_by_name_are_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setitem(sys.modules, "numba.core.config", None)
    assert select_ops("cpu").name == "torch"
    with pytest.raises(RuntimeError, match="numba"):
        select_ops("cpu", override="cpu")


@pytest.mark.parametrize(("name", "value"), [("byteorder", "big"), ("maxsize", 2**31 - 1)])
def test_processors_that_the_kernels_are_not_for_are_named(
    name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert numba_problem() is None
    monkeypatch.setattr("platform.machine", lambda: "s390x")
    monkeypatch.setattr(f"pagemill.kernels.ops.sys.{name}", value)
    assert "s390x" in (numba_problem() or "")


def test_instructions_that_the_processor_lacks_are_refused_by_name() -> None:
    """Running them would end the process."""
    environment = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "+nosuch,-avx,+thing"}
    program = "from pagemill.kernels.ops import numba_problem; print(numba_problem())"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True, timeout=60
    )
    assert done.stdout.strip() == "NUMBA_CPU_FEATURES names what this processor does not have: nosuch, thing"


def test_numba_that_may_not_compile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.core.config.DISABLE_JIT", 1)
    assert "NUMBA_DISABLE_JIT" in (numba_problem() or "")
