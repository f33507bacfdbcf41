"""How near the engine's arithmetic is to exact: `python -m bench.agreement [WORKLOAD.jsonl...] [--sequences N]`

The engine writes greedy continuations; then transformers reads them in float32, and each token is compared with what
float32 would have written in its place (teacher forcing: after one difference the texts go on from the same tokens, so
that one near tie counts once). Where they differ, the gap says how much the float32 logits prefer the other token:
near ties are what rounding decides, a large gap is a fault.

The weights of both are the same: those that the engine computes with, rounded to its dtype where it is bfloat16. Where
the engine quantises them (--set quantization=int4), and with --unrounded, transformers has the checkpoint's own, so
that what was done to them counts too. Without a workload the engine answers the questions below, 128 tokens each.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ANSWER_TOKENS = 128
QUESTIONS = (
    "Why is the sky blue, and why is it red in the evening?",
    "Write a short letter to a landlord about a broken heater.",
    "Explain to a ten-year-old what a prime number is.",
    "Give me a recipe for lentil soup for four people.",
    "What should I look at when I buy a used bicycle?",
    "Write a Python function that counts the words of a text.",
    "Summarise the story of Odysseus and the Cyclops.",
    "How do I ask my manager for a day off?",
    "List five exercises for a stiff back.",
    "What is the difference between weather and climate?",
    "Translate into French: the train leaves at half past six.",
    "Describe a walk through a forest after the rain.",
    "How does a refrigerator keep food cold?",
    "Write a limerick about a cat that cannot sleep.",
    "What are the arguments for and against working from home?",
    "Explain how a hash table finds an entry.",
    "Which vegetables can be sown in March?",
    "Write a product description for a wooden desk lamp.",
    "Why do leaves change their colour in autumn?",
    "What happened at the Congress of Vienna?",
    "Draft an e-mail that moves a meeting to Thursday.",
    "How many sides has a dodecahedron, and how many edges?",
    "Tell me about the life of bees in winter.",
    "What does a database transaction promise?",
    "Give three tips for learning to play the guitar.",
    "Explain inflation in a few sentences.",
    "Write the beginning of a detective story set in Lisbon.",
    "How is cheese made?",
    "What is the fastest way to clean a window without streaks?",
    "Compare bubble sort with merge sort.",
    "Why do ships float although they are made of steel?",
    "Write a thank-you note to a neighbour who watered the plants.",
)

Sequences = Sequence[tuple[list[int], list[int]]]
"""Prompts, and what the engine wrote after each."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Over all tokens written: how many float32 would have written too. `worst_gap`: in logits, of those it would not.

    `identical`: sequences without a difference.
    """

    sequences: int
    tokens: int
    agreeing: int
    identical: int
    worst_gap: float

    @property
    def share(self) -> float:
        return self.agreeing / self.tokens


def compare(model: Any, written: Sequences) -> Agreement:
    """Read what was written with a model of transformers and compare token by token."""
    agreeing = identical = tokens = 0
    worst = 0.0
    for prompt, output in written:
        with torch.inference_mode():
            ids = torch.tensor([prompt + output])
            logits = model(ids, use_cache=False, logits_to_keep=len(output) + 1).logits[0, :-1].float()
        chosen = torch.tensor(output)
        gaps = logits.amax(dim=1) - logits.gather(1, chosen[:, None]).squeeze(1)
        # In an exact tie both are right, whichever comes first.
        agreeing += int((gaps == 0).sum())
        identical += bool((gaps == 0).all())
        worst = max(worst, float(gaps.max()))
        tokens += len(output)
    return Agreement(len(written), tokens, agreeing, identical, worst)


def write(rows: Sequence[tuple[list[int], int]], **settings: Any) -> list[tuple[list[int], list[int]]]:
    """Greedy continuations by an engine with these settings, end-of-sequence ignored."""
    from pagemill import LLM, SamplingParams

    llm = LLM(**settings)
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for _, count in rows]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in rows], params)
    return [(prompt, list(output.outputs[0].token_ids)) for (prompt, _), output in zip(rows, outputs, strict=True)]


def exact_model(name: str, cache_dir: str | None = None, *, rounded: bool = True) -> Any:
    """The model in transformers, float32; its weights rounded to bfloat16 first, or as the checkpoint has them."""
    from transformers import AutoModelForCausalLM

    from pagemill.engine.loader import resolve_model

    folder = resolve_model(name, cache_dir).path
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    if rounded:
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
    return model


def questions(name: str, cache_dir: str | None = None) -> list[tuple[list[int], int]]:
    """The questions, as the model's chat template writes them, with the tokens that each answer may take."""
    from transformers import AutoTokenizer

    from pagemill.engine.loader import resolve_model

    tokenizer = AutoTokenizer.from_pretrained(resolve_model(name, cache_dir).path)
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        for question in QUESTIONS
    ]
    return [(tokenizer(text, add_special_tokens=False).input_ids, ANSWER_TOKENS) for text in texts]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 where less agrees than --least or a gap is larger than --largest-gap."""
    parser = argparse.ArgumentParser(prog="python -m bench.agreement", description=__doc__.split("\n\n")[0])
    parser.add_argument("workloads", nargs="*", metavar="FILE.jsonl", help="as `bench offline` takes them")
    parser.add_argument("--sequences", type=int, default=32, metavar="N", help="the first N of each file (32)")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--unrounded", action="store_true", help="transformers with the checkpoint's own weights")
    parser.add_argument("--least", type=float, default=0.994, metavar="SHARE", help="tokens that must agree (0.994)")
    parser.add_argument("--largest-gap", type=float, default=0.1, metavar="LOGITS", help="at a difference (0.1)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an engine setting")
    options = parser.parse_args(arguments)
    settings: dict[str, Any] = {"model": options.model, "dtype": "bfloat16", "quantization": "none"}
    for text in options.set:
        name, _, value = text.partition("=")
        settings[name] = int(value) if value.isdigit() else value
    plain = settings["dtype"] == "bfloat16" and settings["quantization"] == "none"
    rounded = plain and not options.unrounded
    loads = {Path(name).stem: read(name) for name in options.workloads} or {"questions": questions(options.model)}
    written = {name: write(rows[: options.sequences], **settings) for name, rows in loads.items()}
    model = exact_model(options.model, settings.get("cache_dir"), rounded=rounded)
    poor = False
    for name, sequences in written.items():
        found = compare(model, sequences)
        poor |= found.share < options.least or found.worst_gap > options.largest_gap
        print(
            f"{name}: {found.agreeing} of {found.tokens} tokens agree with float32, {found.share:.2%}; "
            f"{found.identical} of {found.sequences} sequences identical; largest gap {found.worst_gap:.3f}",
            flush=True,
        )
    return 1 if poor else 0


def read(path: str) -> list[tuple[list[int], int]]:
    """The prompts of a workload file, and how many tokens to write after each."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [(row["prompt_token_ids"], row["max_tokens"]) for row in map(json.loads, lines)]


if __name__ == "__main__":
    sys.exit(main())
