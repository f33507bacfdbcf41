"""The same workloads through transformers: `python bench/transformers_batch.py MODEL_FOLDER DTYPE FILE.jsonl...`

One request runs through `generate`, several through `generate_batch` (its continuous batching). That gives every
request the longest max_tokens of the file, so compare tokens per second, not wall time. Prints what `pagemill bench
offline` prints, as far as it applies.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig


def measure(model: Any, rows: list[dict[str, Any]]) -> int:
    """Run all rows; return how many tokens came out."""
    longest = max(row["max_tokens"] for row in rows)
    if len(rows) == 1:
        ids = torch.tensor([rows[0]["prompt_token_ids"]])
        options = {"max_new_tokens": longest, "min_new_tokens": longest, "do_sample": False, "pad_token_id": 0}
        return int(model.generate(ids, attention_mask=torch.ones_like(ids), **options).shape[1] - ids.shape[1])
    config = GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0)
    results = model.generate_batch([row["prompt_token_ids"] for row in rows], generation_config=config)
    return sum(len(result.generated_tokens) for result in results.values())


def main(folder: str, dtype: str, *files: str) -> None:
    begun = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    load = time.perf_counter() - begun
    for file in files:
        rows = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
        start = time.perf_counter()
        count = measure(model, rows)
        wall = time.perf_counter() - start
        result = {"engine": "transformers", "workload": Path(file).stem, "output_tokens": count}
        result |= {"wall_s": round(wall, 3), "tokens_per_s": round(count / wall, 1), "load_s": round(load, 3)}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
