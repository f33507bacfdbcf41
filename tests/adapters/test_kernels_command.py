"""`pagemill kernels build`, and an engine that starts on what it left: nothing is compiled then, whatever is asked."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from pagemill.kernels.cpu.kernel_cache import KernelCache
from tests.adapters.processes import environment, pagemill

_EVERY_KIND = """
import json, sys
from pagemill import LLM, SamplingParams
llm = LLM(sys.argv[1], cache_dir=sys.argv[2], dtype=sys.argv[3], threads=1, skip_tokenizer_init=True,
          num_blocks_override=64, max_num_seqs=8)
params = [
    SamplingParams(max_tokens=8, temperature=0),
    SamplingParams(max_tokens=8, temperature=0.9, top_p=0.9, top_k=5, min_p=0.1, seed=3, n=2),
    SamplingParams(max_tokens=8, logprobs=3, prompt_logprobs=2),
    SamplingParams(max_tokens=6, presence_penalty=0.5, frequency_penalty=0.1, repetition_penalty=1.2,
                   logit_bias={5: 2.0}, stop_token_ids=[4]),
    SamplingParams(max_tokens=6, allowed_token_ids=[3, 4, 9], min_tokens=2),
    SamplingParams(max_tokens=6, beam_width=3, temperature=0),
]
llm.generate([[5, 6, 7, 8] * 4] * len(params), params)
cache = llm._parts.core._runner.ops.cache
print(json.dumps({"compiled": list(cache.compiled), "loaded": cache.loaded}))
"""


def test_an_engine_compiles_nothing_after_a_build(tmp_path: Path) -> None:
    from pagemill.engine.blank_model import write_blank_llama

    model, folder = tmp_path / "model", tmp_path / "cache"
    model.mkdir()
    write_blank_llama(model)
    # What other tests have compiled is taken over; a build of everything takes half a minute.
    usual = KernelCache().folder
    built = KernelCache(str(folder)).folder
    assert usual is not None
    assert built is not None
    shutil.copytree(usual, built, dirs_exist_ok=True)
    for kernel in built.glob("edit.*"):
        kernel.unlink()
    done = pagemill("kernels", "build", "--cache-dir", str(folder), "--dtype", "float32", timeout=240)
    assert done.returncode == 0, done.stderr
    assert str(built) in done.stdout
    assert "compiling kernel 1: " in done.stderr
    assert len(list(built.glob("edit.*"))) == 4
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o222)
    engine = subprocess.run(
        [sys.executable, "-c", _EVERY_KIND, str(model), str(folder), "float32"],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment(),
        check=False,
    )
    assert engine.returncode == 0, engine.stderr
    result = json.loads(engine.stdout.splitlines()[-1])
    assert result["compiled"] == []
    assert result["loaded"] >= 10


def test_a_build_that_would_be_lost_is_refused(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    done = pagemill("kernels", "build", "--cache-dir", str(in_the_way))
    assert done.returncode == 2
    assert "cache_dir must be a folder" in done.stderr
    assert str(in_the_way) in done.stderr
    done = pagemill("kernels", "build", "--device", "cuda")
    assert done.returncode == 2
    assert "device must be cpu" in done.stderr
