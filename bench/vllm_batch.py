"""A workload through vLLM on the CPU, for `bench.compare`: `PYTHON vllm_batch.py MODEL_FOLDER DTYPE FILE.jsonl`

PYTHON is that of an environment with vLLM's build for the CPU; nothing of Pagemill is imported. The first requests warm
it up, the prefix cache is forgotten after them. Prints what `pagemill bench offline` prints, as far as it applies.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def main(folder: str, dtype: str, *files: str) -> None:
    begun = time.perf_counter()
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(folder, dtype=dtype, max_model_len=4096, enable_prefix_caching=True)
    load = time.perf_counter() - begun
    for file in files:
        rows = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
        prompts = [{"prompt_token_ids": row["prompt_token_ids"]} for row in rows]
        params = [SamplingParams(temperature=0, max_tokens=row["max_tokens"], ignore_eos=True) for row in rows]
        llm.generate(prompts[:8], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
        llm.reset_prefix_cache()
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        wall = time.perf_counter() - start
        count = sum(len(output.outputs[0].token_ids) for output in outputs)
        result = {"engine": "vllm", "workload": Path(file).stem, "output_tokens": count, "wall_s": round(wall, 3)}
        print(json.dumps(result | {"tokens_per_s": round(count / wall, 1), "load_s": round(load, 3)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
