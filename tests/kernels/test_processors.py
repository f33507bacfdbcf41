"""The kernels compiled for other processors than this one: in float32 they write the same tokens.

`make cpu-check` tries more of them, and 64-bit Arm as far as that can be done without one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench.cpu_targets import environment_of

from tests.kernels.test_torch_ops import generate

_ENGINE = """
import json, sys
from pagemill.kernels.cpu.target import instructions
from tests.kernels.test_torch_ops import generate
print(json.dumps([instructions(), *generate(sys.argv[1])]))
"""


@pytest.mark.timeout(300)  # the first time everything is compiled once more
def test_a_processor_without_wide_vectors_writes_the_same(tmp_path: Path) -> None:
    from tests.engine.tiny_models import CONFIGS, save_model

    save_model(CONFIGS["llama-gqa"](), tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", _ENGINE, str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment_of("haswell"),
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    instructions, *generated = json.loads(done.stdout.splitlines()[-1])
    assert instructions == "AVX2, bfloat16 widened to float32"
    assert generated == list(generate(str(tmp_path)))
