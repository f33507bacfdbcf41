"""What structured output costs: compiling, masks, forks and memory, over random JSON schemas and SmolLM2's vocabulary.

    python bench/grammar_cost.py [--schemas N] [--vocabulary N]

The schemas and the random writer are those of the tests. `first compile` is the wall time of a grammar that is not
cached, with its trial in the helper process; `in process` is the engine's own part of it. `--vocabulary` pads the
vocabulary with made-up words, since a mask costs more where there are more tokens.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.engine.invented_schemas import SchemaMaker, Writer

from pagemill.engine.errors import RequestError
from pagemill.engine.grammar import Grammar, GrammarCompiler, Matcher
from pagemill.engine.loader import resolve_model
from pagemill.engine.structured_outputs import StructuredOutputs
from pagemill.engine.tokenizer import Tokenizer

EOS = 2


class Timed:
    """A function that remembers the seconds of its calls."""

    def __init__(self, function: Callable[..., Any], clock: Callable[[], float]) -> None:
        self._function = function
        self._clock = clock
        self.seconds: list[float] = []

    def __call__(self, *arguments: Any) -> Any:
        begun = self._clock()
        try:
            return self._function(*arguments)
        finally:
            self.seconds.append(self._clock() - begun)

    def show(self, name: str, unit: str) -> None:
        scale = {"ms": 1e3, "us": 1e6}[unit]
        values = sorted(second * scale for second in self.seconds)
        p99 = values[min(len(values) - 1, int(len(values) * 0.99))]
        median = statistics.median(values)
        print(
            f"{name:16s} p50 {median:8.2f} {unit}  p99 {p99:8.2f} {unit}  max {values[-1]:8.2f} {unit}  ({len(values)})"
        )


class Walk:
    """A matcher whose calls are timed; the writer takes it for one."""

    fills = Timed(Matcher.fill, time.thread_time)
    accepts = Timed(Matcher.accept, time.thread_time)
    forks = Timed(Matcher.fork, time.thread_time)

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher

    def fill(self, mask: Any) -> None:
        self.fills(self._matcher, mask)

    def accept(self, token_id: int) -> bool:
        self.forks(self._matcher)
        accepted: bool = self.accepts(self._matcher, token_id)
        return accepted


def resident() -> int:
    """Bytes of this process in memory."""
    size: int = psutil.Process().memory_info().rss
    return size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=300)
    parser.add_argument("--vocabulary", type=int, default=0)
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_folder(resolve_model("smollm2-135m").path)
    if arguments.vocabulary > tokenizer.vocab_size:
        missing = arguments.vocabulary - tokenizer.vocab_size
        rng = random.Random(0)
        letters = "etaoinshrdlucmfwypvbgkqjxz"
        words = {
            "Ġ" * rng.randint(0, 1) + "".join(rng.choices(letters, k=rng.randint(5, 12))) for _ in range(2 * missing)
        }
        tokenizer.backend.add_tokens(sorted(words)[:missing])
        tokenizer.vocab_size = tokenizer.backend.get_vocab_size(with_added_tokens=True)
    vocab_size = tokenizer.vocab_size
    compiler = GrammarCompiler(tokenizer, vocab_size, (EOS,))
    begun = time.perf_counter()
    compiler.compile(StructuredOutputs(regex="a"))
    print(f"{vocab_size} tokens; the trie and the helper take {1e3 * (time.perf_counter() - begun):.0f} ms")

    compiles = Timed(compiler.compile, time.perf_counter)
    own = Timed(Grammar._compile, time.thread_time)
    grammars: list[Grammar] = []
    refused = 0
    before = resident()
    for seed in range(arguments.schemas):
        try:
            grammars.append(compiles(StructuredOutputs(json=SchemaMaker(random.Random(seed)).make())))
        except RequestError:
            refused += 1
    memory = (resident() - before) / len(grammars)
    writer = Writer(tokenizer, vocab_size, EOS)
    for seed, grammar in enumerate(grammars):
        own(grammar)
        writer.write(Walk(grammar.matcher()), random.Random(seed), budget=60, limit=300)  # type: ignore[arg-type]
    compiles.show("first compile", "ms")
    own.show("in process", "ms")
    Walk.fills.show("mask", "us")
    Walk.accepts.show("accept", "us")
    Walk.forks.show("fork", "us")
    grown = (resident() - before) / len(grammars)
    print(f"{refused} of {arguments.schemas} refused; {memory / 1e3:.0f} kB a grammar, {grown / 1e3:.0f} kB when used")


if __name__ == "__main__":
    main()
