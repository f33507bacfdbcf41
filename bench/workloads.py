"""Write the workloads that `make bench` runs: `python bench/workloads.py FOLDER`.

Each line is {"prompt_token_ids": [...], "max_tokens": n}. Lengths follow chat traffic (log-normal, most prompts short,
a long tail); token ids are random, since speed does not depend on what they say. The same files come out every time.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

FIRST_ID, LAST_ID = 300, 49151  # ordinary tokens of SmolLM2


def lengths(rng: random.Random, median: float, spread: float, low: int, high: int) -> int:
    """One log-normal length within [low, high]."""
    while True:
        length = round(median * rng.lognormvariate(0.0, spread))
        if low <= length <= high:
            return length


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(FIRST_ID, LAST_ID) for _ in range(count)]


def workloads() -> dict[str, list[tuple[list[int], int]]]:
    """Name -> prompts with the number of tokens to generate."""
    rng = random.Random(0)
    system = tokens(rng, 1300)
    return {
        "single": [(tokens(rng, 128), 128)],
        "chat": [(tokens(rng, lengths(rng, 30, 1.2, 4, 512)), lengths(rng, 120, 0.9, 4, 256)) for _ in range(96)],
        "prefix": [(system + tokens(rng, lengths(rng, 80, 0.8, 8, 600)), 32) for _ in range(48)],
        "long": [(tokens(rng, 2048), 64) for _ in range(8)],
    }


def main(folder: str) -> None:
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in workloads().items():
        lines = (json.dumps({"prompt_token_ids": prompt, "max_tokens": count}) for prompt, count in rows)
        (out / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the workloads that `make bench` runs.")
    parser.add_argument("folder", metavar="FOLDER")
    main(parser.parse_args().folder)
