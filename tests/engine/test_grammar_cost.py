"""What hostile grammars may cost, the helper that tries them, and what is kept."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from pagemill.engine import grammar_trial
from pagemill.engine.errors import RequestError
from pagemill.engine.grammar import GrammarCompiler
from pagemill.engine.structured_outputs import StructuredOutputs
from pagemill.engine.tokenizer import Tokenizer
from tests.engine.grammars import EOS, VOCAB_SIZE, allowed

HOSTILE: dict[str, dict[str, Any]] = {
    "intersections": {"json": {"allOf": [{"type": "string", "pattern": f"a{number}.*"} for number in range(40)]}},
    "automaton": {"json": {"type": "integer", "multipleOf": 12345.678}},
    "inline": {"grammar": 'start: %json {"type": "integer", "multipleOf": 1000003}'},
    "rules": {
        "grammar": "".join(f'r{number} ::= "a" r{number + 1}\n' for number in range(2800))
        + 'root ::= r0\nr2800 ::= "x"'
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_grammar_that_would_never_be_ready_is_refused_alone(
    tokenizer: Tokenizer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_trial, "CPU_SECONDS", 0.3)
    compiler = GrammarCompiler(tokenizer, 1000, (EOS,))
    refusals: list[RequestError] = []

    def compile_hostile() -> None:
        try:
            compiler.compile(StructuredOutputs(**HOSTILE[name]))
        except RequestError as error:
            refusals.append(error)

    neighbours = [StructuredOutputs(json={"const": number}) for number in range(3)]
    compiler.compile(neighbours[0])
    thread = threading.Thread(target=compile_hostile)
    thread.start()
    for form in neighbours:
        assert compiler.compile(form).matcher().fork()
    thread.join(60)
    assert [(error.code, "more than 0.3 s" in error.message) for error in refusals] == [("invalid_request", True)]
    assert compiler.compile(StructuredOutputs(json={"const": 4}))


def test_a_lost_helper_is_replaced(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, 1000, (EOS,))
    compiler.compile(StructuredOutputs(regex="a"))
    assert compiler._vocabulary is not None
    first = compiler._vocabulary.trial._process
    assert first is not None
    first.kill()
    first.wait(60)
    assert compiler.compile(StructuredOutputs(regex="b"))
    second = compiler._vocabulary.trial._process
    assert second is not None and second is not first
    del compiler
    second.wait(60)


def test_a_helper_that_cannot_work_is_the_engines_error(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    for executable, reason in (("/nowhere/python", "cannot be started"), ("/bin/false", "exited with status 1")):
        monkeypatch.setattr(grammar_trial.sys, "executable", executable)
        compiler = GrammarCompiler(tokenizer, 1000, (EOS,))
        with pytest.raises(RequestError, match=reason) as error:
            compiler.compile(StructuredOutputs(regex="a"))
        assert error.value.code == "engine_error"
        assert compiler.compile(StructuredOutputs(choice=["a"]))
        monkeypatch.undo()
        assert compiler.compile(StructuredOutputs(regex="a"))


@pytest.mark.parametrize("grammar", ['start: e\ne: e e e | e e | "a" | "b"', 'start: start start | "a" | '])
def test_an_ambiguous_grammar_ends_its_request_before_its_steps_get_long(
    compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: str
) -> None:
    matcher = compiler.compile(StructuredOutputs(grammar=grammar)).matcher()
    (letter,) = tokenizer.encode("a")
    with pytest.raises(RequestError, match=r"grammar cannot be used: .*items"):
        for _ in range(2000):
            allowed(matcher)
            if not matcher.accept(letter) and matcher.failure:
                raise matcher.failure


@pytest.mark.parametrize(
    "text", ["\n" * 60_000, '"' * 60_000, '"\\' * 30_000, "/" * 60_000, "a " * 30_000, "%json " * 9000]
)
def test_reading_a_grammar_takes_no_longer_for_being_odd(compiler: GrammarCompiler, text: str) -> None:
    started = time.thread_time()
    with pytest.raises(RequestError):
        compiler.compile(StructuredOutputs(grammar=text + "\nstart: ("))
    assert time.thread_time() - started < 1.0


def test_grammars_are_kept_and_the_least_used_are_dropped(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, 1000, (EOS,))
    first = compiler.compile(StructuredOutputs(choice=["a", "b"]))
    assert compiler.compile(StructuredOutputs(choice=["a", "b", "a"])) is first
    for number in range(20):
        compiler.compile(StructuredOutputs(choice=[f"{number}-{item:011d}" for item in range(4096)]))
    assert compiler._kept_source <= 1 << 20
    assert compiler.compile(StructuredOutputs(choice=["a", "b"])) is not first


def test_several_threads_compile_at_once(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, (EOS,))
    sizes: list[int] = []

    def work(seed: int) -> None:
        for number in range(6):
            form = StructuredOutputs(json={"type": "string", "maxLength": 1 + (seed * number) % 5})
            sizes.append(len(allowed(compiler.compile(form).matcher())))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(sizes) == 36 and min(sizes) > 0
