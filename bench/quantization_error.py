"""What quantised weights cost in exactness: logits beside those of the same model in float32, on the same tokens.

    python -m bench.quantization_error [--model M] [--tokens N] [--schemes bfloat16 int8 int4 gguf]

Prompts are continued greedily in float32 (a GGUF's values dequantised), then each form of the model computes the logits
behind every token of these texts (teacher forcing). The difference of logits is taken after the mean of each row, which
no sampler sees, and told beside their own spread. An agreement is a position where both have the same likeliest token.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pagemill.engine.config import EngineConfig
from pagemill.engine.kv_pool import KVPool
from pagemill.engine.llm import LLM
from pagemill.engine.loader import resolve_model
from pagemill.engine.model_runner import ModelRunner
from pagemill.engine.quantization import keeps_gguf
from pagemill.engine.sampling_params import SamplingParams
from pagemill.kernels.metadata import AttentionMetadata

PROMPTS = (
    "The capital of France is Paris. The capital of Italy is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Water boils at 100 degrees Celsius at sea level. At higher altitudes it boils at a lower temperature because",
    "Write an e-mail to a colleague who has missed three meetings in a row.\n\nDear",
    "Q: A train leaves at 9:40 and arrives at 12:05. How long does the journey take?\nA:",
    "In the beginning of the nineteenth century, most people in Europe lived",
    "The three branches of the government of the United States are",
    "Once upon a time there was a miller who had nothing in the world but his mill and",
)

SCHEMES: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16", "quantization": "none"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "gguf": {"dtype": "bfloat16", "quantization": "gguf"},
    "int8, float32": {"dtype": "float32", "quantization": "int8"},
    "int4, float32": {"dtype": "float32", "quantization": "int4"},
    "gguf, float32": {"dtype": "float32", "quantization": "gguf"},
}


@dataclass(frozen=True, slots=True)
class Error:
    """Of logits: the largest and the mean absolute difference, positions, those of the same likeliest token, and the
    largest gap, in the exact logits, between a position's likeliest token and the one that was likeliest here."""

    largest: float
    mean: float
    positions: int
    agreeing: int
    gap: float

    @property
    def agreement(self) -> float:
        return self.agreeing / self.positions


def runner_of(model: str, **settings: Any) -> ModelRunner:
    config = EngineConfig(model=model, device="cpu", num_blocks_override=200, **settings)
    found = resolve_model(config.model, config.cache_dir, convert_weights=not keeps_gguf(config))
    return ModelRunner(config, found)


def continued(model: str, prompts: tuple[str, ...], tokens: int) -> list[list[int]]:
    """Token ids of the prompts and of what the model in float32 answers."""
    llm = LLM(model=model, dtype="float32", device="cpu", num_blocks_override=400, num_speculative_tokens=0)
    outputs = llm.generate(list(prompts), SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
    return [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]


@torch.inference_mode()
def logits_behind(runner: ModelRunner, ids: list[int]) -> torch.Tensor:
    """float32 [tokens, vocabulary]: the logits behind each token of a text."""
    count, size = len(ids), runner.block_size
    blocks = -(-count // size)
    pool = KVPool(runner._layout(blocks + 1), runner._ops)
    positions = np.arange(count)
    meta = AttentionMetadata.build(
        query_start=np.array([0, count]),
        seq_lens=np.array([count]),
        block_tables=np.arange(1, blocks + 1, dtype=np.int32)[None],
        slot_mapping=positions + size,
        positions=positions,
    )
    model = runner._model
    hidden = model.forward(torch.tensor(ids), meta, pool.layers, torch.arange(count))
    return model.logits(hidden)


def compare(exact: list[torch.Tensor], found: list[torch.Tensor]) -> Error:
    """The error of logits, text by text."""
    expected, actual = torch.cat(exact), torch.cat(found)
    difference = (actual - actual.mean(1, keepdim=True)) - (expected - expected.mean(1, keepdim=True))
    best, chosen = expected.argmax(1), actual.argmax(1)
    rows = torch.arange(len(best))
    gaps = expected[rows, best] - expected[rows, chosen]
    return Error(
        largest=float(difference.abs().max()),
        mean=float(difference.abs().mean()),
        positions=len(best),
        agreeing=int((best == chosen).sum()),
        gap=float(gaps.max()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=64, help="greedy tokens behind each prompt")
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    args = parser.parse_args()
    texts = continued(args.model, PROMPTS, args.tokens)
    plain = runner_of(args.model, dtype="float32", quantization="none")
    exact = [logits_behind(plain, ids) for ids in texts]
    spread = float(torch.cat(exact).std(1).mean())
    print(
        f"{args.model}: {sum(map(len, texts))} positions, logits of a row spread by {spread:.2f} (standard deviation)"
    )
    print(f"{'scheme':<16}{'largest':>9}{'mean':>9}{'agreement':>22}{'gap':>8}{'MB':>8}")
    for scheme in args.schemes:
        runner = runner_of(args.model, **SCHEMES[scheme])
        error = compare(exact, [logits_behind(runner, ids) for ids in texts])
        agreement = f"{error.agreeing}/{error.positions} = {error.agreement:.2%}"
        megabytes = sum(runner.weight_bytes.values()) / 1e6
        print(f"{scheme:<16}{error.largest:>9.3f}{error.mean:>9.4f}{agreement:>22}{error.gap:>8.3f}{megabytes:>8.1f}")
        del runner


if __name__ == "__main__":
    main()
